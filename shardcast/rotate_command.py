"""`shardcast rotate-key`: another key signs the run's versions from now on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from protocol import keyfile
from protocol.errors import OurFault, SourceFault, UserError
from protocol.manifest import InvalidManifest, Manifest, envelope_from_json
from protocol.rotation import chain_to_json, sign_rotation
from protocol.signing import SignedEnvelope
from protocol.trust import why_unreachable
from shardcast.config import parse_source
from shardcast.publish import next_version
from shardcast.sources import said_in

_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 64 * 2**20


async def run(origin: str, old_key: Path, new_key: Path, after_version: int | None, run_id: str | None) -> None:
    """Sign the statement, give it to the origin, and say what to do next. Raises UserError, OurFault, SourceFault."""
    base = parse_source(origin)
    try:
        old = keyfile.load(old_key)
    except FileNotFoundError:
        raise UserError(f"{old_key} isn't there: name the key file that signs the versions now") from None
    latest = await next_version(base) - 1
    if after_version is None and latest < 0:
        raise UserError("nothing was published yet: begin the run with the new key instead")
    after = latest if after_version is None else after_version
    run_id = run_id or await _run_of(base, latest)
    new, made = keyfile.load_or_create(new_key)  # before it signs anything: lost, it would end the run
    try:
        await _post(base, sign_rotation(run_id, old, new.key_id, after))
    except UserError:  # the origin didn't take it; where that isn't known, the key stays
        if made:
            await asyncio.to_thread(new_key.unlink)
        raise
    print(f"{'made' if made else 'took'} {new_key}: {new.key_id}")
    print(f"the key {old.key_id} signs no version of run {run_id} above {after}; the new one does")
    print(
        f"now start the trainer again with {new_key}. Everyone goes on pinning the first key: don't change it anywhere"
    )


async def _run_of(base: str, version: int) -> str:
    """The run that an origin serves, by the manifest of a version."""
    async with _session() as session:
        body = await _answer(session.get(f"{base}/v1/manifests/{version}", allow_redirects=False), base)
    try:
        return Manifest.from_json_bytes(envelope_from_json(body).payload).run_id
    except InvalidManifest as error:
        raise SourceFault(
            f"{base} serves no manifest of version {version}: {error}; name the run by --run-id"
        ) from None


async def _post(base: str, statement: SignedEnvelope) -> None:
    async with _session() as session:
        await _answer(session.post(f"{base}/v1/keys", data=chain_to_json([statement]), allow_redirects=False), base)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))


async def _answer(request: aiohttp.client._RequestContextManager, base: str) -> bytes:
    try:
        async with request as response:
            body = b""
            async for chunk in response.content.iter_chunked(65536):
                body += chunk
                if len(body) > _MAX_ANSWER_BYTES:
                    raise SourceFault(f"{base} doesn't answer like an origin")
            if response.status >= 500 or response.status == 408:
                raise OurFault(f"the origin at {base} answers {response.status}: {said_in(body) or 'no reason given'}")
            if response.status != 200:
                raise UserError(
                    f"the origin at {base} refuses ({response.status}): {said_in(body) or 'no reason given'}"
                )
            return body
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise OurFault(f"can't reach the origin at {base}: {why_unreachable(error)}") from error

"""What sources have proven: manifests signed by the trainer's key, and so the versions that exist.

A version number is taken for published only with its manifest, and never with another digest than it was once seen with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from protocol.errors import BadSignature, SourceFault
from protocol.manifest import Digest, InvalidManifest, Manifest, SignedEnvelope, manifest_digest
from shardcast.config import ClientLimits
from shardcast.pool import SourcePool
from shardcast.sources import Head, Misbehaved, Source, Unavailable, Unknown
from shardcast.storage import VersionStore

log = logging.getLogger("shardcast")

_RETRY_PAUSE_S = 0.5
_HEAD_GRACE_S = 0.5
_KEYS_EVERY_S = 30.0
_MANIFESTS_KEPT = 8


class Proven:
    """Asks sources and believes signatures. `run_id`: if given, other runs' versions are refused. Used by one client."""

    def __init__(
        self,
        store: VersionStore,
        limits: ClientLimits,
        pool: Callable[[], SourcePool],
        *,
        run_id: str | None,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._limits = limits
        self._pool = pool
        self._run_id = run_id
        self._clock = clock
        self._manifests: dict[Digest, tuple[Manifest, SignedEnvelope]] = {}
        self._keys_asked: dict[str, float] = {}  # when each source was last asked for rotations of the key
        self.newest = -1  # the newest version that was proven to exist

    async def head(self, after: int | None = None, wait_s: float = 0.0) -> Head | None:
        """See `ShardcastClient.head`."""
        deadline = self._clock() + wait_s
        wait = 0.0 if after is None else wait_s  # what is there already is not held up by a source that has nothing
        while True:
            pause = min(max(self._pool().next_ready() or 0.0, _RETRY_PAUSE_S), 30.0)
            try:
                found = await self._ask_heads(after, wait)
            except SourceFault:
                if self._clock() + pause >= deadline:
                    raise
            else:
                if found is not None or self._clock() >= deadline:
                    return found
                pause = 0.0 if after is None else pause
            after = -1 if after is None else after
            await asyncio.sleep(max(0.0, min(pause, deadline - self._clock())))
            wait = max(0.0, deadline - self._clock())

    async def manifest(
        self, version: int, expected_digest: Digest | str | None = None
    ) -> tuple[Manifest, SignedEnvelope]:
        """See `ShardcastClient.manifest`."""
        expected = Digest(expected_digest) if expected_digest is not None else self._store.names.get(version)
        stored = self._store.get(version)
        if stored is not None and expected in (None, stored.digest):
            return stored.manifest, stored.envelope
        if expected is not None:
            self._store.check_name(version, expected)
            if expected in self._manifests:
                return self._manifests[expected]
        deadline = self._clock() + self._limits.deadline_s
        while True:
            pool = self._pool()
            absent: list[Source] = []
            sources = pool.usable()
            for source in sources:
                try:
                    return await self._manifest_from(source, version, expected)
                except Unknown as fault:
                    absent.append(source)
                    log.info("%s", fault, extra={"action": "manifest", "source": source.url})
                except SourceFault as fault:
                    pool.failed(source, fault)
            wait = pool.next_ready()
            if len(absent) == len(sources) and expected is None:
                newest = await asyncio.gather(*(_newest_of(source) for source in absent))
                asked = {source.url for source in absent}
                dropped = [f"{stats.last_fault} (dropped)" for url, stats in pool.stats.items() if url not in asked]
                raise SourceFault(f"no source has version {version}: {'; '.join([*newest, *dropped])}")
            if wait is None or self._clock() + wait > deadline:
                raise SourceFault(f"no source gave the manifest of version {version}: {pool.report()}")
            await asyncio.sleep(max(wait, _RETRY_PAUSE_S))

    async def manifest_if_there(self, version: int, digest: Digest) -> Manifest | None:
        """See `ShardcastClient.manifest_if_there`."""
        stored = self._store.get(version)
        if stored is not None and stored.digest == digest:
            return stored.manifest
        if self._store.names.get(version) not in (None, digest):
            return None
        for source in self._pool().usable():
            try:
                return (await self._manifest_from(source, version, digest, at_hand=True))[0]
            except Unknown:
                continue
            except SourceFault as fault:
                self._pool().failed(source, fault)
        return None

    async def _ask_heads(self, after: int | None, wait_s: float) -> Head | None:
        pool = self._pool()
        sources = pool.usable()
        if not sources:
            raise SourceFault(f"every source was dropped: {pool.report()}")
        tasks = {asyncio.create_task(self._proven_head(source, after, wait_s)) for source in sources}
        found: list[Head | None] = []
        waiting = set(tasks)
        try:
            while waiting:
                # Once one has proven a head, the others have a moment to prove a newer one.
                grace = _HEAD_GRACE_S if any(found) else None
                ended, waiting = await asyncio.wait(waiting, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
                found += [task.result() for task in ended if task.exception() is None]
                for task in ended:
                    _raise_unless_source_fault(task)
                if any(found) and (after is not None or not ended):
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not found:
            raise SourceFault(f"no source answers: {pool.report()}")
        return max((head for head in found if head is not None), key=lambda head: head.version, default=None)

    async def _proven_head(self, source: Source, after: int | None, wait_s: float) -> Head | None:
        pool = self._pool()
        try:
            await self._follow_keys(source)
            head = await source.head(after, wait_s)
            if head is None or (after is not None and head.version <= after):
                return None
            await self._manifest_from(source, head.version, head.manifest_digest)
            return head
        except SourceFault as fault:
            pool.failed(source, fault)
            raise

    async def _manifest_from(
        self, source: Source, version: int, expected: Digest | None, *, at_hand: bool = False
    ) -> tuple[Manifest, SignedEnvelope]:
        """Ask one source and check everything. Raises Misbehaved, Unavailable."""
        if expected is not None and expected in self._manifests:
            return self._manifests[expected]
        await self._follow_keys(source)
        envelope = await source.envelope(version, at_hand=at_hand)
        try:
            manifest = await self._open_manifest(source, envelope)
        except (BadSignature, InvalidManifest) as error:
            raise Misbehaved(f"{source.url}: manifest of version {version} refused: {error}") from None
        digest = manifest_digest(envelope.payload)
        self._check_manifest(source, manifest, version)
        if expected is not None and digest != expected:
            raise Misbehaved(f"{source.url}: serves version {version} as {digest}, expected {expected}")
        named = self._store.names.get(version)
        if named is not None and named != digest:
            raise Misbehaved(f"{source.url}: serves version {version} as {digest}; here it names {named} for ever")
        self._remember(digest, manifest, envelope)
        self.newest = max(self.newest, version)
        return manifest, envelope

    async def _open_manifest(self, source: Source, envelope: SignedEnvelope) -> Manifest:
        try:
            return await asyncio.to_thread(self._store.keys.open_manifest, envelope)
        except BadSignature:
            await self._follow_keys(source, within_s=0.0)  # it may have been rotated a moment ago
            return await asyncio.to_thread(self._store.keys.open_manifest, envelope)

    async def _follow_keys(self, source: Source, within_s: float = _KEYS_EVERY_S) -> None:
        """Ask a source, now and then, for rotations of the trainer's key, and keep those that extend the chain.

        Every source is asked, before its news is waited for, so that no single one can hide a rotation.
        """
        asked = self._keys_asked.get(source.url)
        if asked is not None and self._clock() - asked < within_s:
            return
        statements = await source.rotations()
        self._keys_asked[source.url] = self._clock()
        if await asyncio.to_thread(self._store.extend_keys, statements):
            self._manifests.clear()  # some may be signed by a key that was rotated away

    def _check_manifest(self, source: Source, manifest: Manifest, version: int) -> None:
        if manifest.policy_version != version:
            raise Misbehaved(f"{source.url}: serves the manifest of version {manifest.policy_version} for {version}")
        if self._run_id is not None and manifest.run_id != self._run_id:
            raise Misbehaved(f"{source.url}: serves run {manifest.run_id!r}, this is run {self._run_id!r}")
        if manifest.total_bytes > self._limits.max_total_bytes:
            raise Unavailable(
                f"{source.url}: version {version} has {manifest.total_bytes} bytes, "
                f"this client takes at most {self._limits.max_total_bytes}"
            )

    def _remember(self, digest: Digest, manifest: Manifest, envelope: SignedEnvelope) -> None:
        self._manifests[digest] = (manifest, envelope)
        while len(self._manifests) > _MANIFESTS_KEPT:
            del self._manifests[next(iter(self._manifests))]


async def _newest_of(source: Source) -> str:
    """What a source that lacks a version has instead, as far as it says."""
    try:
        head = await source.head(None, 0.0)
    except SourceFault as fault:
        return str(fault)
    return f"{source.url}: its newest is {head.version}" if head else f"{source.url}: nothing was published there yet"


def _raise_unless_source_fault(task: asyncio.Task[Head | None]) -> None:
    error = task.exception()
    if error is not None and not isinstance(error, SourceFault):
        raise error

"""The origin: serves what the trainer announces. It can't make a version; only the pinned key can.

Loops: `_collect_forever` takes the store's versions and the coordinator's list, and removes what nobody needs;
it wakes after each new version and every `COLLECT_EVERY_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

import aiohttp
from aiohttp import web

from protocol.errors import BadSignature, SourceFault, UserError
from protocol.manifest import Manifest, SignedEnvelope, envelope_from_json, manifest_digest, open_manifest
from shardcast.catalog import Catalog
from shardcast.config import ServerLimits
from shardcast.layout import incoming_folder
from shardcast.metrics import ShardcastMetrics
from shardcast.names import VersionConflict
from shardcast.partial import DiskFullError
from shardcast.peer_server import PeerService
from shardcast.server import ShardcastApp, error_response
from shardcast.storage import StoredVersion, VersionStore

log = logging.getLogger("shardcast")

COLLECT_EVERY_S = 60.0
_ASK_TIMEOUT_S = 10.0
_MAX_REQUIRED = 100_000
_MAX_POSTS = 4
_POST_TIMEOUT_S = 30.0


class Origin:
    """One run's origin over a data directory. `coordinator`: whose list of required versions is asked before any
    version is removed; while it can't be had, everything is kept.
    """

    def __init__(
        self,
        store: VersionStore,
        pinned_keys: Collection[str],
        *,
        limits: ServerLimits,
        keep_last: int,
        coordinator: str | None = None,
        help_peers: bool = True,
    ) -> None:
        self._store = store
        self._pinned = frozenset(pinned_keys)
        self._keep_last = keep_last
        self._coordinator = coordinator
        self.catalog = Catalog(store, ShardcastMetrics())
        serving = ShardcastApp(self.catalog, limits)
        self.app = serving.build()
        if help_peers:
            PeerService(serving).add_to(self.app)
        self.app.router.add_post("/v1/versions", self._post_version)
        self._accepting = asyncio.Lock()
        self._reading = asyncio.Semaphore(_MAX_POSTS)  # anyone may post; this bounds the memory that it costs
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Collect old versions until cancelled."""
        while True:
            try:
                await self.collect()
            except OSError as error:
                log.error("can't remove old versions: %s", error, extra={"action": "collect"})
            self._wake.clear()
            try:
                async with asyncio.timeout(COLLECT_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def accept(self, envelope: SignedEnvelope) -> bool:
        """Take a signed version whose files lie in `incoming/<version>`; says whether it is new.

        The same version with the same digest again is fine. Raises BadSignature, InvalidManifest, VersionConflict,
        UserError (files missing, number not above the head), DiskFullError.
        """
        manifest = open_manifest(envelope, self._pinned)
        digest = manifest_digest(envelope.payload)
        async with self._accepting:
            self._store.check_name(manifest.policy_version, digest)
            if self._store.names.get(manifest.policy_version) == digest:
                await asyncio.to_thread(self._store.forget_incoming, manifest.policy_version)
                return False
            self._check_order(manifest)
            stored = await asyncio.to_thread(self._adopt, manifest, envelope)
        self.catalog.announce(stored)
        self._wake.set()
        log.info(
            "announced version %d, %d bytes, %s",
            stored.version,
            manifest.total_bytes,
            digest,
            extra={"action": "announce", "version": stored.version},
        )
        return True

    async def collect(self) -> list[int]:
        """Remove versions that nobody needs. Keeps everything while the coordinator can't be asked."""
        required = await self._required()
        if required is None:
            return []
        return await asyncio.to_thread(self._store.collect, required=required, keep_last=self._keep_last)

    def _check_order(self, manifest: Manifest) -> None:
        latest = self._store.names.latest
        if latest is not None and manifest.policy_version < latest:
            raise VersionConflict(
                f"version {manifest.policy_version} comes after {latest} was used: publish as {latest + 1} or higher"
            )

    def _adopt(self, manifest: Manifest, envelope: SignedEnvelope) -> StoredVersion:
        folder = incoming_folder(self._store.root, manifest.policy_version)
        return self._store.adopt(folder, envelope, manifest)

    async def _post_version(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_POST_TIMEOUT_S), self._reading:
                envelope = envelope_from_json(await request.read())
            new = await self.accept(envelope)
        except TimeoutError:
            return error_response(408, "the manifest didn't come in time; try again", 1)
        except BadSignature as error:
            return error_response(403, str(error))
        except VersionConflict as error:
            return error_response(409, str(error))
        except DiskFullError as error:
            return error_response(507, str(error))
        except (SourceFault, UserError) as error:
            return error_response(400, str(error))
        head = self.catalog.head
        assert head is not None or not new
        return web.json_response(
            {"new": new, "head": None if head is None else head.version}, status=201 if new else 200
        )

    async def _required(self) -> set[int] | None:
        """The versions that the coordinator still needs; empty without a coordinator, None if it can't say."""
        if self._coordinator is None:
            return set()
        url = f"{self._coordinator}/api/v1/versions/required"
        timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
                response.raise_for_status()
                versions = (await response.json())["versions"]
            if not isinstance(versions, list) or len(versions) > _MAX_REQUIRED:
                raise ValueError("`versions` is not a list")
            return {int(version) for version in versions}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError, KeyError) as error:
            log.warning(
                "keeping every version: %s can't be asked: %s",
                url,
                str(error) or type(error).__name__,
                extra={"action": "ask_required"},
            )
            return None

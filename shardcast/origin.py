"""The origin: serves what the trainer announces. It can't make a version; only the pinned key can.

Loops: `_collect_forever` takes the store's versions and the coordinator's list, and removes what nobody needs;
it wakes after each new version and every `COLLECT_EVERY_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from protocol.errors import BadSignature, SourceFault, UserError
from protocol.manifest import Manifest, SignedEnvelope, envelope_from_json, manifest_digest
from protocol.rotation import KeyRotation, chain_from_json, open_rotation
from shardcast.catalog import Catalog
from shardcast.config import ServerLimits
from shardcast.discovery import Coordinator
from shardcast.layout import incoming_folder
from shardcast.metrics import ShardcastMetrics
from shardcast.names import VersionConflict
from shardcast.partial import DiskFullError
from shardcast.peer_server import PeerService
from shardcast.retention import needed
from shardcast.server import ShardcastApp, error_response
from shardcast.storage import StoredVersion, VersionStore

log = logging.getLogger("shardcast")

COLLECT_EVERY_S = 60.0
_MAX_POSTS = 4
_POST_TIMEOUT_S = 30.0


class Origin:
    """One run's origin over a data directory. `coordinator`: whose list of required versions is asked before any
    version is removed; while it can't be had, everything is kept.
    """

    def __init__(
        self,
        store: VersionStore,
        *,
        limits: ServerLimits,
        keep_last: int,
        coordinator: Coordinator | None = None,
        help_peers: bool = True,
    ) -> None:
        self._store = store
        self._keep_last = keep_last
        self._coordinator = coordinator
        self.catalog = Catalog(store, ShardcastMetrics())
        serving = ShardcastApp(self.catalog, limits)
        self.app = serving.build()
        if help_peers:
            PeerService(serving).add_to(self.app)
        self.app.router.add_post("/v1/versions", self._post_version)
        self.app.router.add_post("/v1/keys", self._post_keys)
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
        manifest = self._store.keys.open_manifest(envelope)
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

    async def rotate(self, statements: list[SignedEnvelope]) -> int:
        """Follow rotations of the trainer's key; how many were news. Raises InvalidRotation if one can't be followed,
        UserError if it would orphan versions that are served already.
        """
        ring = self._store.keys.ring
        for statement in statements:
            ring = ring.extended(statement)
            self._check_after(open_rotation(statement))
        added = await asyncio.to_thread(self._store.extend_keys, statements)
        self.catalog.reconsider()
        return added

    async def collect(self) -> list[int]:
        """Remove versions that nobody needs. Keeps everything while the coordinator can't be asked."""
        required = await needed(self._coordinator, self._store)
        if required is None:
            return []
        return await asyncio.to_thread(self._store.collect, required=required, keep_last=self._keep_last)

    def _check_after(self, rotation: KeyRotation) -> None:
        for version in self._store.versions:
            stored = self._store.get(version)
            signer = None if stored is None else stored.envelope.key_id
            if version > rotation.after_version and signer == rotation.old_key:
                raise UserError(
                    f"version {version} is signed by the old key and is above {rotation.after_version}: name the last "
                    "version that the old key signed"
                )

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
        async def take(body: bytes) -> web.Response:
            new = await self.accept(envelope_from_json(body))
            head = self.catalog.head
            assert head is not None or not new
            answer = {"new": new, "head": None if head is None else head.version}
            return web.json_response(answer, status=201 if new else 200)

        return await self._posted(request, take)

    async def _post_keys(self, request: web.Request) -> web.Response:
        async def take(body: bytes) -> web.Response:
            return web.json_response({"new": await self.rotate(chain_from_json(body))})

        return await self._posted(request, take)

    async def _posted(self, request: web.Request, take: Callable[[bytes], Awaitable[web.Response]]) -> web.Response:
        """Read a body that anyone may have sent, and turn what is wrong with it into a status."""
        try:
            async with asyncio.timeout(_POST_TIMEOUT_S), self._reading:
                body = await request.read()
            return await take(body)
        except TimeoutError:
            return error_response(408, "the body didn't come in time; try again", 1)
        except BadSignature as error:
            return error_response(403, str(error))
        except VersionConflict as error:
            return error_response(409, str(error))
        except DiskFullError as error:
            return error_response(507, str(error))
        except (SourceFault, UserError) as error:
            return error_response(400, str(error))

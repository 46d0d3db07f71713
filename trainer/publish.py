"""Turns the trainer's weights into a policy version: bf16 safetensors, signed, announced, served.

The coordinator hears of a version before the origin offers it, so that no worker can hold a version that its submissions
could not name. Every step is idempotent: after a crash the same weights are published again under the same digest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from coordinator.client import Backoff, TrainerClient
from protocol.errors import OurFault
from protocol.manifest import Manifest, manifest_digest, sign_manifest
from protocol.signing import Identity, SignedEnvelope
from shardcast.publish import Described, announce, build_manifest, describe, describe_packed, make_delta, pack, stage
from trainer.precision import PUBLISHED
from trainer.published import Published, PublishedVersions, delta_base

log = logging.getLogger(__name__)

_SETTLE_S = 10.0
_CORES_PER_THREAD = 4  # deltas are made beside the next step, which has the other cores
# Whatever a model folder holds besides its weights goes along with every version, so that each is whole by itself.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A bf16 copy of all weights, on the CPU, with `lm_head.weight` written out even where it is tied.

    (vLLM's CPU build keeps the old head of a tied model when weights are reloaded, so it must never see a tied one.)
    """
    state = {
        name: tensor.detach().to("cpu", PUBLISHED, copy=True).contiguous()
        for name, tensor in model.state_dict().items()
    }
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = model.get_output_embeddings().weight.detach().to("cpu", PUBLISHED, copy=True)
    return state


def write_version(state: Mapping[str, torch.Tensor], model_folder: Path, target: Path) -> None:
    """Write a version's folder: the weights, and the other files of the initial model folder. Raises OSError."""
    target.mkdir(parents=True)
    for file in sorted(model_folder.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, target / file.name)
    try:
        save_file(dict(state), target / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how it says that the disk refuses
        raise OSError(str(error)) from error


class Publisher:
    """Publishes versions one after the other, in the background if asked to."""

    def __init__(
        self,
        client: TrainerClient,
        identity: Identity,
        *,
        run_id: str,
        model_folder: Path,
        origin: str,
        origin_data: Path,
        shard_bytes: int,
        full_every: int = 10,
        packed: bool = True,
    ) -> None:
        self._client = client
        self._identity = identity
        self._run_id = run_id
        self._model_folder = model_folder
        self._origin = origin
        self._origin_data = origin_data
        self._shard_bytes = shard_bytes
        self._full_every = full_every
        self._packed = packed
        self._published = PublishedVersions(origin_data / "published")
        self._written: set[int] = set()  # versions whose bytes this process wrote
        self._running: asyncio.Task[str] | None = None

    async def begin(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Publish in the background; waits for the previous version first, and raises what that raised."""
        await self.finish()
        self._running = asyncio.create_task(self.publish(state, version), name=f"publish {version}")

    async def finish(self) -> None:
        """Wait for the version that is being published, if any."""
        running, self._running = self._running, None
        if running is not None:
            await running

    async def settle(self) -> None:
        """The trainer is failing: give what is being published a moment to get out, then drop it (a restart repeats it)."""
        running, self._running = self._running, None
        if running is not None:
            await asyncio.wait({running}, timeout=_SETTLE_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def digest_of(self, state: Mapping[str, torch.Tensor], version: int) -> str:
        """The manifest digest that these weights would have as `version`."""
        with tempfile.TemporaryDirectory(dir=self._scratch()) as scratch:
            described = await asyncio.to_thread(self._make, state, Path(scratch) / "version", version)
        return str(manifest_digest(described.manifest.to_json_bytes()))

    async def publish(self, state: Mapping[str, torch.Tensor], version: int) -> str:
        """Write, hash, sign, announce, serve; the manifest digest. An origin that is away is waited for."""
        with tempfile.TemporaryDirectory(dir=self._scratch()) as scratch:
            folder = Path(scratch) / "version"
            described = await asyncio.to_thread(self._make, state, folder, version)
            envelope = sign_manifest(described.manifest, self._identity)
            published = await asyncio.to_thread(self._published.keep, folder, envelope, described.manifest)
        self._written.add(version)
        await self._client.announce(envelope)
        await stage(
            published.files,
            self._origin_data,
            version,
            move=False,
            torrent=described.torrent,
            delta=published.delta,
            packed=published.packed,
        )
        await self._announce_at_origin(envelope, version)
        await asyncio.to_thread(self._published.prune, version)
        return str(manifest_digest(envelope.payload))

    def _make(self, state: Mapping[str, torch.Tensor], folder: Path, version: int) -> Described:
        """Fill `folder` with the version's `files` and the blobs that it has, as `PublishedVersions` keeps them."""
        files = folder / "files"
        write_version(state, self._model_folder, files)
        described = describe(files, run_id=self._run_id, policy_version=version, shard_bytes=self._shard_bytes)
        before = self._published.find(version)
        if before is not None and _same_content(before.manifest, described.manifest):
            # Announced before a crash, maybe: the digest must be the same, also if the base is gone by now.
            return self._again(before, described, folder)
        if self._packed:
            described = self._with_packed(described, folder)
        return replace(described, manifest=self._with_delta(described.manifest, folder))

    def _again(self, before: Published, described: Described, folder: Path) -> Described:
        for blob in (before.delta, before.packed):
            if blob is not None:
                shutil.copyfile(blob, folder / blob.name)
        if before.packed is not None:
            return describe_packed(before.manifest, folder / "packed")
        return replace(described, manifest=before.manifest)

    def _with_packed(self, described: Described, folder: Path) -> Described:
        manifest, blob = described.manifest, folder / "packed"
        begun = time.perf_counter()
        found = pack(folder / "files", manifest, blob, shard_bytes=self._shard_bytes, threads=_threads())
        if found is None or found.manifest.packed is None:
            return described
        size = found.manifest.packed.size
        log.info(
            "version %d has a packed form of %.0f %% of its bytes, after %.1f s",
            manifest.policy_version,
            100 * size / manifest.total_bytes,
            time.perf_counter() - begun,
            extra={"action": "pack", "version": manifest.policy_version, "bytes": size},
        )
        return found

    def _with_delta(self, manifest: Manifest, folder: Path) -> Manifest:
        version = manifest.policy_version
        number = delta_base(version, self._full_every, self._published.versions)
        base = None if number is None else self._published.find(number)
        if base is None or not self._is_intact(base):
            return manifest
        begun = time.perf_counter()
        try:
            made = make_delta(
                base.files,
                base.manifest,
                folder / "files",
                manifest,
                folder / "delta",
                shard_bytes=self._shard_bytes,
                threads=_threads(),
            )
        except OurFault as error:
            log.warning("version %d is published in full alone: %s", version, error, extra={"action": "delta"})
            return manifest
        size = manifest.total_bytes if made is None or made.delta is None else made.delta.size
        log.info(
            "version %d is published %s, after %.1f s",
            version,
            "in full alone"
            if made is None
            else f"with a delta of {size} bytes to {number} (1/{manifest.total_bytes / size:.0f})",
            time.perf_counter() - begun,
            extra={"action": "delta", "version": version, "bytes": size},
        )
        return made or manifest

    def _is_intact(self, base: Published) -> bool:
        """Whether a base is of this run and, if another process wrote it, still what it was: else it fails every worker."""
        version = base.manifest.policy_version
        if version in self._written or base.manifest.run_id != self._run_id:
            return base.manifest.run_id == self._run_id
        again = build_manifest(base.files, run_id=self._run_id, policy_version=version, shard_bytes=self._shard_bytes)
        return _same_content(again, base.manifest)

    async def _announce_at_origin(self, envelope: SignedEnvelope, version: int) -> None:
        """An origin that is away is waited for: generation goes on meanwhile, as far as staleness allows."""
        backoff = Backoff()
        while True:
            try:
                await announce(self._origin, envelope)
                return
            except OurFault as error:
                log.warning("%s; trying again", error, extra={"action": "publish_retry", "version": version})
            await backoff.pause()

    def _scratch(self) -> Path:
        """Beside the origin's data, so that files are linked, not copied."""
        folder = self._origin_data / "scratch"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _same_content(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests of a version are of the same files in the same shards, whatever blobs make those."""
    mine, theirs = ((m.run_id, m.policy_version, m.files, m.shards) for m in (one, other))
    return mine == theirs


def _threads() -> int:
    return max(1, (os.cpu_count() or 1) // _CORES_PER_THREAD)

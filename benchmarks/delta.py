"""What a delta between two real policy versions weighs, and what it costs to make and to apply.

    python -m benchmarks.delta [--model FOLDER] [--cache FOLDER] [--repeats 5] [--threads 1]

Two consecutive versions of SmolLM2-135M-Instruct come from a real training at each learning rate (`training_pair`; made
once, minutes). Then, in alternating repeats: make the delta; apply it to a fresh folder as a client does, every shard
hashed and written; the same with the version packed, which needs no base; and, to compare with, compress the difference of
the bytes (xor) by zstd alone. MB are 10^6 bytes of the model. Per core means per second of CPU time, all threads and the
kernel's part included; wall time is beside it, and is the same on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import zstandard

from benchmarks.training_pair import Recipe, make_pair
from protocol.manifest import Manifest, ManifestFile, manifest_digest, sign_manifest
from protocol.signing import Identity
from shardcast.delta.apply import Applier
from shardcast.delta.decode import BlobFile, DeltaView
from shardcast.delta.encode import encode_delta, encode_packed
from shardcast.delta.views import FolderView
from shardcast.partial import PartialVersion
from shardcast.publish import build_manifest

RATES = (1e-5, 1e-6)
_MODEL = Path(".cache/models/smollm2-135m-instruct")
_CACHE = Path(".cache/benchmarks/delta")
_XOR_CHUNK = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One learning rate. `ratio`: full bytes to the delta's. Speeds in MB/s per core: medians over `repeats`, and least and
    most; `wall_mb_s` by the clock.
    """

    learning_rate: float
    full_bytes: int
    delta_bytes: int
    ratio: float
    changed_words: float
    xor_ratio: float
    encode_mb_s: float
    apply_mb_s: float
    xor_mb_s: float
    spread: dict[str, tuple[float, float]]
    wall_mb_s: dict[str, float]
    packed_share: float
    pack_mb_s: float
    unpack_mb_s: float
    digest_equal: bool
    repeats: int


class Pair:
    """Two versions in folders, and what is done with them."""

    def __init__(self, before: Path, after: Path, scratch: Path, threads: int) -> None:
        self.before, self.after = (_manifest(folder, version) for version, folder in enumerate((before, after)))
        self._folders = (before, after)
        self._scratch = scratch
        self._threads = threads
        self.blob = scratch / "blob"
        self.packed = scratch / "packed"
        self._work = {
            "encode": self._encode,
            "apply": self._apply,
            "pack": self._pack,
            "unpack": self._unpack,
            "xor": self._xor,
        }
        self.seconds: dict[str, list[float]] = {name: [] for name in self._work}  # of CPU
        self.wall: dict[str, list[float]] = {name: [] for name in self._work}
        self.xor_bytes = 0
        self.digest_equal = True

    def repeat(self) -> None:
        """Each thing once."""
        for blob in (self.blob, self.packed):
            blob.unlink(missing_ok=True)  # to free an old file's pages would count as making the new one
        for name, work in self._work.items():
            cpu, wall = _timed(work)
            self.seconds[name].append(cpu)
            self.wall[name].append(wall)
            shutil.rmtree(self._scratch / "made", ignore_errors=True)
            (self._scratch / "made.journal").unlink(missing_ok=True)

    def _encode(self) -> None:
        before, after = self._folders
        with FolderView(before, self.before.files) as base, FolderView(after, self.after.files) as target:
            encode_delta(base, target, self.after, self.blob, limit=self.after.total_bytes, threads=self._threads)

    def _pack(self) -> None:
        encode_packed(self._folders[1], self.after, self.packed, limit=self.after.total_bytes, threads=self._threads)

    def _apply(self) -> None:
        self._make(self.before.files, self.blob)

    def _unpack(self) -> None:
        self._make((), self.packed)

    def _make(self, base_files: Sequence[ManifestFile], path: Path) -> None:
        envelope = sign_manifest(self.after, Identity.from_seed(bytes(32)))
        partial = PartialVersion(self._scratch / "made", envelope, self.after, manifest_digest(envelope.payload))
        partial.open()
        with FolderView(self._folders[0], base_files) as base, BlobFile(path) as blob:
            view = DeltaView(base, self.after, blob.read, blob.size)
            applied = Applier(partial, view, threads=self._threads).run()
        self.digest_equal &= applied.wrong == 0 and not partial.missing
        partial.seal(durable=False)

    def _xor(self) -> None:
        before, after = (np.memmap(folder / "model.safetensors", np.uint8, "r") for folder in self._folders)
        compressor = zstandard.ZstdCompressor(level=3)
        chunks = range(0, len(after), _XOR_CHUNK)
        pairs = ((before[at : at + _XOR_CHUNK], after[at : at + _XOR_CHUNK]) for at in chunks)
        self.xor_bytes = sum(len(compressor.compress((old ^ new).tobytes())) for old, new in pairs)

    def changed_words(self) -> float:
        """The share of 16-bit words that differ."""
        before, after = (np.memmap(folder / "model.safetensors", np.uint16, "r") for folder in self._folders)
        return float(np.count_nonzero(before != after) / len(after))

    def row(self, learning_rate: float) -> Row:
        """The figures of all repeats."""
        full, size = self.after.total_bytes, self.blob.stat().st_size
        speeds = {name: [full / 1e6 / each for each in seconds] for name, seconds in self.seconds.items()}
        median = {name: round(statistics.median(each), 1) for name, each in speeds.items()}
        return Row(
            learning_rate,
            full,
            size,
            round(full / size, 1),
            round(self.changed_words(), 5),
            round(full / self.xor_bytes, 1),
            median["encode"],
            median["apply"],
            median["xor"],
            {name: (round(min(each), 1), round(max(each), 1)) for name, each in speeds.items()},
            {name: round(full / 1e6 / statistics.median(each), 1) for name, each in self.wall.items()},
            round(self.packed.stat().st_size / full, 4),
            median["pack"],
            median["unpack"],
            self.digest_equal,
            len(self.seconds["encode"]),
        )


def main() -> None:
    """Measure, print a table, and end with a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=_MODEL)
    parser.add_argument("--cache", type=Path, default=_CACHE)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    folders = {rate: make_pair(options.model, options.cache, Recipe(rate)) for rate in RATES}
    with tempfile.TemporaryDirectory(dir=options.cache) as scratch:
        pairs = {}
        for rate, (before, after) in folders.items():
            own = Path(scratch) / str(rate)
            own.mkdir()
            pairs[rate] = Pair(before, after, own, options.threads)
        for _ in range(options.repeats):
            for pair in pairs.values():
                pair.repeat()
        rows = [pair.row(rate) for rate, pair in pairs.items()]
    print(_table(rows))
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "threads": options.threads}
    print(json.dumps({"benchmark": "delta", "machine": machine, "rows": [asdict(row) for row in rows]}))


def _manifest(folder: Path, version: int) -> Manifest:
    return build_manifest(folder, run_id="benchmark", policy_version=version)


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds of CPU, and of the clock."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def _table(rows: list[Row]) -> str:
    head = f"{'lr':>8} {'full MB':>8} {'delta kB':>9} {'ratio':>8} {'xor+zstd':>9} {'changed':>8}"
    head += f" {'encode MB/s·core':>18} {'apply MB/s·core':>18} {'wall':>9} {'equal':>6}"
    head += f" {'packed':>7} {'pack/unpack MB/s·core':>22}"
    lines = [head]
    for row in rows:
        speeds = " ".join(
            f"{median:>8.0f} ({row.spread[name][0]:.0f}–{row.spread[name][1]:.0f})".rjust(18)
            for name, median in (("encode", row.encode_mb_s), ("apply", row.apply_mb_s))
        )
        wall = f"{row.wall_mb_s['encode']:.0f}/{row.wall_mb_s['apply']:.0f}"
        lines.append(
            f"{row.learning_rate:>8g} {row.full_bytes / 1e6:>8.1f} {row.delta_bytes / 1e3:>9.1f} {'1/' + str(row.ratio):>8} "
            f"{'1/' + str(row.xor_ratio):>9} {row.changed_words:>8.2%} {speeds} {wall:>9} {row.digest_equal!s:>6}"
            f" {row.packed_share:>7.1%} {row.pack_mb_s:>14.0f}/{row.unpack_mb_s:.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

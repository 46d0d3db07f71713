"""A decoder written from docs/protocol.md alone, in plain Python: what the page says is what blobs hold."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.unit.shardcast.delta.versions import make_blob, manifest, safetensors, step, words, write


class Bits:
    """Parts of a frame, one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        part, self.data = self.data[:count], self.data[count:]
        assert len(part) == count
        return part

    def bits(self, count: int) -> list[int]:
        part = self.take(-(-count // 8))
        return [part[i // 8] >> (7 - i % 8) & 1 for i in range(count)]


def o(w: int) -> int:
    return 2**16 - 1 - w if w >= 2**15 else w + 2**15


def w_of(value: int) -> int:
    return value - 2**15 if value >= 2**15 else 2**16 - 1 - value


def decode(base: bytes, threshold: int, shift: int, gaps: int, content: bytes) -> bytes:
    old = list(struct.unpack(f"<{len(base) // 2}H", base))
    parts = Bits(content)
    small = sorted((i for i, w in enumerate(old) if w % 2**15 < threshold), key=lambda i: (old[i] % 2**15 // 2**7, i))
    changed = [i for i, flag in zip(small, parts.bits(len(small)), strict=True) if flag]
    high = list(parts.take(gaps))
    high = [h if h < 255 else struct.unpack("<I", parts.take(4))[0] for h in high]
    low = parts.bits(gaps * shift)
    at = -1
    for index, h in enumerate(high):
        gap = h << shift
        for bit in range(shift):
            gap |= low[index * shift + bit] << (shift - 1 - bit)
        at += gap + 1
        changed.append(at)
    falls = parts.bits(len(changed))
    big = parts.bits(len(changed))
    lows, highs = parts.take(sum(big)), parts.take(sum(big))
    assert not parts.data
    over = iter([a + 256 * b + 2 for a, b in zip(lows, highs, strict=True)])
    new = old.copy()
    for i, fall, more in zip(changed, falls, big, strict=True):
        change = next(over) if more else 1
        new[i] = w_of((o(old[i]) + (-change if fall else change)) % 2**16)
    return struct.pack(f"<{len(new)}H", *new)


def together(shards: list[tuple[int, int]], span: int) -> list[tuple[int, int]]:
    """What each section makes: (file, size)."""
    made: list[tuple[int, int]] = []
    for file, size in shards:
        if made and made[-1][0] == file and made[-1][1] + size <= span:
            made[-1] = (file, made[-1][1] + size)
        else:
            made.append((file, size))
    return made


def apply_by_the_page(base: list[bytes], sizes: list[int], shards: list[tuple[int, int]], blob: bytes) -> list[bytes]:
    """Files of these sizes, whose shards are (file, size) in order."""
    assert blob[:8] == b"RSDELTA\x01"
    span, count = struct.unpack_from("<II", blob, 8)
    lengths = struct.unpack_from(f"<{count}I", blob, 16)
    shards = together(shards, span)
    assert count == len(shards)
    at = 16 + 4 * count
    files = [bytearray() for _ in sizes]
    for (file, size), length in zip(shards, lengths, strict=True):
        section, at = blob[at : at + length], at + length
        begin = len(files[file])
        while section:
            kind, zero, source, made, offset = struct.unpack_from("<BBHIQ", section)
            section = section[16:]
            assert zero == 0
            if kind == 4:
                files[file] += files[source][offset : offset + made]
                continue
            old = base[source][offset : offset + made] if base else b""
            if kind == 0:
                files[file] += old
                continue
            head = struct.unpack_from("<HBBIII", section) if kind == 1 else struct.unpack_from("<I", section)
            section = section[16 if kind == 1 else 4 :]
            frame_size = head[4] if kind == 1 else head[0]
            content = zstandard.ZstdDecompressor().decompress(section[:frame_size])
            section = section[frame_size:]
            if kind == 1:
                assert len(content) == head[5]
                files[file] += decode(old, head[0], head[1], head[3], content)
            elif kind == 2:
                files[file] += bytes(a ^ b for a, b in zip(old, content, strict=True))
            else:
                assert kind == 3 and (source, offset) == (0, 0)
                files[file] += content
        assert len(files[file]) - begin == size
    assert at == len(blob)
    return [bytes(data) for data in files]


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.02, 0.6])
def test_blobs_are_as_the_page_says(tmp_path: Path, share: float) -> None:
    old, head = words(3000), words(40_000, seed=1)
    head[::97] = np.arange(len(head[::97]), dtype=np.uint16) * 150  # every exponent, NaN and infinities too
    new, new_head = step(old, share), step(head, share / 4, seed=2)

    def model(weights: np.ndarray, first: np.ndarray, scale: float) -> bytes:
        scales = np.full(9, scale, np.float32).tobytes()
        tensors = {"a": ("BF16", first.tobytes()), "s": ("F32", scales), "w": ("F16", weights.tobytes())}
        return safetensors({**tensors, "z": ("BF16", first.tobytes())})

    files = {
        "base": {"m.safetensors": model(old, head, 1.0), "t.json": b"old"},
        "new": {"m.safetensors": model(new, new_head, 1.5), "t.json": b"newer"},
    }
    base, target = (write(tmp_path / name, data) for name, data in files.items())
    blob = make_blob(base, target, tmp_path / "blob", shard=30_000, span=70_000)
    made = manifest(target, 2, 30_000)
    shards = [(shard.file, shard.size) for shard in made.shards]
    sizes = [file.size for file in made.files]
    assert apply_by_the_page(list(files["base"].values()), sizes, shards, blob) == list(files["new"].values())

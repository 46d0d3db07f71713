"""Bounds, medians and the table: pure functions of the samples."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.manifest import DEFAULT_SHARD_BYTES
from shardcast.config import MIB


@dataclass(frozen=True, slots=True)
class Sample:
    """One publication. Seconds from the announcement until a worker held the verified version."""

    worker_s: tuple[float, ...]
    prepare_s: float  # hashing and the like, before the announcement
    needed: int  # bytes that a worker must receive: of the files, the packed form, or the delta
    origin_sent: int  # bytes on the wire, headers included
    relays_sent: int
    cpu_s: Mapping[str, float] = field(default_factory=dict)  # by role
    failures: int = 0  # tries before this one in which some worker never had the version

    @property
    def cpu_share(self) -> float:
        """Of what all cores could do until the last worker was done, origin, relays and workers alone."""
        return sum(self.cpu_s.values()) / ((os.cpu_count() or 1) * self.last_s)

    @property
    def first_s(self) -> float:
        return min(self.worker_s)

    @property
    def last_s(self) -> float:
        return max(self.worker_s)


def shard_bytes(size: int) -> int:
    """The default for 256 MiB and more; for smaller files as many shards as 256 MiB have, at least 64 KiB each."""
    fraction = 1 << max(0, (round(256 * MIB / size)).bit_length() - 1)
    return max(MIB // 16, DEFAULT_SHARD_BYTES // fraction)


def origin_bound_s(size: int, mbit: float) -> float:
    """The origin must send every byte once."""
    return size * 8 / (mbit * 1e6)


def tree_bound_s(size: int, mbit: float, relays: int, workers: int) -> float:
    """Workers take from relays alone, and relays keep the whole: the relays' uplinks carry a copy per worker.

    Relays and workers together receive (relays + workers) copies out of 1 + relays uplinks; the relays' own uplinks
    carry `workers` copies. Neither can go faster than the links.
    """
    copies = max(1.0, workers / relays, (relays + workers) / (1 + relays))
    return copies * origin_bound_s(size, mbit)


def summarize(samples: Sequence[Sample], size: int, bound_s: float) -> dict[str, object]:
    """Medians over the repeats of one variant. `bound_s`: for the files as they are; `wire_bound_s`: for what must travel."""
    last = statistics.median(sample.last_s for sample in samples)
    origin = statistics.median(sample.origin_sent for sample in samples)
    needed = statistics.median(sample.needed for sample in samples)
    wire_bound_s = bound_s * needed / size
    roles = sorted({role for sample in samples for role in sample.cpu_s})
    return {
        "n": len(samples),
        "failed": sum(sample.failures for sample in samples),
        "first_s": round(statistics.median(sample.first_s for sample in samples), 2),
        "last_s": round(last, 2),
        "last_s_all": [round(sample.last_s, 2) for sample in samples],
        "prepare_s": round(statistics.median(sample.prepare_s for sample in samples), 2),
        "origin_bytes": int(origin),
        "origin_copies": round(origin / size, 3),
        "relay_copies": round(statistics.median(sample.relays_sent for sample in samples) / size, 3),
        "bound_s": round(bound_s, 2),
        "ratio_to_bound": round(last / bound_s, 3),
        "wire_share": round(needed / size, 4),
        "wire_bound_s": round(wire_bound_s, 2),
        "ratio_to_wire_bound": round(last / wire_bound_s, 3),
        "cpu_share": round(statistics.median(sample.cpu_share for sample in samples), 2),
        "cpu_s": {role: round(statistics.median(s.cpu_s.get(role, 0.0) for s in samples), 2) for role in roles},
    }


def with_ratios(variants: Mapping[str, dict[str, object]], reference: str) -> dict[str, dict[str, object]]:
    """Each variant with how many times faster than `reference` its last worker is."""
    if reference not in variants:
        return dict(variants)
    slow = float(str(variants[reference]["last_s"]))
    return {
        name: {**facts, "times_faster_than_published": round(slow / float(str(facts["last_s"])), 2)}
        for name, facts in variants.items()
    }


def table(variants: Mapping[str, Mapping[str, object]]) -> str:
    """The variants as text, one a line."""
    columns = {
        "n": "n",
        "failed": "failed",
        "first": "first_s",
        "last": "last_s",
        "origin x": "origin_copies",
        "relays x": "relay_copies",
        "bound": "bound_s",
        "last/bound": "ratio_to_bound",
        "needed": "wire_share",
        "its bound": "wire_bound_s",
        "last/its": "ratio_to_wire_bound",
        "CPU": "cpu_share",
    }
    last = "times_faster_than_published"
    lines = [f"{'variant':<22}" + "".join(f"{name:>11}" for name in columns) + f"{'x published':>13}"]
    for name, facts in variants.items():
        cells = "".join(f"{facts[column]!s:>11}" for column in columns.values())
        lines.append(f"{name:<22}{cells}{facts.get(last, '-')!s:>13}")
    return "\n".join(lines)

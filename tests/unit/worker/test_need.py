from __future__ import annotations

import pytest

from tests.unit.worker.machines import GIB, RTX4090, T4, machine
from worker.machine import Machine
from worker.need import Need, need_of, shortages


def test_an_engine_needs_more_than_its_weights() -> None:
    assert Need(GIB // 4).engine_bytes == GIB // 4 + GIB
    assert Need(14 * GIB).engine_bytes == int(14 * GIB * 1.35)
    assert Need(14 * GIB).disk_bytes == 42 * GIB
    assert need_of(GIB, 0.25).cpu_cache_bytes == GIB // 4
    assert need_of(GIB, None).cpu_cache_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("found", "size", "words"),
    [
        (machine(RTX4090), 14 * GIB, []),
        (machine(RTX4090), 20 * GIB, ["27.0 GiB of GPU memory", "smaller model"]),
        (machine(T4), GIB, ["too old for bf16"]),
        (machine(RTX4090, disk=10 * GIB), 14 * GIB, ["up to 42.0 GiB", "--home"]),
        (machine(memory=3 * GIB), GIB // 4, ["3.2 GiB of memory on a CPU", "--kv-cache-gib"]),
        (machine(memory=4 * GIB), GIB // 4, []),
    ],
)
def test_what_is_short_is_named_with_what_would_help(found: Machine, size: int, words: list[str]) -> None:
    said = " ".join(f"{each.what} {each.remedy}" for each in shortages(found, Need(size), "/home/w"))
    assert bool(said) == bool(words)
    for word in words:
        assert word in said

"""benchmarks.shardcast.report: bounds and medians."""

from __future__ import annotations

import pytest

from benchmarks.shardcast.report import (
    Sample,
    origin_bound_s,
    shard_bytes,
    summarize,
    table,
    tree_bound_s,
    with_ratios,
)

MIB = 2**20


def sample(*worker_s: float, sent: int = 100) -> Sample:
    return Sample(worker_s, prepare_s=0.5, needed=100, origin_sent=sent, relays_sent=4 * sent, cpu_s={"origin": 1.0})


def test_the_bounds_are_those_of_the_links() -> None:
    assert origin_bound_s(256 * MIB, 200.0) == pytest.approx(10.737, abs=1e-3)
    assert tree_bound_s(256 * MIB, 200.0, relays=2, workers=4) == pytest.approx(21.475, abs=1e-3)
    assert tree_bound_s(256 * MIB, 200.0, relays=2, workers=32) == pytest.approx(16 * 10.737, abs=1e-1)
    assert tree_bound_s(256 * MIB, 200.0, relays=8, workers=1) == pytest.approx(10.737, abs=1e-3)


def test_a_summary_is_of_the_last_worker_and_takes_medians() -> None:
    found = summarize([sample(1.0, 2.0), sample(3.0, 9.0), sample(2.0, 4.0, sent=120)], 100, 2.0)
    assert (found["n"], found["first_s"], found["last_s"], found["ratio_to_bound"]) == (3, 2.0, 4.0, 2.0)
    assert (found["origin_copies"], found["relay_copies"]) == (1.0, 4.0)
    assert found["last_s_all"] == [2.0, 9.0, 4.0] and found["cpu_s"] == {"origin": 1.0}


def test_variants_are_held_against_the_published_package() -> None:
    variants = {"ours": summarize([sample(2.0)], 100, 1.0), "published": summarize([sample(8.0)], 100, 1.0)}
    rated = with_ratios(variants, "published")
    assert rated["ours"]["times_faster_than_published"] == 4.0
    assert with_ratios({"ours": variants["ours"]}, "published") == {"ours": variants["ours"]}
    assert len(table(rated).splitlines()) == 3 and "4.0" in table(rated)


def test_smaller_files_have_as_many_shards() -> None:
    assert [shard_bytes(size * MIB) for size in (1024, 256, 64, 8, 1)] == [
        2 * MIB,
        2 * MIB,
        MIB // 2,
        MIB // 16,
        MIB // 16,
    ]

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.dispatch import (
    EVERYTHING,
    Grant,
    Load,
    Share,
    choose_environment,
    grant,
    order_for_worker,
    sample_seed,
    share_of,
    within_groups,
    within_share,
)
from coordinator.store.groups import LeasableSample

IDLE = Load(leased=0, unconsumed=0, newcomers_leased=0)


def granted(load: Load = IDLE, *, wanted: int = 8, newcomer: bool = False, paused: bool = False) -> Grant:
    return grant(
        wanted=wanted,
        newcomer=newcomer,
        paused=paused,
        load=load,
        max_staleness=1,
        batch_samples=8,
        newcomer_share=0.25,
    )


@given(st.binary(min_size=32, max_size=32), st.text(max_size=30))
def test_a_seed_has_63_bits_and_belongs_to_the_sample(secret: bytes, sample: str) -> None:
    seed = sample_seed(secret, sample)
    assert 0 <= seed < 2**63
    assert seed == sample_seed(secret, sample)


def test_seeds_differ_between_samples_and_runs() -> None:
    seeds = {sample_seed(bytes([run]) * 32, f"g{group}-{i}") for run in (1, 2) for group in range(20) for i in range(5)}
    assert len(seeds) == 200


@pytest.mark.parametrize(
    ("load", "options", "expected"),
    [
        (IDLE, {}, Grant(8)),
        (IDLE, {"wanted": 256}, Grant(16)),
        (Load(10, 4, 0), {}, Grant(2)),
        (Load(16, 0, 0), {}, Grant(0, "capacity")),
        (Load(0, 16, 0), {}, Grant(0, "capacity")),
        (Load(20, 20, 0), {}, Grant(0, "capacity")),
        (IDLE, {"paused": True}, Grant(0, "paused")),
        (IDLE, {"newcomer": True}, Grant(4)),
        (Load(4, 0, 3), {"newcomer": True}, Grant(1)),
        (Load(4, 0, 4), {"newcomer": True}, Grant(0, "newcomers")),
        (Load(4, 0, 4), {}, Grant(8)),
        (Load(15, 0, 0), {"newcomer": True}, Grant(1)),
        (Load(16, 0, 0), {"newcomer": True}, Grant(0, "capacity")),
    ],
)
def test_how_many_leases_are_granted(load: Load, options: dict[str, int], expected: Grant) -> None:
    assert granted(load, **options) == expected  # type: ignore[arg-type]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(1, 256), st.booleans())
def test_leases_never_exceed_the_capacity(leased: int, unconsumed: int, new: int, wanted: int, newcomer: bool) -> None:
    count = granted(Load(leased, unconsumed, new), wanted=wanted, newcomer=newcomer).count
    assert 0 <= count <= wanted
    assert count == 0 or leased + unconsumed + count <= 16


def test_environments_are_chosen_by_their_share() -> None:
    weights = {"sums": 3.0, "code": 1.0}
    dispatched: Counter[str] = Counter()
    for _ in range(40):
        dispatched[choose_environment(weights, dispatched)] += 1
        assert abs(dispatched["sums"] - 0.75 * dispatched.total()) <= 1, "never more than a group off its share"
    assert dispatched == {"sums": 30, "code": 10}


def test_a_new_environment_joins_an_old_run() -> None:
    assert choose_environment({"sums": 1.0, "code": 1.0}, {"sums": 100, "retired": 50}) == "code"


def test_what_a_worker_gave_up_comes_last_for_it() -> None:
    assert order_for_worker(["a", "b", "c", "d"], {"a", "c"}) == ["b", "d", "a", "c"]


@pytest.mark.parametrize(
    ("share", "others", "expected"),
    [
        (1.0, True, EVERYTHING),
        (0.25, False, EVERYTHING),
        (0.25, True, Share(4, 12)),
        (0.01, True, Share(1, 1)),
    ],
)
def test_a_share_binds_only_while_others_are_active(share: float, others: bool, expected: Share) -> None:
    assert share_of(share, others_active=others, group_size=16, capacity=48) == expected


@pytest.mark.parametrize(
    ("granted", "live", "most", "expected"),
    [
        (Grant(8), 5, None, Grant(8)),
        (Grant(8), 5, 12, Grant(7)),
        (Grant(8), 12, 12, Grant(0, "share")),
        (Grant(8), 20, 12, Grant(0, "share")),
        (Grant(0, "paused"), 0, 12, Grant(0, "paused")),
    ],
)
def test_leases_stay_within_the_share(granted: Grant, live: int, most: int | None, expected: Grant) -> None:
    assert within_share(granted, live, most) == expected


def test_samples_stay_within_the_share_of_their_group() -> None:
    samples = [LeasableSample(f"g{i // 4}-{i % 4}", f"g{i // 4}", 0, (1,), 8) for i in range(8)]
    chosen = [sample.sample_id for sample in within_groups(samples, {"g0": 1}, 2)]
    assert chosen == ["g0-0", "g1-0", "g1-1"]
    assert within_groups(samples, {"g0": 9}, None) == samples

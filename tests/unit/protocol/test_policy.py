from __future__ import annotations

import pytest

from protocol.policy import capacity, newcomers_room, oldest_admissible, room, staleness


@pytest.mark.parametrize(("trainer", "rollout", "expected"), [(5, 5, 0), (5, 3, 2), (3, 5, 0), (0, 0, 0)])
def test_staleness_counts_versions_and_is_never_negative(trainer: int, rollout: int, expected: int) -> None:
    assert staleness(trainer, rollout) == expected


@pytest.mark.parametrize(("trainer", "limit", "expected"), [(0, 2, 0), (1, 2, 0), (5, 2, 3), (5, 0, 5)])
def test_the_oldest_admissible_version(trainer: int, limit: int, expected: int) -> None:
    assert oldest_admissible(trainer, limit) == expected
    assert staleness(trainer, expected) <= limit
    if expected:
        assert staleness(trainer, expected - 1) > limit


def test_on_policy_has_room_for_one_batch() -> None:
    assert capacity(0, 16) == 16
    assert capacity(2, 16) == 48


@pytest.mark.parametrize(("leased", "unconsumed", "expected"), [(0, 0, 48), (40, 8, 0), (10, 8, 30), (50, 9, 0)])
def test_room_is_what_neither_leases_nor_rollouts_take(leased: int, unconsumed: int, expected: int) -> None:
    assert room(max_staleness=2, batch_samples=16, leased=leased, unconsumed=unconsumed) == expected


@pytest.mark.parametrize(
    ("share", "leased", "expected"), [(0.5, 0, 24), (0.5, 20, 4), (0.5, 24, 0), (0.5, 30, 0), (0.001, 0, 1)]
)
def test_newcomers_share_their_part_and_can_always_begin(share: float, leased: int, expected: int) -> None:
    assert newcomers_room(total=48, share=share, newcomers_leased=leased) == expected

from __future__ import annotations

import pytest

from coordinator.audit import HALVING_TOKENS, WorkerClass, classify, fraction, is_drawn
from protocol.ledger import Standing

SECRET = bytes(32)


@pytest.mark.parametrize(
    ("standing", "watched", "expected"),
    [
        (Standing(accepted=31), False, WorkerClass.PROBATION),
        (Standing(accepted=31), True, WorkerClass.PROBATION),
        (Standing(accepted=32), False, WorkerClass.ESTABLISHED),
        (Standing(accepted=32), True, WorkerClass.WATCHED),
        (Standing(accepted=32, banned=True), True, WorkerClass.BANNED),
    ],
)
def test_the_class_of_a_worker(standing: Standing, watched: bool, expected: WorkerClass) -> None:
    assert classify(standing, watched=watched, probation_rollouts=32) is expected


def share(clean_tokens: int, *, newcomer: bool = False, watched: bool = False, floor: float = 0.1) -> float:
    return fraction(newcomer=newcomer, watched=watched, clean_tokens=clean_tokens, floor=floor)


def test_the_share_falls_with_standing_to_the_floor() -> None:
    shares = [share(n * HALVING_TOKENS) for n in range(8)]
    assert shares[:3] == [1.0, 0.5, 0.25]
    assert shares == sorted(shares, reverse=True) and shares[-1] == 0.1
    assert share(10**12) == 0.1, "never to zero"


def test_newcomers_and_the_watched_are_audited_in_full() -> None:
    assert share(10**9, newcomer=True) == share(10**9, watched=True) == 1.0


def test_a_floor_of_one_audits_everything() -> None:
    assert share(10**9, floor=1.0) == 1.0
    assert all(is_drawn(SECRET, f"r{i}", 1.0) for i in range(200))


def test_the_draw_is_fixed_by_the_secret_and_of_the_right_size() -> None:
    drawn = [is_drawn(SECRET, f"r{i}", 0.25) for i in range(4000)]
    assert 800 < sum(drawn) < 1200
    assert drawn == [is_drawn(SECRET, f"r{i}", 0.25) for i in range(4000)]
    assert drawn != [is_drawn(bytes([1] * 32), f"r{i}", 0.25) for i in range(4000)]

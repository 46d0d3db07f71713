from __future__ import annotations

import pytest

from coordinator.groups import Drop, Member, Reopen, Serve, decide

FRESH, OLD = 5, 3  # at trainer version 6 with staleness 2, versions from 4 on are admissible


def members(*versions: int) -> list[Member]:
    return [Member(f"r{i}", version) for i, version in enumerate(versions)]


@pytest.mark.parametrize(
    ("versions", "past_deadline", "expected"),
    [
        ((FRESH, FRESH, FRESH), False, Serve(("r0", "r1", "r2"), ())),
        ((FRESH, OLD, FRESH), False, Serve(("r0", "r2"), ("r1",))),
        ((FRESH, OLD, OLD), False, Reopen(("r1", "r2"))),
        ((OLD, OLD, OLD), False, Reopen(("r0", "r1", "r2"))),
        ((FRESH, FRESH), True, Serve(("r0", "r1"), ())),
        ((FRESH, OLD), True, Drop(("r1",), ("r0",))),
        ((FRESH,), True, Drop((), ("r0",))),
        ((), True, Drop((), ())),
        ((4, 4), False, Serve(("r0", "r1"), ())),
        ((9, 7), False, Serve(("r0", "r1"), ())),
    ],
)
def test_what_becomes_of_a_group(versions: tuple[int, ...], past_deadline: bool, expected: object) -> None:
    decision = decide(members(*versions), trainer_version=6, max_staleness=2, min_group=2, past_deadline=past_deadline)
    assert decision == expected


def test_on_policy_takes_the_newest_version_only() -> None:
    decision = decide(members(6, 5, 6), trainer_version=6, max_staleness=0, min_group=1, past_deadline=False)
    assert decision == Serve(("r0", "r2"), ("r1",))

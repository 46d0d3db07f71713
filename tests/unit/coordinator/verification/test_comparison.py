"""Groups compared: symmetrical for honest workers, one-sided for those who steer, choose or give up."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.verification.comparison import Member, compare
from coordinator.verification.pooled import COMPARISONS, GIVEN_UP, NEAR_TIE, REWARD_HIGH, REWARD_LOW
from coordinator.verification.pooling import Evidence, is_alarmed, normalised, observe

SHARE = COMPARISONS.near_tie_share


def member(number: int, worker: str, reward: float, ties: float | None = 0, lost: float = 0) -> Member:
    return Member(f"g-{number}", worker, 10, reward, ties, lost)


def values(members: list[Member], worker: str, **options: object) -> dict[str, float]:
    settings: dict[str, object] = {"given_up": (), "usual_reward": None, "near_tie_share": SHARE} | options
    found = compare(members, settings.pop("given_up"), **settings)  # type: ignore[arg-type]
    return {each.test: each.value for each in found.get(worker, ())}


def test_rewards_are_compared_with_those_of_others_on_the_task() -> None:
    members = [member(0, "a", 1.0), member(1, "a", 0.5), member(2, "b", 0.0), member(3, "c", 0.5)]
    assert values(members, "a") == {REWARD_HIGH: 0.5, REWARD_LOW: -0.5}
    assert values(members, "b")[REWARD_LOW] == pytest.approx(2 / 3)


def test_a_worker_alone_is_compared_with_nobody() -> None:
    assert compare([member(0, "a", 1.0), member(1, "a", 0.0)], (), usual_reward=0.5, near_tie_share=SHARE) == {}
    assert compare([], (), usual_reward=0.5, near_tie_share=SHARE) == {}


def test_a_lost_near_tie_counts_by_what_it_brought() -> None:
    won = [member(0, "a", 1.0, ties=1, lost=1), member(1, "b", 0.0)]
    assert values(won, "a")[NEAR_TIE] == pytest.approx(1.0 - SHARE)
    vain = [member(0, "a", 0.0, ties=1, lost=1), member(1, "b", 1.0)]
    assert values(vain, "a")[NEAR_TIE] == pytest.approx(SHARE - 1.0)
    kept = [member(0, "a", 1.0, ties=1, lost=0), member(1, "b", 0.0)]
    assert values(kept, "a")[NEAR_TIE] == pytest.approx(-SHARE)


def test_what_was_not_audited_has_no_near_ties() -> None:
    assert NEAR_TIE not in values([member(0, "a", 1.0, ties=None), member(1, "b", 0.0)], "a")


def test_samples_given_up_are_compared_with_what_is_usual() -> None:
    members = [member(0, "b", 0.0), member(1, "b", 1.0), member(2, "a", 1.0)]
    assert values(members, "a", given_up=[("a", "g-0"), ("a", "g-0")], usual_reward=0.75)[GIVEN_UP] == 0.75
    assert values(members, "a", given_up=[("a", "g-0"), ("a", "g-1")], usual_reward=0.75)[GIVEN_UP] == 0.25
    assert GIVEN_UP not in values(members, "a", given_up=[("a", "g-2")], usual_reward=0.75), "it came back to it"
    assert GIVEN_UP not in values(members, "a", given_up=[("a", "gone")], usual_reward=0.75)
    assert GIVEN_UP not in values(members, "a", given_up=[("a", "g-0")]), "nothing is usual yet"


def groups_of(draw: np.random.Generator, count: int, cheat: str) -> list[tuple[list[Member], list[tuple[str, str]]]]:
    """Groups of four samples each by "a" and others, of tasks that differ in difficulty and in near ties."""
    made = []
    for _ in range(count):
        difficulty, ties = draw.random(), draw.poisson(0.7, 8)
        rewards = (draw.random(8) > difficulty).astype(float)
        lost = draw.binomial(ties, SHARE)
        if cheat == NEAR_TIE:
            steered = (draw.random(8) < 0.3) & (ties > 0) & (np.arange(8) < 4) & (rewards == 0)
            rewards[steered], lost[steered] = 1.0, 1
        owner = ["a"] * 4 + ["b"] * 4
        gone = draw.random(8) < (0.1 if cheat != GIVEN_UP else 0.5 * (1.0 - rewards))
        given_up = [("a", f"g-{i}") for i in range(4) if gone[i]]
        owner = ["b" if ("a", f"g-{i}") in given_up else name for i, name in enumerate(owner)]
        members = [member(i, owner[i], float(rewards[i]), float(ties[i]), float(lost[i])) for i in range(8)]
        made.append((members, given_up))
    return made


def alarmed(cheat: str, count: int) -> set[str]:
    """The tests that alarm for "a" within so many groups."""
    draw = np.random.default_rng(5)
    evidence = {test.name: Evidence(test.name) for test in COMPARISONS.tests}
    found: set[str] = set()
    for members, given_up in groups_of(draw, count, cheat):
        statistics = compare(members, given_up, usual_reward=0.5, near_tie_share=SHARE).get("a", [])
        for test in COMPARISONS.tests:
            if (value := normalised(test, statistics)) is not None:
                evidence[test.name] = observe(evidence[test.name], value, 40)
                if is_alarmed(evidence[test.name], test, COMPARISONS):
                    found.add(test.name)
    return found


def test_honest_workers_are_not_alarmed() -> None:
    assert alarmed("nothing", 4000) == set()


def test_steering_near_ties_towards_reward_is_found() -> None:
    assert NEAR_TIE in alarmed(NEAR_TIE, 2500)


def test_giving_up_what_would_fail_is_found() -> None:
    assert GIVEN_UP in alarmed(GIVEN_UP, 500)

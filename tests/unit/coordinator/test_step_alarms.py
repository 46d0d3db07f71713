"""Which alarms begin and end with a step, also if it is reported twice."""

from __future__ import annotations

import pytest

from coordinator.step_alarms import changes, lasting, with_alarms


@pytest.mark.parametrize(
    ("now", "before", "reported", "begun", "over"),
    [
        ({"kl"}, set(), None, ["kl"], []),
        ({"kl"}, {"kl"}, None, [], []),
        (set(), {"kl"}, None, [], ["kl"]),
        ({"skipped", "entropy"}, {"kl"}, None, ["entropy", "skipped"], ["kl"]),
        ({"kl"}, set(), {"kl"}, [], []),  # said before the crash
        (set(), {"kl"}, set(), [], []),
        ({"kl"}, set(), set(), ["kl"], []),  # the replay came out otherwise
        (set(), {"kl"}, {"kl"}, [], ["kl"]),
    ],
)
def test_by_hand(now: set[str], before: set[str], reported: set[str] | None, begun: list[str], over: list[str]) -> None:
    assert changes(now, before, reported) == (begun, over)


def test_a_steps_numbers_keep_its_alarms() -> None:
    stored = with_alarms({"reward_mean": 0.5}, {"kl"})
    assert stored == {"reward_mean": 0.5, "alarm/kl": 1.0}
    assert lasting(stored) == {"kl"}

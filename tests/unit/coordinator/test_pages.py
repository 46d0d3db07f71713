from __future__ import annotations

import pytest

from coordinator.dashboard.pages import duration


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-0.4, "0 s"),  # the database's clock and ours
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (172_799, "47 h"),
        (172_800, "2 d"),
        (1e8, "1157 d"),
    ],
)
def test_times_are_told_in_units_that_a_person_can_grasp(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown

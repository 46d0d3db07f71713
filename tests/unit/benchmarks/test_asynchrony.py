"""The planner by hand, and the three modes on short waits."""

from __future__ import annotations

import pytest

from benchmarks.asynchrony.__main__ import interval, modes, summary
from benchmarks.asynchrony.planner import Shape, makespan, predict
from benchmarks.asynchrony.run import WARM_UP, Measured, Training, _within


def test_slots_take_the_next_group_as_soon_as_they_are_free() -> None:
    assert makespan([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert makespan([1.0, 1.0, 1.0], 1) == 3.0
    assert makespan([5.0, 1.0], 4) == 5.0


def test_without_a_tail_the_modes_are_simple_sums() -> None:
    even = Shape(groups=8, slots=4, train_s=1.0, median_s=1.0, sigma=0.0)
    assert predict(even, "synchronous") == pytest.approx(2.0 + 1.0)
    assert predict(even, "step_off", 1) == pytest.approx(2.0)
    assert predict(even, "asynchronous") == pytest.approx(2.0)
    slow = Shape(groups=8, slots=4, train_s=5.0, median_s=1.0, sigma=0.0)
    assert predict(slow, "asynchronous") == predict(slow, "step_off", 1) == pytest.approx(5.0)


def test_a_tail_costs_who_waits_for_it() -> None:
    tailed = Shape()
    synchronous, step_off, asynchronous = (predict(tailed, name, 1) for name in modes(1))
    assert synchronous > step_off > asynchronous
    assert synchronous > 3 * asynchronous


@pytest.mark.parametrize("name", ["synchronous", "step_off", "asynchronous"])
async def test_staleness_is_what_the_mode_allows(name: str) -> None:
    shape = Shape(groups=2, slots=2, train_s=0.0, median_s=0.0, sigma=0.0)
    measured = await Training(modes(1)[name], shape, WARM_UP + 4, 0, 1e-2).run()
    most = {"synchronous": 0.0, "step_off": 1.0, "asynchronous": 4.0}[name]
    assert 0.0 <= measured.staleness <= most
    assert 0.0 <= measured.idle_slots <= 1.0 and 0.0 <= measured.idle_trainer <= 1.0
    assert measured.step_s > 0.0


def test_busy_time_is_counted_inside_the_window_alone() -> None:
    assert _within([(0.0, 2.0), (3.0, 5.0), (8.0, 9.0)], 1.0, 4.0) == pytest.approx(2.0)


def test_speedup_and_rewards_are_paired_by_seed() -> None:
    def measured(step_s: float, reward: float) -> Measured:
        return Measured(step_s, 1.0, 0.5, 0.5, 0.0, reward)

    found = {
        "synchronous": [measured(2.0, 0.5), measured(4.0, 0.7)],
        "step_off": [measured(1.5, 0.5), measured(1.5, 0.5)],
        "asynchronous": [measured(1.0, 0.5), measured(2.0, 0.7)],
    }
    result = summary(Shape(), 1, found)
    assert result["speedup"] == pytest.approx([2.0, 2.0, 2.0])
    assert result["reward_difference"] == pytest.approx([0.0, 0.0, 0.0])
    assert interval([1.0]) == [1.0, 1.0, 1.0]

"""The planner by hand, the modes on a virtual clock, and what the report makes of them."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.asynchrony import real
from benchmarks.asynchrony.__main__ import final_reward, modes
from benchmarks.asynchrony.planner import Inputs, Shape, makespan, predict
from benchmarks.asynchrony.pupils import Sleeper
from benchmarks.asynchrony.report import interval, learnt, line, times
from benchmarks.asynchrony.run import WARM_UP, Measured, Training, _within
from benchmarks.asynchrony.virtual import run_virtually

NAMES = ["synchronous", "step_off", "asynchronous"]


def measured(name: str, shape: Shape, steps: int = WARM_UP + 4, seed: int = 0) -> Measured:
    return run_virtually(Training(modes(1)[name], shape, steps, seed, Sleeper()).run())


def test_slots_take_the_next_group_as_soon_as_they_are_free() -> None:
    assert makespan([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert makespan([1.0, 1.0, 1.0], 1) == 3.0
    assert makespan([5.0, 1.0], 4) == 5.0


def test_without_a_tail_the_modes_are_simple_sums() -> None:
    even = Inputs.of(Shape(groups=8, slots=4, train_s=1.0, median_s=1.0, sigma=0.0))
    assert predict(even, "synchronous") == pytest.approx(2.0 + 1.0)
    assert predict(even, "step_off", 1) == pytest.approx(2.0)
    assert predict(even, "asynchronous") == pytest.approx(2.0)
    slow = Inputs.of(Shape(groups=8, slots=4, train_s=5.0, median_s=1.0, sigma=0.0))
    assert predict(slow, "asynchronous") == predict(slow, "step_off", 1) == pytest.approx(5.0)


def test_a_tail_costs_who_waits_for_it() -> None:
    tailed = Inputs.of(Shape())
    synchronous, step_off, asynchronous = (predict(tailed, name, 1) for name in NAMES)
    assert synchronous > step_off > asynchronous
    assert synchronous > 3 * asynchronous


@pytest.mark.parametrize("name", NAMES)
def test_staleness_is_what_the_mode_allows(name: str) -> None:
    found = measured(name, Shape(groups=2, slots=2, train_s=1.0, median_s=1.0, sigma=1.0))
    most = {"synchronous": 0.0, "step_off": 1.0, "asynchronous": 4.0}[name]
    assert 0.0 <= found.staleness <= most
    assert 0.0 <= found.idle_slots <= 1.0 and 0.0 <= found.idle_trainer <= 1.0


@pytest.mark.parametrize("name", NAMES)
def test_without_a_tail_a_schedule_takes_exactly_what_is_planned(name: str) -> None:
    shape = Shape(groups=8, slots=4, train_s=1.0, median_s=1.0, sigma=0.0)
    found = measured(name, shape)
    assert found.step_s == pytest.approx(predict(Inputs.of(shape), name, 1))
    assert found.inputs.train_s == pytest.approx(1.0)
    assert min(found.inputs.times) == pytest.approx(1.0) and max(found.inputs.times) == pytest.approx(1.0)


def test_with_a_tail_a_long_schedule_takes_what_its_own_times_plan() -> None:
    found = measured("asynchronous", Shape(), steps=300)
    assert found.step_s == pytest.approx(predict(found.inputs, "asynchronous"), rel=0.05)


async def test_the_machines_own_clock_gives_the_same_kinds_of_numbers() -> None:
    shape = Shape(groups=2, slots=2, train_s=0.0, median_s=0.0, sigma=0.0)
    async with asyncio.timeout(60.0):
        found = await Training(modes(1)["asynchronous"], shape, WARM_UP + 4, 0, Sleeper()).run()
    assert found.step_s > 0.0


def test_virtual_time_passes_by_waiting_alone() -> None:
    async def waits() -> float:
        clock = asyncio.get_running_loop().time
        begun = clock()
        await asyncio.gather(asyncio.sleep(3600.0), asyncio.sleep(7200.0))
        return clock() - begun

    assert run_virtually(waits()) == pytest.approx(7200.0)


def test_a_reward_is_the_same_every_time() -> None:
    once, again = (final_reward(modes(1)["asynchronous"], Shape(groups=2, slots=2), 7, 3, 1e-2) for _ in range(2))
    assert once == again
    assert 0.0 <= once <= 1.0


def test_busy_time_is_counted_inside_the_window_alone() -> None:
    assert _within([(0.0, 2.0), (3.0, 5.0), (8.0, 9.0)], 1.0, 4.0) == pytest.approx(2.0)


def test_speedup_and_rewards_are_paired_by_seed() -> None:
    def run(step_s: float) -> Measured:
        return Measured(step_s, 1.0, 0.5, 0.5, 0.0, Inputs(16, 16, 0.5, (step_s,)))

    timed = {
        "synchronous": [run(2.0), run(4.0)],
        "step_off": [run(1.5), run(1.5)],
        "asynchronous": [run(1.0), run(2.0)],
    }
    rewards = {"synchronous": [0.5, 0.7, 0.6], "step_off": [0.5, 0.5, 0.5], "asynchronous": [0.5, 0.7, 0.9]}
    timing, learning = times(Shape(), 1, timed), learnt(rewards)
    assert timing["speedup"] == pytest.approx([2.0, 2.0, 2.0])
    assert learning["reward_difference"][0] == pytest.approx(0.1)
    assert (timing["seeds"], learning["reward_seeds"]) == (2, 3)
    assert timing["modes"]["asynchronous"]["deviation"] == pytest.approx([0.0, 0.0, 0.0])
    assert "asynchronous" in line("asynchronous", timing["modes"]["asynchronous"])
    assert interval([1.0]) == [1.0, 1.0, 1.0]
    assert interval([0.0] * 20 + [1.0] * 20)[0] == 0.5, "more than the table has"


def test_a_real_runs_steps_are_timed_between_their_reports() -> None:
    reports = [{"step_seconds": 0.5, "reward_mean": reward} for reward in (0.1, 0.2, 0.3, 0.4)]
    found = real.measured([0.0, 10.0, 12.0, 14.0], reports, 0.5)
    assert found == real.Real(step_s=2.0, training=0.25, staleness=0.5, reward=0.4)

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.plan import Load, lines, plan
from protocol.errors import UserError

LOAD = Load(batch=640, step_s=16.0, worker_rate=2500.0, mean_length=1000.0, verifier_rate=40_000.0)


def test_sixteen_workers_balance_the_step() -> None:
    found = plan(LOAD)
    assert (found.balanced_workers, found.balanced_verifiers) == (16, 1)
    assert found.step_s == 16.0
    assert found.trainer_busy == found.workers_busy == found.verifiers_busy == 1.0


def test_twenty_workers_leave_the_trainer_busy_all_the_time() -> None:
    found = plan(LOAD, workers=20)
    assert (found.step_s, found.bottleneck, found.trainer_busy) == (16.0, "training", 1.0)
    assert found.workers_busy == pytest.approx(0.8)


def test_too_few_workers_bound_the_step() -> None:
    found = plan(LOAD, workers=8)
    assert (found.step_s, found.bottleneck, found.trainer_busy) == (32.0, "generation", 0.5)


def test_too_slow_a_verifier_bounds_the_step() -> None:
    found = plan(replace(LOAD, verifier_rate=10_000.0), verifiers=2)
    assert (found.balanced_verifiers, found.bottleneck, found.step_s) == (4, "verification", 32.0)
    assert plan(replace(LOAD, verifier_rate=10_000.0, audit_fraction=0.25)).balanced_verifiers == 1


def test_staleness_counts_arrival_generation_and_verification() -> None:
    # 16 s a step; a rollout takes 32 · 1000 / 2500 = 12.8 s and 0.025 s to prefill.
    assert plan(LOAD).least_max_staleness == 2
    assert plan(replace(LOAD, dissemination_s=5.0)).least_max_staleness == 3
    assert plan(replace(LOAD, longest=4000.0)).least_max_staleness == 5
    assert plan(replace(LOAD, dissemination_s=4.0)).on_policy_step_s == pytest.approx(4 + 3 * 16)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 50), st.floats(1, 1e5), st.floats(0.1, 1e3), st.floats(0, 1e3))
def test_something_is_always_busy_and_more_workers_never_slow_a_step(
    workers: int, verifiers: int, rate: float, step_s: float, dissemination_s: float
) -> None:
    load = replace(LOAD, worker_rate=rate, step_s=step_s, dissemination_s=dissemination_s)
    found = plan(load, workers=workers, verifiers=verifiers)
    busy = (found.trainer_busy, found.workers_busy, found.verifiers_busy)
    assert max(busy) == 1.0 and min(busy) > 0.0
    assert plan(load, workers=workers + 1, verifiers=verifiers).step_s <= found.step_s
    assert plan(load).bottleneck == "training" or plan(load).step_s == pytest.approx(step_s)
    assert found.least_max_staleness >= 1 and found.on_policy_step_s >= found.step_s


@pytest.mark.parametrize(
    "change",
    [{"batch": 0}, {"step_s": float("nan")}, {"worker_rate": -1.0}, {"audit_fraction": 0.0}, {"longest": -1.0}],
)
def test_what_can_not_be_planned(change: dict[str, float]) -> None:
    with pytest.raises(UserError):
        replace(LOAD, **change)  # type: ignore[arg-type]


def test_the_plan_in_words() -> None:
    text = "\n".join(lines(LOAD, plan(LOAD, workers=20)))
    assert "16 workers and 1 verifiers" in text and "16.0 s, bound by training" in text and "trainer 100%" in text

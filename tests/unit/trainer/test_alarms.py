"""When the metrics of a step are a reason to look."""

from __future__ import annotations

import logging

import pytest

from trainer.alarms import Alarms, Watch, raised

CALM = {"effective_sample_size": 0.9, "approx_kl": 0.01, "approx_kl_fresh": 1e-4, "entropy": 1.0, "applied": 1.0}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, set()),
        ({"effective_sample_size": 0.29}, {"effective_sample_size"}),
        ({"approx_kl": 0.31}, {"kl"}),
        ({"approx_kl_fresh": 0.03}, {"fresh_kl"}),
        ({"entropy": 0.19}, {"entropy"}),
        ({"applied": 0.0}, {"skipped"}),
        ({"effective_sample_size": 0.1, "entropy": 0.0}, {"effective_sample_size", "entropy"}),
    ],
)
def test_by_hand(changes, names):
    assert set(raised({**CALM, **changes}, 2.0, Alarms())) == names


def test_an_empty_step_raises_nothing():
    assert raised({"tokens": 0.0}, None, Alarms()) == {}


def test_alarms_are_metrics_while_they_last_and_are_logged_at_both_ends(caplog):
    watch = Watch()
    with caplog.at_level(logging.INFO, logger="trainer.alarms"):
        steps = [{**CALM, "effective_sample_size": size} for size in (0.9, 0.1, 0.1, 0.9)]
        for metrics in steps:
            watch.look(metrics)
    assert [metrics.get("alarm/effective_sample_size") for metrics in steps] == [None, 1.0, 1.0, None]
    assert [record.action for record in caplog.records] == ["alarm", "alarm_over"]


def test_entropy_is_compared_with_the_runs_first_steps():
    watch = Watch()
    for entropy in (2.0, 2.0, 2.0, 2.0, 2.0):
        watch.look({**CALM, "entropy": entropy})
    low = {**CALM, "entropy": 0.19}
    watch.look(low)
    assert low["alarm/entropy"] == 1.0


def test_what_a_run_began_with_outlives_a_restart():
    before = Watch()
    for _ in range(5):
        assert before.look(dict(CALM)) == {}
    resumed = Watch(entropies=list(before.entropies))
    assert set(resumed.look({**CALM, "entropy": 0.05})) == {"entropy"}
    assert Watch().look({**CALM, "entropy": 0.05}) == {}

"""The service's own conversions; calls through a real server are tested with the client."""

from __future__ import annotations

from coordinator.service import measurements
from protocol.rollout import EOS_LOGPROB


def test_measurements_say_what_came_and_what_is_admitted() -> None:
    metrics = {"proof_mantissa_mean": 7.0, "seed_mismatches": 3.0, EOS_LOGPROB: -25.0}
    admitted = {"proof_mantissa_mean": 3.6, EOS_LOGPROB: -20.7, "seed_margin_max": 0.6}
    found = [(each.name, each.value, each.admitted, each.at_least) for each in measurements(metrics, admitted)]
    assert found == [(EOS_LOGPROB, -25.0, -20.7, True), ("proof_mantissa_mean", 7.0, 3.6, False)]

from __future__ import annotations

import pytest

from coordinator import knobs
from protocol.errors import UserError
from tests.stored_run import SCHEDULING


@pytest.mark.parametrize(("name", "value"), [("audit_fraction", 0.5), ("max_staleness", 0.0), ("worker_share", 1.0)])
def test_what_may_be_set(name: str, value: float) -> None:
    assert knobs.check(name, value) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audit_fraction", 0.0),
        ("audit_fraction", float("nan")),
        ("max_staleness", 1.5),
        ("max_staleness", 65),
        ("max_staleness", float("inf")),
        ("worker_share", -1),
        ("group_size", 4),
        ("draining", 1),
    ],
)
def test_what_may_not(name: str, value: float) -> None:
    with pytest.raises(UserError):
        knobs.check(name, value)


def test_a_knob_that_was_turned_wins_over_the_run_file() -> None:
    turned = {"max_staleness": 3.0, knobs.DRAINING: 1.0}
    scheduling = knobs.scheduling(SCHEDULING, turned)
    assert (scheduling.max_staleness, scheduling.draining) == (3, True)
    assert scheduling.worker_share == SCHEDULING.worker_share
    assert knobs.scheduling(SCHEDULING, {}) == SCHEDULING
    assert knobs.values(SCHEDULING, 0.5, turned)["audit_fraction"] == 0.5

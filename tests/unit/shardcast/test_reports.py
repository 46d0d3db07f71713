"""shardcast.reports: what anyone may say, and how little it can do."""

from __future__ import annotations

import pytest

from shardcast.delta.errors import FallbackReason
from shardcast.metrics import ShardcastMetrics
from shardcast.reports import _BURST, PER_MINUTE, Report, Reports, parse_report

GOOD = Report(3, FallbackReason.BLOB_ABSENT)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_reports_are_counted_and_handed_on() -> None:
    metrics, told = ShardcastMetrics(), []
    reports = Reports(metrics, lambda: 3)
    reports.on_report = told.append
    assert reports.add(GOOD)
    assert told == [GOOD] and reports.counts == {"blob_absent": 1}
    name = "rollswarm_shardcast_reported_delta_fallbacks_total"
    assert metrics.registry.get_sample_value(name, {"reason": "blob_absent"}) == 1


@pytest.mark.parametrize("newest", [None, 2])
def test_a_version_that_does_not_exist_is_refused(newest: int | None) -> None:
    with pytest.raises(ValueError, match="no version 3"):
        Reports(ShardcastMetrics(), lambda: newest).add(GOOD)


def test_a_flood_is_cut_off_and_does_not_silence_the_server_for_ever() -> None:
    clock = Clock()
    reports = Reports(ShardcastMetrics(), lambda: 3, clock)
    assert sum(reports.add(GOOD) for _ in range(1000)) == _BURST
    clock.now = 60.0
    assert sum(reports.add(GOOD) for _ in range(1000)) == min(PER_MINUTE, _BURST)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"version": 1}',
        b'{"version": 1, "reason": "because"}',
        b'{"version": "1", "reason": "blob_wrong"}',
        b'{"version": true, "reason": "blob_wrong"}',
        b'{"version": -1, "reason": "blob_wrong"}',
        b'{"version": 1, "reason": "blob_wrong", "more": 1}',
        b'{"version": 1, "reason": ["blob_wrong"]}',
        b"[" * 250,
        b'{"version": 1, "reason": "blob_wrong"}' + b" " * 300,
    ],
)
def test_anything_else_is_no_report(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_report(body)


def test_a_report_is_read_as_it_was_written() -> None:
    assert parse_report(b'{"version": 3, "reason": "blob_absent"}') == GOOD
    assert GOOD.to_json() == {"version": 3, "reason": "blob_absent"}

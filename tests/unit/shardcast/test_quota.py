from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardcast.config import MIB
from shardcast.quota import MonthlyQuota


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


class Clock:
    def __init__(self, text: str) -> None:
        self.now = at(text)

    def __call__(self) -> float:
        return self.now


def test_a_month_begins_anew(tmp_path: Path) -> None:
    clock = Clock("2026-12-31 23:59:30")
    quota = MonthlyQuota(tmp_path / "month.json", 100, clock)
    quota.count(70)
    assert quota.left_bytes == 30
    quota.count(70)
    assert (quota.left_bytes, quota.seconds_to_next_month) == (0, 31)
    clock.now = at("2027-01-01 00:00:00")
    assert quota.left_bytes == 100
    quota.count(1)
    quota.save()
    assert MonthlyQuota(tmp_path / "month.json", 100, clock).left_bytes == 99


def test_a_restart_forgets_nothing_and_a_kill_little(tmp_path: Path) -> None:
    clock, file = Clock("2026-11-30"), tmp_path / "month.json"
    quota = MonthlyQuota(file, 1000 * MIB, clock)
    for _ in range(40):
        quota.count(MIB)
    assert MonthlyQuota(file, 1000 * MIB, clock).left_bytes == (1000 - 32) * MIB  # as after `kill -9`
    quota.save()
    assert MonthlyQuota(file, 1000 * MIB, clock).left_bytes == (1000 - 40) * MIB


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"month": 3, "sent_bytes": 1}', '{"month": "2026-11", "sent_bytes": -1}']
)
def test_a_spoilt_file_is_set_aside(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "month.json"
    file.write_text(content)
    assert MonthlyQuota(file, 100, Clock("2026-11-30")).left_bytes == 100
    assert "counted from zero" in caplog.text
    assert (tmp_path / "month.bad").read_text() == content and not file.exists()


def test_a_disk_that_takes_nothing_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quota = MonthlyQuota(tmp_path / "no" / "month.json", 100, Clock("2026-11-30"))
    quota.count(100)
    assert quota.left_bytes == 0 and "can't keep" in caplog.text

"""shardcast.progress: what is written where no terminal is."""

from __future__ import annotations

import pytest

from shardcast.client import Progress, Way
from shardcast.progress import PlainProgress, shown


def test_a_line_per_tenth_with_the_speed_of_what_came_now() -> None:
    now = 0.0
    lines: list[str] = []
    progress = PlainProgress("version 3", lines.append, lambda: now)
    total = 10 * 2**20
    progress(Progress(total // 5, total))  # resumed at 20 %
    now = 2.0
    for done in range(total // 5, total, 2**16):
        progress(Progress(done, total))
    progress(Progress(total, total))
    progress(Progress(total, total))
    assert [line.split(" %")[0] for line in lines] == [f"version 3: {step}" for step in range(20, 101, 10)]
    assert lines[-1] == "version 3: 100 % of 10.0 MiB, 4.2 MB/s\n"


def test_a_delta_that_fails_begins_anew_in_full() -> None:
    lines: list[str] = []
    progress = PlainProgress("v", lines.append, lambda: 0.0)
    for step in (Progress(0, 100, Way.DELTA), Progress(100, 100, Way.DELTA), Progress(0, 2**20, Way.MIXED)):
        progress(step)
    assert [line.split(",")[0] for line in lines] == [
        "v (delta): 0 % of 0.0 MiB",
        "v (delta): 100 % of 0.0 MiB",
        "v (mixed): 0 % of 1.0 MiB",
    ]


def test_nothing_to_fetch_is_all_of_it() -> None:
    lines: list[str] = []
    PlainProgress("v", lines.append)(Progress(0, 0))
    assert lines[0].startswith("v: 100 %")


def test_without_a_terminal_plain_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with shown("v", 100) as on_progress:
        on_progress(Progress(50, 100))
    assert capsys.readouterr().err.startswith("v: 50 % of 0.0 MiB") and "\x1b" not in capsys.readouterr().err

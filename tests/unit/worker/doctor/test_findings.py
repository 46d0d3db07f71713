from __future__ import annotations

import json

import pytest

from worker.doctor.findings import Finding, Level, as_json, as_lines, exit_status, fail, ok, warn

_ALL = [ok("disk", "much"), warn("clock", "40 s ahead", "set it"), fail("dns", "no address", "check the name")]


def test_only_a_failure_fails() -> None:
    assert exit_status(_ALL) == 1
    assert exit_status(_ALL[:2]) == 0


def test_a_problem_is_followed_by_its_remedy() -> None:
    lines = as_lines(_ALL)
    assert lines == [
        "ok    disk   much",
        "WARN  clock  40 s ahead",
        "             → set it",
        "FAIL  dns    no address",
        "             → check the name",
    ]


def test_scripts_get_json() -> None:
    told = json.loads(as_json(_ALL))
    assert told["ok"] is False
    assert told["findings"][2] == {"name": "dns", "level": "fail", "text": "no address", "remedy": "check the name"}


def test_a_problem_without_a_remedy_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        Finding("dns", Level.FAIL, "no address")

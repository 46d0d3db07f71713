"""A finding: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


class Level(enum.StrEnum):
    """`warn`: it works, but worse than it could. `fail`: it won't work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is never empty unless all is well."""

    name: str
    level: Level
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.level is Level.OK) == (not self.remedy), (
            f"{self.name}: a problem has a remedy, and nothing else has"
        )


def ok(name: str, text: str) -> Finding:
    return Finding(name, Level.OK, text)


def warn(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Level.WARN, text, remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Level.FAIL, text, remedy)


def exit_status(findings: Sequence[Finding]) -> int:
    """0 if this machine can work, 1 if something fails. Warnings don't count."""
    return int(any(each.level is Level.FAIL for each in findings))


def as_lines(findings: Sequence[Finding]) -> list[str]:
    """For a person, in plain text."""
    signs = {Level.OK: "ok  ", Level.WARN: "WARN", Level.FAIL: "FAIL"}
    width = max((len(each.name) for each in findings), default=0)
    lines = []
    for each in findings:
        lines.append(f"{signs[each.level]}  {each.name.ljust(width)}  {each.text}")
        if each.remedy:
            lines.append(f"      {' ' * width}  → {each.remedy}")
    return lines


def as_json(findings: Sequence[Finding]) -> str:
    """For scripts: one object, with the verdict first."""
    return json.dumps({"ok": not exit_status(findings), "findings": [asdict(each) for each in findings]}, indent=1)

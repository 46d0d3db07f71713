"""The demo's live console view: one panel on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

_LINE_EVERY_S = 10.0
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """Values between 0 and 1 as bars."""
    return "".join(_BARS[min(len(_BARS) - 1, int(max(0.0, value) * len(_BARS)))] for value in values)


class View:
    """Shows the coordinator's status until told to stop. `names`: worker key id → what the demo calls it."""

    def __init__(self, title: str, versions: int, names: Mapping[str, str]) -> None:
        self._title = title
        self._versions = versions
        self._names = names
        self._begun = time.monotonic()
        self._last_line = -_LINE_EVERY_S

    def watch(self, read: Callable[[], dict[str, Any] | None], done: Callable[[], bool], pause_s: float = 3.0) -> None:
        """Show what `read` gives until `done`."""
        if not sys.stdout.isatty():
            while not done():
                self._print_line(read())
                time.sleep(pause_s)
            return
        from rich.live import Live

        with Live(self.panel(read()), refresh_per_second=2) as live:
            while not done():
                live.update(self.panel(read()))
                time.sleep(pause_s)

    def _print_line(self, status: dict[str, Any] | None) -> None:
        now = time.monotonic()
        if now - self._last_line < _LINE_EVERY_S:
            return
        self._last_line = now
        print(self.line(status), flush=True)

    def line(self, status: dict[str, Any] | None) -> str:
        """One line of plain text."""
        elapsed = f"{time.monotonic() - self._begun:5.0f} s"
        if status is None:
            return f"{elapsed}  starting"
        reward = _metric(status, "reward_mean")
        rollouts = status["rollouts"]
        return (
            f"{elapsed}  version {_or_dash(status['head_version'])}/{self._versions}  "
            f"reward {_number(reward[-1] if reward else None)}  {status['verified_tokens_per_s']:.0f} verified tok/s  "
            f"leases {status['live_leases']}  waiting {rollouts.get('pending', 0) + rollouts.get('verifying', 0)}  "
            f"rejected {sum(status['rejections'].values())}  "
            + "  ".join(
                f"{self._names.get(w['worker_id'], w['name'])}: {w['accepted']} ok"
                + (f", {w['rejected']} rejected" if w["rejected"] else "")
                + (", BANNED" if w["banned"] else "")
                for w in status["workers"]
            )
        )

    def panel(self, status: dict[str, Any] | None) -> Any:
        """The live panel."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        elapsed = f"{time.monotonic() - self._begun:.0f} s"
        if status is None:
            return Panel(Text("starting the processes …"), title=self._title, subtitle=elapsed)
        reward = _metric(status, "reward_mean")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        grid.add_row("Policy version", f"{_or_dash(status['head_version'])} of {self._versions}")
        grid.add_row("Reward", f"{_number(reward[-1] if reward else None)}  {sparkline(reward)}")
        grid.add_row(
            "Verified", f"{status['verified_tokens_per_s']:.0f} tokens/s, staleness ≤ {status['max_staleness_seen']}"
        )
        rollouts = ", ".join(f"{count} {state}" for state, count in status["rollouts"].items()) or "none yet"
        grid.add_row("Rollouts", rollouts)
        rejections = ", ".join(f"{reason} {count}" for reason, count in status["rejections"].items()) or "none"
        grid.add_row("Rejected", rejections)
        workers = Table("worker", "accepted", "rejected", "credits", "standing", box=None, padding=(0, 2))
        for worker in status["workers"]:
            standing = (
                Text(f"banned ({worker['ban_reason'][:60]})", style="red")
                if worker["banned"]
                else Text("good", style="green")
            )
            workers.add_row(
                self._names.get(worker["worker_id"], worker["name"]),
                str(worker["accepted"]),
                str(worker["rejected"]),
                str(worker["credits"]),
                standing,
            )
        return Panel(Group(grid, "", workers), title=self._title, subtitle=elapsed)


def _metric(status: Mapping[str, Any], name: str) -> list[float]:
    return [step["metrics"][name] for step in status["steps"] if name in step["metrics"]]


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"

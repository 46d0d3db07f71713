"""The worker's face: one live panel on a terminal, plain lines elsewhere, JSON lines on request."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from protocol.terms import RunTerms
from worker.status import Status

_LINE_EVERY_S = 10.0
_FRAME_S = 0.5


async def show(status: Status, terms: RunTerms, *, worker: str, as_json: bool) -> None:
    """Show the status until cancelled."""
    if as_json or not sys.stdout.isatty():
        while True:
            say(status, as_json=as_json)
            await asyncio.sleep(_LINE_EVERY_S)
    from rich.live import Live

    with Live(panel(status, terms, worker), refresh_per_second=4, redirect_stderr=False) as live:
        while True:
            live.update(panel(status, terms, worker))
            await asyncio.sleep(_FRAME_S)


def say(status: Status, *, as_json: bool) -> None:
    """Print the status as it is now, in one line."""
    print(json.dumps(status.as_dict()) if as_json else one_line(status), flush=True)


def one_line(status: Status) -> str:
    """The status in one line of plain text."""
    version = "-" if status.policy_version is None else status.policy_version
    parts = [
        status.phase,
        f"policy {version}",
        f"{status.tokens_per_second():.0f} tok/s",
        f"{status.in_flight} leases",
        f"{status.accepted} accepted",
        f"{status.rejected} rejected",
        f"{status.credits} credits",
    ]
    if status.outbox:
        parts.append(f"{status.outbox} in the outbox")
    if status.swap_failure:
        parts.append(f"newer weights not loaded: {status.swap_failure}")
    if status.twin:
        parts.append("another worker uses this identity")
    if status.last_reason:
        parts.append(f"last reason: {status.last_reason}")
    return " · ".join(parts)


def panel(status: Status, terms: RunTerms, worker: str) -> Any:
    """The live panel."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    version = "–" if status.policy_version is None else str(status.policy_version)
    table.add_row("State", Text(status.phase + (f" (waiting for {status.waiting_for})" if status.waiting_for else "")))
    table.add_row("Policy version", f"{version}   swaps {status.swaps}, last pause {status.last_swap_s:.2f} s")
    if status.fetching_version is not None:
        done, total = status.fetch_done / 1e6, max(status.fetch_total, 1) / 1e6
        table.add_row("Next weights", f"version {status.fetching_version}: {done:.0f} of {total:.0f} MB")
    table.add_row("Generating", f"{status.tokens_per_second():.0f} tokens/s   {status.in_flight} leases in flight")
    table.add_row("Handed in", f"{status.receipts} receipts   {status.outbox} waiting in the outbox")
    table.add_row("Verdicts", f"{status.accepted} accepted   {status.rejected} rejected   {status.pending} pending")
    table.add_row("Credits", f"{status.credits} verified tokens   {status.strikes} strikes")
    if status.swap_failure:
        table.add_row("Newer weights", Text(f"not loaded: {status.swap_failure}", style="red"))
    if status.twin:
        table.add_row("Warning", Text("another worker uses this identity: see the log", style="red"))
    if status.last_reason:
        table.add_row("Last reason", Text(status.last_reason, style="yellow"))
    title = Text(f"{terms.name} · {terms.model}")  # Text: what the coordinator says is never markup
    return Panel(table, title=title, subtitle=f"worker {worker}", expand=False)

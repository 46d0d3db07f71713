from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from rich.console import Console

from tests.factories import make_terms
from worker.console import one_line, panel, show
from worker.status import Status


def rendered(status: Status, **terms: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(panel(status, make_terms(**terms), "abcd1234"))
    return out.getvalue()


def test_a_line_says_what_matters() -> None:
    line = one_line(Status(phase="working", policy_version=7, in_flight=3, accepted=5, rejected=1, credits=900))
    assert line == "working · policy 7 · 0 tok/s · 3 leases · 5 accepted · 1 rejected · 900 credits"


def test_a_line_adds_what_needs_attention() -> None:
    line = one_line(Status(outbox=2, last_reason="proof: another model"))
    assert line.endswith("2 in the outbox · last reason: proof: another model")
    assert "policy -" in line


def test_the_panel_shows_standing_and_the_reason_for_rejections() -> None:
    text = rendered(Status(credits=900, strikes=1, rejected=2, last_reason="proof: [red]12[/red] of 128", swaps=3))
    assert "900 verified tokens" in text and "1 strikes" in text and "2 rejected" in text
    assert "proof: [red]12[/red] of 128" in text, "what comes from outside is shown as it is"
    assert "test · tiny" in text and "abcd1234" in text


def test_the_panel_shows_a_download_on_its_way() -> None:
    text = rendered(Status(fetching_version=4, fetch_done=5_000_000, fetch_total=20_000_000))
    assert "version 4: 5 of 20 MB" in text


def test_markup_in_a_runs_name_cannot_break_the_panel() -> None:
    assert "[/nonsense]" in rendered(Status(), name="[/nonsense]")


@pytest.mark.parametrize("as_json", [True, False])
async def test_without_a_terminal_lines_are_printed(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    task = asyncio.create_task(show(Status(phase="working"), make_terms(), worker="abcd1234", as_json=as_json))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["phase"] if as_json else line.split(" ·")[0]) == "working"

"""shardcast.discovery: a coordinator that answers rubbish decides nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from protocol.errors import SourceFault, UserError
from protocol.terms import WELL_KNOWN_PATH
from shardcast.config import ServerLimits
from shardcast.discovery import Coordinator
from shardcast.listen import listening
from tests.factories import make_terms


async def ask(required: Any = None, terms: str = "", status: int = 200) -> tuple[set[int] | str, list[str] | str]:
    """What is made of a coordinator's two answers; the fault's text where they are refused."""

    async def answer_required(request: web.Request) -> web.Response:
        return web.Response(text=required if isinstance(required, str) else json.dumps(required), status=status)

    async def answer_terms(request: web.Request) -> web.Response:
        return web.Response(text=terms, status=status)

    app = web.Application()
    app.router.add_get("/api/v1/versions/required", answer_required)
    app.router.add_get(WELL_KNOWN_PATH, answer_terms)
    found: list[Any] = []
    async with listening(app, "127.0.0.1", 0, ServerLimits(shutdown_s=0.1)) as url:
        coordinator = Coordinator(url)
        for question in (coordinator.required, coordinator.relays):
            try:
                found.append(await question())
            except SourceFault as fault:
                found.append(str(fault))
    return found[0], found[1]


async def test_what_a_coordinator_says_is_taken_in() -> None:
    relays = ("http://a:1/", "no url", "http://b:2", "http://a:1")
    assert await ask({"versions": [3, 1]}, make_terms(relays=relays).to_json()) == (
        {1, 3},
        ["http://a:1", "http://b:2"],
    )


@pytest.mark.parametrize(
    "required",
    ["", "[]", "[" * 100_000, {"versions": "x"}, {"versions": [-1]}, {"versions": ["1"]}, {"versions": [2**60]}, {}],
)
async def test_rubbish_is_a_fault_and_no_list(required: Any) -> None:
    versions, relays = await ask(required, "{}")
    assert isinstance(versions, str) and isinstance(relays, str)


async def test_an_endless_answer_is_cut_off() -> None:
    versions, relays = await ask(" " * (2**20 + 1), " " * (2**20 + 1))
    assert "more than" in versions and "more than" in relays


async def test_other_answers_and_silence_are_faults() -> None:
    versions, _ = await ask({"versions": []}, status=503)
    assert "503" in versions
    with pytest.raises(SourceFault, match="can't be asked"):
        await Coordinator("http://127.0.0.1:9").required()
    with pytest.raises(UserError):
        Coordinator("nonsense")

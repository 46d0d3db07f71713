"""shardcast.manners and shardcast.asker: clients first, siblings their share, and what a header may say."""

from __future__ import annotations

import asyncio

import pytest

from shardcast.asker import CLIENT, FROM_HEADER, Asker, Kind
from shardcast.manners import SHARE, Manners

SOON = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_sibling_waits_until_clients_got_their_multiple() -> None:
    manners = Manners(Clock())
    async with asyncio.timeout(SOON):
        with manners.serving_client():
            waiting = asyncio.create_task(manners.let_clients_pass(1000))
            manners.sent(int(999 / SHARE))
            await asyncio.sleep(0)
            assert not waiting.done()
            manners.sent(int(1 / SHARE))
            await waiting


async def test_a_sibling_need_not_wait_when_no_client_is_served() -> None:
    manners = Manners(Clock())
    async with asyncio.timeout(SOON):
        await manners.let_clients_pass(10**6)
        with manners.serving_client():
            waiting = asyncio.create_task(manners.let_clients_pass(10**6))
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting


async def test_a_relay_is_busy_while_it_serves_clients_most_of_the_time() -> None:
    clock = Clock()
    manners = Manners(clock)
    assert not manners.busy
    with manners.serving_client():
        clock.now = 0.5
        assert not manners.busy
        clock.now = 5.0
        assert manners.busy
    clock.now = 5.5
    assert manners.busy
    clock.now = 9.0
    assert not manners.busy
    manners.expect_clients()
    assert manners.busy


@pytest.mark.parametrize("asker", [Asker(Kind.RELAY, "a1"), Asker(Kind.PEER, "a1"), Asker(Kind.PEER, "a1", busy=True)])
def test_an_asker_survives_its_header(asker: Asker) -> None:
    assert Asker.parse(asker.header()[FROM_HEADER]) == asker


@pytest.mark.parametrize("header", [None, "", "peer", "client x", "king x busy", "x" * 9999])
def test_anything_else_is_a_client(header: str | None) -> None:
    assert Asker.parse(header) == CLIENT and CLIENT.header() == {}

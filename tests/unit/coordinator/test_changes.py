from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from coordinator.dashboard.changes import Changes
from coordinator.limits import Door, DoorLimits
from tests.dashboard import serving
from tests.stored_run import StoredRun


class Run:
    """Counts looks; a look waits until it is let."""

    def __init__(self) -> None:
        self.looks = 0
        self.state: object = 1
        self.let: asyncio.Queue[None] = asyncio.Queue()
        self.away = False

    async def look(self) -> object:
        await self.let.get()
        self.looks += 1
        if self.away:
            raise OSError("no database")
        return self.state


async def hear(*followed: AsyncGenerator[bool, None]) -> list[bool]:
    async with asyncio.timeout(20):
        return list(await asyncio.gather(*(anext(each) for each in followed)))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_look_tells_all_streams() -> None:
    run = Run()
    changes = Changes(run.look, every_s=0.0)
    async with contextlib.AsyncExitStack() as opened:
        streams = [await opened.enter_async_context(contextlib.aclosing(changes.follow())) for _ in range(20)]
        run.let.put_nowait(None)
        assert await hear(*streams) == [False] * 20
        run.state = 2
        run.let.put_nowait(None)
        assert await hear(*streams) == [True] * 20
        run.let.put_nowait(None)
        assert await hear(*streams) == [False] * 20
        assert (run.looks, len(changes)) == (3, 20)
    assert len(changes) == 0


async def test_who_reads_slowly_still_hears_that_something_changed() -> None:
    run = Run()
    changes = Changes(run.look, every_s=0.0)
    async with contextlib.aclosing(changes.follow()) as slow, contextlib.aclosing(changes.follow()) as quick:
        run.let.put_nowait(None)
        assert await hear(slow, quick) == [False, False]
        for state, changed in ((2, True), (2, False), (2, False)):
            run.state = state
            run.let.put_nowait(None)
            assert await hear(quick) == [changed]
        assert await hear(slow) == [True]


async def test_a_database_that_was_away_ends_no_stream() -> None:
    run = Run()
    changes = Changes(run.look, every_s=0.0)
    async with contextlib.aclosing(changes.follow()) as stream:
        run.let.put_nowait(None)
        assert await hear(stream) == [False]
        run.away = True
        run.let.put_nowait(None)
        await settle()
        assert run.looks == 2
        run.away, run.state = False, 2
        run.let.put_nowait(None)
        assert await hear(stream) == [True]


async def test_nobody_looks_while_nobody_follows() -> None:
    run = Run()
    changes = Changes(run.look, every_s=0.0)
    for _ in range(100):
        run.let.put_nowait(None)
    async with contextlib.aclosing(changes.follow()) as stream:
        await hear(stream)
    await settle()
    looks = run.looks
    await settle()
    assert run.looks == looks < 100
    async with contextlib.aclosing(changes.follow()) as stream:
        assert await hear(stream) == [False], "and who comes later is served again"


async def test_streams_are_bounded_and_take_no_room_of_calls(run: StoredRun) -> None:
    told: list[str] = []
    door = Door(DoorLimits(calls=1, streams=2), time.monotonic, told.append)
    async with (
        serving(run, door=door) as client,
        client.get("/api/v1/changes") as first,
        client.get("/api/v1/changes") as second,
    ):
        for stream in (first, second):
            assert await stream.content.readline() == b": nothing new\n"
        assert (await client.get("/api/v1/status")).status == 200
        refused = await client.get("/api/v1/changes")
        assert (refused.status, told) == (429, ["streams"])
        assert int(refused.headers["Retry-After"]) >= 30
        assert "limits.streams" in (await refused.json())["error"]

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.together import Together


class Work:
    """Doubles numbers; the first call waits until `go`. A negative number is a fault of its own, 13 breaks the whole call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.go = asyncio.Event()

    async def __call__(self, items: Sequence[int]) -> Sequence[int | Exception]:
        self.calls.append(list(items))
        await self.go.wait()
        if 13 in items:
            raise RuntimeError("13")
        return [ValueError(str(item)) if item < 0 else 2 * item for item in items]


async def begun(together: Together[int, int], *items: int) -> list[asyncio.Task[int]]:
    """Calls that have all handed in their item."""
    tasks = [asyncio.create_task(together.do(item)) for item in items]
    await asyncio.sleep(0)
    return tasks


async def test_what_comes_while_work_is_under_way_is_done_together() -> None:
    work = Work()
    together = Together(work, most=3)
    tasks = await begun(together, 1)
    await asyncio.sleep(0)
    tasks += await begun(together, 2, 3, 4, 5)
    work.go.set()
    assert await asyncio.gather(*tasks) == [2, 4, 6, 8, 10]
    assert work.calls == [[1], [2, 3, 4], [5]]


async def test_an_answer_that_is_a_fault_is_raised_to_its_caller_alone() -> None:
    work = Work()
    work.go.set()
    good, bad = await begun(Together(work, most=8), 1, -1)
    assert await good == 2
    with pytest.raises(ValueError, match="-1"):
        await bad


async def test_one_that_breaks_the_work_harms_no_other() -> None:
    work = Work()
    work.go.set()
    tasks = await begun(Together(work, most=8), 1, 13, 2)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert (answers[0], answers[2]) == (2, 4)
    assert isinstance(answers[1], RuntimeError)
    assert work.calls == [[1, 13, 2], [1], [13], [2]]


async def test_who_has_gone_away_is_left_out() -> None:
    work = Work()
    together = Together(work, most=8)
    first = await begun(together, 1)
    await asyncio.sleep(0)
    gone, stays = await begun(together, 2, 3)
    gone.cancel()
    await asyncio.sleep(0)
    work.go.set()
    assert await stays == 6
    assert await first[0] == 2
    assert work.calls == [[1], [3]]


async def test_an_answer_that_nobody_waits_for_any_more_is_not_forgotten() -> None:
    work, lost = Work(), list[tuple[int, int]]()
    together = Together(work, most=8, lost=lambda item, answer: lost.append((item, answer)))
    gone, stays = await begun(together, 1, 2)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    work.go.set()
    assert await stays == 4
    assert lost == [(1, 2)]


async def test_a_database_that_is_away_is_asked_once_for_all() -> None:
    calls = 0

    async def away(items: Sequence[int]) -> Sequence[int]:
        nonlocal calls
        calls += 1
        raise ConnectionRefusedError

    tasks = await begun(Together(away, most=8), 1, 2, 3)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ConnectionRefusedError] * 3
    assert calls == 1

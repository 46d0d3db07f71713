"""shardcast.uplink: turns round the addresses, against a clock that the test moves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from shardcast.uplink import Uplink

RATE = 1000.0  # bytes per second, of which 250 may go at once


@dataclass
class Bench:
    """An uplink, and in which order its turns come."""

    now: float = 0.0
    came: list[tuple[str, bool]] = field(default_factory=list)
    left: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.uplink = Uplink(RATE, lambda: self.now)

    def ask(self, name: str, count: int = 250) -> asyncio.Task[None]:
        async def ask() -> None:
            here = await self.uplink.turn(name[0], count, lambda: name in self.left)
            self.came.append((name, here))

        return asyncio.create_task(ask())

    async def settle(self, now: float) -> list[str]:
        """Who has had a turn once it is `now`."""
        for _ in range(10):  # each turn that is given is seen by its task in the next round of the loop
            await asyncio.sleep(0)
        self.now = now
        self.uplink.give_back(0)
        for _ in range(10):
            await asyncio.sleep(0)
        return [name for name, here in self.came if here]


async def test_an_address_that_asks_much_waits_for_itself() -> None:
    bench = Bench()
    tasks = [bench.ask(f"a{number}") for number in range(8)]
    await bench.settle(0.0)
    tasks.append(bench.ask("b0"))
    assert await bench.settle(0.0) == ["a0", "a1"]  # a burst, and one that is paid off
    for step in range(1, 9):
        await bench.settle(step * 0.25 + 1e-6)
    assert [name for name, _ in bench.came][2:5] == ["a2", "b0", "a3"]
    await asyncio.gather(*tasks)


async def test_who_left_costs_nothing() -> None:
    bench = Bench()
    tasks = [bench.ask(name) for name in ("a0", "a1", "a2", "a3", "a4", "a5")]
    assert await bench.settle(0.0) == ["a0", "a1"]
    bench.left = {"a2", "a3", "a4"}
    assert bench.uplink.wait_s("a") == pytest.approx(0.25)
    assert await bench.settle(0.25 + 1e-6) == ["a0", "a1", "a5"]
    assert bench.came[2:5] == [("a2", False), ("a3", False), ("a4", False)]
    await asyncio.gather(*tasks)


async def test_the_wait_of_one_more_is_its_own_and_as_many_of_each_other() -> None:
    bench = Bench()
    tasks = [bench.ask(f"a{number}") for number in range(11)] + [bench.ask("b0")]
    await bench.settle(0.0)
    assert bench.uplink.wait_s("a") == pytest.approx(10 * 0.25)
    assert bench.uplink.wait_s("b") == pytest.approx(3 * 0.25)
    assert bench.uplink.wait_s("c") == pytest.approx(2 * 0.25)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert bench.uplink.wait_s("a") == 0.0


async def test_what_was_not_sent_is_given_to_the_next() -> None:
    bench = Bench()
    tasks = [bench.ask("a0"), bench.ask("a1"), bench.ask("a2")]
    assert await bench.settle(0.0) == ["a0", "a1"]
    bench.uplink.give_back(250)
    assert await bench.settle(0.0) == ["a0", "a1", "a2"]
    await asyncio.gather(*tasks)


async def test_a_turn_that_is_cancelled_as_it_comes_costs_nothing() -> None:
    bench = Bench()
    await bench.ask("a0", 500)
    late = bench.ask("a1", 10_000)
    assert await bench.settle(0.0) == ["a0"]
    bench.now = 0.25 + 1e-6
    bench.uplink.give_back(0)  # it has its turn, and doesn't know yet
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    await bench.ask("a2")
    assert [name for name, _ in bench.came] == ["a0", "a2"]

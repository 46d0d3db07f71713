"""coordinator.store.tallies: whatever was counted before, the total is that of all rows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from coordinator.store import database, events, marks, tallies
from coordinator.store import tables as t
from protocol.signing import Identity
from tests.stored_run import StoredRun, accepted, rejected

_HOUR_S = 3600.0


async def advance(run: StoredRun, tally: tallies.Tally, limit: int, *, later_s: float = _HOUR_S) -> bool:
    """As upkeep does, so much later."""
    async with run.db.write() as connection:
        return await tallies.advance(connection, tally, await database.now(connection) + later_s, limit)


async def totals(run: StoredRun) -> dict[str, Counter[tuple[str, ...]]]:
    async with run.db.read() as connection:
        return {tally.name: await tallies.total(connection, tally) for tally in tallies.ALL}


async def counted_anew(run: StoredRun) -> dict[str, Counter[tuple[str, ...]]]:
    """By reading all rows."""
    rollouts = [(row.state, row.precision, str(row.spans)) for row in await run.rows(t.rollouts)]
    found: dict[str, Counter[tuple[str, ...]]] = {
        "rollouts": Counter(rollouts),
        "drops": Counter(),
        "ledger": Counter(),
    }
    found["staleness"] = Counter((str(row.staleness),) for row in await run.rows(t.consumptions))
    for row in await run.rows(t.drops):
        found["drops"][(row.reason,)] += row.count
    for row in await run.rows(t.ledger):
        found["ledger"][(row.kind,)] += row.amount
    return found


async def mark_of(run: StoredRun, name: str) -> float:
    async with run.db.read() as connection:
        return await marks.read(connection, name)


@pytest.mark.parametrize("seed", range(3))
async def test_a_total_is_that_of_all_rows_at_any_time(
    run: StoredRun, alice: Identity, bob: Identity, seed: int
) -> None:
    draw, batch, moved = random.Random(seed), 0, set()
    for _ in range(14):
        worker = draw.choice((alice, bob))
        if not (await run.standing(worker)).banned:
            await run.work(worker, draw.randint(1, 3))
        if draw.random() < 0.7:
            for pending in await run.claim():  # a ban drops others that were claimed
                await run.record(pending.rollout_id, rejected() if draw.random() < 0.07 else accepted(pending))
        if draw.random() < 0.5 and await run.pull(batch):
            await run.step(batch)
            if draw.random() < 0.7:
                await run.feeding.acknowledge(batch)
            batch += 1
        async with run.db.write() as connection:
            await events.count_refusal(connection, at=1.0, reason=draw.choice(("refused:lease", "refused:limit")))
        for tally in tallies.ALL:
            await advance(run, tally, draw.randint(1, 4))
            if await mark_of(run, tally.source.name):
                moved.add(tally.name)
        assert await totals(run) == await counted_anew(run)
    assert moved == {tally.name for tally in tallies.ALL}


async def test_what_is_under_way_is_not_counted_for_good(run: StoredRun, alice: Identity) -> None:
    (first,) = await run.work(alice, 1)
    assert not await advance(run, tallies.ROLLOUTS, 10)
    assert await mark_of(run, "rollouts") <= (await run.row(t.rollouts, t.rollouts.c.rollout_id == first)).received_at
    assert not await run.rows(t.tallies)
    await run.judge(rejected())
    await advance(run, tallies.ROLLOUTS, 10)
    assert [(row.name, row.key, row.amount) for row in await run.rows(t.tallies)] == [
        ("rollouts", "rejected|bf16|1", 1)
    ]


async def test_what_is_new_is_not_counted_for_good(run: StoredRun, alice: Identity) -> None:
    """Who has asked for the time may still add a line that is older."""
    await run.work(alice, 1)
    await run.judge(rejected())
    for tally in tallies.ALL:
        assert not await advance(run, tally, 10, later_s=1.0)
    assert not await run.rows(t.tallies)
    assert await totals(run) == await counted_anew(run)


async def test_what_lies_in_one_place_is_counted_together(run: StoredRun, alice: Identity) -> None:
    """However few at once: a part that ends within one moment, or one batch, would never end."""
    await run.work(alice, 4)
    await run.judge()
    assert len(await run.pull()) == 2
    await run.feeding.acknowledge(0)
    await run.change(t.rollouts, received_at=5.0)
    while any([await advance(run, tally, 1) for tally in tallies.ALL]):
        assert await totals(run) == await counted_anew(run)
    assert {row.name for row in await run.rows(t.tallies)} == {"rollouts", "staleness", "ledger"}
    assert await totals(run) == await counted_anew(run)


async def test_replicas_count_side_by_side(run: StoredRun, alice: Identity) -> None:
    """Each row once, whoever comes first, also the first time."""
    await run.work(alice, 4)
    await run.judge()
    assert len(await run.pull()) == 2
    await run.feeding.acknowledge(0)
    for _ in range(3):
        await asyncio.gather(*(advance(run, tally, 1) for tally in tallies.ALL for _ in range(3)))
        assert await totals(run) == await counted_anew(run)

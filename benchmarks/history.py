"""`python -m benchmarks.history`: what pages, rooms and upkeep cost after many rollouts, on PostgreSQL.

A history is written by SQL, as large as `--sizes` says; then each question is asked `--repeats` times, as the process that
serves it asks. Where the time grows with the history, a long run makes everybody wait. Ends with a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from benchmarks.tables import table
from coordinator import migrate
from coordinator.dashboard.pool import beside
from coordinator.store import (
    browse,
    evidence,
    groups,
    leases,
    pace,
    retention,
    rollouts,
    summary,
    tallies,
    versions,
    workers,
)
from coordinator.store.database import Database, Lane
from demo.postgres import Postgres, find_binaries

_WORKERS = 1000
_GROUP = 16
_BATCH = 1024
_KEPT = 50_000  # newest rollouts whose payload is still there
_PER_S = 500  # rollouts received a second
_SOME = "w7"

Ask = Callable[[AsyncConnection], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, over whose connections: "page", "room" or "upkeep"."""

    whose: str
    ask: Ask


_HISTORY = (
    "SET session_replication_role = replica",  # no foreign key is looked up: all is consistent by construction
    """INSERT INTO workers (worker_id, name, hardware, software, address, registered_at, last_seen_at, credits, strikes,
                            accepted, rejected, banned, ban_reason)
       SELECT 'w' || i, 'worker ' || i, 'gpu', 'benchmark', '10.0.0.' || i, :begin, :end, 0, 0, 1000, 0, false, ''
       FROM generate_series(0, :workers - 1) AS i""",
    """INSERT INTO evidence (worker_id, test, bets, log_e, rollouts, tokens, updated_at)
       SELECT 'w' || i, 't' || j, '[0.5, 0.5, 0.5, 0.5, 0.5]', 0.1, 1000, 64000, :end
       FROM generate_series(0, :workers - 1) AS i, generate_series(1, 8) AS j""",
    """INSERT INTO policy_versions (version, manifest_digest, payload, key_id, signature, announced_at, withdrawn)
       SELECT i, 'v' || i, '', 'k', '', :begin, false FROM generate_series(0, :n / :batch) AS i""",
    """INSERT INTO batches (batch, trainer_version, opened_at, acknowledged_at)
       SELECT i, i, :begin + i, CASE WHEN i < :n / :batch - 2 THEN :begin + i * :batch / :rate END
       FROM generate_series(0, :n / :batch) AS i""",
    """INSERT INTO steps (batch, trainer_version, optimizer_steps, metrics, dropped, reported_at)
       SELECT i, i, i, '{}', '{}', :begin + i FROM generate_series(0, :n / :batch) AS i""",
    """INSERT INTO groups (group_id, ordinal, environment, task_index, prompt, prompt_token_ids, reference, max_tokens,
                           n_samples, state, created_at, deadline, batch, compared)
       SELECT 'g' || i, i, 'math', i, 'What is one and one?', decode(repeat('01000000', 20), 'hex'), '2', 64, :group,
              CASE WHEN i * :group < :n - 3 * :batch THEN 'done' ELSE 'served' END, :begin, :end, i * :group / :batch, true
       FROM generate_series(0, :n / :group - 1) AS i""",
    """INSERT INTO samples (sample_id, group_id, ordinal, seed, state, attempts)
       SELECT 's' || i, 'g' || i / :group, i, i, 'accepted', CASE WHEN i % 50 = 0 THEN 2 ELSE 1 END
       FROM generate_series(0, :n - 1) AS i""",
    """INSERT INTO leases (lease_id, sample_id, worker_id, min_version, acquired_at, deadline, state, committed_length,
                           committed_digest, committed_version, earlier_commitments)
       SELECT 'l' || i, 's' || i, 'w' || i % :workers, i / :batch, :begin + i / :rate, :end, 'completed', 0, '', 0, '[]'
       FROM generate_series(0, :n - 1) AS i""",
    # One in fifty was let go by another before.
    """INSERT INTO leases (lease_id, sample_id, worker_id, min_version, acquired_at, deadline, state, committed_length,
                           committed_digest, committed_version, earlier_commitments)
       SELECT 'e' || i, 's' || i, 'w' || (i + 1) % :workers, i / :batch, :begin + i / :rate, :end, 'expired', 0, '', 0, '[]'
       FROM generate_series(0, :n - 1, 50) AS i""",
    # One in a hundred is rejected; what was answered for its sample instead is not part of this history.
    """INSERT INTO rollouts (rollout_id, sample_id, group_id, lease_id, worker_id, received_at, tokens, oldest_version,
                             newest_version, spans, state, attempts)
       SELECT 'r' || i, 's' || i, 'g' || i / :group, 'l' || i, 'w' || i % :workers, :begin + i / :rate, 64, i / :batch,
              i / :batch, 1 + i % 2, CASE WHEN i % 100 = 0 THEN 'rejected'
                                          WHEN i < :n - 3 * :batch THEN 'trained' ELSE 'served' END, 1
       FROM generate_series(0, :n - 1) AS i""",
    """INSERT INTO verdicts (rollout_id, outcome, reason, detail, reward, audited, old_logprobs, entropies, metrics,
                             admitted, observations, verifier, verified_at)
       SELECT 'r' || i, CASE WHEN i % 100 = 0 THEN 'rejected' ELSE 'accepted' END,
              CASE WHEN i % 100 = 0 THEN 'proof' END, '', 1, true, '', '', '{}', '{}', '{}', 'v', :begin + i / :rate
       FROM generate_series(0, :n - 1) AS i""",
    """INSERT INTO consumptions (rollout_id, batch, staleness, trained)
       SELECT 'r' || i, i / :batch, i % 3, true FROM generate_series(0, :n - 1) AS i WHERE i % 100 > 0""",
    """INSERT INTO ledger (worker_id, kind, amount, rollout_id, note, created_at)
       SELECT 'w' || i % :workers, CASE WHEN i % 100 = 0 THEN 'strike' ELSE 'credit' END, 64, 'r' || i, '',
              :begin + i / :rate
       FROM generate_series(0, :n - 1) AS i""",
    """INSERT INTO drops (rollout_id, reason, tokens, count, dropped_at)
       SELECT 'r' || i, 'rejected:proof', 64, 1, :begin + i / :rate FROM generate_series(0, :n - 1) AS i WHERE i % 100 = 0""",
    """INSERT INTO payloads (rollout_id, payload, key_id, signature)
       SELECT 'r' || i, decode(repeat('00112233', 300), 'hex'), 'k', ''
       FROM generate_series(greatest(0, :n - :kept), :n - 1) AS i""",
)


async def write_history(url: str, count: int, end: float) -> None:
    """So many rollouts, received at `_PER_S` a second until `end`; most trained on, one in a hundred rejected."""
    values = {"n": count, "workers": _WORKERS, "group": _GROUP, "batch": _BATCH, "rate": f"{_PER_S}.0", "kept": _KEPT}
    values |= {"begin": end - count / _PER_S, "end": end}
    engine = create_async_engine(url)
    try:
        async with engine.begin() as connection:
            for statement in _HISTORY:
                await connection.exec_driver_sql(re.sub(r"(?<!\w):(\w+)", lambda name: str(values[name[1]]), statement))
        async with engine.connect() as connection:
            connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
            await connection.exec_driver_sql("VACUUM ANALYZE")
    finally:
        await engine.dispose()


def _page(ask: Ask) -> Question:
    return Question("page", ask)


def _room(ask: Ask) -> Question:
    return Question("room", ask)


def questions(end: float) -> dict[str, Question]:
    """By name. What takes an hour to find in the history is what a page of fifty lines shows."""
    some = [f"w{i}" for i in range(100)]
    return {
        "overview, metrics": _page(lambda c: summary.read(c, probation_rollouts=0)),
        "has anything changed": _page(summary.state),
        "rollouts, newest": _page(browse.rollouts),
        "rollouts, of a worker": _page(lambda c: browse.rollouts(c, worker_id=_SOME)),
        "rollouts, rejected": _page(lambda c: browse.rollouts(c, state="rejected")),
        "rollouts, a reason that none has": _page(lambda c: browse.rollouts(c, reason="seed")),
        "ledger, newest": _page(browse.ledger),
        "ledger, sums": _page(browse.ledger_sums),
        "strikes of a worker": _page(lambda c: browse.strikes(c, _SOME)),
        "audit log's kinds": _page(browse.event_actions),
        "verdicts of a worker": _room(lambda c: rollouts.latest_verdicts(c, _SOME, 20)),
        "account of a worker": _room(lambda c: workers.ledger_mark(c, _SOME)),
        "load": _room(rollouts.count_unconsumed),
        "versions needed": _room(versions.required),
        "speed of 100 workers": _room(lambda c: pace.of_workers(c, some, end)),
        "who held samples before": _room(lambda c: leases.held_before(c, some, [f"s{i * 7}" for i in range(50)])),
        "samples given up": _room(lambda c: evidence.given_up(c, [f"g{i}" for i in range(8)])),
        "samples of a worker in open groups": _room(lambda c: groups.used_by_worker(c, _SOME)),
        "newcomers' leases": _room(lambda c: leases.count_live_of_newcomers(c, 64)),
        "stragglers": _room(lambda c: pace.stragglers(c, end, 10.0)),
        "usual reward": _room(lambda c: evidence.usual_reward(c, "math", 2**40)),
        "unconsumed of a worker": _room(lambda c: rollouts.unconsumed_of_worker(c, _SOME)),
        "samples that wait": _room(lambda c: groups.waiting(c, 100)),
        "next group": _room(groups.next_ordinal),
        "retention": Question("upkeep", lambda c: _retain(c, end)),
        "counting what is over": Question("upkeep", lambda c: _count(c, end)),
    }


async def _retain(connection: AsyncConnection, end: float) -> retention.Forgotten:
    """As upkeep does once a minute; nothing is due."""
    before = end - _KEPT / _PER_S
    return await retention.forget(connection, trained_before=before, others_before=before, limit=1000)


async def _count(connection: AsyncConnection, end: float) -> None:
    """As upkeep does every ten seconds, all at once."""
    for tally in tallies.ALL:
        while await tallies.advance(connection, tally, end, 1_000_000):
            pass


async def measure(url: str, repeats: int, end: float) -> dict[str, float]:
    """Milliseconds of each question, the median."""
    rooms = Database.open(url)
    pages = beside(rooms)
    found: dict[str, float] = {}
    try:
        async with rooms.write(Lane.TRAINING) as connection:
            await _count(connection, end)  # upkeep had its time
            while (await _retain(connection, end)).more:
                pass
        for name, question in questions(end).items():
            times = []
            for _ in range(repeats + 1):
                began = time.perf_counter()
                if question.whose == "upkeep":
                    async with rooms.write(Lane.TRAINING) as connection:
                        await question.ask(connection)
                else:
                    async with (pages if question.whose == "page" else rooms).read() as connection:
                        await question.ask(connection)
                times.append((time.perf_counter() - began) * 1e3)
            found[name] = median(times[1:])  # the first finds nothing in memory
    finally:
        await pages.close()
        await rooms.close()
    return found


async def run(postgres: Postgres, sizes: list[int], repeats: int) -> dict[int, dict[str, float]]:
    """Milliseconds by size and question."""
    found = {}
    for size in sizes:
        name, end = f"history_{size}", time.time()
        url = postgres.create(name)
        await migrate.upgrade(url)
        await write_history(url, size, end)
        found[size] = await measure(url, repeats, end)
        postgres.drop(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.history", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 500_000], help="rollouts")
    parser.add_argument("--repeats", type=int, default=5)
    # A benchmark that is told to stop takes its processes with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    arguments = parser.parse_args()
    binaries = find_binaries()
    if binaries is None:
        sys.exit("there is no PostgreSQL here: install it first")
    postgres = Postgres(binaries)
    try:
        found = asyncio.run(run(postgres, arguments.sizes, arguments.repeats))
    finally:
        postgres.stop()
    first, last = arguments.sizes[0], arguments.sizes[-1]
    rows = [
        {"question": name}
        | {f"ms at {size:,}": found[size][name] for size in arguments.sizes}
        | {"ratio": found[last][name] / found[first][name]}
        for name in found[first]
    ]
    print(table(rows))
    print(json.dumps({"benchmark": "history", "cores": os.cpu_count(), "machine": platform.machine(), "ms": found}))


if __name__ == "__main__":
    main()

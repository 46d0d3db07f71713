"""Signed statements of account as the API gives them.

A ledger may be long: it is read in parts, folded and written in a thread, and what was made is kept until the worker's ledger
has something new.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Row

from coordinator import statements
from coordinator.dashboard.api import answers
from coordinator.export_ledger import envelope_json
from coordinator.store import database, workers
from coordinator.store import run as run_store
from coordinator.store.database import Database
from protocol.signing import SignedEnvelope
from protocol.statement import Statement

_KEPT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Kept:
    mark: tuple[int, int]
    body: bytes


class Accounts:
    """Makes one at a time: however many ask, one thread and one ledger in memory is what it costs."""

    def __init__(
        self, db: Database, sign: Callable[[Statement], SignedEnvelope], kept_bytes: int = _KEPT_BYTES
    ) -> None:
        self._db = db
        self._sign = sign
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._alone = asyncio.Lock()

    async def get(self, worker_id: str) -> bytes | None:
        """The statement with its ledger's lines in JSON, as of when the last line was new; None for who never registered."""
        return await self._known(worker_id) or await self._make(worker_id)

    async def _known(self, worker_id: str) -> bytes | None:
        kept = self._kept.get(worker_id)
        if kept is None:
            return None
        async with self._db.read() as connection:
            mark = await workers.ledger_mark(connection, worker_id)
        if mark != kept.mark:
            return None
        if worker_id in self._kept:
            self._kept.move_to_end(worker_id)
        return kept.body

    async def _make(self, worker_id: str) -> bytes | None:
        async with self._alone:
            known = await self._known(worker_id)  # who was before may have made it
            if known is not None:
                return known
            run = await run_store.load(self._db)
            assert run is not None
            async with self._db.read() as connection:
                if await workers.standing(connection, worker_id) is None:
                    return None
                mark = await workers.ledger_mark(connection, worker_id)
                as_of = await database.now(connection)
                rows = await workers.ledger_rows(connection, worker_id)
            body = await asyncio.to_thread(self._written, run.run_id, worker_id, rows, as_of)
            self._keep(worker_id, _Kept(mark, body))
            return body

    def _written(self, run_id: str, worker_id: str, rows: Sequence[Row[Any]], as_of: float) -> bytes:
        entries = [workers.entry_of(row) for row in rows]
        signed = self._sign(statements.account(run_id, worker_id, entries, as_of))
        answer = answers.SignedStatement(
            answers.Envelope(**envelope_json(signed)),
            [(entry.kind.value, entry.amount, entry.rollout_id, entry.note) for entry in entries],
        )
        return TypeAdapter(answers.SignedStatement).dump_json(answer)

    def _keep(self, worker_id: str, made: _Kept) -> None:
        """The least recently used are forgotten first; what is larger than all that may be kept is not kept."""
        self._kept.pop(worker_id, None)
        self._kept[worker_id] = made
        total = sum(len(each.body) for each in self._kept.values())
        while total > self._kept_bytes:
            total -= len(self._kept.popitem(last=False)[1].body)

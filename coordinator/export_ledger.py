"""`coordinator ledger`: every entry, and a signed statement per worker, as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from sqlalchemy import select

from coordinator import statements
from coordinator.export_file import exporting
from coordinator.store import run as run_store
from coordinator.store import tables as t
from protocol.signing import Identity, SignedEnvelope
from protocol.statement import sign_statement


def envelope_json(envelope: SignedEnvelope) -> dict[str, str]:
    """An envelope in JSON: the payload is the very text that was signed."""
    return {
        "payload": envelope.payload.decode(),
        "key_id": envelope.key_id,
        "signature": envelope.signature.hex(),
    }


async def export_ledger(url: str, out: Path, identity: Identity) -> int:
    """How many entries were written. Raises UserError if the database holds no run or the file can't be written."""
    count = 0
    async with exporting(url, out) as (db, scratch):
        run = await run_store.load(db)
        assert run is not None
        async with db.read() as connection:
            ids = list((await connection.execute(select(t.workers.c.worker_id).order_by("worker_id"))).scalars())
            with scratch.open("w") as file:
                for worker_id in ids:
                    made = await statements.make(connection, run.run_id, worker_id)
                    assert made is not None
                    statement, entries = made
                    for entry in entries:
                        line = {"worker_id": worker_id, "kind": entry.kind.value, "amount": entry.amount}
                        line |= {"rollout_id": entry.rollout_id, "note": entry.note}  # type: ignore[dict-item]
                        file.write(json.dumps(line) + "\n")
                    file.write(json.dumps({"statement": envelope_json(sign_statement(statement, identity))}) + "\n")
                    count += len(entries)
    return count

"""What leaves the database: payloads that are forgotten, rollouts as Parquet, the ledger with its statements."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from coordinator import statements
from coordinator.export import export
from coordinator.export_ledger import export_ledger
from coordinator.store import database, events, retention
from coordinator.store import tables as t
from protocol.errors import BadSignature, UserError
from protocol.ledger import Entry, EntryKind
from protocol.signing import Identity, SignedEnvelope
from protocol.statement import digest_of, open_statement, sign_statement
from tests.factories import COORDINATOR, RUN_ID, make_identity
from tests.stored_run import StoredRun, rejected


def url_of(run: StoredRun) -> str:
    return run.db.engine.url.render_as_string(hide_password=False)


async def forget(run: StoredRun, *, trained: float = 0.0, others: float = 0.0, limit: int = 100) -> int:
    async with run.db.write() as connection:
        at = await database.now(connection)
        forgotten = await retention.forget(
            connection, trained_before=at + 1 - trained, others_before=at + 1 - others, limit=limit
        )
        return forgotten.payloads


def parts(folder: Path) -> list[Path]:
    """Files that are not whole."""
    return list(folder.glob("*.part"))


async def payloads(run: StoredRun) -> set[str]:
    return {row.rollout_id for row in await run.rows(t.payloads)}


async def test_only_what_is_trained_or_refused_for_long_is_forgotten(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 2)
    (first, second) = await run.judge()
    await run.pull()
    assert await forget(run) == 0, "served, but no checkpoint holds it"
    await run.feeding.acknowledge(0)
    await run.work(alice, 1)
    (refused,) = await run.judge(rejected())
    await run.work(alice, 1)
    assert await forget(run, trained=3600.0, others=3600.0) == 0
    assert await forget(run, limit=1, others=3600.0) == 1
    assert await forget(run, others=3600.0) == 1
    kept = await payloads(run)
    assert refused in kept and len(kept) == 2 and not {first, second} & kept
    assert await forget(run) == 1
    assert len(await payloads(run)) == 1, "what is pending stays"
    row = await run.row(t.verdicts, t.verdicts.c.rollout_id == first)
    assert (row.old_logprobs, row.reward) == (b"", 1.0)


async def test_retention_goes_on_where_it_was(run: StoredRun, alice: Identity) -> None:
    for batch in range(3):
        await run.work(alice, 4)
        await run.judge()
        assert len(await run.pull(batch)) == 2
        await run.feeding.acknowledge(batch)
    assert [await forget(run, limit=3) for _ in range(6)] == [3, 1, 3, 1, 3, 1]
    assert await payloads(run) == set()
    assert await forget(run) == 0
    (kept,) = await run.work(alice, 1)
    assert await forget(run) == 0 and await payloads(run) == {kept}


async def test_a_refusal_forgets_nothing_that_was_taken_later(run: StoredRun, alice: Identity) -> None:
    (taken,) = await run.work(alice, 1)
    async with run.db.write() as connection:
        await events.count_refusal(connection, at=1.0, reason="refused:lease")
        await events.count_drop(connection, at=1.0, reason="refused:form", tokens=0, rollout_id=taken)
    assert await forget(run) == 0 and await payloads(run) == {taken}
    await run.judge(rejected())
    assert await forget(run) == 1, "its own rejection is a later line"


async def test_verified_rollouts_become_a_table(run: StoredRun, alice: Identity, tmp_path: Path) -> None:
    await run.work(alice, 2)
    ids = await run.judge()
    await run.work(alice, 1)
    await run.judge(rejected())
    out = tmp_path / "rollouts.parquet"
    assert await export(url_of(run), out) == 2
    table = pq.read_table(out).to_pylist()
    assert {row["rollout_id"] for row in table} == set(ids)
    first = table[0]
    assert first["prompt"] == "0 + 1 =" and first["reward"] == 1.0 and first["outcome"] == "accepted"
    assert len(first["token_ids"]) == len(first["behaviour_logprobs"]) == len(first["old_logprobs"]) == 6
    assert first["loss_mask"] == [True] * 6
    assert (first["segment_authors"], first["segment_lengths"]) == (["model"], [6])
    assert first["span_versions"] == [0] and first["span_ends"] == [6]
    assert await export(url_of(run), out, outcomes=("accepted", "rejected")) == 3
    assert {row["reason"] for row in pq.read_table(out).to_pylist()} == {None, "proof"}


async def test_an_export_that_can_not_be_written_leaves_nothing(run: StoredRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        await export(url_of(run), tmp_path / "absent" / "rollouts.parquet")
    assert parts(tmp_path) == []


async def test_of_a_run_that_was_never_served_there_is_nothing_to_export(
    empty_database_url: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="served once"):
        await export(empty_database_url, tmp_path / "rollouts.parquet")
    with pytest.raises(UserError, match="served once"):
        await export_ledger(empty_database_url, tmp_path / "ledger.jsonl", COORDINATOR)
    assert parts(tmp_path) == []


async def test_the_ledger_leaves_with_a_statement_that_binds_its_lines(
    run: StoredRun, alice: Identity, tmp_path: Path
) -> None:
    await run.work(alice, 2)
    await run.judge()
    out = tmp_path / "ledger.jsonl"
    assert await export_ledger(url_of(run), out, COORDINATOR) == 2
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    mine = [line for line in lines if line.get("worker_id") == alice.key_id]
    opened = {}
    for line in lines:
        if "statement" in line:
            signed = line["statement"]
            envelope = SignedEnvelope(signed["payload"].encode(), signed["key_id"], bytes.fromhex(signed["signature"]))
            statement = open_statement(envelope, COORDINATOR.key_id)
            opened[statement.worker_id] = statement
    entries = [Entry(alice.key_id, EntryKind(e["kind"]), e["amount"], e["rollout_id"], e["note"]) for e in mine]
    statement = opened[alice.key_id]
    assert (statement.run_id, statement.entries, statement.credits) == (RUN_ID, 2, 12)
    assert statement.entries_digest == digest_of(entries) != digest_of(entries[:1])
    assert statement.credits == (await run.standing(alice)).credits


async def test_a_statement_is_the_coordinators_or_nobodys(run: StoredRun, alice: Identity) -> None:
    async with run.db.read() as connection:
        made = await statements.make(connection, RUN_ID, alice.key_id)
        assert await statements.make(connection, RUN_ID, make_identity(99).key_id) is None
    assert made is not None
    envelope = sign_statement(made[0], COORDINATOR)
    assert open_statement(envelope, COORDINATOR.key_id) == made[0]
    with pytest.raises(BadSignature):
        open_statement(envelope, alice.key_id)
    with pytest.raises(BadSignature, match="no statement"):
        open_statement(COORDINATOR.sign("statement", b"[]"), COORDINATOR.key_id)

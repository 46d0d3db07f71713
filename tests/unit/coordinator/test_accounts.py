from __future__ import annotations

import asyncio
import json
import time

import pytest

from coordinator import tokens
from coordinator.dashboard.api.accounts import Accounts
from coordinator.limits import Door, DoorLimits, Rate
from coordinator.operators import Role
from coordinator.store import workers
from protocol.ledger import Entry, EntryKind
from protocol.signing import Identity, SignedEnvelope
from protocol.statement import Statement, sign_statement
from tests.dashboard import bearer, serving
from tests.factories import COORDINATOR, SECRET
from tests.stored_run import StoredRun


class Signer:
    """Remembers what it signed."""

    def __init__(self) -> None:
        self.signed: list[Statement] = []

    def __call__(self, statement: Statement) -> SignedEnvelope:
        self.signed.append(statement)
        return sign_statement(statement, COORDINATOR)


async def strike(run: StoredRun, worker: Identity) -> None:
    async with run.db.write() as connection:
        await workers.add_entries(connection, [Entry(worker.key_id, EntryKind.STRIKE, 1, None, "form")], 1.0)


@pytest.mark.parametrize(("kept_bytes", "made"), [(1 << 20, [0, 1]), (10, [0, 0, 1, 1])])
async def test_a_statement_is_made_again_only_when_the_ledger_has_something_new(
    run: StoredRun, alice: Identity, bob: Identity, kept_bytes: int, made: list[int]
) -> None:
    signer = Signer()
    accounts = Accounts(run.db, signer, kept_bytes)
    first = await asyncio.gather(accounts.get(alice.key_id), accounts.get(alice.key_id))
    await strike(run, bob)
    await strike(run, alice)
    second = [await accounts.get(alice.key_id), await accounts.get(alice.key_id)]
    assert [statement.strikes for statement in signer.signed] == made
    entries = [json.loads(body or b"")["entries"] for body in (*first, *second)]
    assert entries == [[], [], [["strike", 1, None, "form"]], [["strike", 1, None, "form"]]]
    assert await accounts.get("ed25519:0") is None


async def test_statements_are_charged_to_the_key_that_asks(run: StoredRun, alice: Identity) -> None:
    told: list[str] = []
    door = Door(DoorLimits(key=Rate(0.001, 2.0)), time.monotonic, told.append)
    mine = {"Authorization": f"Bearer {tokens.make_token(SECRET, alice.key_id, time.time())}"}
    async with serving(run, door=door) as client:
        path = f"/api/v1/workers/{alice.key_id}/statement"
        assert [(await client.get(path, headers=mine)).status for _ in range(3)] == [200, 200, 429]
        viewer = await bearer(run, Role.VIEWER, "vera")
        assert (await client.get(path, headers=viewer)).status == 200, "a worker can't use up what is an operator's"
        assert told == ["key"]

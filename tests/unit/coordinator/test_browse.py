"""Pages for viewers: they show what is there, escape whatever a stranger said, and survive any query."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from coordinator.dashboard.tokens import colour, level_of
from coordinator.operators import Role
from coordinator.store import tables as t
from protocol.rollout import RejectionReason, Segment
from protocol.signing import Identity, SignedEnvelope
from protocol.statement import open_statement
from tests.dashboard import Client, serving, token_of
from tests.factories import COORDINATOR, EOS, make_turns_rollout, sign_rollout
from tests.stored_run import StoredRun, rejected
from tests.turns import make_turns

EVIL = "<script>alert(1)</script>"


@pytest_asyncio.fixture
async def client(run: StoredRun) -> AsyncIterator[Client]:
    """A viewer's browser."""
    async with serving(run) as client:
        await client.post("/login", data={"token": await token_of(run, Role.VIEWER)})
        yield client


async def page(client: Client, path: str) -> str:
    response = await client.get(path, allow_redirects=False)
    assert response.status == 200, (path, await response.text())
    return await response.text()


async def use(run: StoredRun, alice: Identity, bob: Identity) -> tuple[str, str]:
    """The ids of an accepted and of a rejected rollout."""
    await run.work(alice, 1)
    (good,) = await run.judge()
    await run.work(bob, 1)
    (bad,) = await run.judge(rejected(RejectionReason.PROOF, EVIL))
    await run.change(t.workers, name=EVIL, hardware=EVIL, software=EVIL)
    await run.change(t.groups, prompt=EVIL)
    return good, bad


async def test_every_page_shows_what_is_there_and_escapes_it(
    client: Client, run: StoredRun, alice: Identity, bob: Identity
) -> None:
    good, bad = await use(run, alice, bob)
    paths = ("/leaderboard", "/workers", f"/workers/{bob.key_id}", "/rollouts", f"/rollouts/{good}", f"/rollouts/{bad}")
    for path in (*paths, "/ledger", "/audit", "/run", "/"):
        text = await page(client, path)
        assert "<script>" not in text, path
    worker = await page(client, f"/workers/{bob.key_id}")
    assert bad in worker and "strike" in worker and "&lt;script&gt;" in worker
    rollout = await page(client, f"/rollouts/{good}")
    assert "&lt;script&gt;" in rollout and rollout.count('class="token gap') == 5 + 6 and "reward" in rollout
    assert good in await page(client, "/rollouts?state=accepted") and bad not in await page(
        client, "/rollouts?state=accepted"
    )
    assert bad in await page(client, "/rollouts?reason=proof")
    assert "strike" in await page(client, f"/ledger?worker_id={bob.key_id}")


async def test_an_empty_run_has_pages(client: Client) -> None:
    for path in ("/leaderboard", "/workers", "/rollouts", "/ledger", "/audit", "/run"):
        await page(client, path)


async def test_the_page_the_ledger_and_the_statement_say_the_same(
    client: Client, run: StoredRun, alice: Identity, bob: Identity
) -> None:
    await use(run, alice, bob)
    answer = await (await client.get(f"/api/v1/workers/{alice.key_id}/statement")).json()
    signed = answer["statement"]
    envelope = SignedEnvelope(signed["payload"].encode(), signed["key_id"], bytes.fromhex(signed["signature"]))
    statement = open_statement(envelope, COORDINATOR.key_id)
    assert statement.credits == (await run.standing(alice)).credits == sum(line[1] for line in answer["entries"])
    assert f"<b>{statement.credits}</b><span>verified tokens</span>" in await page(client, f"/workers/{alice.key_id}")
    assert (await client.get("/api/v1/workers/ed25519:0/statement")).status == 404


@pytest.mark.parametrize("path", ["/workers/nobody", "/rollouts/nothing", "/workers/%00", "/rollouts/%00%ff"])
async def test_what_is_not_there(client: Client, path: str) -> None:
    assert (await client.get(path)).status in (400, 404)


@pytest.mark.parametrize("path", ["/workers", "/rollouts", "/ledger", "/audit", "/leaderboard"])
async def test_any_query_is_survived(client: Client, run: StoredRun, alice: Identity, path: str) -> None:
    await run.work(alice, 1)
    for value in ("%00", "%FF", "-1", "9" * 30, "1e400", "nan", "inf", "'; DROP TABLE workers", "%25_%5C", "x" * 500):
        names = ("page", "before", "search", "standing", "sort", "state", "reason", "worker_id", "action")
        await page(client, f"{path}?{'&'.join(f'{name}={value}' for name in names)}")


def test_a_forgotten_payload_leaves_a_page() -> None:
    assert colour((), (), (), (), lambda ids: "") == []


def test_tokens_are_coloured_by_their_gap_and_know_their_version() -> None:
    found = colour((1, 2, 3), (-1.0, -1.0, -1.0), (-1.0, -1.25, -9.0), ((2, 4), (3, 5)), lambda ids: str(ids[0]))
    assert [(token.text, token.level, token.version) for token in found] == [("1", 0, 4), ("2", 2, 4), ("3", 4, 5)]
    assert [token.level for token in colour((1,), (-1.0,), (), ((1, 0),), lambda ids: "")] == [0]
    assert level_of(float("nan")) == level_of(float("inf")) == 4


async def test_changes_are_told(client: Client, run: StoredRun, alice: Identity) -> None:
    async with client.get("/api/v1/changes") as stream:
        assert (await stream.content.readline()).startswith(b": nothing new")
        await run.work(alice, 1)
        line = b""
        while not line.startswith(b"data:"):
            line = await stream.content.readline()
        assert line == b"data: changed\n"


def test_what_a_tool_answered_has_no_gap() -> None:
    found = colour((1, 2), (-1.0, 0.0), (-1.0, -9.0), ((2, 4),), lambda ids: str(ids[0]), (True, False))
    assert [(token.by_model, token.gap, token.level) for token in found] == [(True, 0.0, 0), (False, None, 0)]


async def test_a_rollouts_page_shows_what_a_tool_answered_as_such_and_escapes_it(
    begin: Callable[..., Awaitable[StoredRun]], alice: Identity
) -> None:
    shown = "<b>&"
    turns = make_turns((ord("="),), tool=lambda call: "".join(chr(ord(letter) - 32) for letter in shown))
    run = await begin(turns=turns)
    lease = await run.lease_one(alice)
    call = tuple(b"1+1=")
    segments = (Segment.by_model(call), Segment.by_environment(turns.answer(call)), Segment.by_model((65, EOS)))
    rollout = make_turns_rollout(lease.lease_id, lease.sample_id, segments, turns=turns.rules.digest)
    await run.intake.submit(alice.key_id, sign_rollout(rollout, alice))
    (rollout_id,) = await run.judge()
    async with serving(run) as client:
        await client.post("/login", data={"token": await token_of(run, Role.VIEWER)})
        text = await page(client, f"/rollouts/{rollout_id}")
        assert text.count('<span class="tool" title="token') == 4
        assert text.count('class="token gap') == 5 + 6
        assert all(f'by the environment">{letter}</span>' in text for letter in ("&lt;", "b", "&gt;", "&amp;"))
        assert "is what a tool answered" in text and "<b>6</b><span>tokens by the model" in text
        answer = await (await client.get(f"/api/v1/rollouts/{rollout_id}")).json()
    assert [token["by_model"] for token in answer["tokens"]] == [True] * 4 + [False] * 4 + [True] * 2
    assert "".join(token["text"] for token in answer["tokens"] if not token["by_model"]) == shown

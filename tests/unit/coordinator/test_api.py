"""The JSON API: its description is whole and true, and evidence about a worker goes to that worker and to viewers alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from coordinator import actions, tokens
from coordinator.dashboard.access import COOKIE
from coordinator.dashboard.api.answers import measured_of
from coordinator.dashboard.api.endpoint import PREFIX
from coordinator.operators import Role
from coordinator.store import database
from coordinator.store import tables as t
from coordinator.verification.pooled import ALERT, COMPARISONS, PROOF_MANTISSA, PooledClass, PooledTest
from protocol.rollout import RejectionReason
from protocol.signing import Identity
from tests.dashboard import Client, bearer, serving, token_of, views_of
from tests.factories import SECRET
from tests.stored_run import StoredRun, accepted, rejected

SECRET_DETAIL = "layer 7 of another model"
Headers = Mapping[str, str]


@pytest_asyncio.fixture
async def client(run: StoredRun) -> AsyncIterator[Client]:
    """A stranger's."""
    async with serving(run) as client:
        yield client


@dataclass(frozen=True)
class Happened:
    """A run in which something of every kind happened: the id of a rollout that passed and of one that did not."""

    good: str
    bad: str


@pytest_asyncio.fixture
async def happened(run: StoredRun, alice: Identity, bob: Identity) -> Happened:
    bounds = (PooledClass(1, 0.0, 1.0, 8.0),)
    run.pooled = replace(COMPARISONS, tests=(PooledTest(PROOF_MANTISSA, ALERT, 0.01, bounds),))
    await run.work(alice, 2)
    for pending in await run.claim():
        await run.record(pending.rollout_id, replace(accepted(pending), observations={PROOF_MANTISSA: 3.0}))
    good = (await run.rows(t.rollouts))[0].rollout_id
    await run.pull()
    (bad,) = await run.work(bob, 1)
    measured = {"metrics": {"proof_exponents": 90.0}, "admitted": {"proof_exponents": 5.0}}
    await run.judge(replace(rejected(RejectionReason.PROOF, SECRET_DETAIL), **measured))
    await run.work(alice, 1)
    await run.step(0)
    return Happened(good, bad)


async def worker_token(run: StoredRun, worker: Identity) -> dict[str, str]:
    """What a worker has after it registered."""
    async with run.db.read() as connection:
        now = await database.now(connection)
    return {"Authorization": f"Bearer {tokens.make_token(SECRET, worker.key_id, now)}"}


async def get(client: Client, path: str, headers: Headers | None = None) -> Any:
    response = await client.get(PREFIX + path, headers=headers)
    assert response.status == 200, (path, response.status, await response.text())
    return await response.json()


class Description:
    """The OpenAPI document, held strictly: an answer may have no field that it does not name."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.paths = document["paths"]
        self._components = json.loads(json.dumps(document["components"]))
        for schema in self._components["schemas"].values():
            schema["additionalProperties"] = schema.get("additionalProperties", False)

    def check(self, method: str, path: str, status: int, answer: Any) -> None:
        content = self.paths[path][method]["responses"][str(status)]["content"]["application/json"]
        schema = {**content["schema"], "components": self._components}
        Draft202012Validator.check_schema(schema)
        Draft202012Validator(schema).validate(answer)


async def test_every_route_is_described_and_nothing_else(client: Client, run: StoredRun) -> None:
    document = await get(client, "/openapi.json")
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, each in document["paths"].items() for method in each}
    routes = {
        (route.method, route.resource.canonical)
        for route in views_of(run).application().router.routes()
        if route.resource is not None and route.resource.canonical.startswith(PREFIX) and route.method != "HEAD"
    }
    assert described == routes
    assert {path.rpartition("/")[2] for path in document["paths"] if "/admin/" in path} == actions.ACTIONS.keys()
    names = [operation["operationId"] for each in document["paths"].values() for operation in each.values()]
    assert len(set(names)) == len(names)


async def test_every_answer_of_a_run_is_as_described(
    client: Client, run: StoredRun, happened: Happened, alice: Identity, bob: Identity
) -> None:
    description = Description(await get(client, "/openapi.json"))
    admin = await bearer(run, Role.ADMIN)
    given = {"worker_id": (alice.key_id, bob.key_id), "rollout_id": (happened.good, happened.bad)}
    for path, operations in description.paths.items():
        if "get" not in operations or "event-stream" in str(operations["get"]["responses"]["200"]):
            continue
        (name,) = [each for each in given if "{" + each + "}" in path] or ("",)
        for value in given.get(name, ("",)):
            target = path.replace("{" + name + "}", value) if name else path
            for headers in (admin, {}):
                response = await client.get(target, headers=headers)
                assert headers == {} or response.status == 200, (target, await response.text())
                description.check("get", path, response.status, await response.json())
        unknown = await client.get(path.replace("{" + name + "}", "nobody") if name else path + "?x=1", headers=admin)
        if unknown.status != 200:
            description.check("get", path, unknown.status, await unknown.json())


async def test_every_action_answers_as_described(client: Client, run: StoredRun, bob: Identity) -> None:
    description = Description(await get(client, "/openapi.json"))
    admin, viewer = await bearer(run, Role.ADMIN), await bearer(run, Role.VIEWER)
    bodies: dict[str, dict[str, Any]] = {
        "ban": {"worker": bob.key_id, "reason": "spam"},
        "pardon": {"worker": bob.key_id},
        "admit": {"hardware": "a card"},
        "refuse": {"hardware": "a card"},
        "set": {"name": "audit_fraction", "value": 0.5},
    }
    for action in actions.ACTIONS:
        path = f"{PREFIX}/admin/{action}"
        for body, headers, status in (
            (bodies.get(action, {}), admin, 200),
            ({"nonsense": 1}, admin, 400),
            (bodies.get(action, {}), viewer, 403),
            (bodies.get(action, {}), {}, 401),
            ({"worker": "x" * 70_000}, admin, 413),
        ):
            response = await client.post(path, json=body, headers=headers)
            assert response.status == status, (action, body, await response.text())
            description.check("post", path, status, await response.json())


async def test_strangers_are_told_of_no_single_worker(
    client: Client, run: StoredRun, happened: Happened, alice: Identity, bob: Identity
) -> None:
    status = await get(client, "/status")
    assert (status["workers"], status["events"], status["alerts"]) == (None, None, None)
    assert (status["workers_active"], status["workers_banned"], status["rejections"]) == (2, 0, {"rejected:proof": 1})
    (line, _) = (await get(client, "/leaderboard"))["lines"]
    assert line == {"rank": 1, "worker_id": alice.key_id, "name": "w", "credits": 12, "accepted": 2}
    told = [await (await client.get(path)).text() for path in ("/", "/leaderboard", f"{PREFIX}/status", "/metrics")]
    for text in told:
        assert SECRET_DETAIL not in text and "log_e" not in text and PROOF_MANTISSA not in text
        assert happened.bad not in text and "strike" not in text
    for path in (f"/workers/{bob.key_id}", f"/workers/{bob.key_id}/statement", f"/rollouts/{happened.bad}", "/events"):
        assert (await client.get(PREFIX + path)).status == 401, path


async def test_a_worker_is_told_of_itself_and_of_nobody_else(
    client: Client, run: StoredRun, happened: Happened, alice: Identity, bob: Identity
) -> None:
    mine = await worker_token(run, bob)
    (strike,) = (await get(client, f"/workers/{bob.key_id}", mine))["strikes"]
    assert (strike["rollout_id"], strike["detail"], strike["kind"]) == (happened.bad, SECRET_DETAIL, "strike")
    assert strike["measured"] == [
        {"name": "proof_exponents", "value": 90.0, "admitted": 5.0, "at_least": False, "holds": False}
    ]
    assert (await get(client, f"/workers/{bob.key_id}/statement", mine))["entries"][0][0] == "strike"
    for path in (f"/workers/{alice.key_id}", f"/workers/{alice.key_id}/statement"):
        assert (await client.get(PREFIX + path, headers=mine)).status == 403
    for path in ("/workers", "/rollouts", f"/rollouts/{happened.bad}", "/ledger", "/events", "/run"):
        assert (await client.get(PREFIX + path, headers=mine)).status == 401, "a worker is no viewer"
    assert (await get(client, "/status", mine))["workers"] is None
    forged = {"Authorization": "Bearer " + mine["Authorization"][7:-4] + "AAA="}
    assert (await client.get(f"{PREFIX}/workers/{bob.key_id}", headers=forged)).status == 401


async def test_viewers_are_told_what_the_pages_show(
    client: Client, run: StoredRun, happened: Happened, alice: Identity
) -> None:
    viewer = await bearer(run, Role.VIEWER)
    detail = await get(client, f"/workers/{alice.key_id}", viewer)
    assert detail["evidence"][0]["test"] == PROOF_MANTISSA and detail["evidence"][0]["log_e"] > 0
    rollout = await get(client, f"/rollouts/{happened.good}", viewer)
    assert (rollout["batch"], len(rollout["tokens"]), rollout["rollout"]["reward"]) == (0, 6, 1.0)
    assert rollout["tokens"][1]["gap"] == pytest.approx(1 / 64)
    ids = [each["rollout_id"] for each in (await get(client, "/rollouts?reason=proof", viewer))["rollouts"]]
    assert ids == [happened.bad]
    ledger = await get(client, f"/ledger?worker_id={alice.key_id}", viewer)
    assert sum(entry["amount"] for entry in ledger["entries"]) == detail["worker"]["credits"] == 12
    assert (await get(client, "/run", viewer))["state"] == "granting leases"


async def test_a_session_reads_and_does_not_act(client: Client, run: StoredRun) -> None:
    await client.post("/login", data={"token": await token_of(run, Role.ADMIN)})
    assert len((await get(client, "/workers"))["workers"]) == 2
    answer = await client.post(f"{PREFIX}/admin/pause", json={})
    assert answer.status == 403 and COOKIE not in answer.cookies
    assert "bearer token" in (await answer.json())["error"]


@pytest.mark.parametrize(
    "query", ["page=-1", "page=x", "page=99999", "sort=name", "standing=x", "srot=seen", "search=" + "x" * 121]
)
async def test_a_query_that_makes_no_sense_is_refused_with_a_reason(client: Client, run: StoredRun, query: str) -> None:
    answer = await client.get(f"{PREFIX}/workers?{query}", headers=await bearer(run, Role.VIEWER))
    assert answer.status == 400
    assert query.partition("=")[0] in (await answer.json())["error"]


async def test_every_refusal_is_json(client: Client) -> None:
    for method, path, status in (
        ("GET", "/api/v1/none", 404),
        ("DELETE", "/api/v1/status", 405),
        ("GET", "/api/v2", 404),
    ):
        answer = await client.request(method, path)
        assert answer.status == status and isinstance((await answer.json())["error"], str)


async def test_the_page_lists_every_endpoint_and_loads_nothing_from_elsewhere(client: Client) -> None:
    page = await (await client.get("/api")).text()
    for path, operations in (await get(client, "/openapi.json"))["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in page
    assert "<script" not in page and "https://" not in page


def test_numbers_that_json_cannot_hold_are_null() -> None:
    (line,) = measured_of({"a": float("nan"), "b": 1.0}, {"a": float("inf"), "c": 1.0})
    assert (line.value, line.admitted, line.holds) == (None, None, False)

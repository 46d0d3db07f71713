from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from coordinator.dashboard.access import Access
from coordinator.dashboard.chart import line_chart
from coordinator.dashboard.views import Views
from coordinator.limits import Door, DoorLimits
from coordinator.metrics import Metrics
from coordinator.operators import Role
from coordinator.store import events, hardware
from coordinator.store import tables as t
from coordinator.store.database import Database
from coordinator.verification.pooled import ALERT, COMPARISONS, PROOF_MANTISSA, PooledClass, PooledTest
from protocol.declaration import Declaration
from protocol.rollout import RejectionReason
from protocol.signing import Identity
from protocol.terms import WELL_KNOWN_PATH, RunTerms, parse_terms
from tests.dashboard import Client, bearer, serving, settings_of
from tests.factories import SECRET, make_identity, make_terms
from tests.stored_run import StoredRun, accepted, inconclusive, rejected

EVIL = "<script>alert(1)</script>"


async def read_terms() -> RunTerms:
    return make_terms(name=EVIL)


@pytest_asyncio.fixture
async def stranger(run: StoredRun) -> AsyncIterator[Client]:
    async with serving(run, EVIL) as client:
        yield client


@pytest_asyncio.fixture
async def client(stranger: Client, run: StoredRun) -> Client:
    """A viewer's."""
    stranger.session.headers.update(await bearer(run, Role.VIEWER))
    return stranger


async def use(run: StoredRun, alice: Identity, bob: Identity) -> None:
    """A run in which something of every kind happened."""
    await run.work(alice, 2)
    await run.judge()
    await run.pull()
    await run.work(bob, 1)
    await run.judge(rejected(RejectionReason.FORM, EVIL))
    await run.work(alice, 1)
    await run.change(t.workers, name=EVIL, hardware=EVIL, hardware_class=EVIL)
    await run.feeding.report(
        batch=0,
        trainer_version=0,
        optimizer_steps=1,
        metrics={"reward_mean": 0.5, "grad_norm": float("inf")},
        dropped={},
        trained=[],
    )


async def test_an_empty_run_has_a_page(client: Client) -> None:
    response = await client.get("/")
    page = await response.text()
    assert response.status == 200
    assert page.count(">active<small>probation") == 2


async def test_the_page_escapes_whatever_a_worker_says(
    client: Client, run: StoredRun, alice: Identity, bob: Identity
) -> None:
    await use(run, alice, bob)
    response = await client.get("/")
    page = await response.text()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6, "name, hardware, ban reason, title"
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert "<polyline" in page, "charts are drawn, not escaped"


async def test_the_api_tells_the_run_in_json(client: Client, run: StoredRun, alice: Identity, bob: Identity) -> None:
    await use(run, alice, bob)
    status = await (await client.get("/api/v1/status")).json()
    assert (status["head_version"], status["live_leases"]) == (0, 0)
    assert status["rollouts"] == {"served": 2, "rejected": 1, "pending": 1}
    assert status["rejections"] == {"rejected:form": 1}
    assert status["drops"] == {}
    assert status["accepted_per_minute"] == 2
    by_id = {worker["worker_id"]: worker for worker in status["workers"]}
    assert (by_id[alice.key_id]["credits"], by_id[alice.key_id]["accepted"]) == (12, 2)
    assert (by_id[bob.key_id]["banned"], by_id[bob.key_id]["strikes"]) == (True, 1)
    assert [step["metrics"] for step in status["steps"]] == [{"reward_mean": 0.5}]
    assert "ban" in {event["action"] for event in status["events"]}


async def test_the_overview_lists_the_busiest_workers_and_counts_all(
    client: Client, run: StoredRun, alice: Identity, bob: Identity
) -> None:
    """However many there are: a page with thousands of them, made again every two seconds, would hold up who serves them."""
    await run.join(*(make_identity(number) for number in range(100, 158)))
    await run.change(t.workers, t.workers.c.worker_id == alice.key_id, credits=9)
    await run.change(t.workers, t.workers.c.worker_id == bob.key_id, credits=5, banned=True)
    status = await (await client.get("/api/v1/status")).json()
    assert (status["workers_active"], status["workers_banned"], len(status["workers"])) == (59, 1, 50)
    assert [worker["worker_id"] for worker in status["workers"][:2]] == [alice.key_id, bob.key_id]
    assert '<a href="/workers">all 60</a>' in await (await client.get("/")).text()
    families = text_string_to_metric_families(await (await client.get("/metrics")).text())
    values = {(sample.name, *sample.labels.values()): sample.value for each in families for sample in each.samples}
    assert values["rollswarm_credits",] == 14
    assert (values["rollswarm_workers", "active"], values["rollswarm_workers", "banned"]) == (59, 1)


async def test_two_inconclusive_results_are_an_alert_that_later_events_do_not_hide(
    client: Client, run: StoredRun, alice: Identity
) -> None:
    (identifier,) = await run.work(alice, 1)
    await run.judge(inconclusive())
    assert "<h2>Alerts</h2>" not in await (await client.get("/")).text()
    await run.change(t.rollouts, claim_deadline=1.0)
    await run.judge(inconclusive())
    async with run.db.write() as connection:
        for number in range(40):
            await events.record(connection, at=1.0, actor="trainer", action="version", subject=str(number), detail="")
    status = await (await client.get("/api/v1/status")).json()
    assert [(alert["action"], alert["subject"]) for alert in status["alerts"]] == [("inconclusive", identifier)]
    page = await (await client.get("/")).text()
    assert "<h2>Alerts</h2>" in page and identifier in page and "attempt 2: the prefill failed" in page
    assert status["rollouts"] == {"pending": 1}, "and it is no acceptance"


async def test_evidence_is_shown_per_worker(client: Client, run: StoredRun, alice: Identity) -> None:
    bounds = (PooledClass(1, 0.0, 1.0, 8.0),)
    run.pooled = replace(COMPARISONS, tests=(PooledTest(PROOF_MANTISSA, ALERT, 0.01, bounds),))
    await run.work(alice, 1)
    for pending in await run.claim():
        await run.record(pending.rollout_id, replace(accepted(pending), observations={PROOF_MANTISSA: 3.0}))
    status = await (await client.get("/api/v1/status")).json()
    (line,) = next(worker["evidence"] for worker in status["workers"] if worker["worker_id"] == alice.key_id)
    assert (line["test"], line["rollouts"], line["tokens"], line["alarmed_at"]) == (PROOF_MANTISSA, 1, 6, None)
    assert line["log_e"] > 0
    assert {worker["worker_class"] for worker in status["workers"]} == {"probation"}
    page = await (await client.get("/")).text()
    assert f"{PROOF_MANTISSA} {line['log_e']:.1f}" in page and "1 observations" in page


async def test_metrics_parse_and_say_the_same(client: Client, run: StoredRun, alice: Identity, bob: Identity) -> None:
    await use(run, alice, bob)
    families = text_string_to_metric_families(await (await client.get("/metrics")).text())
    values = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert values[("rollswarm_policy_version",)] == 0
    assert values[("rollswarm_rollouts", "served")] == 2
    assert values[("rollswarm_rejections", "rejected:form")] == 1
    assert values[("rollswarm_workers", "banned")] == 1
    assert values[("rollswarm_workers", "active")] == 1
    assert values[("rollswarm_credits",)] == 12


async def test_a_gauge_that_no_longer_holds_disappears(client: Client, run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 1)
    assert 'rollswarm_rollouts{state="pending"} 1.0' in await (await client.get("/metrics")).text()
    await run.judge()
    assert 'state="pending"' not in await (await client.get("/metrics")).text()


async def test_workers_find_the_terms_and_the_origin_what_to_keep(client: Client, run: StoredRun) -> None:
    body = await (await client.get(WELL_KNOWN_PATH)).read()
    assert parse_terms(body, "test") == make_terms(name=EVIL)
    assert await (await client.get("/api/v1/versions/required")).json() == {"versions": [0]}


async def test_the_style_sheet_is_served_and_nothing_beside_it(client: Client) -> None:
    assert (await client.get("/static/status.css")).status == 200
    for path in ("/static/../views.py", "/static/%2e%2e/views.py", "/nothing"):
        assert (await client.get(path)).status in (403, 404)


async def test_health_follows_the_database(client: Client) -> None:
    response = await client.get("/healthz")
    assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_health_is_told_whatever_the_limits(run: StoredRun) -> None:
    async with serving(run, door=Door(DoorLimits(calls=0), time.monotonic)) as client:
        assert (await client.get("/")).status == 429
        assert (await client.get("/healthz")).status == 200
        assert (await client.post("/healthz")).status == 429, "what it does not answer is a call like any other"


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_health_is_503_when_the_database_is_gone(kind: str, tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}" if kind == "sqlite" else "postgresql+asyncpg://x@127.0.0.1:1/x"
    db = Database.open(url)
    try:
        access = Access(db, SECRET, encrypted=False)
        views = Views(db, Metrics(), read_terms, access=access, settings=settings_of())
        async with TestClient(TestServer(views.application())) as client:
            response = await client.get("/healthz")
            assert (response.status, await response.json()) == (503, {"status": "database unreachable"})
    finally:
        await db.close()


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [0.5, 1.5, -2.0]])
def test_a_chart_stays_in_its_box(values: list[float]) -> None:
    svg = line_chart(values, low=0.0, high=1.0)
    points = svg.split('points="')[1].split('"')[0].split()
    assert len(points) == len(values)
    for point in points:
        x, y = map(float, point.split(","))
        assert 0 <= x <= 640 and 0 <= y <= 150


def test_nothing_to_draw_draws_nothing() -> None:
    assert line_chart([]) == ""


async def test_kinds_of_hardware_and_precision_classes_are_shown(
    client: Client, run: StoredRun, alice: Identity
) -> None:
    async with run.db.write() as connection:
        await hardware.add(connection, EVIL, 1.0)
    await run.join(alice, declared=Declaration(hardware=EVIL))
    await run.work(alice, 1)
    await run.judge(rejected())
    status = await (await client.get("/api/v1/status")).json()
    line = next(line for line in status["hardware"] if line["name"] == EVIL)
    assert (line["state"], line["workers"], line["rejected"], line["rejections"]) == ("shadow", 1, 1, {"proof": 1})
    assert status["precisions"] == {"bf16": 1}
    assert [alert["action"] for alert in status["alerts"]] == ["shadow"]
    page = await (await client.get("/")).text()
    assert "<script>" not in page and "the operator's decision" in page
    metrics = await (await client.get("/metrics")).text()
    assert 'rollswarm_hardware_classes{state="shadow"} 1.0' in metrics
    assert 'rollswarm_shadow_rollouts{outcome="rejected"} 1.0' in metrics

"""What the API tells: the same as the pages, from the same rows. Evidence about a worker goes to that worker and to viewers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from aiohttp import web
from pydantic import AfterValidator, Field

from coordinator import statements
from coordinator.audit import classify
from coordinator.dashboard import run_now
from coordinator.dashboard.api import answers
from coordinator.dashboard.api.endpoint import PREFIX, Asked, Endpoint, Query, Text
from coordinator.dashboard.settings import Settings
from coordinator.dashboard.tokens import of_stored
from coordinator.export_ledger import envelope_json
from coordinator.operators import Role
from coordinator.store import browse, versions
from coordinator.store import run as run_store
from coordinator.store import workers as worker_store
from coordinator.store.database import Database
from coordinator.store.summary import EvidenceLine, Summary

_PAGES_MAX = 10_000
_TIME_MAX = 1e12
STATES = ("", "pending", "verifying", "accepted", "served", "trained", "rejected", "dropped")
STANDINGS = ("", "active", "banned")


def _one_of(*names: str) -> Any:
    """A filter that takes these words alone."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(name for name in names if name)}")
        return value

    return Annotated[str, AfterValidator(check), Field(json_schema_extra={"enum": list(names)})]


Page = Annotated[int, Field(ge=0, le=_PAGES_MAX, description="Page, from 0.")]
Number = Annotated[int | None, Field(ge=0, lt=2**63, description="Only entries with a lower number.")]
WorkerId = Annotated[Text, Field(description="Only this worker's: its whole key id.")]


class PageQuery(Query):
    page: Page = 0


class WorkersQuery(Query):
    page: Page = 0
    search: Annotated[Text, Field(description="Part of a name or key id.")] = ""
    standing: _one_of(*STANDINGS) = ""  # type: ignore[valid-type]
    sort: _one_of(*browse.SORTS) = "credits"  # type: ignore[valid-type]


class RolloutsQuery(Query):
    worker_id: WorkerId = ""
    state: _one_of(*STATES) = ""  # type: ignore[valid-type]
    reason: Annotated[Text, Field(description="The check that it failed.")] = ""
    before: Annotated[
        float | None,
        Field(ge=0, le=_TIME_MAX, allow_inf_nan=False, description="Only those received before, in Unix seconds."),
    ] = None


class LedgerQuery(Query):
    worker_id: WorkerId = ""
    before: Number = None


class EventsQuery(Query):
    action: Annotated[Text, Field(description="Only this action.")] = ""
    before: Number = None


class Reads:
    """`summarise` reads the run at a glance; `changes` follows it."""

    def __init__(
        self,
        db: Database,
        settings: Settings,
        summarise: Callable[[], Awaitable[Summary]],
        changes: Callable[[Asked], Awaitable[web.StreamResponse]],
    ) -> None:
        self._db = db
        self._settings = settings
        self._summarise = summarise
        self._changes = changes

    def endpoints(self) -> list[Endpoint]:
        """In the order that the description lists them."""

        def get(
            path: str, summary: str, answer: Any, handle: Callable[[Asked], Awaitable[Any]], **how: Any
        ) -> Endpoint:
            return Endpoint("GET", PREFIX + path, summary, answer, handle, **how)

        viewer = Role.VIEWER
        return [
            get("/status", "The run at a glance", answers.Status, self.status),
            get("/leaderboard", "Workers by verified tokens", answers.Leaderboard, self.leaderboard, query=PageQuery),
            get(
                "/changes",
                "Server-sent events: one whenever the run has changed",
                str,
                self._changes,
                media="text/event-stream",
            ),
            get("/versions/required", "What an origin must keep", answers.Versions, self.required),
            get("/run", "What the run does, and by which settings", answers.RunNow, self.run, needs=viewer),
            get("/workers", "Workers", answers.Workers, self.workers, needs=viewer, query=WorkersQuery),
            get(
                "/workers/{worker_id}",
                "A worker, the evidence against it, and its strikes",
                answers.WorkerDetail,
                self.worker,
                needs=viewer,
                own="worker_id",
            ),
            get(
                "/workers/{worker_id}/statement",
                "A worker's signed statement of account, and the ledger's lines that it binds",
                answers.SignedStatement,
                self.statement,
                needs=viewer,
                own="worker_id",
            ),
            get("/rollouts", "Rollouts", answers.Rollouts, self.rollouts, needs=viewer, query=RolloutsQuery),
            get(
                "/rollouts/{rollout_id}",
                "A rollout: prompt, tokens, verdict, and what was measured",
                answers.RolloutDetail,
                self.rollout,
                needs=viewer,
            ),
            get("/ledger", "The ledger", answers.Ledger, self.ledger, needs=viewer, query=LedgerQuery),
            get("/events", "The audit log", answers.Events, self.events, needs=viewer, query=EventsQuery),
        ]

    async def status(self, asked: Asked) -> answers.Status:
        return answers.status_of(await self._summarise(), known=asked.caller is not None)

    async def required(self, asked: Asked) -> answers.Versions:
        async with self._db.read() as connection:
            return answers.Versions(list(await versions.required(connection)))

    async def run(self, asked: Asked) -> answers.RunNow:
        return await run_now.read(self._db, self._settings.scheduling, self._settings.audit_fraction)

    async def leaderboard(self, asked: Asked) -> answers.Leaderboard:
        page = asked.query.page
        async with self._db.read() as connection:
            rows = await browse.workers(connection, standing="active", page=page)
        lines = [
            answers.LeaderboardLine(page * browse.PAGE + n, row.worker_id, row.name, row.credits, row.accepted)
            for n, row in enumerate(rows[: browse.PAGE], start=1)
        ]
        return answers.Leaderboard(lines, more=len(rows) > browse.PAGE)

    async def workers(self, asked: Asked) -> answers.Workers:
        async with self._db.read() as connection:
            rows = await browse.workers(connection, **asked.query.model_dump())
        return answers.Workers([self._worker(row) for row in rows[: browse.PAGE]], more=len(rows) > browse.PAGE)

    def _worker(self, row: Any) -> answers.Worker:
        standing = worker_store.standing_of(row)
        probation = self._settings.scheduling.probation_rollouts
        watched = classify(standing, watched=row.watched, probation_rollouts=probation).value
        names = answers.Worker.__dataclass_fields__.keys() - {"worker_class"}
        return answers.Worker(worker_class=watched, **{name: getattr(row, name) for name in names})

    async def worker(self, asked: Asked) -> answers.WorkerDetail:
        worker_id = asked.path["worker_id"]
        async with self._db.read() as connection:
            row = await browse.worker(connection, worker_id)
            if row is None:
                raise web.HTTPNotFound(text="no such worker")
            evidence = await browse.worker_evidence(connection, worker_id)
            strikes = await browse.strikes(connection, worker_id)
        return answers.WorkerDetail(
            self._worker(row),
            [EvidenceLine(each.test, each.log_e, each.rollouts, each.tokens, each.alarmed_at) for each in evidence],
            [
                answers.StandingLine(
                    each.entry_id,
                    each.kind,
                    each.created_at,
                    each.rollout_id,
                    each.note,
                    each.detail or "",
                    answers.measured_of(each.metrics, each.admitted),
                )
                for each in strikes
            ],
        )

    async def statement(self, asked: Asked) -> answers.SignedStatement:
        run = await run_store.load(self._db)
        assert run is not None
        async with self._db.read() as connection:
            made = await statements.make(connection, run.run_id, asked.path["worker_id"])
        if made is None:
            raise web.HTTPNotFound(text="no such worker")
        statement, entries = made
        return answers.SignedStatement(
            answers.Envelope(**envelope_json(self._settings.sign(statement))),
            [(entry.kind.value, entry.amount, entry.rollout_id, entry.note) for entry in entries],
        )

    async def rollouts(self, asked: Asked) -> answers.Rollouts:
        async with self._db.read() as connection:
            rows = await browse.rollouts(connection, **asked.query.model_dump())
        older = rows[-1].received_at if len(rows) == browse.PAGE else None
        return answers.Rollouts([answers.rollout_of(row) for row in rows], before=older)

    async def rollout(self, asked: Asked) -> answers.RolloutDetail:
        async with self._db.read() as connection:
            row = await browse.rollout(connection, asked.path["rollout_id"])
        if row is None:
            raise web.HTTPNotFound(text="no such rollout")
        return answers.RolloutDetail(
            rollout=answers.rollout_of(row),
            prompt=row.prompt,
            detail=row.detail or "",
            batch=row.batch,
            staleness=row.staleness,
            tokens=[
                answers.token_of(token) for token in of_stored(row.payload, row.old_logprobs, self._settings.decode)
            ],
            measured=answers.measured_of(row.metrics, row.admitted),
        )

    async def ledger(self, asked: Asked) -> answers.Ledger:
        async with self._db.read() as connection:
            rows = await browse.ledger(connection, **asked.query.model_dump())
            sums = await browse.ledger_sums(connection)
        lines = [
            answers.LedgerLine(
                row.entry_id, row.worker_id, row.kind, row.amount, row.rollout_id, row.note, row.created_at
            )
            for row in rows
        ]
        return answers.Ledger(lines, sums, before=rows[-1].entry_id if len(rows) == browse.PAGE else None)

    async def events(self, asked: Asked) -> answers.Events:
        async with self._db.read() as connection:
            rows = await browse.events(connection, **asked.query.model_dump())
        lines = [
            answers.NumberedEvent(row.event_id, row.at, row.actor, row.action, row.subject, row.detail) for row in rows
        ]
        return answers.Events(lines, before=rows[-1].event_id if len(rows) == browse.PAGE else None)

"""Pages that list and show: workers, rollouts, ledger, audit log for viewers; the leaderboard for everybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from coordinator.audit import classify
from coordinator.dashboard.access import Access, Caller
from coordinator.dashboard.api.answers import measured_of
from coordinator.dashboard.api.endpoint import clean
from coordinator.dashboard.pages import Pages
from coordinator.dashboard.settings import Settings
from coordinator.dashboard.tokens import of_stored
from coordinator.store import browse, database
from coordinator.store import workers as worker_store
from coordinator.store.database import Database

_PAGES_MAX = 10_000


class BrowseViews:
    """Handlers of pages; the API's are coordinator.dashboard.api.reads."""

    def __init__(self, db: Database, access: Access, pages: Pages, settings: Settings) -> None:
        self._db = db
        self._access = access
        self._pages = pages
        self._settings = settings

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/leaderboard", self.leaderboard)
        app.router.add_get("/workers", self.workers)
        app.router.add_get("/workers/{worker_id}", self.worker)
        app.router.add_get("/rollouts", self.rollouts)
        app.router.add_get("/rollouts/{rollout_id}", self.rollout)
        app.router.add_get("/ledger", self.ledger)
        app.router.add_get("/audit", self.audit)

    async def _viewer(self, request: web.Request) -> Caller:
        """Raises HTTPSeeOther to the log-in page for strangers."""
        caller = await self._access.caller(request)
        if caller is None:
            raise web.HTTPSeeOther("/login")
        return caller

    async def leaderboard(self, request: web.Request) -> web.Response:
        page = _number(request.query, "page") or 0
        async with self._db.read() as connection:
            rows = await browse.workers(connection, standing="active", page=page)
        caller = await self._access.caller(request)
        return self._pages.render("leaderboard.html", caller, rows=rows[: browse.PAGE], page=page, size=browse.PAGE)

    async def workers(self, request: web.Request) -> web.Response:
        caller = await self._viewer(request)
        chosen = {name: _text(request.query, name) for name in ("search", "standing", "sort")}
        page = _number(request.query, "page") or 0
        async with self._db.read() as connection:
            rows = await browse.workers(connection, page=page, **chosen)
            now = await database.now(connection)
        return self._pages.render(
            "workers.html",
            caller,
            rows=[(row, self._class(row), max(0.0, now - row.last_seen_at)) for row in rows[: browse.PAGE]],
            more=len(rows) > browse.PAGE,
            page=page,
            chosen=chosen,
            sorts=list(browse.SORTS),
        )

    def _class(self, row: Any) -> str:
        standing = worker_store.standing_of(row)
        probation = self._settings.scheduling.probation_rollouts
        return classify(standing, watched=row.watched, probation_rollouts=probation).value

    async def worker(self, request: web.Request) -> web.Response:
        caller = await self._viewer(request)
        worker_id = clean(request.match_info["worker_id"])
        async with self._db.read() as connection:
            row = await browse.worker(connection, worker_id)
            if row is None:
                raise web.HTTPNotFound(text="no such worker")
            values: dict[str, Any] = {
                "evidence": await browse.worker_evidence(connection, worker_id),
                "strikes": [
                    (each, measured_of(each.metrics, each.admitted))
                    for each in await browse.strikes(connection, worker_id)
                ],
                "rollouts": await browse.rollouts(connection, worker_id=worker_id),
                "now": await database.now(connection),
            }
        return self._pages.render("worker.html", caller, worker=row, worker_class=self._class(row), **values)

    async def rollouts(self, request: web.Request) -> web.Response:
        caller = await self._viewer(request)
        chosen = {name: _text(request.query, name) for name in ("worker_id", "state", "reason")}
        async with self._db.read() as connection:
            rows = await browse.rollouts(connection, before=_float(request.query, "before"), **chosen)
            now = await database.now(connection)
        more = rows[-1].received_at if len(rows) == browse.PAGE else None
        return self._pages.render("rollouts.html", caller, rows=rows, now=now, chosen=chosen, more=more)

    async def rollout(self, request: web.Request) -> web.Response:
        caller = await self._viewer(request)
        async with self._db.read() as connection:
            row = await browse.rollout(connection, clean(request.match_info["rollout_id"]))
        if row is None:
            raise web.HTTPNotFound(text="no such rollout")
        tokens = of_stored(row.payload, row.old_logprobs, self._settings.decode)
        measured = measured_of(row.metrics, row.admitted)
        return self._pages.render("rollout.html", caller, row=row, tokens=tokens, measured=measured)

    async def ledger(self, request: web.Request) -> web.Response:
        caller = await self._viewer(request)
        worker_id = _text(request.query, "worker_id")
        async with self._db.read() as connection:
            rows = await browse.ledger(connection, worker_id=worker_id, before=_number(request.query, "before"))
            sums = await browse.ledger_sums(connection)
            now = await database.now(connection)
        more = rows[-1].entry_id if len(rows) == browse.PAGE else None
        return self._pages.render("ledger.html", caller, rows=rows, sums=sums, now=now, worker_id=worker_id, more=more)

    async def audit(self, request: web.Request) -> web.Response:
        caller = await self._viewer(request)
        action = _text(request.query, "action")
        async with self._db.read() as connection:
            rows = await browse.events(connection, action=action, before=_number(request.query, "before"))
            names = await browse.event_actions(connection)
            now = await database.now(connection)
        more = rows[-1].event_id if len(rows) == browse.PAGE else None
        return self._pages.render("audit.html", caller, rows=rows, names=names, now=now, action=action, more=more)


def _text(query: Mapping[str, str], name: str) -> str:
    return clean(query.get(name, ""))


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    limit = _PAGES_MAX if name == "page" else 2**62
    return min(int(text), limit) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _float(query: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(query.get(name, ""))
    except ValueError:
        return None
    return value if abs(value) < 1e12 else None

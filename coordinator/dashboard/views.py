"""HTTP handlers. Everything shown comes from one database snapshot; templates escape everything.

What strangers may ask for is made once for all of them (coordinator.dashboard.shared): only operators get a page of their own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web
from sqlalchemy import exc

from coordinator.dashboard.access import Access, Caller
from coordinator.dashboard.admin import AdminViews
from coordinator.dashboard.api import openapi
from coordinator.dashboard.api.acts import Acts
from coordinator.dashboard.api.endpoint import PREFIX, Asked, Doorway, Endpoint, failure
from coordinator.dashboard.api.reads import CHANGES_PATH, Reads
from coordinator.dashboard.browse import BrowseViews
from coordinator.dashboard.changes import Changes
from coordinator.dashboard.chart import line_chart
from coordinator.dashboard.pages import Pages
from coordinator.dashboard.settings import Settings
from coordinator.dashboard.shared import Derived, Shared
from coordinator.limits import Door, DoorLimits, address_group
from coordinator.metrics import Metrics
from coordinator.store import summary, versions
from coordinator.store.database import Database
from protocol.errors import Busy
from protocol.terms import WELL_KNOWN_PATH, RunTerms
from protocol.trust import CA_PATH

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_API_VERSION = "1"
_LEADERS = 10
HEALTH_PATH = "/healthz"
_HEALTH_S = 1.0
_GLANCE_S = 2.0  # how old what everybody is told may be
_BUSY_AGAIN_S = 5
_KEPT = ("Allow", "WWW-Authenticate")  # headers of a refusal, whatever it is told in
_OUR_FAULT = "the coordinator failed; it is not your fault, try again"
# In the order one watches them: what says first that something goes wrong comes first.
_CHARTS = (
    ("reward_mean", "Reward", 0.0, 1.0),
    ("approx_kl_fresh", "Approximate KL on fresh rollouts", 0.0, None),
    ("cut_fraction", "Masked by the trust region", 0.0, None),
    ("staleness_mean", "Staleness (versions)", 0.0, None),
)


class Views:
    """The handlers of one coordinator. `make_terms` reads the run's terms as they stand now.

    `glance_s`: for how long the summary and the terms are kept. An operator's action lets go of them.
    `served`: the database as those see it who serve workers; `db` if there is no pool beside it.
    """

    def __init__(
        self,
        db: Database,
        metrics: Metrics,
        make_terms: Callable[[], Awaitable[RunTerms]],
        *,
        access: Access,
        settings: Settings,
        ca_pem: bytes | None = None,
        door: Door | None = None,
        served: Database | None = None,
        glance_s: float = _GLANCE_S,
    ) -> None:
        self._db = db
        self._ca_pem = ca_pem
        self._door = door or Door(DoorLimits(), time.monotonic)
        self._access = access
        self._settings = settings
        self._pages = Pages()
        self._served = served or db
        self._health = Shared(self._ask_database, min(_HEALTH_S, glance_s))
        self._terms = Shared(make_terms, glance_s)
        self._summary = Shared(self._read_summary, glance_s)
        self._exposition = Derived(metrics.render)
        self._front = Derived(self._status_text)
        described = Endpoint("GET", f"{PREFIX}/openapi.json", "This description", dict[str, Any], self._describe)
        self._changes = Changes(self._state)
        reads = Reads(db, settings, self._summary.get, self.changes, self._door)
        self._endpoints = [*reads.endpoints(), described, *Acts(db, self._acted).endpoints()]
        self._description = openapi.describe(self._endpoints, version=_API_VERSION)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 16, middlewares=[self._guard])
        AdminViews(self._db, self._access, self._pages, self._settings, self._acted).add_routes(app)
        BrowseViews(self._db, self._access, self._pages, self._settings).add_routes(app)
        Doorway(self._access).add_routes(app, self._endpoints)
        app.router.add_get("/api", self.api_page)
        app.router.add_get("/", self.status_page)
        app.router.add_get(WELL_KNOWN_PATH, self.terms)
        if self._ca_pem is not None:
            app.router.add_get(CA_PATH, self.authority)
        app.router.add_get("/metrics", self.prometheus)
        app.router.add_get(HEALTH_PATH, self.healthz)
        app.router.add_static("/static", Path(__file__).parent / "static")
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The address's limits; and what fails by our own fault is logged here and told to nobody."""
        try:
            with self._admitted(request):
                return await handler(request)
        except Busy as busy:
            return _refuse(request, 429, str(busy), {"Retry-After": str(int(busy.retry_after_s) + 1)})
        except exc.TimeoutError:  # no connection is free; a database that is away is another error
            text = "too many ask for pages at once; come back later"
            return _refuse(request, 429, text, {"Retry-After": str(_BUSY_AGAIN_S)})
        except web.HTTPException as refused:
            if refused.status < 400:
                raise
            kept = {name: refused.headers[name] for name in _KEPT if name in refused.headers}
            answer = _refuse(request, refused.status, refused.text or refused.reason, kept)
            if refused.keep_alive is False:
                answer.force_close()
            return answer
        except Exception:
            log.exception("a request failed by our own fault", extra={"action": "internal_error"})
            return _refuse(request, 500, _OUR_FAULT, {})

    def _admitted(self, request: web.Request) -> contextlib.AbstractContextManager[None]:
        """The limits that this request counts against. Health has none: who watches over this process must have an answer,
        above all when there is much to do."""
        address = address_group(request.remote or "unknown")
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        if path == HEALTH_PATH:
            return contextlib.nullcontext()
        if path == CHANGES_PATH:
            return self._door.stream(address)
        return self._door.address(address, registers=request.method == "POST" and request.path == "/login")

    async def changes(self, asked: Asked) -> web.StreamResponse:
        """Server-sent events: one whenever the run has changed."""
        return await self._changes.stream(asked.request)

    async def _state(self) -> tuple[Any, ...]:
        async with self._db.read() as connection:
            return await summary.state(connection)

    def _acted(self) -> None:
        """An operator sees what it did at once."""
        self._summary.forget()
        self._terms.forget()

    async def _read_summary(self) -> summary.Summary:
        async with self._db.read() as connection:
            return await summary.read(connection, probation_rollouts=self._settings.scheduling.probation_rollouts)

    async def terms(self, request: web.Request) -> web.Response:
        terms = await self._terms.get()
        return web.Response(text=terms.to_json(), content_type="application/json")

    async def authority(self, request: web.Request) -> web.Response:
        """The run's own authority, for those who have its digest from the URL they join by."""
        return web.Response(body=self._ca_pem, content_type="application/x-pem-file")

    async def _describe(self, asked: Asked) -> dict[str, Any]:
        return self._description

    async def api_page(self, request: web.Request) -> web.Response:
        caller = await self._access.caller(request)
        origin = f"{request.scheme}://{request.host}"
        return self._pages.render("api.html", caller, described=self._description, origin=origin)

    async def prometheus(self, request: web.Request) -> web.Response:
        return web.Response(body=self._exposition.of(await self._summary.get()), content_type="text/plain")

    async def healthz(self, request: web.Request) -> web.Response:
        """200 if the database answers: without it this process can do nothing."""
        try:
            await self._health.get()
        except Exception:
            return web.json_response({"status": "database unreachable"}, status=503)
        return web.json_response({"status": "ok"})

    async def _ask_database(self) -> None:
        async with self._served.read() as connection:
            await versions.head(connection)

    async def status_page(self, request: web.Request) -> web.Response:
        caller = await self._access.caller(request)
        view, terms = await self._summary.get(), await self._terms.get()
        return self._pages.answer(
            self._front.of(view, terms) if caller is None else self._status_text(view, terms, caller)
        )

    def _status_text(self, view: summary.Summary, terms: RunTerms, caller: Caller | None = None) -> str:
        charts = []
        for key, title, low, high in _CHARTS:
            values = [step.metrics[key] for step in view.steps if key in step.metrics]
            charts.append(
                {
                    "title": title,
                    "svg": jinja2.utils.markupsafe.Markup(line_chart(values, low=low, high=high)),
                    "last": values[-1] if values else None,
                }
            )
        leaders = [worker for worker in view.workers if not worker.banned][:_LEADERS]
        return self._pages.text("status.html", caller, view=view, terms=terms, charts=charts, leaders=leaders)


def _refuse(request: web.Request, status: int, text: str, headers: dict[str, str]) -> web.Response:
    """In JSON from the API, in words elsewhere."""
    if request.path.startswith("/api/"):
        return failure(status, text, headers)
    return web.Response(status=status, text=f"{text}\n", headers=headers)

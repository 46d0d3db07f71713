"""HTTP handlers. Everything shown comes from one database snapshot; templates escape everything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web

from coordinator.dashboard.access import Access
from coordinator.dashboard.admin import AdminViews
from coordinator.dashboard.api import openapi
from coordinator.dashboard.api.acts import Acts
from coordinator.dashboard.api.endpoint import PREFIX, Asked, Doorway, Endpoint, failure
from coordinator.dashboard.api.reads import Reads
from coordinator.dashboard.browse import BrowseViews
from coordinator.dashboard.chart import line_chart
from coordinator.dashboard.pages import Pages
from coordinator.dashboard.settings import Settings
from coordinator.limits import Door, DoorLimits, address_group
from coordinator.metrics import Metrics
from coordinator.store import summary, versions
from coordinator.store.database import Database
from protocol.errors import Busy
from protocol.terms import WELL_KNOWN_PATH, RunTerms
from protocol.trust import CA_PATH

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_CHANGES_EVERY_S = 2.0
_CHANGES_LOOKS = 300
_API_VERSION = "1"
_LEADERS = 10
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
    """The handlers of one coordinator. `make_terms` reads the run's terms as they stand now."""

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
    ) -> None:
        self._db = db
        self._ca_pem = ca_pem
        self._door = door or Door(DoorLimits(), time.monotonic)
        self._access = access
        self._settings = settings
        self._pages = Pages()
        self._metrics = metrics
        self._make_terms = make_terms
        described = Endpoint("GET", f"{PREFIX}/openapi.json", "This description", dict[str, Any], self._describe)
        reads = Reads(db, settings, self._summary, self.changes)
        self._endpoints = [*reads.endpoints(), described, *Acts(db).endpoints()]
        self._description = openapi.describe(self._endpoints, version=_API_VERSION)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 16, middlewares=[self._guard])
        AdminViews(self._db, self._access, self._pages, self._settings).add_routes(app)
        BrowseViews(self._db, self._access, self._pages, self._settings).add_routes(app)
        Doorway(self._access).add_routes(app, self._endpoints)
        app.router.add_get("/api", self.api_page)
        app.router.add_get("/", self.status_page)
        app.router.add_get(WELL_KNOWN_PATH, self.terms)
        if self._ca_pem is not None:
            app.router.add_get(CA_PATH, self.authority)
        app.router.add_get("/metrics", self.prometheus)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_static("/static", Path(__file__).parent / "static")
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The address's limits; and what fails by our own fault is logged here and told to nobody."""
        registers = request.method == "POST" and request.path == "/login"
        try:
            with self._door.address(address_group(request.remote or "unknown"), registers=registers):
                return await handler(request)
        except Busy as busy:
            return _refuse(request, 429, str(busy), {"Retry-After": str(int(busy.retry_after_s) + 1)})
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

    async def changes(self, asked: Asked) -> web.StreamResponse:
        """Server-sent events: one whenever the run has changed, looked at every two seconds; ends after ten minutes."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(asked.request)
        last: tuple[object, ...] = ()
        with contextlib.suppress(ConnectionError):
            for _ in range(_CHANGES_LOOKS):
                async with self._db.read() as connection:
                    state = await summary.state(connection)
                changed = last not in ((), state)
                await response.write(b"data: changed\n\n" if changed else b": nothing new\n\n")
                last = state
                await asyncio.sleep(_CHANGES_EVERY_S)
        return response

    async def _summary(self) -> summary.Summary:
        async with self._db.read() as connection:
            return await summary.read(connection, probation_rollouts=self._settings.scheduling.probation_rollouts)

    async def terms(self, request: web.Request) -> web.Response:
        terms = await self._make_terms()
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
        return web.Response(body=self._metrics.render(await self._summary()), content_type="text/plain")

    async def healthz(self, request: web.Request) -> web.Response:
        """200 if the database answers: without it this process can do nothing."""
        try:
            async with self._db.read() as connection:
                await versions.head(connection)
        except Exception:
            return web.json_response({"status": "database unreachable"}, status=503)
        return web.json_response({"status": "ok"})

    async def status_page(self, request: web.Request) -> web.Response:
        view = await self._summary()
        terms = await self._make_terms()
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
        caller = await self._access.caller(request)
        leaders = [worker for worker in view.workers if not worker.banned][:_LEADERS]
        return self._pages.render("status.html", caller, view=view, terms=terms, charts=charts, leaders=leaders)


def _refuse(request: web.Request, status: int, text: str, headers: dict[str, str]) -> web.Response:
    """In JSON from the API, in words elsewhere."""
    if request.path.startswith("/api/"):
        return failure(status, text, headers)
    return web.Response(status=status, text=f"{text}\n", headers=headers)

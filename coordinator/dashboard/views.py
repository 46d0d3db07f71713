"""HTTP handlers. Everything shown comes from one database snapshot; templates escape everything."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import jinja2
from aiohttp import web

from coordinator.dashboard.access import Access
from coordinator.dashboard.admin import AdminViews
from coordinator.dashboard.browse import BrowseViews
from coordinator.dashboard.chart import line_chart
from coordinator.dashboard.pages import Pages
from coordinator.leasing import Scheduling
from coordinator.limits import Door, DoorLimits, address_group
from coordinator.metrics import Metrics
from coordinator.store import summary, versions
from coordinator.store.database import Database
from protocol.errors import Busy
from protocol.signing import SignedEnvelope
from protocol.statement import Statement
from protocol.terms import WELL_KNOWN_PATH, RunTerms
from protocol.trust import CA_PATH

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_CHANGES_EVERY_S = 2.0
_CHANGES_LOOKS = 300
# In the order one watches them: what says first that something goes wrong comes first.
_CHARTS = (
    ("reward_mean", "Reward", 0.0, 1.0),
    ("approx_kl_fresh", "Approximate KL on fresh rollouts", 0.0, None),
    ("cut_fraction", "Masked by the trust region", 0.0, None),
    ("staleness_mean", "Staleness (versions)", 0.0, None),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What pages show of the run file, where no knob was turned; how tokens are read, and statements signed."""

    scheduling: Scheduling
    audit_fraction: float
    decode: Callable[[Sequence[int]], str]
    sign: Callable[[Statement], SignedEnvelope]


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

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 16, middlewares=[self._guard])
        AdminViews(
            self._db, self._access, self._pages, self._settings.scheduling, self._settings.audit_fraction
        ).add_routes(app)
        settings = self._settings
        BrowseViews(
            self._db,
            self._access,
            self._pages,
            probation_rollouts=settings.scheduling.probation_rollouts,
            decode=settings.decode,
            sign=settings.sign,
        ).add_routes(app)
        app.router.add_get("/", self.status_page)
        app.router.add_get("/api/v1/changes", self.changes)
        app.router.add_get(WELL_KNOWN_PATH, self.terms)
        if self._ca_pem is not None:
            app.router.add_get(CA_PATH, self.authority)
        app.router.add_get("/api/v1/status", self.status)
        app.router.add_get("/api/v1/versions/required", self.required_versions)
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
            after = {"Retry-After": str(int(busy.retry_after_s) + 1)}
            return web.Response(status=429, text=f"{busy}\n", headers=after)
        except web.HTTPException:
            raise
        except Exception:
            log.exception("a request failed by our own fault", extra={"action": "internal_error"})
            return web.Response(status=500, text="the coordinator failed; it is not your fault, try again\n")

    async def changes(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: one whenever the run has changed, looked at every two seconds; ends after ten minutes."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
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

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(dataclasses.asdict(await self._summary()))

    async def required_versions(self, request: web.Request) -> web.Response:
        """What an origin must keep."""
        async with self._db.read() as connection:
            return web.json_response({"versions": await versions.required(connection)})

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
        return self._pages.render("status.html", caller, view=view, terms=terms, charts=charts)

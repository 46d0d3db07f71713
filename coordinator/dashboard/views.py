"""HTTP handlers. Everything shown comes from one database snapshot; templates escape everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import jinja2
from aiohttp import web

from coordinator.dashboard.chart import line_chart
from coordinator.metrics import Metrics
from coordinator.store import summary, versions
from coordinator.store.database import Database
from protocol.signing import short_id
from protocol.terms import WELL_KNOWN_PATH, RunTerms
from protocol.trust import CA_PATH

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
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
        probation_rollouts: int = 0,
        ca_pem: bytes | None = None,
    ) -> None:
        self._db = db
        self._ca_pem = ca_pem
        self._probation_rollouts = probation_rollouts
        self._metrics = metrics
        self._make_terms = make_terms
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters["short"] = short_id

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 16)
        app.router.add_get("/", self.status_page)
        app.router.add_get(WELL_KNOWN_PATH, self.terms)
        if self._ca_pem is not None:
            app.router.add_get(CA_PATH, self.authority)
        app.router.add_get("/api/v1/status", self.status)
        app.router.add_get("/api/v1/versions/required", self.required_versions)
        app.router.add_get("/metrics", self.prometheus)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_static("/static", Path(__file__).parent / "static")
        return app

    async def _summary(self) -> summary.Summary:
        async with self._db.read() as connection:
            return await summary.read(connection, probation_rollouts=self._probation_rollouts)

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
        page = self._templates.get_template("status.html").render(view=view, terms=terms, charts=charts)
        return web.Response(text=page, content_type="text/html", headers=_HEADERS)

"""The admin door in a browser: log in, and the run page with its actions.

GET  /login, POST /login, POST /logout     a token buys a session
GET  /run                                  the run's state and settings; operators get the forms
POST /run                                  a form: asks for confirmation, then does it

The same actions as JSON are coordinator.dashboard.api.acts.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from coordinator import actions
from coordinator.dashboard import run_now
from coordinator.dashboard.access import COOKIE, Access, Caller
from coordinator.dashboard.api.acts import perform
from coordinator.dashboard.bodies import read_form
from coordinator.dashboard.pages import Pages
from coordinator.dashboard.settings import Settings
from coordinator.operators import Role
from coordinator.store import hardware
from coordinator.store.database import Database
from protocol.errors import UserError


class AdminViews:
    """Handlers that need somebody to be known."""

    def __init__(self, db: Database, access: Access, pages: Pages, settings: Settings) -> None:
        self._db = db
        self._access = access
        self._pages = pages
        self._settings = settings

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/login", self.login_page)
        app.router.add_post("/login", self.log_in)
        app.router.add_post("/logout", self.log_out)
        app.router.add_get("/run", self.run_page)
        app.router.add_post("/run", self.act)

    async def login_page(self, request: web.Request) -> web.Response:
        return self._pages.render("login.html", await self._access.caller(request), problem="")

    async def log_in(self, request: web.Request) -> web.Response:
        fields = await read_form(request)
        session = await self._access.log_in(fields.get("token", ""))
        if session is None:
            problem = "This is no token in force."
            return self._pages.render("login.html", None, problem=problem, status=401)
        response = web.Response(status=303, headers={"Location": "/run"})
        self._access.set_cookie(response, session)
        return response

    async def log_out(self, request: web.Request) -> web.Response:
        caller = await self._access.require(request, Role.VIEWER)
        self._access.check_form(caller, await read_form(request))
        response = web.Response(status=303, headers={"Location": "/"})
        response.del_cookie(COOKIE, path="/")
        return response

    async def run_page(self, request: web.Request) -> web.Response:
        caller = await self._access.caller(request)
        if caller is None:
            return web.Response(status=303, headers={"Location": "/login"})
        return await self._run_page(caller)

    async def _run_page(
        self,
        caller: Caller,
        *,
        done: str = "",
        problem: str = "",
        confirm: str = "",
        given: Mapping[str, str] | None = None,
    ) -> web.Response:
        """`confirm`: the action that is asked about, with the arguments `given`."""
        async with self._db.read() as connection:
            lines = await hardware.lines(connection)
        return self._pages.render(
            "run.html",
            caller,
            run=await run_now.read(self._db, self._settings.scheduling, self._settings.audit_fraction),
            hardware=lines,
            actions=actions.ACTIONS,
            may={name: caller.operator.role >= action.needs for name, action in actions.ACTIONS.items()},
            done=done,
            problem=problem,
            confirm=confirm,
            given=given or {},
            status=409 if problem else 200,
        )

    async def act(self, request: web.Request) -> web.Response:
        """First without `confirmed`: show what would be done. Then with it: do it."""
        fields = await read_form(request)
        action = fields.get("action", "")
        known = actions.ACTIONS.get(action)
        caller = await self._access.require(request, Role.OPERATOR if known is None else known.needs)
        self._access.check_form(caller, fields)
        given = actions.clean(action, fields)
        if known is not None and fields.get("confirmed") != "yes":
            return await self._run_page(caller, confirm=action, given=given)
        try:
            done = await perform(self._db, action, given, actor=caller.operator.name)
        except UserError as error:
            return await self._run_page(caller, problem=str(error))
        return await self._run_page(caller, done=done)

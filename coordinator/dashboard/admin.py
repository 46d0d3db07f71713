"""The admin door: log in, the run page with its actions, and the same actions as JSON for commands.

GET  /login, POST /login, POST /logout     a token buys a session
GET  /run                                  the run's state and knobs; operators get the forms
POST /run                                  a form: asks for confirmation, then does it
POST /api/v1/admin/{action}                the same in JSON, by bearer token: coordinator.actions
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from coordinator import actions, knobs
from coordinator.dashboard.access import COOKIE, Access, Caller
from coordinator.dashboard.pages import Pages
from coordinator.leasing import Scheduling
from coordinator.operators import Role
from coordinator.store import database
from coordinator.store import knobs as knob_store
from coordinator.store import run as run_store
from coordinator.store.database import Database
from protocol.errors import UserError

_ARGUMENTS = ("worker", "reason", "name", "value")
_ARGUMENT_MAX = 500


class AdminViews:
    """Handlers that need somebody to be known."""

    def __init__(
        self, db: Database, access: Access, pages: Pages, scheduling: Scheduling, audit_fraction: float
    ) -> None:
        self._db = db
        self._access = access
        self._pages = pages
        self._scheduling = scheduling
        self._audit_fraction = audit_fraction

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/login", self.login_page)
        app.router.add_post("/login", self.log_in)
        app.router.add_post("/logout", self.log_out)
        app.router.add_get("/run", self.run_page)
        app.router.add_post("/run", self.act)
        app.router.add_post("/api/v1/admin/{action}", self.api)

    async def login_page(self, request: web.Request) -> web.Response:
        return self._pages.render("login.html", await self._access.caller(request), problem="")

    async def log_in(self, request: web.Request) -> web.Response:
        fields = await request.post()
        session = await self._access.log_in(str(fields.get("token", "")))
        if session is None:
            problem = "This is no token in force."
            return self._pages.render("login.html", None, problem=problem, status=401)
        response = web.Response(status=303, headers={"Location": "/run"})
        self._access.set_cookie(response, session)
        return response

    async def log_out(self, request: web.Request) -> web.Response:
        caller = await self._access.require(request, Role.VIEWER)
        self._access.check_form(caller, dict(await request.post()))
        response = web.Response(status=303, headers={"Location": "/"})
        response.del_cookie(COOKIE, path="/")
        return response

    async def run_page(self, request: web.Request) -> web.Response:
        caller = await self._access.caller(request)
        if caller is None:
            return web.Response(status=303, headers={"Location": "/login"})
        return await self._run_page(caller)

    async def _run_page(
        self, caller: Caller, *, done: str = "", problem: str = "", confirm: Mapping[str, str] | None = None
    ) -> web.Response:
        async with self._db.read() as connection:
            turned = await knob_store.read(connection)
        run = await run_store.load(self._db)
        assert run is not None
        state = "paused" if run.paused else "draining" if turned.get(knobs.DRAINING) else "granting leases"
        return self._pages.render(
            "run.html",
            caller,
            run=run,
            state=state,
            values=knobs.values(self._scheduling, self._audit_fraction, turned),
            knobs=knobs.KNOBS,
            turned=turned,
            may={name: caller.operator.role >= role for name, role in actions.NEEDS.items()},
            done=done,
            problem=problem,
            confirm=confirm,
            status=409 if problem else 200,
        )

    async def act(self, request: web.Request) -> web.Response:
        """First without `confirmed`: show what would be done. Then with it: do it."""
        fields = dict(await request.post())
        action = str(fields.get("action", ""))
        caller = await self._access.require(request, actions.NEEDS.get(action, Role.OPERATOR))
        self._access.check_form(caller, fields)
        arguments = _arguments(fields)
        if fields.get("confirmed") != "yes":
            return await self._run_page(
                caller, confirm={"action": action, **dict.fromkeys(_ARGUMENTS, ""), **arguments}
            )
        try:
            done = await self._perform(action, arguments, caller)
        except UserError as error:
            return await self._run_page(caller, problem=str(error))
        return await self._run_page(caller, done=done)

    async def api(self, request: web.Request) -> web.Response:
        action = request.match_info["action"]
        caller = await self._access.require(request, actions.NEEDS.get(action, Role.OPERATOR))
        if caller.csrf:
            raise web.HTTPForbidden(text="the API takes a bearer token, not a browser's session")
        try:
            fields: Any = json.loads(await request.text() or "{}")
            if not isinstance(fields, dict):
                raise ValueError("the body must be an object")
            return web.json_response({"done": await self._perform(action, _arguments(fields), caller)})
        except (UserError, ValueError, RecursionError) as error:
            return web.json_response({"error": str(error)}, status=400)

    async def _perform(self, action: str, arguments: Mapping[str, str], caller: Caller) -> str:
        async with self._db.write() as connection:
            at = await database.now(connection)
            return await actions.perform(connection, action, arguments, actor=caller.operator.name, at=at)


def _arguments(fields: Mapping[str, object]) -> dict[str, str]:
    """What actions take, as text: bounded, and without what a database refuses."""
    return {
        name: "".join(character for character in str(fields[name]) if character.isprintable())[:_ARGUMENT_MAX]
        for name in _ARGUMENTS
        if fields.get(name) not in (None, "")
    }

"""Who sends an HTTP request: a bearer token (commands, scripts, workers) or a session cookie (browsers).

A request that changes something by a session must carry the session's own form value (`csrf`): another site can make a browser
send the cookie to us (though SameSite=Strict forbids it), but can't know that. A bearer token is never sent by itself.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from coordinator import operators, tokens
from coordinator.joining import hash_token
from coordinator.operators import Operator, Role
from coordinator.store import database
from coordinator.store import operators as operator_store
from coordinator.store.database import Database
from protocol.errors import BadSignature

COOKIE = "rollswarm_session"
_TOKEN_MAX = 200


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks; `csrf` is what this session's forms carry, "" for a bearer token."""

    operator: Operator
    csrf: str = ""


class Access:
    """Checks callers against the database at every request, so that a revoked token is out at once."""

    def __init__(self, db: Database, secret: bytes, *, encrypted: bool) -> None:
        self._db = db
        self._secret = secret
        self._encrypted = encrypted

    async def caller(self, request: web.Request) -> Caller | None:
        """None if nobody we know."""
        bearer = request.headers.get("Authorization", "")
        if bearer.startswith("Bearer "):
            found = await self._find(hash_token(bearer.removeprefix("Bearer ")[:_TOKEN_MAX]))
            return None if found is None else Caller(found)
        session = request.cookies.get(COOKIE, "")[:_TOKEN_MAX]
        if not session:
            return None
        async with self._db.read() as connection:
            at = await database.now(connection)
        try:
            token_hash = operators.check_session(self._secret, session, at)
        except ValueError:  # an expiry that is no number, under a signature that is none
            return None
        found = None if token_hash is None else await self._find(token_hash)
        return None if found is None else Caller(found, operators.csrf_of(self._secret, session))

    async def worker(self, request: web.Request) -> str:
        """The key id of the worker whose token (bought at registration) the request carries; "" if it carries none."""
        bearer = request.headers.get("Authorization", "")
        if not bearer.startswith("Bearer "):
            return ""
        async with self._db.read() as connection:
            at = await database.now(connection)
        try:
            return tokens.check_token(self._secret, bearer.removeprefix("Bearer ")[:_TOKEN_MAX], at)
        except BadSignature:
            return ""

    async def require(self, request: web.Request, role: Role) -> Caller:
        """The caller, who has at least this role. Raises HTTPUnauthorized or HTTPForbidden."""
        return self.allow(await self.caller(request), role)

    def allow(self, caller: Caller | None, role: Role) -> Caller:
        """The caller, if it has at least this role. Raises HTTPUnauthorized or HTTPForbidden."""
        if caller is None:
            text = "this needs a token of this run (`coordinator token create`)"
            raise web.HTTPUnauthorized(text=text, headers={"WWW-Authenticate": "Bearer"})
        if caller.operator.role < role:
            have, need = caller.operator.role.name.lower(), role.name.lower()
            raise web.HTTPForbidden(text=f"{caller.operator.name} is {have}; this needs {need}")
        return caller

    def check_form(self, caller: Caller, fields: Mapping[str, object]) -> None:
        """Raises HTTPForbidden if a session's request does not come from one of our own forms."""
        given = str(fields.get("csrf", "")).encode("utf-8", "replace")
        if caller.csrf and not hmac.compare_digest(caller.csrf.encode(), given):
            raise web.HTTPForbidden(text="this form is not of your session: load the page again")

    async def log_in(self, token: str) -> str | None:
        """A new session's cookie for a good token."""
        token_hash = hash_token(token.strip()[:_TOKEN_MAX])
        if await self._find(token_hash) is None:
            return None
        async with self._db.read() as connection:
            return operators.make_session(self._secret, token_hash, await database.now(connection))

    def set_cookie(self, response: web.StreamResponse, session: str) -> None:
        """HttpOnly: no script reads it. Strict: no other site sends it. Secure where there is TLS."""
        response.set_cookie(
            COOKIE,
            session,
            max_age=operators.SESSION_LIFETIME_S,
            httponly=True,
            samesite="Strict",
            secure=self._encrypted,
            path="/",
        )

    async def _find(self, token_hash: str) -> Operator | None:
        async with self._db.read() as connection:
            return await operator_store.find(connection, token_hash, await database.now(connection))

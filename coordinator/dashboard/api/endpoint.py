"""One endpoint of the JSON API, and what every request to it passes through: who asks, the query, the body, the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from coordinator.dashboard.access import Access, Caller
from coordinator.dashboard.bodies import read_body
from coordinator.operators import Role
from protocol.errors import UserError

PREFIX = "/api/v1"
JSON = "application/json"
TEXT_MAX = 120
_PROBLEMS_SHOWN = 4
_PROBLEMS_MAX = 500  # characters
_PARAMETER = re.compile(r"{(\w+)}")


def clean(text: str, most: int = TEXT_MAX) -> str:
    """What a database takes: printable, and not without end."""
    return "".join(character for character in text if character.isprintable())[:most]


Text = Annotated[str, Field(max_length=TEXT_MAX), AfterValidator(clean)]


class Query(BaseModel):
    """Parameters of a query. What an endpoint does not know is refused: a misspelt filter would show everything."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that passed. `caller`: None for strangers and workers. `path`, `query`, `body`: checked."""

    request: web.Request
    caller: Caller | None
    path: dict[str, str]
    query: Any
    body: Any


@dataclass(frozen=True)
class Endpoint:
    """`needs`: the least role, None for anybody. `own`: the path's parameter that names the worker who may ask too.

    `answer`: the type of what `handle` returns; another `media` than JSON is answered by a response of its own.
    """

    method: str
    path: str
    summary: str
    answer: Any
    handle: Callable[[Asked], Awaitable[Any]]
    needs: Role | None = None
    own: str = ""
    query: type[Query] = Query
    body: type[BaseModel] | None = None
    media: str = JSON
    refuses: tuple[int, ...] = field(default=())  # further statuses of the endpoint's own

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.answer)

    @property
    def parameters(self) -> list[str]:
        """Names in the path."""
        return _PARAMETER.findall(self.path)

    @property
    def statuses(self) -> list[int]:
        """Every status that it may answer with, in order."""
        found = {200, 400, 429, *self.refuses}
        if self.needs is not None:
            found |= {401, 403}
        if self.parameters:
            found.add(404)
        if self.body is not None:
            found.add(413)
        return sorted(found)


class Doorway:
    """Makes handlers of declarations."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def add_routes(self, app: web.Application, endpoints: list[Endpoint]) -> None:
        for endpoint in endpoints:
            app.router.add_route(endpoint.method, endpoint.path, self._handler(endpoint))

    def _handler(self, endpoint: Endpoint) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(request: web.Request) -> web.StreamResponse:
            path = {name: clean(request.match_info[name]) for name in endpoint.parameters}
            caller = await self._admit(endpoint, request, path)
            try:
                query = endpoint.query.model_validate(dict(request.query))
                body = None
                if endpoint.body is not None:
                    body = endpoint.body.model_validate_json(await read_body(request) or b"{}")
                answer = await endpoint.handle(Asked(request, caller, path, query, body))
            except ValidationError as error:
                raise web.HTTPBadRequest(text=problems(error)) from None
            except UserError as error:
                raise web.HTTPBadRequest(text=str(error)) from None
            if isinstance(answer, web.StreamResponse):
                return answer
            return answer_json(endpoint.adapter.dump_json(answer))

        return handler

    async def _admit(self, endpoint: Endpoint, request: web.Request, path: dict[str, str]) -> Caller | None:
        """Who asks. Raises HTTPUnauthorized or HTTPForbidden."""
        caller = await self._access.caller(request)
        if endpoint.needs is None:
            return caller
        if caller is None and endpoint.own:
            worker = await self._access.worker(request)
            if worker and worker == path[endpoint.own]:
                return None
            if worker:
                raise web.HTTPForbidden(text="a worker is told of itself alone")
        caller = self._access.allow(caller, endpoint.needs)
        if endpoint.method != "GET" and caller.csrf:
            # Another site can make a browser send the cookie, and this API asks for no form value.
            raise web.HTTPForbidden(text="to act, the API takes a bearer token, not a browser's session")
        return caller


def problems(error: ValidationError) -> str:
    """What is wrong with a query or a body, without repeating what was sent."""
    found = [
        f"{'.'.join(str(part) for part in each['loc']) or 'the body'}: {each['msg']}"
        for each in error.errors(include_url=False, include_input=False, include_context=False)[:_PROBLEMS_SHOWN]
    ]
    return clean("; ".join(found), _PROBLEMS_MAX)


def answer_json(body: bytes) -> web.Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return web.Response(body=body, content_type=JSON, headers=headers)


def failure(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    """Every answer of the API that is none: what happened, in words."""
    body = json.dumps({"error": text.strip()})
    return web.Response(status=status, text=body, content_type=JSON, headers=headers)

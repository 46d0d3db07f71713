"""Bodies of requests, as strangers send them: broken off, wrongly encoded, or of another form than they say."""

from __future__ import annotations

from urllib.parse import parse_qsl

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_FIELDS_MAX = 32


async def read_body(request: web.Request) -> bytes:
    """At most the application's limit. Raises HTTPBadRequest if it is broken, HTTPRequestEntityTooLarge if it is too long."""
    try:
        return await request.read()
    except (web.RequestPayloadError, HttpProcessingError, ConnectionError):
        broken = web.HTTPBadRequest(text="the request's body is broken: its encoding or length is not what it says")
        broken.force_close()  # nobody knows where the next request begins
        raise broken from None


async def read_form(request: web.Request) -> dict[str, str]:
    """The fields of a form as our pages send it; nothing that a body says of itself (its charset, its parts) is believed.

    Raises HTTPBadRequest for more fields than any form has.
    """
    text = (await read_body(request)).decode("utf-8", "replace")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise web.HTTPBadRequest(text=f"a form has at most {_FIELDS_MAX} fields") from None

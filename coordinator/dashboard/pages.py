"""Templates, and what every page has in common: headers, navigation, who is logged in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from aiohttp import web

from coordinator.dashboard.access import Caller
from protocol.signing import short_id

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src 'self' data:; script-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def duration(seconds: float) -> str:
    """In whole units that a person can grasp: 59 s, 59 min, 47 h, 300 d."""
    for unit, length, most in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if seconds < most * length:
            return f"{max(0, int(seconds / length))} {unit}"
    return f"{int(seconds / 86_400)} d"


class Pages:
    """Renders templates; everything put into them is escaped. To them the caller is `who`: jinja has its own `caller`."""

    def __init__(self) -> None:
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        self._templates.filters["short"] = short_id
        self._templates.filters["duration"] = duration

    def render(self, template: str, caller: Caller | None, *, status: int = 200, **values: Any) -> web.Response:
        return self.answer(self.text(template, caller, **values), status=status)

    def text(self, template: str, caller: Caller | None, **values: Any) -> str:
        return self._templates.get_template(template).render(who=caller, **values)

    def answer(self, text: str, *, status: int = 200) -> web.Response:
        return web.Response(text=text, content_type="text/html", headers=HEADERS, status=status)

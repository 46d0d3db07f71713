"""Hostile HTTP requests, each chosen by its number: paths, queries, headers and bodies, known and changed."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from coordinator.operators import Role
from tests.adversary.fuzz.mutations import other_bytes
from tests.adversary.fuzz.site import Report, Site, Worker

_AT_ONCE = 16
_TIMEOUT = aiohttp.ClientTimeout(total=300.0)
_PATH_MAX = 7000  # of 8190 that the web server's parser takes: beyond that it answers by itself
_PAGES = (
    "/",
    "/leaderboard",
    "/workers",
    "/workers/{worker_id}",
    "/rollouts",
    "/rollouts/{rollout_id}",
    "/ledger",
    "/audit",
)
_PLACES = (
    *_PAGES,
    "/run",
    "/login",
    "/logout",
    "/api",
    "/metrics",
    "/healthz",
    "/.well-known/rollswarm.json",
    "/static/live.js",
)
_VALUES = (
    "",
    "0",
    "1",
    "-1",
    "9" * 30,
    "1e400",
    "nan",
    "%00",
    "%FF%FE",
    "%ED%A0%80",
    "' OR 1=1 --",
    "%25_%5C",
    "<script>",
    "x" * 2000,
    "../..",
)
_NAMES = (
    "page",
    "before",
    "search",
    "standing",
    "sort",
    "state",
    "reason",
    "worker_id",
    "action",
    "nonsense",
    "%00",
    "a[]",
)
_TYPES = (
    "application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=b",
    "text/plain; charset=utf-99",
    "",
    "x",
)
_BODIES = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"[" * 20_000,
    b'{"a":' * 5_000,
    b"\xff\xfe",
    b'{"worker": "\\ud800"}',
    b'{"value": 1e999}',
    b"--b\r\n\r\n",
)
_METHODS = ("GET",) * 6 + ("POST",) * 4 + ("HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW")


class HttpDoor:
    """Requests by number: the same seed makes the same ones."""

    def __init__(self, site: Site, seed: int = 0) -> None:
        self._site = site
        self._seed = seed
        self._worker: Worker = site.join()
        self._paths: dict[str, Any] = {}
        self.report = Report()

    async def run(self, start: int, stop: int) -> Report:
        """Requests `start` to `stop`; the report goes on from earlier ones."""
        numbers = iter(range(start, stop))
        connector = aiohttp.TCPConnector(limit=_AT_ONCE)
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector, cookie_jar=jar) as session:
            async with session.get(f"{self._site.url}/api/v1/openapi.json") as answer:
                self._paths = (await answer.json())["paths"]

            async def caller() -> None:
                for number in numbers:
                    await self._one(session, number)

            await asyncio.gather(*(caller() for _ in range(min(_AT_ONCE, stop - start))))
        return self.report

    async def _one(self, session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(f"http/{self._seed}/{number}")
        method, path = draw.choice(_METHODS), self._path(draw)
        body = None if method in ("GET", "HEAD") and draw.random() < 0.9 else self._body(draw, path)
        url = URL(self._site.url + path, encoded=True)
        where = f"http {self._seed}/{number} {method} {path[:200]}"
        try:
            async with session.request(
                method, url, data=body, headers=self._headers(draw), allow_redirects=False
            ) as answer:
                text = "" if answer.content_type == "text/event-stream" else await answer.text(errors="replace")
                self._check(where, answer, text)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            self.report.answers["http connection closed"] += 1  # as it may be on a body that nobody wants
        except aiohttp.ClientResponseError as error:
            # What the web server's parser refuses, it refuses with a body, also for HEAD, and hangs up.
            if method == "HEAD" and error.message.startswith("Data after `Connection: close`"):
                self.report.answers["http HEAD refused by the parser"] += 1
            else:
                self.report.bad(f"{where}: {error.message[:200]} {error!r:.300}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.report.bad(f"{where}: {error!r:.300}")

    def _check(self, where: str, answer: aiohttp.ClientResponse, text: str) -> None:
        self.report.answers[f"http {answer.status}"] += 1
        if answer.status >= 500 or "Traceback" in text or 'File "' in text:
            self.report.bad(f"{where}: {answer.status} {text[:300]}")
        if answer.status == 417 or (answer.status == 400 and answer.content_type == "text/plain"):
            return  # by the web server's own parser, which knows nothing of what is served
        if answer.status >= 400 and answer.url.path.startswith("/api/v1") and answer.method not in ("HEAD", "BREW"):
            try:
                assert isinstance(json.loads(text)["error"], str)
            except (ValueError, KeyError, TypeError, AssertionError):
                self.report.bad(f"{where}: {answer.status} is no refusal in JSON: {text[:200]!r}")

    def _path(self, draw: random.Random) -> str:
        path = draw.choice((draw.choice(_PLACES), draw.choice(list(self._paths))))
        for name in ("worker_id", "rollout_id"):
            given = draw.choice((self._worker.identity.key_id, "sha256:" + "0" * 64, *_VALUES))
            path = path.replace("{" + name + "}", given or "x")
        if draw.random() < 0.1:
            path = "/" + quote(other_bytes(draw, path.encode()).lstrip(b"/"), safe="/%?&=")
        if draw.random() < 0.5:
            pairs = [f"{draw.choice(_NAMES)}={draw.choice(_VALUES)}" for _ in range(draw.choice((1, 1, 2, 40)))]
            path += "?" + quote("&".join(pairs), safe="%=&")
            path = path[:_PATH_MAX].rpartition("&")[0] if len(path) > _PATH_MAX else path
        return path

    def _headers(self, draw: random.Random) -> dict[str, str]:
        admin, viewer = self._site.tokens[Role.ADMIN], self._site.tokens[Role.VIEWER]
        headers: dict[str, str] = {}
        token = draw.choice((admin, admin, viewer, self._worker.token, admin[:-1], "", "é" * 9, "x" * 5000))
        if draw.random() < 0.8:
            headers["Authorization"] = f"{draw.choice(('Bearer', 'Bearer', 'Bearer', 'Basic', ''))} {token}"
        if draw.random() < 0.2:
            headers["Cookie"] = draw.choice(
                ("rollswarm_session=a.b.c", "rollswarm_session=" + "9" * 300, "=", "a=b; " * 200)
            )
        if draw.random() < 0.3:
            headers["Content-Type"] = draw.choice(_TYPES)
        if draw.random() < 0.1:
            name = draw.choice(("Range", "If-None-Match", "Accept-Encoding", "Expect", "Accept", "Content-Encoding"))
            headers[name] = draw.choice(("bytes=9-1", "bytes=-", "*", "gzip", "deflate", "br", "a" * 3000))
        return headers

    def _body(self, draw: random.Random, path: str) -> bytes:
        how = draw.random()
        if how < 0.4:
            return draw.choice(_BODIES)
        fields: dict[str, Any] = {
            name: draw.choice(
                (
                    self._worker.identity.key_id,
                    "max_staleness",
                    "a card",
                    3,
                    -1,
                    1e308,
                    None,
                    [],
                    {"a": 1},
                    "\0",
                    "x" * 900,
                )
            )
            for name in draw.sample(
                ("worker", "reason", "name", "value", "hardware", "uses", "days", "note", "csrf"), 4
            )
        }
        good: dict[str, dict[str, Any]] = {
            "set": {
                "name": draw.choice(("max_staleness", "worker_share", "x")),
                "value": draw.choice((2, 0.5, "nan", -1)),
            },
            "invite": {"uses": draw.choice((1, 0, 2**40)), "days": draw.choice((1, 1e-320, 1e300)), "note": "\u202e"},
            "admit": {"hardware": draw.choice(("a card", "\0", " "))},
        }
        if how < 0.7:
            fields = good.get(path.partition("?")[0].rpartition("/")[2], fields)
        if how > 0.9:
            return "&".join(f"{quote(name)}={quote(str(value))}" for name, value in fields.items()).encode()
        data = json.dumps(fields).encode()
        return other_bytes(draw, data) if how > 0.8 else data

"""Bytes that are no request at all, on both sockets: torn, doubled and changed HTTP/1 and HTTP/2, and plain rubbish."""

from __future__ import annotations

import asyncio
import random

from tests.adversary.fuzz.mutations import other_bytes
from tests.adversary.fuzz.site import Report, Site

_READ_S = 0.2  # a server may well wait for more
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_REQUEST = (
    b"POST /api/v1/admin/ban HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
    + b"{" * 20
)
_CHUNKED = b"POST /run HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab=cd\r\nffffffffffffffff\r\n"
_ODD = b"Host: \xff\r\nAuthorization: Bearer \xff\xfe\r\nCookie: rollswarm_session=\xff.\xfe\r\n\r\n"
_BYTES = b"GET /api/v1/workers HTTP/1.1\r\n" + _ODD
_FORM = b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Type: %s\r\nContent-Length: 13\r\n\r\ntoken=\xff%%ED%%A0"
_TYPES = (
    b"text/plain; charset=utf-99",
    b"multipart/form-data; boundary=t",
    b"application/x-www-form-urlencoded; charset=utf-16",
    b"\xff",
)
_PIPELINED = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" * 50


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113, 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def hostile(draw: random.Random) -> bytes:
    """What one connection sends."""
    how = draw.randrange(7)
    if how == 6:
        return draw.choice((_BYTES, _FORM % draw.choice(_TYPES)))
    if how == 0:
        return draw.randbytes(draw.choice((1, 9, 300, 70_000)))
    if how == 1:
        return other_bytes(draw, draw.choice((_REQUEST, _CHUNKED, _PIPELINED)))
    if how == 2:
        return b"GET / HTTP/1.1\r\n" + b"".join(
            b"X-%d: %s\r\n" % (n, draw.randbytes(20)) for n in range(draw.choice((3, 300)))
        )
    frames = [
        frame(
            draw.choice((*range(10), 255)),
            draw.randrange(256),
            draw.choice((0, 1, 2, 3, 2**31 - 1)),
            draw.randbytes(draw.choice((0, 4, 6, 8, 100))),
        )
        for _ in range(draw.choice((1, 5, 200)))
    ]
    data = _PREFACE + frame(4, 0, 0, b"") + b"".join(frames)
    return other_bytes(draw, data) if how == 3 else data


async def run(site: Site, count: int, report: Report, seed: int = 0, at_once: int = 16) -> None:
    """`count` connections, to the HTTP and the gRPC listeners in turn."""
    ports = (site.http, site.grpc, site.trainer)
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await _one(ports[number % 3], random.Random(f"raw/{seed}/{number}"), number, report)

    await asyncio.gather(*(caller() for _ in range(at_once)))


async def _one(port: int, draw: random.Random, number: int, report: Report) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(hostile(draw))
        async with asyncio.timeout(_READ_S):
            await writer.drain()
            while piece := await reader.read(65_536):
                answer += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    status = answer.split(b" ", 2)[1].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed or silent"
    report.answers[f"raw {status}"] += 1
    if status.startswith("5") or b"Traceback" in answer or b'File "' in answer:
        report.bad(f"raw {number}: {answer[:300]!r}")

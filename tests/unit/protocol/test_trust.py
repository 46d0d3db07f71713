"""protocol.trust: what a person reads of a coordinator that can't be reached."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from protocol.trust import Trust, why_unreachable


async def fault(url: str) -> Exception:
    timeout = aiohttp.ClientTimeout(total=0.5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with pytest.raises((aiohttp.ClientError, TimeoutError)) as caught:
            await session.get(url)
    return caught.value


async def test_reasons_are_the_systems_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        refused = why_unreachable(await fault(f"http://127.0.0.1:{port}/"))
        assert refused == "Connection refused"
        taken.listen()
        assert why_unreachable(await fault(f"http://127.0.0.1:{port}/")) == "no answer in time"


async def test_a_server_that_hangs_up_is_said() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        said = why_unreachable(await fault(f"http://127.0.0.1:{port}/"))
        assert said in ("Server disconnected", "Connection reset by peer"), "whichever comes first"


async def test_a_port_that_speaks_no_http_is_said() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00")  # HTTP/2's first frame, as a gRPC server sends it
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        error = await fault(url)
        assert why_unreachable(error) == "what answers there does not speak HTTP: check the port"
        assert str(await Trust(url).explain(error)) == f"{url} does not speak HTTP: check the port"

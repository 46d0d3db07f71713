"""Checks deploy/relay/nginx.conf with a real nginx: `python -m tests.integration.nginx_check`. Not part of the suite."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.shardcast_network import (
    SOON,
    assert_same,
    client,
    make_version,
    origin_in_process,
    publish,
    relay_in_process,
    reserve_port,
    whole,
)

CONF = Path(__file__).parents[2] / "deploy" / "relay" / "nginx.conf"


def write_configuration(folder: Path, listen: int, relay: int) -> None:
    """The shipped file, with this machine's ports and folders, inside the least that nginx needs around it."""
    folder.mkdir()
    text = CONF.read_text()
    for shipped, here in (
        ("listen 8080;", f"listen 127.0.0.1:{listen};"),
        ("server 127.0.0.1:8601;", f"server 127.0.0.1:{relay};"),
        ("/var/cache/nginx/shardcast", str(folder / "cache")),
    ):
        assert shipped in text, shipped
        text = text.replace(shipped, here)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid; error_log {folder}/error.log; user root; worker_processes 1;"
        f"events {{}} http {{ access_log {folder}/access.log; {temporary}\n{text}\n}}"
    )


@asynccontextmanager
async def nginx(folder: Path, relay: int) -> AsyncIterator[str]:
    """nginx in front of a relay's port; its URL."""
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    assert binary is not None, "nginx is not installed"
    port = reserve_port()
    write_configuration(folder, port, relay)
    process = await asyncio.create_subprocess_exec(
        binary, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log"), "-g", "daemon off;"
    )
    try:
        async with asyncio.timeout(SOON), aiohttp.ClientSession() as session:
            while process.returncode is None:
                try:
                    async with session.get(f"http://127.0.0.1:{port}/healthz"):
                        break
                except aiohttp.ClientError:
                    continue
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def check(folder: Path) -> None:
    """Two clients through the cache; the second costs the relay nothing."""
    port = reserve_port()
    async with (
        origin_in_process(folder / "origin") as (origin_url, origin),
        relay_in_process(folder / "relay", origin_url, port=port) as (_, relay),
        nginx(folder / "nginx", port) as url,
        aiohttp.ClientSession() as session,
    ):
        version = await publish(origin_url, origin, make_version(folder / "v0"))
        await whole(relay, 0)
        async with client([url], folder / "first") as first:
            head = await first.head(wait_s=SOON)
            assert head is not None and head.version == 0
            assert_same(await first.fetch(0), version)
        before = relay.metrics.bytes_sent
        async with client([url], folder / "second") as second:
            assert_same(await second.fetch(0), version)
        assert relay.metrics.bytes_sent == before, "the cache asked the relay again"
        shard = version.manifest.shards[1]
        part = await session.get(f"{url}/v1/shards/{shard.digest}", headers={"Range": "bytes=10-19"})
        assert (part.status, part.headers["X-Cache"], len(await part.read())) == (206, "HIT", 10)
        assert (await session.get(f"{url}/v1/head?after=0&wait=1")).status == 204
        have = await session.get(f"{url}/v1/have/{version.manifest.total_digest}")
        assert (await have.json())["complete"] is True and "X-Cache" not in have.headers
        for path in ("/v1/keys", "/v1/versions"):
            assert (await session.post(url + path, data=b"x")).status == 403
        assert (await session.get(f"{url}/v1/manifests/7")).status == 404
        newer = await publish(origin_url, origin, make_version(folder / "v7", 7))
        async with client([url], folder / "second") as third:  # a 404 of before was not kept
            assert_same(await third.fetch(7, newer.digest), newer)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(check(Path(folder)), 4 * SOON))
    print("nginx serves versions as deploy/relay/README.md says", file=sys.stderr)


if __name__ == "__main__":
    main()

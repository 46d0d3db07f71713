"""Both sides of TLS, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator import certificates
from coordinator.channel import Channel, parse_endpoint
from coordinator.client import TrainerClient, Trust, fetch_terms
from coordinator.grpc_server import _start
from coordinator.tls import ServerTls, check_plaintext
from protocol.errors import OurFault, UserError
from protocol.terms import WELL_KNOWN_PATH
from protocol.trust import CA_PATH
from tests.factories import make_terms

NOW = dt.datetime.now(dt.UTC)


def made(folder: Path, *names: str, now: dt.datetime = NOW) -> ServerTls:
    """Certificates in `folder`, as the server reads them."""
    certificates.write(folder, "run", names or ("127.0.0.1",), now)
    return ServerTls(folder / "server.pem", folder / "server.key", folder / "ca.pem", now)


def only(folder: Path, name: str, now: dt.datetime = NOW) -> ServerTls:
    """A certificate for this name alone, loopback not added."""
    authority = certificates.make_authority("run", now)
    leaf = certificates.issue(authority, [name], now)
    for file, content in (("s.pem", leaf.certificate), ("s.key", leaf.key), ("ca.pem", authority.certificate)):
        (folder / file).write_bytes(content)
    return ServerTls(folder / "s.pem", folder / "s.key", folder / "ca.pem", now)


@contextlib.asynccontextmanager
async def web_site(tls: ServerTls | None, terms: str = "") -> AsyncIterator[str]:
    """host:port of a coordinator's HTTP side."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=terms or make_terms(grpc_endpoints=("https://127.0.0.1:1",)).to_json())

    async def authority(request: web.Request) -> web.Response:
        assert tls is not None
        return web.Response(body=tls.ca_pem)

    app = web.Application()
    app.router.add_get(WELL_KNOWN_PATH, answer)
    app.router.add_get(CA_PATH, authority)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls and tls.context).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def grpc_site(tls: ServerTls | None) -> AsyncIterator[int]:
    """Port of a gRPC listener that answers health checks."""
    listener = await _start([grpc.aio.server()], "127.0.0.1", 0, "port", (), tls)
    try:
        yield listener.port
    finally:
        await listener.stop(0)


async def health(channel: Channel, patience_s: float = 5.0) -> int:
    stub = health_pb2_grpc.HealthStub(channel.channel)
    request = health_pb2.HealthCheckRequest()
    answer = await channel.call(lambda: stub.Check(request, timeout=5), patience_s=patience_s)
    return int(answer.status)


async def test_the_pin_in_the_url_is_all_that_a_worker_needs(tmp_path: Path) -> None:
    tls = made(tmp_path)
    async with web_site(tls) as at, grpc_site(tls) as port:
        trust = Trust(f"https://{at}#sha256={tls.pin}")
        assert trust.url == f"https://{at}"
        assert (await fetch_terms(trust, patience_s=0.0)).run_id == make_terms().run_id
        channel = Channel((f"https://127.0.0.1:{port}",), lambda text: None, trust=trust)
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        await channel.channel.close()


async def test_an_authority_in_a_file_is_believed_too(tmp_path: Path) -> None:
    tls = made(tmp_path)
    async with web_site(tls) as at:
        assert await fetch_terms(Trust(f"https://{at}", tmp_path / "ca.pem"), patience_s=0.0)


async def test_another_authority_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    ours, theirs = made(tmp_path / "ours"), made(tmp_path / "theirs")
    async with web_site(theirs) as at:
        with pytest.raises(UserError, match="someone may stand between"):
            await fetch_terms(f"https://{at}#sha256={ours.pin}")


async def test_an_authority_that_is_shown_must_also_have_signed(tmp_path: Path) -> None:
    """Whoever stands between can serve the pinned authority's public certificate, but has no certificate of it."""
    ours, theirs = made(tmp_path / "ours"), made(tmp_path / "theirs")
    theirs.ca_pem = ours.ca_pem
    async with web_site(theirs) as at:
        with pytest.raises(UserError, match=r"nobody that this machine trusts"):
            await fetch_terms(f"https://{at}#sha256={ours.pin}")


async def test_without_a_pin_a_private_authority_is_nobody(tmp_path: Path) -> None:
    async with web_site(made(tmp_path)) as at:
        with pytest.raises(UserError, match=r"#sha256=.*--ca"):
            await fetch_terms(f"https://{at}")


async def test_a_certificate_for_another_host_is_named(tmp_path: Path) -> None:
    tls = only(tmp_path, "elsewhere.example")
    async with web_site(tls) as at, grpc_site(tls) as port:
        trust = Trust(f"https://{at}#sha256={tls.pin}")
        with pytest.raises(UserError, match="is for another host"):
            await fetch_terms(trust)
        told: list[str] = []
        channel = Channel((f"https://127.0.0.1:{port}",), told.append, trust=trust)
        with pytest.raises(OurFault, match="is for another host"):
            await health(channel, patience_s=0.0)
        await channel.channel.close()


async def test_an_expired_certificate_is_named(tmp_path: Path) -> None:
    long_ago = NOW - dt.timedelta(days=500)
    tls = made(tmp_path, now=long_ago)
    async with web_site(tls) as at:
        with pytest.raises(UserError, match=r"has expired.*coordinator certificate"):
            await fetch_terms(f"https://{at}#sha256={tls.pin}")


async def test_plaintext_to_a_tls_port_and_tls_to_a_plaintext_port(tmp_path: Path) -> None:
    async with web_site(made(tmp_path)) as at:
        with pytest.raises(UserError, match="speaks TLS: use https://"):
            await fetch_terms(f"http://{at}")
    async with web_site(None) as at:
        with pytest.raises(UserError, match="does not speak TLS"):
            await fetch_terms(f"https://{at}")


async def test_the_same_on_the_grpc_port(tmp_path: Path) -> None:
    async with grpc_site(made(tmp_path)) as port:
        channel = Channel((f"127.0.0.1:{port}",), lambda text: None)
        with pytest.raises(OurFault, match=f"speaks TLS: give it as https://127.0.0.1:{port}"):
            await health(channel, patience_s=0.0)
        await channel.channel.close()
    async with grpc_site(None) as port:
        channel = Channel((f"https://127.0.0.1:{port}",), lambda text: None)
        with pytest.raises(OurFault, match="does not speak TLS"):
            await health(channel, patience_s=0.0)
        await channel.channel.close()


async def test_terms_that_lead_from_tls_into_plaintext_are_refused(tmp_path: Path) -> None:
    tls = made(tmp_path)
    async with web_site(tls, make_terms(grpc_endpoints=("run.example:7447",)).to_json()) as at:
        with pytest.raises(UserError, match=r"tells workers to use run\.example:7447 without"):
            await fetch_terms(f"https://{at}#sha256={tls.pin}")


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    long_ago = NOW - dt.timedelta(days=500)
    tls = made(tmp_path, now=long_ago)
    async with web_site(tls) as at, grpc_site(tls) as port:
        certificates.write(tmp_path, "run", ["127.0.0.1"], NOW)
        assert tls.refresh(NOW) and not tls.refresh(NOW)
        trust = Trust(f"https://{at}#sha256={tls.pin}")
        await fetch_terms(trust, patience_s=0.0)
        channel = Channel((f"https://127.0.0.1:{port}",), lambda text: None, trust=trust)
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        await channel.channel.close()


async def test_files_that_do_not_fit_leave_the_old_certificate_in_use(tmp_path: Path) -> None:
    tls = made(tmp_path)
    (tmp_path / "server.key").write_bytes(certificates.make_authority("x", NOW).key)
    assert not tls.refresh(NOW)
    (tmp_path / "server.pem").unlink()
    assert not tls.refresh(NOW)
    async with web_site(tls) as at:
        assert await fetch_terms(f"https://{at}#sha256={tls.pin}", patience_s=0.0)


def test_a_file_that_goes_while_it_is_read_leaves_the_old_certificate_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever renews it may be in the middle of that: `serve` goes on."""
    tls, real = made(tmp_path), certificates.about

    def gone(chain: bytes) -> certificates.About:
        (tmp_path / "server.key").unlink()
        return real(chain)

    certificates.write(tmp_path, "run", ["127.0.0.1"], NOW)
    monkeypatch.setattr(certificates, "about", gone)
    assert not tls.refresh(NOW)
    monkeypatch.undo()
    certificates.write(tmp_path, "run", ["127.0.0.1"], NOW)
    assert tls.refresh(NOW)


def test_expiry_is_announced_a_month_before(tmp_path: Path) -> None:
    tls = made(tmp_path)
    assert tls.warning(NOW) == ""
    assert "expires on" in tls.warning(tls.not_after - dt.timedelta(days=20))
    assert "expired on" in tls.warning(tls.not_after + dt.timedelta(days=1))


def test_a_server_does_not_start_with_what_every_worker_would_refuse(tmp_path: Path) -> None:
    tls = made(tmp_path, "run.example")
    tls.check_covers("run.example")
    with pytest.raises(UserError, match=r"not for server\.advertise_host other\.example"):
        tls.check_covers("other.example")
    with pytest.raises(UserError, match="expired on"):
        ServerTls(tmp_path / "server.pem", tmp_path / "server.key", None, NOW + dt.timedelta(days=500))
    with pytest.raises(UserError, match="no certificate and its key"):
        ServerTls(tmp_path / "server.pem", tmp_path / "ca.key", None, NOW)
    with pytest.raises(UserError, match="cannot read"):
        ServerTls(tmp_path / "absent.pem", tmp_path / "server.key", None, NOW)
    with pytest.raises(UserError, match=r"server\.ca.*no certificate"):
        ServerTls(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "server.key", NOW)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_may_be_plaintext(host: str) -> None:
    check_plaintext(host, "host", insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "run.example"])
def test_anything_else_must_be_asked_for_by_name(host: str) -> None:
    with pytest.raises(UserError, match=r"coordinator certificate.*insecure = true"):
        check_plaintext(host, "host", insecure=False)
    check_plaintext(host, "host", insecure=True)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://run.example#sha256=abc", "is no pin"),
        ("https://run.example#md5=abc", "is no pin"),
        ("http://run.example#sha256=" + "0" * 64, "is not encrypted"),
        ("run.example:7448", "https://"),
    ],
)
def test_urls_that_promise_too_much(url: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Trust(url)


def test_an_authority_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        Trust("https://run.example", tmp_path / "absent.pem")
    (tmp_path / "x.pem").write_text("nonsense")
    with pytest.raises(UserError, match="holds no certificate"):
        Trust("https://run.example", tmp_path / "x.pem")


async def test_a_pin_where_there_is_nothing_to_pin(tmp_path: Path) -> None:
    async with web_site(made(tmp_path)) as at:
        trust = Trust(f"https://{at}/below#sha256={'0' * 64}")
        with pytest.raises(UserError, match="nothing to pin"):
            await trust.context()


async def test_the_trainers_token_does_not_travel_readable_by_accident() -> None:
    with pytest.raises(UserError, match="would travel readable"):
        TrainerClient("run.example:7449", "token")
    for endpoint in ("http://run.example:7449", "https://run.example:7449", "127.0.0.1:7449"):
        await TrainerClient(endpoint, "token").close()


@pytest.mark.parametrize(
    "text", ["", "run.example", "run.example:", "run.example:x", "h:0", "h:65536", "https://h:1/x"]
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(UserError, match="no gRPC endpoint"):
        parse_endpoint(text)


def test_endpoints() -> None:
    assert parse_endpoint("https://[::1]:7447").address == "[::1]:7447"
    assert parse_endpoint("run.example:7447").encrypted is False
    assert parse_endpoint("https://run.example:7447").encrypted is True


async def test_a_refused_connection_is_no_matter_of_certificates() -> None:
    trust = Trust("https://127.0.0.1:9")
    try:
        async with aiohttp.ClientSession() as session:
            await asyncio.wait_for(session.get(trust.url), 10)
    except aiohttp.ClientError as error:
        assert await trust.explain(error) is None

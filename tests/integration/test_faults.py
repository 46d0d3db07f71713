"""What goes wrong on strangers' machines, seeded one by one: the message names the fault and the remedy.

Real servers on loopback; no engine. Each test is one fault.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from email.utils import formatdate
from pathlib import Path

import pytest
from aiohttp import web

from coordinator import certificates, discovery
from coordinator.client import Trust, WorkerClient, fetch_terms
from protocol import keyfile
from protocol.errors import OurFault, UserError
from protocol.signing import ROLLOUT, Identity
from protocol.terms import WELL_KNOWN_PATH, RunTerms, parse_terms
from tests.unit.worker.machines import GIB, RTX4090, T4, machine
from worker.config import WorkerConfig
from worker.doctor import checks, probes
from worker.doctor.examine import examine
from worker.doctor.findings import Level
from worker.home import held
from worker.identity_file import export_identity, import_identity
from worker.need import Need
from worker.outbox import Outbox
from worker.pins import check_pins
from worker.preflight import check_fit
from worker.within_memory import samples_at_once, within_memory

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[..., Awaitable[str]]
KEYS = [Identity.from_seed(bytes([number]) * 32) for number in range(3)]


def terms(**changes: object) -> RunTerms:
    values: dict[str, object] = {
        "run_id": "run-1",
        "name": "run",
        "protocol_min": 1,
        "protocol_max": 1,
        "grpc_endpoints": ["127.0.0.1:1"],
        "relays": ["http://127.0.0.1:1"],
        "coordinator_key": KEYS[0].key_id,
        "trainer_key": KEYS[1].key_id,
        "model": "tiny",
        "model_digest": None,
        "temperature": 1.0,
        "eos_token_ids": [0],
        "max_tokens": 8,
        "max_prompt_tokens": 8,
        "max_staleness": 2,
        "lease_term_s": 60.0,
        "precision_classes": ["bf16"],
    }
    return parse_terms(json.dumps(values | changes).encode(), "the test")


def closed_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server with these handlers; its URL."""
    runners: list[web.AppRunner] = []

    async def start(handlers: dict[str, Handler], **options: object) -> str:
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0, **options).start()  # type: ignore[arg-type]
        scheme = "https" if options.get("ssl_context") else "http"
        return f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def answers(body: str, status: int = 200, **headers: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, status=status, headers=headers)

    return answer


async def refusal(url: str, ca: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        await fetch_terms(Trust(url, ca), patience_s=0.0, on_retry=lambda text: None)
    return str(caught.value)


def tls(folder: Path, names: tuple[str, ...], now: dt.datetime) -> dict[str, object]:
    certificates.write(folder, "run", names, now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return {"ssl_context": context}


# The address


def test_1_a_url_without_a_scheme() -> None:
    with pytest.raises(UserError, match=r"https:// or http:// URL, got 'run.example:7448'"):
        Trust("run.example:7448")


async def test_2_a_url_of_something_else(serve: Serve) -> None:
    said = await refusal(await serve({"/": answers("a web site")}))
    assert "404" in said and "is http" in said and "a coordinator's URL?" in said


async def test_3_a_name_that_is_misspelt() -> None:
    finding = checks.name("no-such-host.invalid", await probes.resolve("no-such-host.invalid"))
    assert finding.level is Level.FAIL
    assert "no-such-host.invalid has no address" in finding.text and "spelling" in finding.remedy


async def test_4_a_coordinator_that_is_down() -> None:
    said = await refusal(f"http://127.0.0.1:{closed_port()}")
    assert "cannot reach" in said and "that the coordinator runs" in said


async def test_5_a_port_that_is_blocked() -> None:
    port = closed_port()
    finding = checks.grpc({f"127.0.0.1:{port}": await probes.connect("127.0.0.1", port)})
    assert finding.level is Level.FAIL
    assert f":{port}: " in finding.text and "outgoing TCP" in finding.remedy


# Certificates and clocks


async def test_6_a_certificate_that_has_expired(serve: Serve, tmp_path: Path) -> None:
    old = dt.datetime.now(dt.UTC) - dt.timedelta(days=800)
    url = await serve({}, **tls(tmp_path, ("127.0.0.1",), old))
    said = await refusal(url, tmp_path / "ca.pem")
    assert "has expired" in said and "set the clock" in said and "coordinator certificate" in said


async def test_7_a_certificate_for_another_host(serve: Serve, tmp_path: Path) -> None:
    authority = certificates.make_authority("run", dt.datetime.now(dt.UTC))
    made = certificates.issue(authority, ["other.example"], dt.datetime.now(dt.UTC))
    for name, content in (
        ("ca.pem", authority.certificate),
        ("server.pem", made.certificate),
        ("server.key", made.key),
    ):
        (tmp_path / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    said = await refusal(await serve({}, ssl_context=context), tmp_path / "ca.pem")
    assert "for another host" in said and "address that the operator gave" in said


async def test_8_an_authority_that_nobody_knows(serve: Serve, tmp_path: Path) -> None:
    url = await serve({}, **tls(tmp_path, ("127.0.0.1",), dt.datetime.now(dt.UTC)))
    said = await refusal(url)
    assert "vouches" in said and "#sha256=" in said


async def test_9_a_pin_of_another_authority(serve: Serve, tmp_path: Path) -> None:
    options = tls(tmp_path, ("127.0.0.1",), dt.datetime.now(dt.UTC))
    pem = (tmp_path / "ca.pem").read_text()
    url = await serve({"/.well-known/rollswarm-ca.pem": answers(pem)}, **options)
    said = await refusal(f"{url}#sha256={'0' * 64}")
    assert "another authority" in said and "ask for the new URL" in said


async def test_10_plaintext_to_a_port_that_speaks_tls(serve: Serve, tmp_path: Path) -> None:
    url = await serve({}, **tls(tmp_path, ("127.0.0.1",), dt.datetime.now(dt.UTC)))
    said = await refusal(url.replace("https", "http"))
    assert "speaks TLS: use https://" in said


async def test_11_a_clock_that_is_ten_minutes_off(serve: Serve) -> None:
    told = formatdate(time.time() - 600, usegmt=True)
    url = await serve({"/healthz": answers("{}", Date=told)})
    finding = checks.clock(await probes.clock_offset(Trust(url)))
    assert finding.level is Level.FAIL
    assert "ahead of" in finding.text and "timedatectl" in finding.remedy


# The run


async def test_12_a_worker_that_is_too_old(serve: Serve) -> None:
    body = json.dumps(dataclasses.asdict(terms()) | {"protocol_min": 9, "protocol_max": 9})
    said = await refusal(await serve({WELL_KNOWN_PATH: answers(body)}))
    assert "speaks protocol 9 to 9" in said and "update rollswarm" in said


def test_13_keys_that_are_not_those_of_the_first_visit(tmp_path: Path) -> None:
    check_pins(tmp_path, "https://run.example", terms())
    with pytest.raises(UserError, match="another coordinator key than at the first visit") as caught:
        check_pins(tmp_path, "https://run.example", terms(coordinator_key=KEYS[2].key_id))
    assert "delete" in str(caught.value)


async def test_14_a_coordinator_that_is_started_again() -> None:
    told = asyncio.Event()
    said: list[str] = []

    def outage(text: str) -> None:
        said.append(text)
        told.set()

    client = WorkerClient(
        terms(grpc_endpoints=[f"127.0.0.1:{closed_port()}"]),
        KEYS[2],
        name="w",
        hardware="h",
        software="s",
        on_outage=outage,
    )
    registering = asyncio.create_task(client.register())
    await asyncio.wait_for(told.wait(), 60)
    registering.cancel()
    await asyncio.gather(registering, return_exceptions=True)
    await client.close()
    assert "the coordinator is away" in said[0] and "retrying" in said[0]


async def test_15_a_relay_that_is_dead(serve: Serve) -> None:
    url = await serve({"/healthz": answers('{"complete": 3}', **{"Content-Type": "application/json"})})
    dead = f"http://127.0.0.1:{closed_port()}"
    both = checks.relays(await probes.look_at_relays([url, dead]))
    assert both.level is Level.WARN and dead in both.text and "others are used" in both.remedy
    alone = checks.relays(await probes.look_at_relays([dead]))
    assert alone.level is Level.FAIL and "tell the run's operator" in alone.remedy


async def test_16_a_relay_that_is_none(serve: Serve) -> None:
    finding = checks.relays(await probes.look_at_relays([await serve({})]))
    assert finding.level is Level.FAIL and "no relay" in finding.text


# This machine


def test_17_a_model_that_is_too_big() -> None:
    with pytest.raises(UserError, match=r"54\.0 GiB of GPU memory.*smaller model"):
        check_fit(machine(RTX4090), Need(40 * GIB), "/w")


def test_18_a_gpu_that_is_too_old() -> None:
    with pytest.raises(UserError, match=r"Tesla T4 .* too old for bf16.*8\.0 or newer"):
        check_fit(machine(T4), Need(GIB), "/w")


def test_19_no_room_on_the_disk() -> None:
    with pytest.raises(UserError, match=r"/w has 1\.0 GiB free.*--home on a larger disk"):
        check_fit(machine(RTX4090, disk=GIB), Need(GIB), "/w")


async def test_20_an_engine_that_runs_out_of_memory(tmp_path: Path) -> None:
    async def work(config: WorkerConfig) -> None:
        with samples_at_once(config.concurrency or 8):
            raise OurFault("the engine died: CUDA out of memory")

    said: list[str] = []
    with pytest.raises(OurFault, match=r"ran out of memory.*--max-model-len"):
        await within_memory(work, WorkerConfig(home=tmp_path, concurrency=2), said.append)
    assert said == ["out of memory with 2 samples at once: starting again with 1"]


def test_21_a_driver_that_does_not_match_its_library() -> None:
    finding = checks.driver(machine(problem="Failed to initialize NVML: Driver/library version mismatch"))
    assert finding.level is Level.FAIL and "mismatch" in finding.text and "reboot" in finding.remedy


def test_22_a_build_without_cuda_on_a_gpu() -> None:
    finding = checks.cuda(machine(RTX4090), torch_sees=False)
    assert "torch sees none" in finding.text and "rollswarm[worker]" in finding.remedy


# The worker's own files


def test_23_an_identity_that_is_damaged(tmp_path: Path) -> None:
    keyfile.load_or_create(tmp_path / "identity.key")
    (tmp_path / "identity.key").write_text("-----BEGIN nonsense")
    with pytest.raises(UserError, match=r"is damaged.*restore it from a backup"):
        keyfile.load(tmp_path / "identity.key")


def test_24_an_identity_that_others_can_read(tmp_path: Path) -> None:
    keyfile.load_or_create(tmp_path / "identity.key")
    (tmp_path / "identity.key").chmod(0o644)
    with pytest.raises(UserError, match="can be read by others: run `chmod 600"):
        keyfile.load(tmp_path / "identity.key")


def test_25_two_workers_with_one_identity(tmp_path: Path) -> None:
    with (
        held(tmp_path),
        pytest.raises(UserError, match=r"one identity is one worker.*worker leave.*--home"),
        held(tmp_path),
    ):
        pass


def test_26_a_wrong_passphrase(tmp_path: Path) -> None:
    keyfile.load_or_create(tmp_path / "identity.key")
    export_identity(tmp_path / "identity.key", tmp_path / "backup", "correct horse")
    with pytest.raises(UserError, match="passphrase is wrong"):
        import_identity(tmp_path / "backup", tmp_path / "other.key", "correct house")


def test_27_an_outbox_that_a_bad_disk_has_damaged(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    identifier = outbox.put(KEYS[2].sign(ROLLOUT, b"a rollout"))
    (path,) = tmp_path.glob("*.rollout")
    path.write_bytes(path.read_bytes()[:-3])
    assert outbox.get(identifier) is None
    assert [each.suffix for each in tmp_path.iterdir()] == [".damaged"]  # set aside for a person, not lost
    assert outbox.waiting() == []


def test_28_a_home_on_a_disk_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="choose another --home"), held(tmp_path / "file" / "home"):
        pass


def test_29_a_setting_that_is_misspelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.toml").write_text("concurency = 4\n")
    monkeypatch.setenv("ROLLSWARM_WORKER_CONFIG", str(tmp_path / "worker.toml"))
    with pytest.raises(UserError, match="no setting 'concurency'; there are home, name"):
        WorkerConfig()


def test_30_a_port_for_peers_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = checks.peer_port(port, asked_for=True, problem=probes.port_problem(port))
    assert finding.level is Level.WARN and str(port) in finding.text and "--peer-port" in finding.remedy


async def test_31_a_host_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_NAMELESS_S", 0.3)
    told: list[str] = []
    with pytest.raises(UserError, match=r"no host .run\.example\.invalid': check the spelling of --coordinator"):
        await fetch_terms("https://run.example.invalid:7448", on_retry=told.append)
    assert told, "a network that is only just up may not know the name yet"


async def test_the_doctor_says_all_of_it_at_once_and_never_fails_itself(serve: Serve, tmp_path: Path) -> None:
    body = json.dumps(dataclasses.asdict(terms(relays=[f"http://127.0.0.1:{closed_port()}"])))
    told = formatdate(time.time() - 600, usegmt=True)
    url = await serve({WELL_KNOWN_PATH: answers(body), "/healthz": answers("{}", Date=told)})
    found = {each.name: each for each in await examine(url, WorkerConfig(home=tmp_path))}
    assert found["coordinator"].level is Level.OK
    assert found["disk"].level is Level.OK
    assert {name for name in ("clock", "grpc", "relays") if found[name].level is Level.FAIL} == {
        "clock",
        "grpc",
        "relays",
    }

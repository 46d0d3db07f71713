"""The clients against real gRPC servers on loopback."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from coordinator.channel import Channel
from coordinator.client import Backoff, TrainerClient, WorkerClient, fetch_terms
from coordinator.grpc_server import Listener, serve_trainer, serve_workers
from coordinator.interceptors import peer_address
from coordinator.joining import JoinRule
from coordinator.limits import Door, DoorLimits, Rate
from coordinator.operate import invite
from coordinator.service import TrainerService, WorkerService, poll
from coordinator.store import tables as t
from protocol.declaration import Declaration
from protocol.errors import BadSignature, OurFault, UserError, WorkerFault
from protocol.lease import Commitment
from protocol.renewal import check_renewal
from protocol.rollout import RejectionReason, SamplingParams, token_digest
from protocol.rotation import sign_rotation
from protocol.signing import Identity, SignedEnvelope
from protocol.terms import WELL_KNOWN_PATH
from protocol.wire import rollout_id
from protos.rollswarm.v1 import worker_pb2, worker_pb2_grpc
from tests.factories import (
    EOS,
    MAX_TOKENS,
    RUN_ID,
    SECRET,
    TEMPERATURE,
    TRAINER,
    make_identity,
    make_rollout,
    make_terms,
    make_tokens,
    make_version,
    sign_rollout,
    version_digest,
)
from tests.stored_run import DECLARED, StoredRun

TOKEN = "the-trainers-token"
STRANGER = make_identity(50)


class ShiftedService(WorkerService):
    """Its clock can be set forward, for the next look at it."""

    shift_s = 0.0

    async def clock(self) -> float:
        shift, self.shift_s = self.shift_s, 0.0
        return await super().clock() + shift


class Servers:
    """Both listeners of one coordinator, on ports that stay the same over restarts."""

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self.port = free_port()
        self.listener: Listener | None = None
        self.service = run.service(ShiftedService)
        self.outages: list[str] = []
        self.away = asyncio.Event()
        self._clients: list[WorkerClient | TrainerClient] = []

    async def start(self, max_payload_bytes: int = 1 << 20, door: Door | None = None) -> None:
        self.listener = await serve_workers(
            self.service,
            secret=SECRET,
            host="127.0.0.1",
            port=self.port,
            max_payload_bytes=max_payload_bytes,
            door=door,
        )

    async def stop(self, grace_s: float | None = None) -> None:
        if self.listener is not None:
            await self.listener.stop(grace_s)
            self.listener = None

    def worker(
        self,
        identity: Identity = STRANGER,
        invite: str = "",
        declaration: Declaration | None = DECLARED,
        **terms: Any,
    ) -> WorkerClient:
        client = WorkerClient(
            make_terms(grpc_endpoints=(f"127.0.0.1:{self.port}",), **terms),
            identity,
            name="w",
            hardware="h",
            software="s",
            declaration=declaration,
            on_outage=self._note,
            invite=invite,
        )
        self._clients.append(client)
        return client

    def trainer(self, port: int, token: str = TOKEN, key_rotations: Sequence[SignedEnvelope] = ()) -> TrainerClient:
        client = TrainerClient(f"127.0.0.1:{port}", token, on_outage=self._note, key_rotations=key_rotations)
        self._clients.append(client)
        return client

    def _note(self, text: str) -> None:
        self.outages.append(text)
        self.away.set()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.stop()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest_asyncio.fixture
async def servers(sqlite_url: str) -> AsyncIterator[Servers]:
    run = await StoredRun.begin(sqlite_url)
    servers = Servers(run)
    await servers.start()
    yield servers
    await servers.close()
    await run.db.close()


@pytest_asyncio.fixture
async def trainer_port(servers: Servers) -> AsyncIterator[int]:
    run = servers.run
    service = TrainerService(run.feeding, run_id=RUN_ID, temperature=TEMPERATURE, scheduling=run.scheduling)
    listener = await serve_trainer(service, token=TOKEN, host="127.0.0.1", port=0)
    yield listener.port
    await listener.stop(0)


async def test_a_worker_registers_by_itself_and_leases(servers: Servers) -> None:
    client = servers.worker()
    (lease,), head, reason = await client.acquire(1, 0, 0.0)
    assert (lease.sample_id, lease.min_version, head, reason) == ("g0-0", 0, 0, "")
    assert lease.sampling == SamplingParams(TEMPERATURE, MAX_TOKENS, (EOS,))
    assert bytes(lease.prompt_token_ids).decode() == "0 + 1 ="
    row = await servers.run.row(t.workers)
    assert (row.worker_id, row.name, row.hardware, row.software) == (STRANGER.key_id, "w", "h", "s")
    assert row.address == "127.0.0.1"
    sample = await servers.run.row(t.samples, t.samples.c.sample_id == "g0-0")
    assert lease.seed == sample.seed


async def test_a_whole_life_of_a_rollout(servers: Servers) -> None:
    client = servers.worker()
    (lease,), _, _ = await client.acquire(1, 0, 0.0)
    tokens = make_tokens(6)
    commitment = Commitment(2, token_digest(tokens[:2]), 0)
    renewed, head = await client.renew({lease.lease_id: commitment, "unknown": Commitment()})
    assert (renewed[lease.lease_id][1], head) == ("", 0)
    assert renewed[lease.lease_id][0] >= lease.deadline
    assert renewed["unknown"][1] == "there is no such lease of yours"
    envelope = sign_rollout(make_rollout(lease.lease_id, lease.sample_id, tokens=tokens), STRANGER)
    receipt = await client.submit(envelope)
    assert receipt.rollout_id == rollout_id(envelope.payload)
    assert await client.submit(envelope) == receipt
    assert (await client.standing()).pending == 1
    await servers.run.judge()
    standing = await client.standing()
    assert (standing.credits, standing.accepted, standing.pending) == (6, 1, 0)
    assert [notice.outcome for notice in standing.verdicts] == ["accepted"]


async def test_leases_are_given_back(servers: Servers) -> None:
    client = servers.worker()
    leases, _, _ = await client.acquire(2, 0, 0.0)
    assert await client.give_back([lease.lease_id for lease in leases], "shutdown") == 2
    assert await client.give_back([lease.lease_id for lease in leases], "shutdown") == 0


async def test_a_refusal_carries_its_reason(servers: Servers) -> None:
    client = servers.worker()
    with pytest.raises(WorkerFault) as caught:
        await client.submit(sign_rollout(make_rollout("unknown"), STRANGER))
    assert (caught.value.reason, caught.value.detail) == (RejectionReason.LEASE, "there is no such lease in this run")


async def test_a_banned_worker_hears_why(servers: Servers) -> None:
    client = servers.worker()
    await client.register()
    await servers.run.change(t.workers, banned=True, ban_reason="forged proofs")
    with pytest.raises(WorkerFault, match="this key is banned: forged proofs"):
        await client.acquire(1, 0, 0.0)
    standing = await client.standing()
    assert (standing.banned, standing.ban_reason) == (True, "forged proofs")


async def test_a_receipt_of_another_coordinator_is_not_believed(servers: Servers) -> None:
    client = servers.worker(coordinator_key=make_identity(77).key_id)
    (lease,), _, _ = await client.acquire(1, 0, 0.0)
    with pytest.raises(OurFault, match="no receipt"):
        await client.submit(sign_rollout(make_rollout(lease.lease_id, lease.sample_id), STRANGER))


async def test_a_receipt_of_another_rollout_is_none_of_this(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    client = servers.worker()
    first, second = (await client.acquire(2, 0, 0.0))[0]
    old = await servers.run.intake.submit(
        STRANGER.key_id, sign_rollout(make_rollout(first.lease_id, first.sample_id), STRANGER)
    )

    async def replay(*_: Any) -> Any:
        return old

    monkeypatch.setattr(servers.run.intake, "submit", replay)
    with pytest.raises(OurFault, match="something else"):
        await client.submit(sign_rollout(make_rollout(second.lease_id, second.sample_id), STRANGER))


async def test_a_token_that_ran_out_is_replaced(servers: Servers) -> None:
    client = servers.worker()
    assert len((await client.acquire(1, 0, 0.0))[0]) == 1
    servers.service.shift_s = 901.0
    assert len((await client.acquire(1, 0, 0.0))[0]) == 1
    assert servers.service.shift_s == 0.0


async def test_many_calls_at_once_register_once(servers: Servers) -> None:
    client = servers.worker()
    await asyncio.gather(*(client.standing() for _ in range(5)))
    assert len(await servers.run.rows(t.workers)) == 1


async def test_another_run_behind_the_same_address_is_said(servers: Servers) -> None:
    with pytest.raises(UserError, match="join again"):
        await servers.worker(run_id="older-run").register()


async def test_a_coordinator_that_is_away_is_waited_for(servers: Servers) -> None:
    client = servers.worker()
    await servers.stop()
    waiting = asyncio.create_task(client.acquire(1, 0, 0.0))
    await asyncio.wait_for(servers.away.wait(), 20)
    await servers.start()
    leases, _, _ = await asyncio.wait_for(waiting, 30)
    assert len(leases) == 1
    assert len(servers.outages) == 1, "an outage is said once"


async def test_a_long_poll_outlives_a_restart_of_the_coordinator(servers: Servers) -> None:
    client = servers.worker()
    while (await client.acquire(256, 0, 0.0))[0]:
        pass
    waiting = asyncio.create_task(client.acquire(1, 0, 25.0))
    await client.standing()  # the long poll is on its way by now
    await servers.stop(0)
    await asyncio.wait_for(servers.away.wait(), 20)
    await servers.start()
    leases = await servers.run.rows(t.leases, t.leases.c.state == "live")
    await servers.run.leasing.give_back(STRANGER.key_id, [leases[0].lease_id])
    assert len((await asyncio.wait_for(waiting, 30))[0]) == 1


async def test_patience_ends(servers: Servers) -> None:
    client = servers.worker()
    await servers.stop()
    with pytest.raises(OurFault, match="away"):
        await client.standing(patience_s=0.0)


async def test_what_a_proxy_answers_for_a_coordinator_is_an_outage() -> None:
    """By HTTP, which gRPC calls UNKNOWN: it ended workers."""
    answers, said = [grpc.StatusCode.UNKNOWN, None], []
    channel = Channel(("127.0.0.1:9",), said.append)

    async def ask() -> str:
        code = answers.pop(0)
        if code is not None:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "Received http2 header: 500")
        return "here"

    assert await channel.call(ask, patience_s=30.0) == "here"
    assert said == ["the coordinator is away (unknown); retrying with back-off"]
    await channel.channel.close()


async def test_who_is_told_to_stop_waits_for_no_coordinator() -> None:
    stop = asyncio.Event()
    said = asyncio.Event()
    client = TrainerClient("127.0.0.1:9", "token", on_outage=lambda text: said.set(), stop=stop)
    waiting = asyncio.create_task(client.state())
    await asyncio.wait_for(said.wait(), 20)
    stop.set()
    with pytest.raises(OurFault, match="stopped while the coordinator is away"):
        await asyncio.wait_for(waiting, 30)
    await client.close()


async def test_a_message_that_is_too_large_is_refused_for_good(servers: Servers) -> None:
    await servers.stop()
    await servers.start(max_payload_bytes=1024)
    envelope = STRANGER.sign("rollout", bytes(100_000))
    with pytest.raises(WorkerFault) as caught:
        await servers.worker().submit(envelope)
    assert caught.value.reason == RejectionReason.FORM


async def test_a_port_in_use_is_the_users_mistake(servers: Servers) -> None:
    with pytest.raises(UserError, match=r"server\.grpc_port"):
        await serve_workers(servers.service, secret=SECRET, host="127.0.0.1", port=servers.port, max_payload_bytes=1024)


async def test_the_trainer_learns_where_the_run_stands(servers: Servers, trainer_port: int) -> None:
    client = servers.trainer(trainer_port)
    state = await client.state()
    assert (state.run_id, state.head_version, state.head_digest) == (RUN_ID, 0, version_digest(0))
    assert (state.next_batch, state.groups_per_batch, state.max_staleness) == (0, 2, 1)
    assert await client.announce(make_version(1)) == 1
    assert (await client.state()).head_version == 1


async def test_a_trainer_with_a_rotated_key_brings_the_statements(servers: Servers, trainer_port: int) -> None:
    new = make_identity(67)
    with pytest.raises(BadSignature):
        await servers.trainer(trainer_port).announce(make_version(1, signer=new))
    rotated = servers.trainer(trainer_port, key_rotations=[sign_rotation(RUN_ID, TRAINER, new.key_id, 0)])
    assert await rotated.announce(make_version(1, signer=new)) == 1


async def test_the_trainer_pulls_reports_and_acknowledges(servers: Servers, trainer_port: int) -> None:
    client = servers.trainer(trainer_port)
    assert await client.pull(batch=0, trainer_version=0, held=[], max_groups=2, wait_s=0.0) == []
    await servers.run.join(STRANGER)
    identifiers = await servers.run.work(STRANGER, 2)
    waiting = asyncio.create_task(client.pull(batch=0, trainer_version=0, held=[], max_groups=2, wait_s=20.0))
    await servers.run.judge()
    (group,) = await asyncio.wait_for(waiting, 30)
    assert [item.rollout_id for item in group.rollouts] == identifiers
    assert await client.pull(batch=0, trainer_version=0, held=["g0"], max_groups=2, wait_s=0.0) == []
    await client.report(
        batch=0, trainer_version=0, optimizer_steps=1, metrics={"a": 1.0}, dropped={"b": 2}, trained=identifiers
    )
    assert await client.acknowledge(0) == 1
    assert [row.trained for row in await servers.run.rows(t.consumptions)] == [True, True]
    with pytest.raises(UserError, match="batch 0 is acknowledged"):
        await client.pull(batch=0, trainer_version=0, held=[], max_groups=2, wait_s=0.0)


async def test_the_trainer_withdraws_versions(servers: Servers, trainer_port: int) -> None:
    client = servers.trainer(trainer_port)
    newest = (await client.state()).head_version or 0
    await client.announce(make_version(newest + 1))
    done = await client.withdraw(newest)
    assert (done.next_version, done.withdrawn, done.purged) == (newest + 2, 1, 0)
    assert (await client.state()).head_version == newest
    with pytest.raises(UserError, match="withdrawn"):
        await client.announce(make_version(newest + 1))
    with pytest.raises(UserError, match="choose another"):
        await client.withdraw(newest + 1)


async def test_a_version_that_leaves_a_gap_is_refused(servers: Servers, trainer_port: int) -> None:
    with pytest.raises(UserError, match="the next policy version is 1"):
        await servers.trainer(trainer_port).announce(make_version(5))


async def test_a_wrong_trainer_token_is_said(servers: Servers, trainer_port: int) -> None:
    with pytest.raises(BadSignature, match=r"trainer\.token"):
        await servers.trainer(trainer_port, "wrong").state()


async def test_trainer_calls_are_not_served_to_workers(servers: Servers) -> None:
    with pytest.raises(UserError):
        await servers.trainer(servers.port).state()


Serve = Callable[[Callable[[web.Request], Awaitable[web.Response]]], Awaitable[str]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    opened: list[TestServer] = []

    async def _serve(handler: Callable[[web.Request], Awaitable[web.Response]]) -> str:
        app = web.Application()
        app.router.add_get(WELL_KNOWN_PATH, handler)
        server = TestServer(app)
        await server.start_server()
        opened.append(server)
        return str(server.make_url("/"))

    yield _serve
    for server in opened:
        await server.close()


async def test_terms_are_fetched_and_tried_again(serve: Serve) -> None:
    statuses = [503, 200]
    told: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=statuses.pop(0), text=make_terms().to_json())

    assert await fetch_terms(await serve(handler), on_retry=told.append) == make_terms()
    assert len(told) == 1 and "503" in told[0]


@pytest.mark.parametrize("status", [301, 404, 403])
async def test_an_address_without_terms_is_the_users_mistake(serve: Serve, status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    with pytest.raises(UserError, match=r"is .* a coordinator's URL"):
        await fetch_terms(await serve(handler))


@pytest.mark.parametrize("url", ["", "run.example", "ftp://run.example", "http://", "http://[bad"])
async def test_what_is_no_url_is_the_users_mistake(url: str) -> None:
    with pytest.raises(UserError):
        await fetch_terms(url, patience_s=0.0)


async def test_patience_with_an_absent_coordinator_ends() -> None:
    with pytest.raises(UserError, match="check the URL"):
        await fetch_terms(f"http://127.0.0.1:{free_port()}", patience_s=0.0)


async def test_terms_without_an_endpoint_are_refused() -> None:
    with pytest.raises(UserError, match="no gRPC endpoint"):
        WorkerClient(make_terms(grpc_endpoints=()), STRANGER, name="", hardware="", software="")


async def test_backing_off_grows_up_to_a_limit() -> None:
    backoff = Backoff(0.001, 0.004)
    seconds = [await backoff.pause() for _ in range(5)]
    for waited, ceiling in zip(seconds, (0.001, 0.002, 0.004, 0.004, 0.004), strict=True):
        assert ceiling / 2 <= waited <= ceiling
    backoff.reset()
    assert await backoff.pause() <= 0.001


async def test_a_poll_ends_when_it_has_enough_or_its_time_is_over() -> None:
    answers = iter([0, 0, 7])

    async def attempt() -> int:
        return next(answers)

    assert await poll(attempt, bool, 20.0) == 7

    async def nothing() -> int:
        return 0

    assert await poll(nothing, bool, 0.0) == 0


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:127.0.0.1:5000", "127.0.0.1"), ("ipv6:[::1]:5000", "[::1]"), ("unix:/tmp/socket", "unix:/tmp/socket")],
)
def test_the_address_of_a_peer(peer: str, address: str) -> None:
    assert peer_address(peer) == address


async def test_a_worker_comes_back_when_a_busy_coordinator_says(servers: Servers) -> None:
    await servers.stop()
    turned_away: list[str] = []
    looks = itertools.count()  # a clock that goes 50 ms on at each look, however slow this machine is
    limits = DoorLimits(key=Rate(per_s=10.0, burst=1.0))
    await servers.start(door=Door(limits, lambda: next(looks) * 0.05, turned_away.append))
    worker = servers.worker()
    for _ in range(3):
        assert (await worker.standing(patience_s=10.0)).credits == 0
    assert turned_away and set(turned_away) == {"key"}
    assert any("busy" in said for said in servers.outages)


async def test_a_compressed_message_is_refused(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{servers.port}", compression=grpc.Compression.Gzip) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetChallenge(worker_pb2.GetChallengeRequest(key_id="x" * 4096), timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_run_by_invitation(servers: Servers) -> None:
    servers.run.joining._rule = JoinRule("invite")
    url = str(servers.run.db.engine.url)
    with pytest.raises(UserError, match="by invitation"):
        await servers.worker(make_identity(60)).register(patience_s=0.0)
    token = await invite(url, uses=1, days=1.0, note="a friend")
    await servers.worker(make_identity(61), invite=token).register(patience_s=0.0)
    await servers.worker(make_identity(61)).register(patience_s=0.0)  # has joined before
    with pytest.raises(UserError, match="used up"):
        await servers.worker(make_identity(62), invite=token).register(patience_s=0.0)
    late = await invite(url, uses=1, days=1e-9, note="")
    with pytest.raises(UserError, match="expired"):
        await servers.worker(make_identity(62), invite=late).register(patience_s=0.0)


async def test_a_run_that_asks_for_work(servers: Servers) -> None:
    servers.run.joining._rule = JoinRule("work", 8)
    with pytest.raises(UserError, match="8 bits of work"):
        await servers.worker(make_identity(63)).register(patience_s=0.0)
    await servers.worker(make_identity(63), join="work", work_bits=8).register(patience_s=0.0)
    await servers.worker(make_identity(63)).register(patience_s=0.0)


async def test_a_renewal_that_is_not_signed_is_refused(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = servers.worker()
    leases, _, _ = await worker.acquire(1, 0, 0.0)
    tokens = make_tokens(4)
    commitment = Commitment(4, token_digest(tokens), 0)
    renewed, _ = await worker.renew({leases[0].lease_id: commitment})
    assert renewed[leases[0].lease_id][1] == ""
    row = await servers.run.row(t.leases, t.leases.c.lease_id == leases[0].lease_id)
    check_renewal(
        STRANGER.key_id, RUN_ID, row.lease_id, Commitment(4, row.committed_digest, 0, row.committed_signature)
    )
    monkeypatch.setattr("coordinator.client.sign_renewal", lambda *facts: bytes(64))
    with pytest.raises(BadSignature, match="is not signed"):
        await worker.renew({leases[0].lease_id: commitment})

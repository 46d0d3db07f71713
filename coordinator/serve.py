"""`coordinator serve`: puts the rooms together and keeps them running until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import grpc
from aiohttp import web

from coordinator.admission import Limits
from coordinator.config import RunFile, ServerSection, TracingSection, make_run_id, model_shape, start_tracing
from coordinator.dashboard.access import Access
from coordinator.dashboard.pool import beside
from coordinator.dashboard.settings import Settings
from coordinator.dashboard.views import Views
from coordinator.grpc_server import Listener, serve_trainer, serve_workers
from coordinator.hardware import HardwareRules
from coordinator.limits import Door
from coordinator.metrics import Metrics
from coordinator.migrate import upgrade
from coordinator.rooms import hardware_rules, make_rooms
from coordinator.store import run as run_store
from coordinator.store import versions
from coordinator.store.database import Database
from coordinator.store.run import Run
from coordinator.tls import ServerTls, check_plaintext
from coordinator.upkeep import Live, count_what_is_over, forget_payloads, sweep, watch_certificate
from coordinator.verification.classes import classes_of
from protocol.errors import UserError
from protocol.signing import Identity
from protocol.statement import sign_statement
from protocol.terms import PROTOCOL_MIN, TURNS_PROTOCOL, RunTerms
from protocol.trust import is_loopback
from protocol.turns import TurnRules, Turns

_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the coordinator listens, as it turned out (a configured port of 0 means any free one).

    `join`: the URL that workers elsewhere join by.
    """

    grpc: str
    http: str
    trainer: str
    join: str


async def serve(
    run_file: RunFile,
    *,
    identity: Identity,
    trainer_token: str,
    stop: asyncio.Event,
    on_ready: Callable[[Addresses], None],
) -> None:
    """Serve until `stop` is set. Raises UserError if a port, the model, the thresholds or the database can't be used."""
    # Only verifiers use thresholds, but without them nothing could ever be verified.
    classes = classes_of(run_file.verification)
    vocab_size, hidden_size = model_shape(run_file.model.path)
    await upgrade(run_file.run.database)
    db = Database.open(run_file.run.database)
    try:
        run = await run_store.load_or_begin(
            db,
            run_id=make_run_id(run_file.run.name, secrets.token_hex(4)),
            name=run_file.run.name,
            secret=secrets.token_bytes(32),
            trainer_key=run_file.run.trainer_key,
        )
        limits = Limits(run.run_id, vocab_size, hidden_size, run_file.scheduling.max_staleness, tuple(classes))
        rules = hardware_rules(run_file.verification, classes)
        await _serve_run(run_file, run, db, limits, rules, identity, trainer_token, stop, on_ready)
    finally:
        await db.close()


async def _serve_run(
    run_file: RunFile,
    run: Run,
    db: Database,
    limits: Limits,
    rules: HardwareRules,
    identity: Identity,
    trainer_token: str,
    stop: asyncio.Event,
    on_ready: Callable[[Addresses], None],
) -> None:
    """Open the listeners one after the other, keep house until told to stop, and close what was opened."""
    server, metrics = run_file.server, Metrics()
    rooms = make_rooms(run_file, run, db, identity, limits, rules, metrics)
    live = Live(db, run_file.scheduling.scheduling(), rooms.use)
    await live.refresh()
    tls = _tls(server)
    door = Door(run_file.limits.door(), time.monotonic, lambda limit: metrics.busy.labels(limit=limit).inc())
    async with contextlib.AsyncExitStack() as opened:
        watched = _watch(run_file.tracing, db, opened)
        public = await serve_workers(
            rooms.workers,
            secret=run.secret,
            host=server.host,
            port=server.grpc_port,
            max_payload_bytes=server.max_payload_bytes,
            tls=tls,
            door=door,
            max_connections=run_file.limits.connections,
            reflection=server.reflection,
            tracing=watched,
        )
        opened.push_async_callback(public.stop, _GRACE_S)
        private = await serve_trainer(
            rooms.trainer,
            token=trainer_token,
            host=server.trainer_host,
            port=server.trainer_port,
            tls=None if is_loopback(server.trainer_host) else tls,
            tracing=watched,
        )
        opened.push_async_callback(private.stop, _GRACE_S)
        pages = beside(db)
        opened.push_async_callback(pages.close)
        views = Views(
            pages,
            metrics,
            _terms_reader(
                run_file, run, pages, identity, public, live, limits.precisions, _rules(rooms.turns.values())
            ),
            access=Access(pages, run.secret, encrypted=tls is not None),
            settings=Settings(
                run_file.scheduling.scheduling(),
                run_file.verification.audit_fraction,
                decode=rooms.tokenizer.decode,
                sign=partial(sign_statement, signer=identity),
            ),
            ca_pem=None if tls is None else tls.ca_pem,
            door=door,
            served=db,
        )
        runner = web.AppRunner(views.application(), access_log=None, shutdown_timeout=_GRACE_S)
        await runner.setup()
        opened.push_async_callback(runner.cleanup)
        http_port = await _listen(runner, server.host, server.http_port, tls)
        on_ready(_addresses(server, public.port, http_port, private.port, tls))
        await asyncio.gather(
            sweep(rooms.leasing, live, stop),
            watch_certificate(tls, stop),
            forget_payloads(db, run_file.storage, stop),
            count_what_is_over(db, stop),
        )


def _watch(
    settings: TracingSection, db: Database, opened: contextlib.AsyncExitStack
) -> grpc.aio.ServerInterceptor | None:
    """What writes traces, closed with everything else; None where none are asked for."""
    tracing = start_tracing(settings, "rollswarm-coordinator")
    if tracing is None:
        return None
    from coordinator.tracing import TraceInterceptor

    opened.push_async_callback(asyncio.to_thread, tracing.close)
    return TraceInterceptor(tracing, db)


def _tls(server: ServerSection) -> ServerTls | None:
    """The listeners' certificate, None where all is plaintext. Raises UserError if that was not asked for."""
    if server.certificate is None or server.certificate_key is None:
        check_plaintext(server.host, "host", insecure=server.insecure)
        check_plaintext(server.trainer_host, "trainer_host", insecure=server.insecure)
        return None
    tls = ServerTls(server.certificate, server.certificate_key, server.ca, dt.datetime.now(dt.UTC))
    tls.check_covers(server.advertise_host)
    return tls


def _addresses(server: ServerSection, grpc: int, http: int, trainer: int, tls: ServerTls | None) -> Addresses:
    scheme = "http" if tls is None else "https"
    pin = f"#sha256={tls.pin}" if tls is not None and tls.pin else ""
    return Addresses(
        grpc=f"{server.host}:{grpc}",
        http=f"{scheme}://{server.host}:{http}",
        trainer=f"{server.trainer_host}:{trainer}",
        join=f"{scheme}://{server.advertise_host}:{http}{pin}",
    )


async def _listen(runner: web.AppRunner, host: str, port: int, tls: ServerTls | None) -> int:
    site = web.TCPSite(runner, host, port, ssl_context=None if tls is None else tls.context)
    try:
        await site.start()
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} (server.http_port): {error.strerror}; choose another"
        ) from None
    return int(runner.addresses[0][1])


def _rules(turns: Iterable[Turns]) -> tuple[TurnRules, ...]:
    """Each kind of rules once: environments may share one."""
    return tuple({each.rules.digest: each.rules for each in turns}.values())


def _terms_reader(
    run_file: RunFile,
    run: Run,
    db: Database,
    identity: Identity,
    public: Listener,
    live: Live,
    precisions: tuple[str, ...],
    turns: tuple[TurnRules, ...],
) -> Callable[[], Awaitable[RunTerms]]:
    server = run_file.server

    async def read() -> RunTerms:
        async with db.read() as connection:
            first = (await versions.digests(connection)).get(0)
        return RunTerms(
            run_id=run.run_id,
            name=run.name,
            protocol_min=TURNS_PROTOCOL if turns else PROTOCOL_MIN,
            protocol_max=TURNS_PROTOCOL if turns else PROTOCOL_MIN,
            grpc_endpoints=(f"{'https://' if server.certificate else ''}{server.advertise_host}:{public.port}",),
            relays=run_file.shardcast.relays,
            coordinator_key=identity.key_id,
            trainer_key=run.trainer_key,
            model=run_file.model.name,
            model_digest=first,
            temperature=run_file.sampling.temperature,
            eos_token_ids=run_file.sampling.eos_token_ids,
            max_tokens=run_file.max_tokens,
            max_prompt_tokens=server.max_prompt_tokens,
            max_staleness=live.scheduling.max_staleness,
            lease_term_s=run_file.scheduling.lease_term_s,
            precision_classes=precisions,
            join=run_file.join.door,
            work_bits=run_file.join.rule().work_bits,
            turns=turns,
        )

    return read

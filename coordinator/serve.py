"""`coordinator serve`: puts the rooms together and keeps them running until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from aiohttp import web

from coordinator import knobs
from coordinator.admission import Limits
from coordinator.config import RunFile, ServerSection, StorageSection, VerificationSection, make_run_id, model_shape
from coordinator.dashboard.access import Access
from coordinator.dashboard.views import Settings, Views
from coordinator.feeding import Feeding
from coordinator.grpc_server import Listener, serve_trainer, serve_workers
from coordinator.hardware import HardwareRules
from coordinator.intake import Intake
from coordinator.leasing import EnvironmentShare, Leasing, Scheduling
from coordinator.limits import Door
from coordinator.metrics import Metrics
from coordinator.migrate import upgrade
from coordinator.registration import Joining
from coordinator.service import TrainerService, WorkerService
from coordinator.store import database, retention, versions
from coordinator.store import knobs as knob_store
from coordinator.store import run as run_store
from coordinator.store.database import Database
from coordinator.store.run import Run
from coordinator.tls import ServerTls, check_plaintext
from coordinator.tokenizer import RunTokenizer
from coordinator.verification.classes import classes_of
from coordinator.verification.thresholds import Thresholds
from environments.registry import make_environment
from protocol.errors import UserError
from protocol.signing import Identity
from protocol.statement import sign_statement
from protocol.terms import PROTOCOL_MAX, PROTOCOL_MIN, RunTerms
from protocol.trust import is_loopback

log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_GRACE_S = 3.0
_CERTIFICATE_EVERY_S = 5.0
_FORGET_EVERY_S = 60.0
_FORGET_AT_ONCE = 500


class Live:
    """The scheduling as operators have it now; `use` is told of every change."""

    def __init__(self, db: Database, configured: Scheduling, use: Callable[[Scheduling], None]) -> None:
        self._db = db
        self._configured = configured
        self._use = use
        self.scheduling = configured

    async def refresh(self) -> None:
        async with self._db.read() as connection:
            turned = await knob_store.read(connection)
        scheduling = knobs.scheduling(self._configured, turned)
        if scheduling != self.scheduling:
            self.scheduling = scheduling
            self._use(scheduling)


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
    metrics = Metrics()
    scheduling = run_file.scheduling.scheduling()
    tokenizer = RunTokenizer(run_file.model.path)
    leasing = Leasing(
        db,
        secret=run.secret,
        scheduling=scheduling,
        environments=environment_shares(run_file),
        tokenize=tokenizer.encode,
        max_prompt_tokens=run_file.server.max_prompt_tokens,
        hardware_rules=rules,
    )
    intake = Intake(
        db,
        identity=identity,
        limits=limits,
        temperature=run_file.sampling.temperature,
        eos_token_ids=run_file.sampling.eos_token_ids,
        max_strikes=run_file.verification.max_strikes,
        max_payload_bytes=run_file.server.max_payload_bytes,
    )
    workers = WorkerService(
        db,
        run_id=run.run_id,
        secret=run.secret,
        joining=Joining(
            db,
            run_id=run.run_id,
            secret=run.secret,
            precisions=limits.precisions,
            hardware_rules=rules,
            rule=run_file.join.rule(),
        ),
        leasing=leasing,
        intake=intake,
        temperature=run_file.sampling.temperature,
        eos_token_ids=run_file.sampling.eos_token_ids,
        metrics=metrics,
    )
    feeding = Feeding(db, run_id=run.run_id, trainer_key=run.trainer_key, scheduling=scheduling)
    trainer = TrainerService(
        feeding,
        run_id=run.run_id,
        temperature=run_file.sampling.temperature,
        scheduling=scheduling,
    )

    def use(turned: Scheduling) -> None:
        for room in (leasing, feeding, trainer):
            room.use(turned)
        intake.use(replace(limits, max_staleness=turned.max_staleness))

    live = Live(db, scheduling, use)
    await live.refresh()
    server = run_file.server
    tls = _tls(server)
    door = Door(run_file.limits.door(), time.monotonic, lambda limit: metrics.busy.labels(limit=limit).inc())
    public = await serve_workers(
        workers,
        secret=run.secret,
        host=server.host,
        port=server.grpc_port,
        max_payload_bytes=server.max_payload_bytes,
        tls=tls,
        door=door,
        max_connections=run_file.limits.connections,
        reflection=server.reflection,
    )
    try:
        private = await serve_trainer(
            trainer,
            token=trainer_token,
            host=server.trainer_host,
            port=server.trainer_port,
            tls=None if is_loopback(server.trainer_host) else tls,
        )
        try:
            views = Views(
                db,
                metrics,
                _terms_reader(run_file, run, db, identity, public, live, limits.precisions),
                access=Access(db, run.secret, encrypted=tls is not None),
                settings=Settings(
                    scheduling,
                    run_file.verification.audit_fraction,
                    decode=tokenizer.decode,
                    sign=partial(sign_statement, signer=identity),
                ),
                ca_pem=None if tls is None else tls.ca_pem,
                door=door,
            )
            runner = web.AppRunner(views.application(), access_log=None, shutdown_timeout=_GRACE_S)
            await runner.setup()
            try:
                http_port = await _listen(runner, server.host, server.http_port, tls)
                on_ready(_addresses(server, public.port, http_port, private.port, tls))
                await asyncio.gather(
                    _sweep(leasing, live, stop),
                    _watch_certificate(tls, stop),
                    _forget_forever(db, run_file.storage, stop),
                )
            finally:
                await runner.cleanup()
        finally:
            await private.stop(_GRACE_S)
    finally:
        await public.stop(_GRACE_S)


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


async def _watch_certificate(tls: ServerTls | None, stop: asyncio.Event) -> None:
    """Take up renewed files, and warn once a day while expiry is near, until `stop` is set."""
    warned = 0
    while tls is not None and not stop.is_set():
        now = dt.datetime.now(dt.UTC)
        await asyncio.to_thread(tls.refresh, now)
        warning = tls.warning(now)
        if warning and warned != now.toordinal():
            warned = now.toordinal()
            log.warning("%s", warning, extra={"action": "certificate"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _CERTIFICATE_EVERY_S)


async def _listen(runner: web.AppRunner, host: str, port: int, tls: ServerTls | None) -> int:
    site = web.TCPSite(runner, host, port, ssl_context=None if tls is None else tls.context)
    try:
        await site.start()
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} (server.http_port): {error.strerror}; choose another"
        ) from None
    return int(runner.addresses[0][1])


async def _forget_forever(db: Database, storage: StorageSection, stop: asyncio.Event) -> None:
    """Forget payloads whose time is over, a few at a time so that nobody waits, until `stop` is set."""
    while not stop.is_set():
        pause = _FORGET_EVERY_S
        try:
            async with db.write() as connection:
                at = await database.now(connection)
                forgotten = await retention.forget(
                    connection,
                    trained_before=at - storage.trained_days * 86_400,
                    others_before=at - storage.rejected_days * 86_400,
                    limit=_FORGET_AT_ONCE,
                )
            if forgotten:
                pause = _SWEEP_S
                log.info("%d payloads forgotten", forgotten, extra={"action": "retention"})
        except Exception:
            log.exception("retention failed; it goes on", extra={"action": "sweep_error"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)


async def _sweep(leasing: Leasing, live: Live, stop: asyncio.Event) -> None:
    """Free overdue leases and look at the knobs every second, also while no worker asks, until `stop` is set."""
    while not stop.is_set():
        try:
            await live.refresh()
            expired = await leasing.expire()
            if expired:
                log.info("%d leases expired", expired, extra={"action": "expire"})
        except Exception:
            log.exception("the sweep failed; it goes on", extra={"action": "sweep_error"})
        try:
            await asyncio.wait_for(stop.wait(), _SWEEP_S)
        except TimeoutError:
            continue


def hardware_rules(settings: VerificationSection, classes: Mapping[str, Thresholds]) -> HardwareRules:
    """Which hardware is taken at its word: what the run file names, and what the thresholds were measured on."""
    return HardwareRules(
        patterns=settings.hardware,
        calibrated={name: thresholds.hardware for name, thresholds in classes.items()},
        shadow_rollouts=settings.shadow_rollouts,
        shadow_classes=settings.shadow_classes,
    )


def environment_shares(run_file: RunFile) -> list[EnvironmentShare]:
    """The run's mixture. Raises UserError if an environment or one of its parameters is unknown."""
    return [
        EnvironmentShare(
            section.name,
            section.weight,
            section.max_tokens,
            make_environment(section.kind or section.name, section.params).task,
        )
        for section in run_file.environments
    ]


def _terms_reader(
    run_file: RunFile,
    run: Run,
    db: Database,
    identity: Identity,
    public: Listener,
    live: Live,
    precisions: tuple[str, ...],
) -> Callable[[], Awaitable[RunTerms]]:
    server = run_file.server

    async def read() -> RunTerms:
        async with db.read() as connection:
            first = (await versions.digests(connection)).get(0)
        return RunTerms(
            run_id=run.run_id,
            name=run.name,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
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
        )

    return read

"""`coordinator serve`: puts the rooms together and keeps them running until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from coordinator.admission import Limits
from coordinator.config import RunFile, VerificationSection, make_run_id, model_shape
from coordinator.dashboard.views import Views
from coordinator.feeding import Feeding
from coordinator.grpc_server import Listener, serve_trainer, serve_workers
from coordinator.hardware import HardwareRules
from coordinator.intake import Intake
from coordinator.joining import Joining
from coordinator.leasing import EnvironmentShare, Leasing
from coordinator.metrics import Metrics
from coordinator.migrate import upgrade
from coordinator.service import TrainerService, WorkerService
from coordinator.store import run as run_store
from coordinator.store import versions
from coordinator.store.database import Database
from coordinator.store.run import Run
from coordinator.tokenizer import RunTokenizer
from coordinator.verification.classes import classes_of
from coordinator.verification.thresholds import Thresholds
from environments.registry import make_environment
from protocol.errors import UserError
from protocol.signing import Identity
from protocol.terms import PROTOCOL_MAX, PROTOCOL_MIN, RunTerms

log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the coordinator listens, as it turned out (a configured port of 0 means any free one)."""

    grpc: str
    http: str
    trainer: str


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
    leasing = Leasing(
        db,
        secret=run.secret,
        scheduling=scheduling,
        environments=environment_shares(run_file),
        tokenize=RunTokenizer(run_file.model.path).encode,
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
        joining=Joining(db, secret=run.secret, precisions=limits.precisions, hardware_rules=rules),
        leasing=leasing,
        intake=intake,
        temperature=run_file.sampling.temperature,
        eos_token_ids=run_file.sampling.eos_token_ids,
        metrics=metrics,
    )
    trainer = TrainerService(
        Feeding(db, run_id=run.run_id, trainer_key=run.trainer_key, scheduling=scheduling),
        run_id=run.run_id,
        temperature=run_file.sampling.temperature,
        scheduling=scheduling,
    )
    server = run_file.server
    public = await serve_workers(
        workers, secret=run.secret, host=server.host, port=server.grpc_port, max_payload_bytes=server.max_payload_bytes
    )
    try:
        private = await serve_trainer(trainer, token=trainer_token, host=server.trainer_host, port=server.trainer_port)
        try:
            views = Views(
                db,
                metrics,
                _terms_reader(run_file, run, db, identity, public, limits.precisions),
                probation_rollouts=run_file.scheduling.probation_rollouts,
            )
            runner = web.AppRunner(views.application(), access_log=None)
            await runner.setup()
            try:
                http_port = await _listen(runner, server.host, server.http_port)
                on_ready(
                    Addresses(
                        f"{server.host}:{public.port}",
                        f"http://{server.host}:{http_port}",
                        f"{server.trainer_host}:{private.port}",
                    )
                )
                await _sweep(leasing, stop)
            finally:
                await runner.cleanup()
        finally:
            await private.stop(_GRACE_S)
    finally:
        await public.stop(_GRACE_S)


async def _listen(runner: web.AppRunner, host: str, port: int) -> int:
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} (server.http_port): {error.strerror}; choose another"
        ) from None
    return int(runner.addresses[0][1])


async def _sweep(leasing: Leasing, stop: asyncio.Event) -> None:
    """Free overdue leases every second, also while no worker asks; returns when `stop` is set."""
    while not stop.is_set():
        try:
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
    run_file: RunFile, run: Run, db: Database, identity: Identity, public: Listener, precisions: tuple[str, ...]
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
            grpc_endpoints=(f"{server.advertise_host}:{public.port}",),
            relays=run_file.shardcast.relays,
            coordinator_key=identity.key_id,
            trainer_key=run.trainer_key,
            model=run_file.model.name,
            model_digest=first,
            temperature=run_file.sampling.temperature,
            eos_token_ids=run_file.sampling.eos_token_ids,
            max_tokens=run_file.max_tokens,
            max_prompt_tokens=server.max_prompt_tokens,
            max_staleness=run_file.scheduling.max_staleness,
            lease_term_s=run_file.scheduling.lease_term_s,
            precision_classes=precisions,
        )

    return read

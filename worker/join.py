"""`worker join`: puts identity, weights, engine and loops together, and runs them."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from coordinator.client import Trust, WorkerClient, fetch_terms
from environments.turns import require_tool
from protocol import keyfile
from protocol.declaration import BF16, Declaration, hardware_class
from protocol.errors import UserError
from protocol.signing import short_id
from protocol.terms import RunTerms
from protocol.trust import is_loopback
from shardcast.client import ShardcastClient
from shardcast.swarm import Swarm, SwarmConfig
from worker import console, preflight
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.hardware import (
    default_concurrency,
    default_enforce_eager,
    default_kv_cache_gib,
    describe,
    devices,
    native_dtype,
)
from worker.loop import Worker
from worker.outbox import Outbox
from worker.pins import check_pins
from worker.status import Status
from worker.vllm_engine.installed import require_vllm
from worker.weights import WeightsFollower
from worker.within_memory import samples_at_once

log = logging.getLogger(__name__)

EngineFactory = Callable[[WorkerConfig, RunTerms], Engine]


async def join(
    url: str, config: WorkerConfig, make_engine: EngineFactory, *, as_json: bool, ca: Path | None = None
) -> None:
    """Work for the run behind `url` until stopped. Raises UserError for what the user can mend."""
    trust = Trust(url, ca)
    if not trust.encrypted and not is_loopback(trust.host):
        _say(f"{trust.url} is not encrypted: whoever is on the way can read and change what is said", as_json)
    terms = await fetch_terms(trust, on_retry=lambda text: _say(text, as_json))
    identity, made = keyfile.load_or_create(config.identity_path)
    _say(f"{'made' if made else 'using'} the identity {short_id(identity.key_id)} in {config.identity_path}", as_json)
    if check_pins(config.home / "pins", trust.url, terms):
        _say(f"pinned the keys of {trust.url}", as_json)
    if not terms.relays:
        raise UserError(f"{trust.url} names no relay to take weights from: tell its operator to set shardcast.relays")
    require_admitted(config.precision, terms, trust.url)
    require_tools(terms, trust.url)
    at_once = config.concurrency or default_concurrency(terms.max_tokens)
    config = config.model_copy(update={"concurrency": at_once})
    engine = make_engine(config, terms)
    _say(f"joining {terms.name}: {terms.model}, staleness ≤ {terms.max_staleness}", as_json)
    status = Status()
    run_folder = config.home / "runs" / terms.run_id
    client = WorkerClient(
        terms,
        identity,
        name=config.name,
        hardware=describe(),
        software=f"rollswarm {installed_version()}",
        declaration=Declaration(config.precision, hardware_class(devices(), engine.build)),
        on_outage=lambda text: log.warning("%s", text, extra={"action": "outage"}),
        trust=trust,
        invite=config.invite,
    )
    shardcast = ShardcastClient(
        terms.relays,
        (terms.trainer_key,),
        run_folder / "weights",
        run_id=terms.run_id,
        max_mbit=config.max_download_mbit,
        swarm=_swarm(config),
    )
    try:
        await preflight.look(shardcast, config, lambda text: _say(text, as_json))
    except UserError:
        await client.close()
        await shardcast.close()
        raise
    worker = Worker(
        terms,
        identity=identity,
        client=client,
        engine=engine,
        follower=WeightsFollower(shardcast, terms, status),
        outbox=Outbox(run_folder / "outbox"),
        status=status,
        concurrency=at_once,
        drain_s=config.drain_s,
        precision=config.precision,
    )
    _stop_on_signals(worker)
    face = asyncio.create_task(console.show(status, terms, worker=short_id(identity.key_id), as_json=as_json))
    try:
        with samples_at_once(at_once):
            await worker.run()
    finally:
        face.cancel()
        await asyncio.gather(face, return_exceptions=True)
        await client.close()
        await shardcast.close()
    console.say(status, as_json=as_json)  # how it ended: the last line was printed before the last receipts came


def require_admitted(precision: str, terms: RunTerms, url: str) -> None:
    """Raise UserError unless the run takes rollouts of this precision: before anything is fetched or loaded."""
    if precision not in terms.precision_classes:
        admitted = ", ".join(terms.precision_classes) or "none at all"
        raise UserError(
            f"{url} admits precision {admitted}, not {precision}: join with --precision "
            f"{(*terms.precision_classes, BF16)[0]}, or ask its operator to calibrate and admit {precision}"
        )


def require_tools(terms: RunTerms, url: str) -> None:
    """Raise UserError unless this machine has the tools that the run's tasks call: before anything is fetched or loaded."""
    for rules in terms.turns:
        require_tool(rules, url)


def _swarm(config: WorkerConfig) -> Swarm | None:
    """Only if this machine's owner asked for peers."""
    if not config.peers:
        return None
    return Swarm(SwarmConfig(config.peer_port, config.max_upload_mbit))


def _stop_on_signals(worker: Worker) -> None:
    """The first SIGTERM or Ctrl-C drains; a second ends at once (leases then expire by themselves)."""
    loop = asyncio.get_running_loop()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            _die()
        asked = True
        print("finishing what is begun; once more to stop at once", file=sys.stderr, flush=True)
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


def _die() -> NoReturn:
    raise KeyboardInterrupt


def _say(text: str, as_json: bool) -> None:
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def installed_version() -> str:
    try:
        return version("rollswarm")
    except PackageNotFoundError:
        return "unknown"


def vllm_engine(config: WorkerConfig, terms: RunTerms) -> Engine:
    """The real engine: vLLM for GPUs, or its CPU build."""
    require_vllm()
    from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig

    return VllmEngine(
        VllmEngineConfig(
            max_num_seqs=config.concurrency or default_concurrency(terms.max_tokens),
            dtype=native_dtype() if config.dtype == "auto" else config.dtype,
            max_model_len=config.max_model_len or terms.max_prompt_tokens + terms.max_tokens,
            enforce_eager=default_enforce_eager() if config.enforce_eager is None else config.enforce_eager,
            kv_cache_gib=default_kv_cache_gib() if config.kv_cache_gib is None else config.kv_cache_gib,
            gpu_memory_utilization=config.gpu_memory_utilization,
            precision=config.precision,
            tensor_parallel=config.tensor_parallel,
        )
    )


def reference_engine(config: WorkerConfig, terms: RunTerms) -> Engine:
    """transformers, one sequence at a time: slow, and the definition of what is right. For tests."""
    from worker.reference_engine import ReferenceEngine

    if config.precision != BF16:
        raise UserError(
            f"the reference engine computes in bf16 or float32, not in {config.precision}: use --engine vllm"
        )
    return ReferenceEngine(native_dtype() if config.dtype == "auto" else config.dtype)

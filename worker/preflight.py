"""Before a worker downloads anything: what the run's model needs, and whether this machine has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from protocol.errors import RollswarmError, UserError
from shardcast.client import ShardcastClient
from worker.config import WorkerConfig, chosen_gpus
from worker.machine import Machine, measure
from worker.need import Need, need_of, shortages

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0


async def look(shardcast: ShardcastClient, config: WorkerConfig, say: Callable[[str], None]) -> None:
    """Say what this machine is and what the run needs. Raises UserError if it doesn't fit, with all reasons and remedies.

    A run that has no version yet, or relays that are away for now, are no reason to stop: the worker waits for them.
    """
    machine = await asyncio.to_thread(measure, config.home, chosen_gpus())
    say(f"this machine: {machine.words}")
    if machine.driver_problem:
        trouble = f"the GPU driver says: {machine.driver_problem}; `worker doctor` tells what to do"
        if _build_for_gpus():
            raise UserError(trouble)
        say(trouble)
    need = await _need(shardcast, config.kv_cache_gib)
    if need is None:
        say("what the model needs is not known yet: no version is published, or no relay answers")
        return
    say(f"the run needs {need.words}")
    check_fit(machine, need, str(config.home))


def _build_for_gpus() -> bool:
    """Whether the vLLM here is the one that can't do without a GPU."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


def check_fit(machine: Machine, need: Need, folder: str) -> None:
    """Raises UserError if the machine can't work for the run."""
    found = shortages(machine, need, folder)
    if found:
        raise UserError("; ".join(f"{each.what}: {each.remedy}" for each in found))


async def _need(shardcast: ShardcastClient, kv_cache_gib: float | None) -> Need | None:
    """Of the newest version, from its signed manifest."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            head = await shardcast.head(wait_s=0.0)
            if head is None:
                return None
            manifest, _ = await shardcast.manifest(head.version, head.manifest_digest)
    except (RollswarmError, TimeoutError) as error:
        log.info("the size of the model is not known yet: %s", error, extra={"action": "preflight"})
        return None
    return need_of(manifest.total_bytes, kv_cache_gib)

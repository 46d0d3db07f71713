"""`trainer run`: reads the run file and the keys, connects, and trains until done or stopped."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from pathlib import Path

import torch

from coordinator import trainer_token
from coordinator.client import TrainerClient
from protocol import keyfile
from protocol.errors import OurFault, UserError
from protocol.signing import SignedEnvelope
from shardcast.publish import key_rotations
from trainer.config import load_trainer_run
from trainer.crew import Crew
from trainer.loop import Trainer
from trainer.step import StepResult
from trainer.steplog import open_logs
from trainer.team import Team

log = logging.getLogger(__name__)


async def run_trainer(path: Path, environment: Mapping[str, str]) -> None:
    """Train as the run file says. `environment` may hold torchrun's variables.

    SIGTERM ends after the current step, with a checkpoint.
    """
    run = load_trainer_run(path)
    try:
        identity = keyfile.load(run.trainer.key)
    except FileNotFoundError:
        raise UserError(f"there is no trainer key {run.trainer.key}: `trainer identity` makes one") from None
    token = trainer_token.load(run.trainer.token)
    if run.trainer.threads is not None:
        torch.set_num_threads(run.trainer.threads)
    team = Team.join(environment)
    if not team.leads:
        _, temperature = team.tell(None)
        await asyncio.to_thread(lambda: Crew(run, temperature, team).follow())
        team.leave()
        return
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    rotations = await _rotations(run.trainer.origin)
    logs = open_logs(run.trainer.tensorboard, run.trainer.wandb_project, run.model_path.name)

    def on_step(batch: int, result: StepResult) -> None:
        _log_step(batch, result)
        logs.write(batch, result.metrics)

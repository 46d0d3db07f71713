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
from trainer.config import TrainerRun, load_trainer_run
from trainer.crew import Crew, objective_of
from trainer.loop import Trainer
from trainer.periodic_evaluation import EvaluationPlan, PeriodicEvaluation
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
    objective_of(run.trainer)  # a mistake there is said before anything is waited for
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
    client = TrainerClient(
        run.trainer.coordinator, token, key_rotations=rotations, stop=stop, ca=run.trainer.coordinator_ca
    )
    logs = open_logs(run.trainer.tensorboard, run.trainer.wandb_project, run.model_path.name)

    trained = 0

    def on_step(batch: int, result: StepResult) -> None:
        nonlocal trained
        trained = batch
        _log_step(batch, result)
        logs.write(batch, result.metrics)

    evaluation = _evaluation(run, path)
    try:
        await Trainer(run, client, identity, stop, team, evaluation).run(on_step)
        if evaluation is not None:
            await evaluation.finish(stop)
            logs.write(trained, _log_evaluation(evaluation.collect()))
    finally:
        if evaluation is not None:
            await evaluation.close()
        logs.close()
        await client.close()
        team.leave()


def _evaluation(run: TrainerRun, path: Path) -> PeriodicEvaluation | None:
    config = run.trainer
    if not config.evaluate_every:
        return None
    return PeriodicEvaluation(
        EvaluationPlan(
            config=path,
            model=run.model_path,
            out=config.evaluations,
            every=config.evaluate_every,
            tasks=config.evaluate_tasks,
            samples=config.evaluate_samples,
        )
    )


async def _rotations(origin: str) -> list[SignedEnvelope]:
    """The statements that rotated the trainer's key, as the origin keeps them. Without an origin there are none yet."""
    try:
        return await key_rotations(origin)
    except OurFault as error:
        log.warning("%s: taking it that the trainer's key was never rotated", error, extra={"action": "rotations"})
        return []


def _log_evaluation(numbers: dict[str, float]) -> dict[str, float]:
    """Say what ended after the last step, whose report can't tell it any more."""
    if numbers:
        measures = [name for name in numbers if "@" in name and not name.endswith(("/low", "/high"))]
        means = ", ".join(f"{name.removeprefix('eval/')} {numbers[name]:.3f}" for name in measures)
        log.info("version %d is evaluated: %s", numbers["eval/version"], means, extra={"action": "evaluation"})
    return numbers


def _log_step(batch: int, result: StepResult) -> None:
    numbers = result.metrics
    log.info(
        "step %d: reward %.3f, grad norm %.3f, KL %.4f, %d trained, %.1f s",
        batch,
        numbers["reward_mean"],
        numbers.get("grad_norm", 0.0),
        numbers.get("approx_kl_fresh", 0.0),
        len(result.trained),
        numbers["step_seconds"],
        extra={"action": "step"},
    )

"""The rooms of one run, put together from its run file: who leases, who takes in, who feeds, and the services before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.admission import Limits
from coordinator.config import RunFile, VerificationSection
from coordinator.feeding import Feeding
from coordinator.grouping import EnvironmentShare
from coordinator.hardware import HardwareRules
from coordinator.intake import Intake
from coordinator.leasing import Leasing
from coordinator.metrics import Metrics
from coordinator.multi_turn import run_turns
from coordinator.registration import Joining
from coordinator.scheduling import SERVING, Scheduling
from coordinator.service import TrainerService, WorkerService
from coordinator.store.database import Database
from coordinator.store.run import Run
from coordinator.verification.thresholds import Thresholds
from environments.registry import make_environment
from protocol.signing import Identity
from protocol.tokenizer import RunTokenizer
from protocol.turns import Turns


@dataclass(frozen=True, slots=True)
class Rooms:
    """What one process serves a run with."""

    tokenizer: RunTokenizer
    leasing: Leasing
    intake: Intake
    feeding: Feeding
    workers: WorkerService
    trainer: TrainerService
    limits: Limits
    turns: Mapping[str, Turns]

    def use(self, scheduling: Scheduling) -> None:
        """Go by these numbers from now on, everywhere."""
        for room in (self.leasing, self.feeding, self.trainer):
            room.use(scheduling)
        self.intake.use(replace(self.limits, max_staleness=scheduling.max_staleness))


def make_rooms(
    run_file: RunFile,
    run: Run,
    db: Database,
    identity: Identity,
    limits: Limits,
    rules: HardwareRules,
    metrics: Metrics,
) -> Rooms:
    """Raises UserError if the tokenizer or an environment can't be used."""
    scheduling, sampling = run_file.scheduling.scheduling(), run_file.sampling
    tokenizer = RunTokenizer(run_file.model.path)
    turns = run_turns(run_file, tokenizer)
    leasing = Leasing(
        db,
        secret=run.secret,
        scheduling=scheduling,
        environments=environment_shares(run_file),
        tokenize=tokenizer.encode,
        max_prompt_tokens=run_file.server.max_prompt_tokens,
        hardware_rules=rules,
        freshness=SERVING,
    )
    intake = Intake(
        db,
        identity=identity,
        limits=limits,
        temperature=sampling.temperature,
        eos_token_ids=sampling.eos_token_ids,
        max_strikes=run_file.verification.max_strikes,
        max_payload_bytes=run_file.server.max_payload_bytes,
        turns=turns,
    )
    feeding = Feeding(db, run_id=run.run_id, trainer_key=run.trainer_key, scheduling=scheduling)
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
        temperature=sampling.temperature,
        eos_token_ids=sampling.eos_token_ids,
        metrics=metrics,
        turns=turns,
    )
    trainer = TrainerService(feeding, run_id=run.run_id, temperature=sampling.temperature, scheduling=scheduling)
    return Rooms(tokenizer, leasing, intake, feeding, workers, trainer, limits, turns)


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


def hardware_rules(settings: VerificationSection, classes: Mapping[str, Thresholds]) -> HardwareRules:
    """Which hardware is taken at its word: what the run file names, and what the thresholds were measured on."""
    return HardwareRules(
        patterns=settings.hardware,
        calibrated={name: thresholds.hardware for name, thresholds in classes.items()},
        shadow_rollouts=settings.shadow_rollouts,
        shadow_classes=settings.shadow_classes,
    )

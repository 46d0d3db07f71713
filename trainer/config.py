"""The `[trainer]` section of the run file, and the few fields of other sections that the trainer needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from protocol.errors import UserError, explain_validation
from protocol.manifest import DEFAULT_SHARD_BYTES
from protocol.runfile import read_run_file
from trainer.alarms import Alarms

_NUMBERS = (int, float, int | None, float | None)  # types of fields that take neither true nor "2"


class TrainerConfig(BaseModel):
    """How the run trains. Paths are relative to the run file; docs/run-file.md says what each field means.

    `coordinator`: its private listener, `host:port`, or `https://host:port` for TLS; `coordinator_ca`: the authority of its
    certificate, if it is not a public one.
    `versions`: policy versions to publish after version 0, then the trainer ends. `learning_rate` etc.: trainer.optim.
    `behaviour_tolerance`: how far, in nats, a worker's log-probs may differ from the trusted ones and still be used;
    0 uses the trusted ones alone. `token_budget`: padded tokens per microbatch. `full_every`: each so-manyth version is
    published without a delta; the others carry the difference to the one before. `packed`: versions can also be had
    without what is redundant in bf16, a third less. `old_logprobs`: what stands for the
    behaviour policy in the loss: `trusted` (the verifier's), `snapshot` (the step-start policy's), `ewma`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    coordinator: str = "127.0.0.1:7449"
    coordinator_ca: Path | None = None
    origin: str = "http://127.0.0.1:8600"
    origin_data: Path = Path("origin")
    key: Path = Path("trainer.key")
    token: Path = Path("trainer.token")
    checkpoints: Path = Path("checkpoints")
    versions: int = Field(100, ge=1)
    loss: str = "ipo"
    loss_params: dict[str, Any] = {}
    modifiers: tuple[dict[str, Any], ...] = ()
    regularizers: tuple[dict[str, Any], ...] = ()
    advantage: str = "dr_grpo"
    baseline_decay: float = Field(0.95, ge=0, lt=1)
    critic_learning_rate: float = Field(1e-3, gt=0)
    critic_updates: int = Field(2, ge=1)
    critic_lambda: float = Field(0.0, ge=0, le=1)
    keep_zero_advantage: bool = False
    pass_rate: tuple[float, float] = (0.0, 1.0)
    mask_overlong: bool = False
    length_target: int = Field(0, ge=0)
    length_penalty: float = Field(3e-4, ge=0)
    old_logprobs: str = Field("trusted", pattern="^(trusted|snapshot|ewma)$")
    ewma_decay: float | None = Field(None, gt=0, lt=1)
    teacher: Path | None = None
    updates_per_batch: int = Field(1, ge=1)
    behaviour_tolerance: float = Field(0.0, ge=0)
    optimizer: str = Field("adamw", pattern="^(adamw|muon)$")
    learning_rate: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    skip_grad_norm: float = Field(math.inf, gt=0, allow_inf_nan=True)
    max_skipped_steps: int = Field(5, ge=1)
    alarm_effective_sample_size: float = Field(0.3, ge=0, le=1)
    alarm_kl: float = Field(0.3, gt=0, allow_inf_nan=True)
    alarm_fresh_kl: float = Field(0.01, gt=0, allow_inf_nan=True)
    alarm_entropy_share: float = Field(0.1, ge=0, le=1)
    token_budget: int = Field(4096, ge=16)
    share_prompts: bool = True
    publish_every: int = Field(1, ge=1)
    checkpoint_every: int = Field(1, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    evaluate_every: int = Field(0, ge=0)
    evaluate_tasks: int = Field(100, ge=1)
    evaluate_samples: int = Field(4, ge=1)
    evaluations: Path = Path("evaluations")
    tensorboard: Path | None = Path("tensorboard")
    wandb_project: str = ""
    lora_rank: int = Field(0, ge=0)
    lora_alpha: float = Field(0.0, ge=0)
    recompute_activations: bool = False
    dtype: str = Field("float32", pattern="^(float32|bfloat16)$")
    device: str = "cpu"
    threads: int | None = Field(None, ge=1)
    seed: int = 0
    full_every: int = Field(10, ge=1)
    packed: bool = True
    shard_bytes: int = Field(DEFAULT_SHARD_BYTES, ge=1 << 16)

    def alarms(self) -> Alarms:
        """When the metrics of a step are a reason to look."""
        return Alarms(
            effective_sample_size=self.alarm_effective_sample_size,
            kl=self.alarm_kl,
            fresh_kl=self.alarm_fresh_kl,
            entropy_share=self.alarm_entropy_share,
        )

    @field_validator("tensorboard", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("advantage")
    @classmethod
    def _known_advantage(cls, value: str) -> str:
        from trainer.advantage import check_advantage

        check_advantage(value)
        return value

    @field_validator("pass_rate")
    @classmethod
    def _a_band(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not value[0] <= value[1]:
            raise ValueError("the band must be [low, high] with low ≤ high")
        return value

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if field is not None and field.annotation in _NUMBERS and isinstance(value, bool | str):
                raise ValueError(f"{name} must be a number, got {value!r}")
        return values

    @model_validator(mode="after")
    def _a_rank_to_scale(self) -> TrainerConfig:
        if self.lora_alpha and not self.lora_rank:
            raise ValueError("lora_alpha scales adapters, and without lora_rank there are none: set both or neither")
        return self

    @model_validator(mode="after")
    def _something_for_muon(self) -> TrainerConfig:
        if self.optimizer == "muon" and self.lora_rank:
            raise ValueError(
                'optimizer = "muon" is for whole matrices, and with lora_rank only adapters train: leave out one of them'
            )
        return self

    @model_validator(mode="after")
    def _one_baseline(self) -> TrainerConfig:
        by_variance = any(entry.get("name") == "vcpo" and entry.get("baseline") is True for entry in self.modifiers)
        if by_variance and self.advantage == "critic":
            raise ValueError(
                'advantage = "critic" and vcpo with baseline = true are two baselines: leave out one of them'
            )
        return self

    @model_validator(mode="after")
    def _an_average_to_compare_with(self) -> TrainerConfig:
        if self.old_logprobs == "ewma" and self.ewma_decay is None:
            raise ValueError('old_logprobs = "ewma" needs ewma_decay, say 0.9')
        return self


class TrainerRun(BaseModel):
    """What the trainer takes from a run file; the coordinator checks the rest."""

    model_config = ConfigDict(frozen=True)

    model_path: Path
    trainer: TrainerConfig


def load_trainer_run(path: Path) -> TrainerRun:
    """Read a run file. Raises UserError that names the file and the field."""
    values = read_run_file(path)
    model = values.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("path"), str):
        raise UserError(f"{path}: model.path: the folder of the initial policy is missing")
    section = values.get("trainer", {})
    if not isinstance(section, dict):
        raise UserError(f"{path}: [trainer] must be a table, got {section!r}")
    try:
        config = TrainerConfig(**section)
    except ValidationError as error:
        errors = [{**item, "loc": ("trainer", *item["loc"])} for item in error.errors()]
        raise UserError(explain_validation(errors, str(path))) from None
    folder = path.resolve().parent
    paths = {
        name: folder / getattr(config, name) for name in ("origin_data", "key", "token", "checkpoints", "evaluations")
    }
    for name in ("coordinator_ca", "teacher", "tensorboard"):
        if getattr(config, name) is not None:
            paths[name] = folder / getattr(config, name)
    return TrainerRun(model_path=folder / model["path"], trainer=config.model_copy(update=paths))

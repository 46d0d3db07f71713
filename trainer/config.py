"""The `[trainer]` section of the run file, and the few fields of other sections that the trainer needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from protocol.errors import UserError, explain_validation
from protocol.runfile import read_run_file


class TrainerConfig(BaseModel):
    """How the run trains. Paths are relative to the run file.

    `coordinator`: its private listener, `host:port`, or `https://host:port` for TLS; `coordinator_ca`: the authority of its
    certificate, if it is not a public one.
    `versions`: policy versions to publish after version 0, then the trainer ends. `learning_rate` etc.: trainer.optim.
    `behaviour_tolerance`: how far, in nats, a worker's log-probs may differ from the trusted ones and still be used;
    0 uses the trusted ones alone. `token_budget`: padded tokens per microbatch. `full_every`: each so-manyth version is
    published without a delta; the others carry the difference to the one before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    advantage: str = "dr_grpo"
    behaviour_tolerance: float = Field(0.0, ge=0)
    learning_rate: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    max_skipped_steps: int = Field(5, ge=1)
    token_budget: int = Field(4096, ge=16)
    share_prompts: bool = True
    checkpoint_every: int = Field(1, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    dtype: str = Field("float32", pattern="^(float32|bfloat16)$")
    device: str = "cpu"
    threads: int | None = Field(None, ge=1)
    seed: int = 0
    full_every: int = Field(10, ge=1)
    shard_bytes: int = Field(8 << 20, ge=1 << 16)

    @field_validator("advantage")
    @classmethod
    def _known_advantage(cls, value: str) -> str:
        from trainer.advantage import make_advantage

        make_advantage(value)
        return value


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
    try:
        config = TrainerConfig(**values.get("trainer", {}))
    except ValidationError as error:
        errors = [{**item, "loc": ("trainer", *item["loc"])} for item in error.errors()]
        raise UserError(explain_validation(errors, str(path))) from None
    folder = path.resolve().parent
    paths = {name: folder / getattr(config, name) for name in ("origin_data", "key", "token", "checkpoints")}
    if config.coordinator_ca is not None:
        paths["coordinator_ca"] = folder / config.coordinator_ca
    return TrainerRun(model_path=folder / model["path"], trainer=config.model_copy(update=paths))

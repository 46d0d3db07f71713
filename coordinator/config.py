"""The run file (TOML), as the coordinator and the verifier read it. The trainer reads its own section of the same file.

Relative paths are relative to the run file. Unknown fields are refused by name, so a typo never goes unnoticed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coordinator.hardware import DEFAULT_HARDWARE
from coordinator.joining import JoinRule
from coordinator.limits import DoorLimits, Rate
from coordinator.scheduling import Scheduling
from protocol.declaration import BF16, PRECISIONS
from protocol.errors import UserError, explain_validation
from protocol.joining import WORK, WORK_BITS_MAX
from protocol.runfile import read_run_file
from protocol.signing import public_key

if TYPE_CHECKING:
    from coordinator.tracing import Tracing

_RUN_ID_LENGTH = 64


def check_relay(url: str) -> None:
    """Raises ValueError if weights can't be had from there: workers would be told of it and give up."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{url!r} is no relay's URL; it reads http://host:port or https://host")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(_Section):
    """What the run is called and where its state lives."""

    name: str = Field(min_length=1, max_length=64)
    database: str = "sqlite+aiosqlite:///run.db"
    trainer_key: str

    @field_validator("trainer_key")
    @classmethod
    def _is_key(cls, value: str) -> str:
        try:
            public_key(value)
        except Exception as error:
            raise ValueError(f"no key id ({error}); `trainer identity` prints it") from None
        return value


class ModelSection(_Section):
    """The policy's Hugging Face folder: tokenizer and config are read here; weights come by SHARDCAST."""

    name: str
    path: Path


class SamplingSection(_Section):
    """How completions are sampled. Temperature only."""

    temperature: float = Field(1.0, gt=0.0, le=10.0)
    eos_token_ids: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _no_truncation(cls, values: Any) -> Any:
        for name in ("top_p", "top_k", "min_p"):
            if isinstance(values, dict) and name in values:
                raise ValueError(
                    f"{name} is refused: truncated supports of old and new policy differ (infinite ratios)"
                )
        return values


class SchedulingSection(_Section):
    """Batch shape, staleness, deadlines. Sizes in samples unless named otherwise, times in seconds."""

    groups_per_batch: int = Field(8, ge=1, le=4096)
    group_size: int = Field(16, ge=1, le=1024)
    min_group: int = Field(2, ge=1)
    max_staleness: int = Field(2, ge=0, le=64)
    lease_term_s: float = Field(60.0, gt=0)
    group_deadline_s: float = Field(300.0, gt=0)
    newcomer_share: float = Field(0.5, gt=0, le=1)
    probation_rollouts: int = Field(32, ge=0)
    worker_share: float = Field(1.0, gt=0, le=1)
    newcomer_address_share: float = Field(0.5, gt=0, le=1)

    @model_validator(mode="after")
    def _group_fits(self) -> SchedulingSection:
        if self.min_group > self.group_size:
            raise ValueError(f"min_group ({self.min_group}) exceeds group_size ({self.group_size})")
        return self

    def scheduling(self) -> Scheduling:
        return Scheduling(**self.model_dump())


class EnvironmentSection(_Section):
    """One environment of the mixture, known by `name` (unique) and of `kind` (its name if left out).

    `weight`: share of groups. `params`: the environment's own.
    """

    name: str = Field(min_length=1, max_length=64)
    kind: str = ""
    weight: float = Field(1.0, gt=0)
    max_tokens: int = Field(ge=1, le=131072)
    params: dict[str, Any] = {}


class VerificationSection(_Section):
    """How rollouts are verified. `thresholds_file`: what `coordinator calibrate` wrote; or `thresholds`, the same in place.

    `classes`: a thresholds file for each further precision class. `hardware` and `shadow_…`: coordinator.hardware.
    """

    audit_fraction: float = Field(1.0, gt=0, le=1)
    max_strikes: int = Field(3, ge=1)
    dtype: str = Field("bfloat16", pattern="^(bfloat16|float32)$")
    resident_versions: int = Field(2, ge=1)
    claim_rollouts: int = Field(64, ge=1, le=4096)
    claim_term_s: float = Field(120.0, gt=0)
    threads: int = Field(1, ge=1)
    engine: str = Field("transformers", pattern="^(transformers|vllm)$")
    kv_cache_gib: float | None = Field(None, gt=0)
    tensor_parallel: int = Field(1, ge=1)
    time_limit_s: float = Field(600.0, gt=0)
    memory_gib: float | None = Field(None, gt=0)
    thresholds: dict[str, Any] = {}
    thresholds_file: Path | None = None
    classes: dict[str, Path] = {}
    hardware: tuple[str, ...] = DEFAULT_HARDWARE
    shadow_rollouts: int = Field(256, ge=0)
    shadow_classes: int = Field(8, ge=0)

    @model_validator(mode="after")
    def _one_source(self) -> VerificationSection:
        if self.thresholds and self.thresholds_file is not None:
            raise ValueError("thresholds and thresholds_file are both given: keep one")
        if (self.thresholds or self.thresholds_file is not None) and BF16 in self.classes:
            raise ValueError("classes.bf16 is what thresholds_file gives: keep one")
        for name in self.classes:
            if name not in PRECISIONS:
                raise ValueError(f"classes.{name} is no precision class: known are {', '.join(PRECISIONS)}")
        return self


class ServerSection(_Section):
    """Listeners. The trainer's stays on loopback unless said otherwise. `advertise_host` is what workers are told.

    `certificate`, `certificate_key`: PEM files, for all listeners but a trainer's on loopback. `ca`: the authority that
    workers pin, if it is not a public one. `insecure`: plaintext elsewhere than on loopback, asked for by name.
    """

    host: str = "127.0.0.1"
    grpc_port: int = Field(7447, ge=0, le=65535)
    http_port: int = Field(7448, ge=0, le=65535)
    trainer_host: str = "127.0.0.1"
    trainer_port: int = Field(7449, ge=0, le=65535)
    advertise_host: str = "127.0.0.1"
    certificate: Path | None = None
    certificate_key: Path | None = None
    ca: Path | None = None
    insecure: bool = False
    reflection: bool = False
    max_payload_bytes: int = Field(4 << 20, ge=1024)
    max_prompt_tokens: int = Field(4096, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> ServerSection:
        if (self.certificate is None) != (self.certificate_key is None):
            raise ValueError("certificate and certificate_key go together: one of them is missing")
        if self.ca is not None and self.certificate is None:
            raise ValueError("ca is given without a certificate that it could vouch for")
        if self.insecure and self.certificate is not None:
            raise ValueError("insecure = true contradicts the certificate: keep one of them")
        return self


class LimitsSection(_Section):
    """What one key, one address and all together may ask for; per process. Rates per second, `…_burst` at once."""

    key_rate: float = Field(100.0, gt=0)
    key_burst: float = Field(400.0, ge=1)
    key_calls: int = Field(64, ge=1)
    address_rate: float = Field(400.0, gt=0)
    address_burst: float = Field(2000.0, ge=1)
    address_calls: int = Field(2048, ge=1)
    registration_rate: float = Field(0.5, gt=0)
    registration_burst: float = Field(60.0, ge=1)
    calls: int = Field(8192, ge=1)
    connections: int = Field(16_384, ge=1)
    address_streams: int = Field(8, ge=1)
    streams: int = Field(256, ge=1)

    def door(self) -> DoorLimits:
        return DoorLimits(
            key=Rate(self.key_rate, self.key_burst),
            key_calls=self.key_calls,
            address=Rate(self.address_rate, self.address_burst),
            address_calls=self.address_calls,
            registrations=Rate(self.registration_rate, self.registration_burst),
            calls=self.calls,
            address_streams=self.address_streams,
            streams=self.streams,
        )


class JoinSection(_Section):
    """Who may join: anyone (`open`), who has an invitation (`invite`), or who has done `work_bits` of work (`work`)."""

    door: Literal["open", "invite", "work"] = "open"
    work_bits: int = Field(20, ge=1, le=WORK_BITS_MAX)

    def rule(self) -> JoinRule:
        return JoinRule(self.door, self.work_bits if self.door == WORK else 0)


class StorageSection(_Section):
    """How long payloads are kept, in days: after their training is safe in a checkpoint; after receipt, if not accepted."""

    trained_days: float = Field(7.0, ge=0)
    rejected_days: float = Field(30.0, ge=0)


class TracingSection(_Section):
    """Where traces of rollouts' lives go (OTLP over HTTP); nowhere unless `endpoint` is given. `sample`: share of lives."""

    endpoint: str = ""
    sample: float = Field(1.0, gt=0, le=1)


class ShardcastSection(_Section):
    """Where weights come from. `relays` are told to workers; `sources` are the verifier's own (relays if empty)."""

    relays: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @field_validator("relays", "sources")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            check_relay(url)
        return value


class RunFile(_Section):
    """A whole run file. `trainer` is kept as it is: trainer.config reads it."""

    run: RunSection
    model: ModelSection
    sampling: SamplingSection
    scheduling: SchedulingSection = SchedulingSection()
    environments: tuple[EnvironmentSection, ...] = Field(min_length=1)
    verification: VerificationSection = VerificationSection()
    server: ServerSection = ServerSection()
    join: JoinSection = JoinSection()
    limits: LimitsSection = LimitsSection()
    storage: StorageSection = StorageSection()
    tracing: TracingSection = TracingSection()
    shardcast: ShardcastSection = ShardcastSection()
    trainer: dict[str, Any] = {}

    @model_validator(mode="after")
    def _names_differ(self) -> RunFile:
        names = [environment.name for environment in self.environments]
        if len(set(names)) != len(names):
            raise ValueError("environments: two have the same name")
        return self

    @property
    def max_tokens(self) -> int:
        return max(environment.max_tokens for environment in self.environments)


def load_run_file(path: Path) -> RunFile:
    """Read and check a run file. Raises UserError that names the file, the field and what to do."""
    values = read_run_file(path)
    try:
        run_file = RunFile(**values)
    except ValidationError as error:
        raise UserError(explain_validation(error.errors(), str(path))) from None
    return _resolve(run_file, path.resolve().parent)


def _resolve(run_file: RunFile, folder: Path) -> RunFile:
    """Make relative paths relative to the run file's folder."""
    database = run_file.run.database
    thresholds_file = run_file.verification.thresholds_file
    server = run_file.server
    prefix = "sqlite+aiosqlite:///"
    if database.startswith(prefix) and not database.startswith(prefix + "/"):
        database = prefix + str(folder / database.removeprefix(prefix))
    return run_file.model_copy(
        update={
            "run": run_file.run.model_copy(update={"database": database}),
            "model": run_file.model.model_copy(update={"path": folder / run_file.model.path}),
            "verification": run_file.verification.model_copy(
                update={
                    "thresholds_file": thresholds_file and folder / thresholds_file,
                    "classes": {name: folder / file for name, file in run_file.verification.classes.items()},
                }
            ),
            "server": server.model_copy(
                update={
                    name: path and folder / path
                    for name in ("certificate", "certificate_key", "ca")
                    for path in [getattr(server, name)]
                }
            ),
        }
    )


def make_run_id(name: str, suffix: str) -> str:
    """An id that manifests and folders can carry, made of the run's name and a suffix that is unique."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "run"
    return f"{slug[: _RUN_ID_LENGTH - len(suffix) - 1]}-{suffix}"


def model_shape(path: Path) -> tuple[int, int]:
    """(vocabulary size, hidden size) from the model folder's config.json. Raises UserError if it is no model folder."""
    try:
        config = json.loads((path / "config.json").read_text())
        return int(config["vocab_size"]), int(config["hidden_size"])
    except FileNotFoundError:
        raise UserError(f"model.path: {path} has no config.json; it must be a Hugging Face model folder") from None
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"model.path: cannot read {path / 'config.json'}: {error!r}") from error


def start_tracing(settings: TracingSection, service: str) -> Tracing | None:
    """None where no traces are asked for. Raises UserError if they are and OpenTelemetry is not installed."""
    if not settings.endpoint:
        return None
    try:
        from coordinator.tracing import Tracing

        return Tracing.to(settings.endpoint, service=service, sample=settings.sample)
    except ImportError as error:
        raise UserError(
            f"tracing.endpoint is given, but {error.name} is not installed: pip install 'rollswarm[otel]'"
        ) from None

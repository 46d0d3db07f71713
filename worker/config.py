"""How a worker is set up on this machine: flags before environment (ROLLSWARM_WORKER_…) before a TOML file before defaults.

The file is ROLLSWARM_WORKER_CONFIG, or rollswarm/worker.toml in the user's configuration folder.
"""

from __future__ import annotations

import difflib
import os
import platform
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from protocol.declaration import BF16, PRECISIONS
from protocol.errors import UserError

_PREFIX = "ROLLSWARM_WORKER_"


def default_home() -> Path:
    """Where identity, pins, outbox and weights are kept."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "rollswarm"


def chosen_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES, None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def config_path() -> Path:
    """The TOML file, whether or not it exists."""
    named = os.environ.get(f"{_PREFIX}CONFIG")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "rollswarm" / "worker.toml"


def file_values() -> dict[str, Any]:
    """What the TOML file says. Raises UserError that names the file, and a field that there is none of."""
    path = config_path()
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        if f"{_PREFIX}CONFIG" in os.environ:
            raise UserError(f"there is no file {path}: mend {_PREFIX}CONFIG, or unset it") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    unknown = sorted(values.keys() - WorkerConfig.model_fields.keys())
    if unknown:
        known = ", ".join(WorkerConfig.model_fields)
        raise UserError(f"{path}: there is no setting {unknown[0]!r}; there are {known}")
    return values


class WorkerConfig(BaseSettings):
    """Every field can be set by a flag of `worker join`, by ROLLSWARM_WORKER_<FIELD>, or in the TOML file."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="ignore", frozen=True)

    home: Path = Field(default_factory=default_home)
    name: str = Field(default_factory=lambda: platform.node()[:64] or "worker", max_length=64)
    dtype: str = Field("auto", pattern="^(auto|bfloat16|float32)$")
    precision: str = Field(BF16, pattern=f"^({'|'.join(PRECISIONS)})$")
    concurrency: int | None = Field(None, ge=1, le=256)  # None: what suits the machine and the run's lengths
    max_model_len: int | None = Field(None, ge=8)
    kv_cache_gib: float | None = Field(None, gt=0)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    tensor_parallel: int = Field(1, ge=1)
    enforce_eager: bool | None = None  # None: what suits the machine
    max_download_mbit: float | None = Field(None, gt=0)
    invite: str = ""
    drain_s: float = Field(30.0, ge=0)
    peers: bool = False  # peers see one another's addresses, so the owner of this machine must ask for it
    peer_port: int = Field(8611, ge=0, le=65535)  # 0: accept no connections, only make them
    max_upload_mbit: float | None = Field(None, gt=0)

    @property
    def identity_path(self) -> Path:
        return self.home / "identity.key"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The first that has a field decides."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, file_values())


def check_environment() -> None:
    """Raise UserError for a variable that looks like a setting and is none: a typo would be passed over in silence."""
    known = {f"{_PREFIX}{name.upper()}" for name in (*WorkerConfig.model_fields, "config")}
    unknown = sorted(name for name in os.environ if name.upper().startswith(_PREFIX) and name.upper() not in known)
    if unknown:
        close = difflib.get_close_matches(unknown[0].upper(), known, 1)
        raise UserError(
            f"there is no setting {unknown[0]}"
            + (f": did you mean {close[0]}?" if close else "; `worker config` shows them")
        )


def origins(flags: Collection[str]) -> dict[str, str]:
    """Where each field's value comes from, in words. `flags`: fields that were given on the command line."""
    environment = {name.upper() for name in os.environ}
    file = file_values()
    found = {}
    for name in WorkerConfig.model_fields:
        variable = f"{_PREFIX}{name.upper()}"
        if name in flags:
            found[name] = "flag"
        elif variable in environment:
            found[name] = variable
        else:
            found[name] = str(config_path()) if name in file else "default"
    return found

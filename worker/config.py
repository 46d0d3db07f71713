"""How a worker is set up on this machine: flags before environment (ROLLSWARM_WORKER_…) before defaults."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from protocol.declaration import BF16, PRECISIONS


def default_home() -> Path:
    """Where identity, pins, outbox and weights are kept."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "rollswarm"


class WorkerConfig(BaseSettings):
    """Every field can be set by a flag of `worker join` or by ROLLSWARM_WORKER_<FIELD>."""

    model_config = SettingsConfigDict(env_prefix="ROLLSWARM_WORKER_", extra="ignore", frozen=True)

    home: Path = Field(default_factory=default_home)
    name: str = Field(default_factory=lambda: platform.node()[:64] or "worker", max_length=64)
    dtype: str = Field("auto", pattern="^(auto|bfloat16|float32)$")
    precision: str = Field(BF16, pattern=f"^({'|'.join(PRECISIONS)})$")
    concurrency: int = Field(8, ge=1, le=256)
    max_model_len: int | None = Field(None, ge=8)
    kv_cache_gib: float | None = Field(None, gt=0)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    tensor_parallel: int = Field(1, ge=1)
    enforce_eager: bool = False
    max_download_mbit: float | None = Field(None, gt=0)
    drain_s: float = Field(30.0, ge=0)
    peers: bool = False  # peers see one another's addresses, so the owner of this machine must ask for it
    peer_port: int = Field(8611, ge=0, le=65535)  # 0: accept no connections, only make them
    max_upload_mbit: float | None = Field(None, gt=0)

    @property
    def identity_path(self) -> Path:
        return self.home / "identity.key"

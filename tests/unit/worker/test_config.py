from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from worker.config import WorkerConfig, default_home


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLSWARM_WORKER_CONCURRENCY", "ROLLSWARM_WORKER_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_flags_come_before_the_environment_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerConfig().concurrency == 8
    monkeypatch.setenv("ROLLSWARM_WORKER_CONCURRENCY", "16")
    assert WorkerConfig().concurrency == 16
    assert WorkerConfig(concurrency=3).concurrency == 3


def test_everything_of_a_worker_lies_in_its_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_home() == tmp_path / "rollswarm"
    assert WorkerConfig().identity_path == tmp_path / "rollswarm" / "identity.key"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home() == tmp_path / ".local" / "share" / "rollswarm"


@pytest.mark.parametrize(
    "field",
    [{"concurrency": 0}, {"concurrency": 257}, {"gpu_memory_utilization": 1.5}, {"kv_cache_gib": 0}, {"drain_s": -1}],
)
def test_nonsense_is_refused(field: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        WorkerConfig(**field)  # type: ignore[arg-type]

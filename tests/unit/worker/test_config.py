from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from protocol.errors import UserError
from worker.config import WorkerConfig, check_environment, config_path, default_home, origins


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLSWARM_WORKER_CONCURRENCY", "ROLLSWARM_WORKER_HOME", "ROLLSWARM_WORKER_CONFIG", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_flags_come_before_the_environment_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerConfig().concurrency is None
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


def test_a_file_comes_after_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_path() == tmp_path / "rollswarm" / "worker.toml"
    assert WorkerConfig().concurrency is None  # there is no file
    config_path().parent.mkdir()
    config_path().write_text('concurrency = 4\nname = "box"\n')
    assert (WorkerConfig().concurrency, WorkerConfig().name) == (4, "box")
    monkeypatch.setenv("ROLLSWARM_WORKER_CONCURRENCY", "5")
    assert WorkerConfig().concurrency == 5
    assert origins(["home"]) | {"home": "flag", "concurrency": "ROLLSWARM_WORKER_CONCURRENCY"} == origins(["home"])
    assert origins([])["name"] == str(config_path())


@pytest.mark.parametrize(
    ("text", "message"),
    [("speed = 9", "no setting 'speed'"), ("concurrency = ", "cannot read"), (None, "there is no file")],
)
def test_a_file_that_can_not_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "mine.toml"
    monkeypatch.setenv("ROLLSWARM_WORKER_CONFIG", str(path))
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        WorkerConfig()


def test_a_variable_that_is_no_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSWARM_WORKER_CONCURRENCY", "16")
    check_environment()
    monkeypatch.setenv("ROLLSWARM_WORKER_CONCURENCY", "16")
    with pytest.raises(UserError, match="CONCURENCY: did you mean ROLLSWARM_WORKER_CONCURRENCY"):
        check_environment()

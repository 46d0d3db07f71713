"""Numbers of steps in event files; a log that fails never stops a training."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from protocol.errors import UserError
from trainer.steplog import StepLogs, open_logs


def test_event_files_hold_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logs = open_logs(tmp_path, "", "run")
    for step in (1, 2):
        logs.write(step, {"reward_mean": step / 4, "alarm/kl": 1.0})
    logs.close()
    logs.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward_mean")] == [(1, 0.25), (2, 0.5)]
    assert len(events.Scalars("alarm/kl")) == 2


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.calls += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise AssertionError("it was given up")


def test_a_log_that_fails_is_said_once_and_given_up(caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    logs = StepLogs([broken])
    logs.write(1, {"a": 1.0})
    logs.write(2, {"a": 1.0})
    logs.close()
    assert broken.calls == 1
    assert "disk full" in caplog.text


def test_a_project_goes_to_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = []
    run = SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: logged.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project, name: run))
    logs = open_logs(None, "project", "run")
    logs.write(3, {"a": 1.0})
    logs.close()
    assert logged == [(3, {"a": 1.0}), "end"]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.split(".")[0] in ("wandb", "tensorboard") or name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install wandb"):
        open_logs(None, "project", "run")
    open_logs(tmp_path, "", "run").write(1, {"a": 1.0})
    assert list(tmp_path.iterdir()) == []

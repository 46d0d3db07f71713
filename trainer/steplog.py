"""Where a step's numbers go besides the coordinator: TensorBoard files, and Weights & Biases if the run names a project.

Losing a log never stops a training: what can't be written is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from protocol.errors import UserError

log = logging.getLogger(__name__)


class StepLog(Protocol):
    """One place for numbers."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a step (batches trained on)."""

    def close(self) -> None:
        """No more will come."""


class TensorBoardLog:
    """Event files below `folder`. A resumed run goes on in the same folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLog:
    """A run of a Weights & Biases project; its credentials and settings are wandb's own."""

    def __init__(self, project: str, name: str) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("trainer.wandb_project is set and wandb is not installed: pip install wandb") from None
        self._run: Any = wandb.init(project=project, name=name)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class StepLogs:
    """All of them, as one."""

    def __init__(self, logs: list[StepLog]) -> None:
        self._logs = logs

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write everywhere; a place that fails is given up, and the training goes on."""
        for each in list(self._logs):
            try:
                each.write(step, numbers)
            except Exception as error:
                log.warning("%s: no more is logged there (%s)", type(each).__name__, error, extra={"action": "steplog"})
                self._logs.remove(each)

    def close(self) -> None:
        """Safe to call twice."""
        while self._logs:
            self._logs.pop().close()


def open_logs(folder: Path | None, wandb_project: str, name: str) -> StepLogs:
    """`folder` None: no TensorBoard. Without the tensorboard package there is none either, which is said."""
    logs: list[StepLog] = []
    if folder is not None:
        try:
            logs.append(TensorBoardLog(folder))
        except ImportError:
            log.info("no TensorBoard files: pip install tensorboard", extra={"action": "steplog"})
    if wandb_project:
        logs.append(WandbLog(wandb_project, name))
    return StepLogs(logs)

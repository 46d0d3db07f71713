"""`trainer run` in processes that begin with everything imported, so that a test can start and kill many of them."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["trainer.run", "trainer.crew", "transformers.models.llama.modeling_llama"])
STOP_S = 30.0


def _train(config: Path, log: Path) -> None:
    """What the process runs: the command's own code, with its output in a file."""
    import asyncio

    from protocol.cli import set_up_logging
    from trainer.run import run_trainer

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    set_up_logging()
    asyncio.run(run_trainer(config, {}))


class ForkedTrainer:
    """One process that trains by the run file `config`. What it says is appended to `log`."""

    def __init__(self, config: Path, log: Path) -> None:
        self.log = log
        self._process = _FORKED.Process(target=_train, args=(config, log), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, as a power cut would. Fails if it has ended by itself."""
        assert self._process.is_alive(), self.last_words()
        self._process.kill()
        self._process.join(STOP_S)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, None if it still runs."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def close(self) -> None:
        """Make sure that it is gone."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_S)
        self._process.close()

    def last_words(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-12:])

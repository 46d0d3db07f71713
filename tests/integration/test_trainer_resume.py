"""A trainer that is killed by SIGKILL, over and over, ends with the very weights of one that never was.

Real processes, the coordinator's own service on a real port, and a real origin. The batches lie ready in a database, of
which both trainings get a copy: nothing that they are fed can differ. What is trained has every state that must be gone on
from: optimizer, critic, averaged weights, drawn tokens.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.feeding import Feeding
from coordinator.grpc_server import serve_trainer
from coordinator.service import TrainerService
from coordinator.store import tables as t
from demo.presets import Ports
from demo.processes import Processes
from protocol import keyfile
from tests.factories import RUN_ID, TEMPERATURE, TRAINER
from tests.integration.forked_trainer import ForkedTrainer
from tests.recorded_batches import begin, copy_of, record
from tests.stored_run import StoredRun
from tests.tiny_model import build_tiny_model

BATCHES = 10
SOON_S = 300.0  # on a busy machine; all of the test takes some 30 s on an idle one
_TOKEN = "a token of the private listener"


class Watched(Feeding):
    """The coordinator's own, which says what the trainer has got to."""

    def __init__(self, run: StoredRun) -> None:
        super().__init__(run.db, run_id=RUN_ID, trainer_key=TRAINER.key_id, scheduling=run.scheduling)
        self._changed = asyncio.Condition()
        self._served = self._reported = self._head = -1

    async def announce(self, *arguments: Any) -> int:
        head = await super().announce(*arguments)
        await self._tell("_head", head)
        return head

    async def pull(self, **arguments: Any) -> Any:
        groups = await super().pull(**arguments)
        await self._tell("_served", arguments["batch"])
        return groups

    async def report(self, **arguments: Any) -> None:
        await super().report(**arguments)
        await self._tell("_reported", arguments["batch"])

    async def version(self, number: int) -> None:
        """Wait until that version is announced."""
        await self._reached("_head", number)

    async def served(self, batch: int) -> None:
        """Wait until that batch, or a later one, is given out."""
        await self._reached("_served", batch)

    async def reported(self, batch: int) -> None:
        """Wait until a step on that batch, or a later one, is reported."""
        await self._reached("_reported", batch)

    async def _tell(self, what: str, number: int) -> None:
        async with self._changed:
            setattr(self, what, number)
            self._changed.notify_all()

    async def _reached(self, what: str, number: int) -> None:
        async with asyncio.timeout(SOON_S), self._changed:
            await self._changed.wait_for(lambda: getattr(self, what) >= number)


class Training:
    """A folder to train in, and the servers beside it."""

    def __init__(self, folder: Path, feeding: Watched) -> None:
        self.folder, self.feeding = folder, feeding

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator[ForkedTrainer]:
        trainer = await asyncio.to_thread(ForkedTrainer, self.folder / "run.toml", self.folder / "trainer.log")
        try:
            yield trainer
        finally:
            await asyncio.to_thread(trainer.close)

    async def to_the_end(self) -> None:
        async with self.trainer() as trainer:
            assert await asyncio.to_thread(trainer.wait, SOON_S) == 0, trainer.last_words()

    def weights(self) -> bytes:
        """Of the last batch's checkpoint."""
        return (self.checkpoints / f"checkpoint-{BATCHES:08d}" / "weights.safetensors").read_bytes()


def _prepare(folder: Path, model: Path, coordinator: int, origin: int) -> None:
    """What a trainer finds in its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(_run_file(model, coordinator, origin))
    (folder / "trainer.token").write_text(_TOKEN)
    keyfile.write(folder / "trainer.key", TRAINER)


@asynccontextmanager
async def served(folder: Path, run: StoredRun, model: Path) -> AsyncIterator[Training]:
    """The coordinator's private listener and an origin, for a training in `folder`."""
    feeding, ports = Watched(run), Ports.free()
    service = TrainerService(feeding, run_id=RUN_ID, temperature=TEMPERATURE, scheduling=run.scheduling)
    listener = await serve_trainer(service, token=_TOKEN, host="127.0.0.1", port=0)
    _prepare(folder, model, listener.port, ports.origin)
    with Processes(folder / "logs") as processes:
        serve = ["--trainer-key", TRAINER.key_id, "--data-dir", str(folder / "origin"), "--port", str(ports.origin)]
        await asyncio.to_thread(processes.start("origin", ["shardcast.main", "origin", *serve]).wait_ready, SOON_S)
        try:
            yield Training(folder, feeding)
        finally:
            await listener.stop(0.0)
            await run.db.close()


def _run_file(model: Path, coordinator: int, origin: int) -> str:
    return f"""
[model]
path = "{model}"
[trainer]
coordinator = "127.0.0.1:{coordinator}"
origin = "http://127.0.0.1:{origin}"
versions = {BATCHES}
checkpoint_every = 2
learning_rate = 1e-3
loss = "klpo"
loss_params = {{ draws = 2 }}
advantage = "critic"
old_logprobs = "ewma"
ewma_decay = 0.9
updates_per_batch = 2
threads = 1
tensorboard = ""
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


async def recording(folder: Path, url: str, model: Path) -> StoredRun:
    """A run with all its batches; its version 0 is the trainer's own, which is killed as soon as it has announced it."""
    run = await begin(url, BATCHES)
    async with served(folder, run, model) as training:
        async with training.trainer() as trainer:
            await training.feeding.version(0)
            trainer.kill()
        await record(run, BATCHES)
    return run


async def kill_within_a_step(training: Training, batch: int, delay_s: float) -> None:
    """Some moments after a batch was given out: within its step, or whatever comes behind it."""
    async with training.trainer() as trainer:
        await training.feeding.served(batch)
        ended = await asyncio.to_thread(trainer.wait, delay_s)
        assert ended is None, trainer.last_words()
        trainer.kill()


async def kill_between_steps(training: Training, batch: int) -> None:
    """When a step was reported, and what comes behind it has not begun."""
    async with training.trainer() as trainer:
        await training.feeding.reported(batch)
        trainer.kill()


async def kill_while_a_checkpoint_is_written(training: Training) -> None:
    """The process is stopped when one is seen, and killed if it is still not whole then."""
    async with training.trainer() as trainer:
        await asyncio.to_thread(_kill_in_a_write, trainer, training.checkpoints)
    assert _unfinished(training.checkpoints), "the write never came to its end"


def _kill_in_a_write(trainer: ForkedTrainer, checkpoints: Path) -> None:
    while trainer.wait(0.0005) is None:
        if not _unfinished(checkpoints):
            continue
        os.kill(trainer.pid, signal.SIGSTOP)
        if _unfinished(checkpoints):
            trainer.kill()
            return
        os.kill(trainer.pid, signal.SIGCONT)
    raise AssertionError(f"no checkpoint was seen being written: {trainer.last_words()}")


def _unfinished(checkpoints: Path) -> list[Path]:
    return list(checkpoints.glob(".checkpoint-*.partial"))


async def versions(run: StoredRun) -> list[tuple[int, str]]:
    """What was announced, in order."""
    found = select(t.policy_versions.c.version, t.policy_versions.c.manifest_digest)
    async with run.db.read() as connection:
        return sorted((row.version, row.manifest_digest) for row in await connection.execute(found))


@pytest.mark.timeout(1200)
async def test_kill_minus_nine_changes_no_bit_of_the_weights(tmp_path: Path, sqlite_url: str, model: Path) -> None:
    recorded = await recording(tmp_path / "recording", sqlite_url, model)
    one = copy_of(tmp_path / "run.db", tmp_path / "one", recorded)
    other = copy_of(tmp_path / "run.db", tmp_path / "other", recorded)
    async with served(tmp_path / "one", one, model) as uninterrupted:
        await uninterrupted.to_the_end()
        published = await versions(one)
    seed = random.SystemRandom().randrange(1 << 32)
    moments = random.Random(seed)
    async with served(tmp_path / "other", other, model) as killed:
        await kill_within_a_step(killed, moments.randrange(1, 3), moments.uniform(0.0, 0.1))
        await kill_while_a_checkpoint_is_written(killed)
        await kill_between_steps(killed, 6)
        await kill_within_a_step(killed, 8, moments.uniform(0.0, 0.1))
        await killed.to_the_end()
        assert await versions(other) == published, f"moments of seed {seed}: {killed.folder}"
    assert [number for number, _ in published] == list(range(BATCHES + 1))
    assert len({digest for _, digest in published}) == BATCHES + 1, "every step changed the weights"
    assert killed.weights() == uninterrupted.weights(), f"moments of seed {seed}"

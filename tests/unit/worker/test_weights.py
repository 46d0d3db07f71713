"""Following the head, with a scripted source; tests/integration and tests/e2e follow real relays."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import SourceFault
from shardcast.client import Progress
from worker import weights as module
from worker.engine import Weights
from worker.status import Status
from worker.weights import WeightsFollower


def digest(version: int) -> str:
    return "sha256:" + f"{version:064x}"


class ScriptedClient:
    """Heads come from a script: a version, None (nothing new in time), or an error; then the source falls silent."""

    def __init__(self, script: Iterable[int | Exception | None], fail_fetch: Iterable[int] = ()) -> None:
        self._script = iter(script)
        self._fail_fetch = list(fail_fetch)
        self.asked: list[int | None] = []
        self.kept: list[set[int]] = []
        self.exhausted = asyncio.Event()

    async def head(self, after: int | None, wait_s: float) -> Any:
        self.asked.append(after)
        for said in self._script:
            if isinstance(said, Exception):
                raise said
            return None if said is None else SimpleNamespace(version=said, manifest_digest=digest(said))
        self.exhausted.set()
        return await asyncio.Event().wait()

    async def fetch(self, version: int, expected: str, on_progress: Any) -> Path:
        if version in self._fail_fetch:
            self._fail_fetch.remove(version)
            raise SourceFault("the relay is gone")
        on_progress(Progress(5, 10))
        return Path(f"/versions/{version}")

    def prune(self, keep: set[int]) -> None:
        self.kept.append(keep)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)


def follower(client: ScriptedClient) -> tuple[WeightsFollower, Status]:
    status = Status()
    return WeightsFollower(client, None, status), status  # type: ignore[arg-type]


async def test_the_first_version_is_waited_for() -> None:
    following, status = follower(ScriptedClient([None, None, 3]))
    assert await following.first() == Weights(3, digest(3), Path("/versions/3"))
    assert status.waiting_for == "the first policy version"
    assert (status.fetch_done, status.fetch_total, status.fetching_version) == (5, 10, None)


async def test_sources_that_fail_are_asked_again() -> None:
    client = ScriptedClient([SourceFault("no source answers"), 1, 1], fail_fetch=[1])
    following, status = follower(client)
    assert (await following.first()).version == 1
    assert client.asked == [None, None, None] and status.fetching_version is None


async def test_every_newer_version_is_handed_on_and_the_one_before_is_kept() -> None:
    client = ScriptedClient([1, None, 4])
    following, _ = follower(client)
    handed: list[Weights] = []

    async def take(weights: Weights) -> None:
        handed.append(weights)

    task = asyncio.create_task(following.follow(Weights(0, digest(0), Path("/versions/0")), take))
    await asyncio.wait_for(client.exhausted.wait(), timeout=10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [weights.version for weights in handed] == [1, 4]
    assert client.asked == [0, 1, 1, 4]
    assert client.kept == [{0, 1}, {1, 4}]


async def test_a_version_that_the_engine_refuses_is_not_pruned_for() -> None:
    client = ScriptedClient([1])
    following, _ = follower(client)

    async def refuse(weights: Weights) -> None:
        raise RuntimeError("the engine is dead")

    with pytest.raises(RuntimeError, match="the engine is dead"):
        await following.follow(Weights(0, digest(0), Path("/versions/0")), refuse)
    assert client.kept == []

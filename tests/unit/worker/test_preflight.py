from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import SourceFault, UserError
from tests.unit.worker.machines import GIB, RTX4090, machine
from worker import preflight
from worker.config import WorkerConfig


class Source:
    """What `look` asks of a ShardcastClient: the size of the newest version, or why it can't be told."""

    def __init__(self, size: int | None, fault: str = "") -> None:
        self._size, self._fault = size, fault

    async def head(self, wait_s: float) -> Any:
        if self._fault:
            raise SourceFault(self._fault)
        return None if self._size is None else SimpleNamespace(version=1, manifest_digest="sha256:0")

    async def manifest(self, version: int, digest: str) -> Any:
        return SimpleNamespace(total_bytes=self._size), None


@pytest.fixture
def _big_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "measure", lambda home, chosen: machine(RTX4090))


@pytest.mark.usefixtures("_big_gpu")
async def test_it_says_what_the_machine_is_and_what_the_run_needs(tmp_path: Path) -> None:
    said: list[str] = []
    await preflight.look(Source(2 * GIB), WorkerConfig(home=tmp_path), said.append)  # type: ignore[arg-type]
    assert said == [
        "this machine: NVIDIA GeForce RTX 4090 (24.0 GiB, 23.0 GiB free)",
        "the run needs 2.0 GiB of weights, 3.0 GiB of memory, 6.0 GiB of disk",
    ]


@pytest.mark.usefixtures("_big_gpu")
async def test_a_model_that_is_too_big_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="smaller model"):
        await preflight.look(Source(40 * GIB), WorkerConfig(home=tmp_path), lambda text: None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_big_gpu")
@pytest.mark.parametrize("source", [Source(None), Source(None, "every relay is away")])
async def test_a_run_without_a_version_or_relays_for_now_is_waited_for(tmp_path: Path, source: Source) -> None:
    said: list[str] = []
    await preflight.look(source, WorkerConfig(home=tmp_path), said.append)  # type: ignore[arg-type]
    assert "not known yet" in said[-1]


@pytest.mark.parametrize("gpu_build", [True, False])
async def test_a_broken_driver_stops_only_the_build_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_build: bool
) -> None:
    monkeypatch.setattr(preflight, "measure", lambda home, chosen: machine(problem="no devices were found"))
    monkeypatch.setattr(preflight, "_build_for_gpus", lambda: gpu_build)
    said: list[str] = []
    if gpu_build:
        with pytest.raises(UserError, match=r"no devices were found.*worker doctor"):
            await preflight.look(Source(GIB), WorkerConfig(home=tmp_path), said.append)  # type: ignore[arg-type]
    else:
        await preflight.look(Source(GIB), WorkerConfig(home=tmp_path), said.append)  # type: ignore[arg-type]
        assert "no devices were found" in said[1]

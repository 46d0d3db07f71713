"""How VllmEngine decides around a failing vLLM, with vLLM's AsyncLLM played by a few lines (its real use: integration)."""

import asyncio
from pathlib import Path

import pytest

from protocol.errors import OurFault
from tests.tiny_model import build_other_tiny_model, build_tiny_model
from worker.engine import SwapFailed, Weights
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig
from worker.vllm_engine.engine_log import EngineLog


class ScriptedVllm:
    """Records calls; reloads of a folder in `failing` raise, and wait for `gate` first if there is one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: set[Path] = set()
        self.gate: asyncio.Event | None = None
        self.reloading = asyncio.Event()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", True)
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"label {version}")

    async def collective_rpc(self, method: str, kwargs: dict) -> list[None]:
        path = Path(kwargs["weights_path"])
        self.calls.append(f"load {path.name}")
        self.reloading.set()
        if self.gate is not None:
            await self.gate.wait()
        if path in self.failing:
            raise RuntimeError("out of memory")
        return [None]

    def shutdown(self, timeout: float) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Weights, Weights]:
    first, second = build_tiny_model(tmp_path / "old"), build_other_tiny_model(tmp_path / "new")
    return Weights(3, "sha256:3", first), Weights(4, "sha256:4", second)


@pytest.fixture
def vllm() -> ScriptedVllm:
    return ScriptedVllm()


@pytest.fixture
def engine(versions: tuple[Weights, Weights], vllm: ScriptedVllm) -> VllmEngine:
    engine = VllmEngine(VllmEngineConfig())
    engine._engine, engine._loaded = vllm, versions[0]
    return engine


async def test_a_swap_pauses_loads_labels_and_resumes(engine: VllmEngine, vllm: ScriptedVllm, versions) -> None:
    report = await engine.swap(versions[1])
    assert vllm.calls == ["pause", "load new", "label 4", "resume"]
    assert (report.version, report.requests_in_flight, report.prefix_tokens_recomputed) == (4, 0, 0)


async def test_a_failed_reload_restores_the_old_weights(engine: VllmEngine, vllm: ScriptedVllm, versions) -> None:
    vllm.failing = {versions[1].path}
    with pytest.raises(SwapFailed, match=r"version 4 failed: RuntimeError: out of memory; .* goes on with version 3"):
        await engine.swap(versions[1])
    assert vllm.calls == ["pause", "load new", "load old", "resume"]


async def test_an_engine_with_weights_of_no_version_stops(engine: VllmEngine, vllm: ScriptedVllm, versions) -> None:
    vllm.failing = {weights.path for weights in versions}
    with pytest.raises(OurFault, match="restart the worker") as raised:
        await engine.swap(versions[1])
    assert not isinstance(raised.value, SwapFailed)
    assert vllm.calls == ["pause", "load new", "load old", "shutdown"]
    with pytest.raises(OurFault, match="restart the worker"):
        await engine.swap(versions[0])


async def test_a_cancelled_swap_still_ends_with_the_right_label(
    engine: VllmEngine, vllm: ScriptedVllm, versions
) -> None:
    vllm.gate = asyncio.Event()
    swapping = asyncio.create_task(engine.swap(versions[1]))
    await asyncio.wait_for(vllm.reloading.wait(), 30)
    swapping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await swapping
    vllm.gate.set()
    await engine.swap(versions[0])  # waits for the one before
    assert vllm.calls == ["pause", "load new", "label 4", "resume", "pause", "load old", "label 3", "resume"]


async def test_nothing_is_paused_for_weights_that_cannot_be_loaded(
    engine: VllmEngine, vllm: ScriptedVllm, tmp_path: Path
) -> None:
    with pytest.raises(SwapFailed, match=r"config\.json"):
        await engine.swap(Weights(5, "sha256:5", tmp_path / "nowhere"))
    assert vllm.calls == []


def test_the_log_quotes_the_error_itself(tmp_path: Path) -> None:
    log = EngineLog(tmp_path, "ERROR")
    assert log.last_error() == ""
    (log.config_path.parent / "errors.log").write_text(
        "EngineCore failed to start.\nTraceback (most recent call last):\n  File x\nValueError: no memory for the cache\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert log.last_error() == "ValueError: no memory for the cache"

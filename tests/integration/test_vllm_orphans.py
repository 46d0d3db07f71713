"""A worker that is killed takes vLLM's processes with it, and the next one clears what else is left."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.tiny_model import build_tiny_model
from worker.vllm_engine.scratch import Scratch

ROOT = Path(__file__).resolve().parents[2]
_GONE_S = 30.0

_SCRIPT = """
import asyncio, sys
from pathlib import Path
from worker.engine import Weights
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig

async def run():
    engine = VllmEngine(VllmEngineConfig(max_num_seqs=2, max_model_len=64, enforce_eager=True, kv_cache_gib=0.1))
    await engine.start(Weights(0, "sha256:" + "0" * 64, Path(sys.argv[1])))
    print("started", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(run())
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder of a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        yield Path(folder)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_kill_minus_nine_of_a_worker_leaves_no_engine_behind(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "start_an_engine.py"
    script.write_text(_SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TMPDIR": str(temporary),
    }
    model = build_tiny_model(tmp_path / "model")
    with subprocess.Popen(
        [sys.executable, str(script), str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    ) as worker:
        assert worker.stdout is not None
        assert any(line.strip() == "started" for line in worker.stdout)
        engines = psutil.Process(worker.pid).children(recursive=True)
        assert any("vllm" in engine.name().lower() for engine in engines)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        _, alive = psutil.wait_procs(engines, timeout=_GONE_S)
        for left in alive:
            left.kill()
    assert not alive, "an engine outlived its worker"
    (left,) = temporary.glob("rollswarm-engine-*")
    assert {path.parent for path in temporary.rglob("*") if path.is_socket()} == {left}
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    Scratch().remove()
    assert not list(temporary.glob("rollswarm-engine-*"))

"""Strictly synchronous against asynchronous with a network of real processes on this machine's cores.

    origin ─ relay ─ coordinator ─ verifier ─ trainer ─ one worker

The demo's tiny model and run file; all that differs is `max_staleness`: 0 makes every part wait for the others. Both use all
cores whenever they have something to do, so on a machine whose cores are busy anyhow there is little to overlap.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from demo.main import prepare_model
from demo.presets import PRESETS, Ports, run_file
from demo.processes import Process, Processes
from protocol import keyfile

WARM_UP = 2  # steps
_READY_S = 300.0
_LIMIT_S = 1500.0
_STALENESS = {"synchronous": 0, "asynchronous": 2}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True, slots=True)
class Real:
    """`step_s`: between reports of steps, after warm-up. `training`: share of it in which the trainer steps.

    `staleness`: mean at consumption, in versions.
    """

    step_s: float
    training: float
    staleness: float
    reward: float


def compare(engine: str, versions: int, cache: Path) -> dict[str, Any]:
    """Both modes, one run each. `versions`: steps of a run, more than the warm-up."""
    found = {}
    for name, staleness in _STALENESS.items():
        with tempfile.TemporaryDirectory(prefix="rollswarm-asynchrony-") as folder:
            found[name] = _run(engine, staleness, versions, Path(folder), cache)
        print(f"{name:13} {found[name].step_s:6.1f} s/step, training {found[name].training:.0%} of it", flush=True)
    speedup = found["synchronous"].step_s / found["asynchronous"].step_s
    print(f"speedup {speedup:.2f}")
    modes = {name: asdict(each) for name, each in found.items()}
    return {"engine": engine, "versions": versions, **modes, "speedup": speedup}


def _run(engine: str, staleness: int, versions: int, folder: Path, cache: Path) -> Real:
    preset = replace(PRESETS["tiny"], max_staleness=staleness, versions=versions)
    model, eos = prepare_model(preset, cache)
    ports, config = Ports.free(), folder / "run.toml"
    trainer_key = keyfile.load_or_create(folder / "trainer.key")[0]
    config.write_text(run_file(preset, ports, model=model, eos=eos, trainer=trainer_key))
    with Processes(folder / "logs", _ENVIRONMENT) as processes:
        trainer = _start(processes, folder, config, ports, trainer_key.key_id)
        join = [
            "worker.main",
            "join",
            "--coordinator",
            f"http://127.0.0.1:{ports.http}",
            "--home",
            str(folder / "worker"),
        ]
        options = ["--engine", engine, "--enforce-eager", "--kv-cache-gib", str(preset.kv_cache_gib)]
        limits = ["--concurrency", str(preset.concurrency), "--max-model-len", str(preset.max_model_len)]
        processes.start("worker", [*join, *options, *limits])
        trainer.wait(_LIMIT_S)
    return _measured(folder / "run.db")


def _start(processes: Processes, folder: Path, config: Path, ports: Ports, key: str) -> Process:
    """All roles but the worker, each when what it needs is there; the trainer's process."""
    origin, http = f"http://127.0.0.1:{ports.origin}", f"http://127.0.0.1:{ports.http}"
    serve = ["--trainer-key", key, "--coordinator", http]
    for name, source, port in (("origin", [], ports.origin), ("relay", ["--origin", origin], ports.relay)):
        place = ["--data-dir", str(folder / name), "--host", "127.0.0.1", "--port", str(port)]
        processes.start(name, ["shardcast.main", name, *serve, *source, *place]).wait_ready(_READY_S)
    processes.start("coordinator", ["coordinator.main", "serve", "--config", str(config)]).wait_ready(_READY_S)
    trainer = processes.start("trainer", ["trainer.main", "run", "--config", str(config)])
    processes.start("verifier", ["coordinator.main", "verify", "--config", str(config)])
    return trainer


def _measured(database: Path) -> Real:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        rows = connection.execute("SELECT reported_at, metrics FROM steps ORDER BY batch").fetchall()
        (staleness,) = connection.execute("SELECT avg(staleness) FROM consumptions").fetchone()
    finally:
        connection.close()
    return measured([float(row[0]) for row in rows], [json.loads(row[1]) for row in rows], float(staleness or 0.0))


def measured(reported_at: list[float], metrics: list[dict[str, float]], staleness: float) -> Real:
    """From the reports of a run's steps, in order."""
    step_s = (reported_at[-1] - reported_at[WARM_UP - 1]) / (len(reported_at) - WARM_UP)
    training = fmean(each["step_seconds"] for each in metrics[WARM_UP:])
    return Real(step_s, training / step_s, staleness, metrics[-1]["reward_mean"])

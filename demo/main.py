"""`make demo`: the whole network on this machine, one process per role, ended by a budget of policy versions.

    origin ─ relay ─ coordinator ─ verifier ─ trainer ─ an honest worker ─ a cheating worker

It evaluates the policy before and after on held-out tasks, and writes runs/demo/report.json and reward.png. Exit status 0
means that everything the report promises held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from coordinator.operate import make_token
from coordinator.operators import Role
from demo.models import SMOLLM2_EOS_TOKEN_IDS, TINY_EOS_TOKEN_IDS, make_tiny, smollm2
from demo.presets import PRESETS, Ports, Preset, run_file
from demo.processes import Process, Processes
from demo.report import make_report, plot_reward
from demo.view import View
from protocol import keyfile
from protocol.cli import run_app
from protocol.errors import OurFault, UserError

_START_S = 60.0
_EVALUATION_S = 300.0
_ATTACK = "other_weights"
# Elsewhere workers have machines of their own; here they must not take the cores from those who use what they make.
_WORKER_NICE = 5


class Demo:
    """One run of the demo in `folder`."""

    def __init__(self, preset: Preset, folder: Path, cache: Path) -> None:
        self._preset = preset
        self._folder = folder
        self._ports = Ports.free()
        self._model, self._eos = prepare_model(preset, cache)
        self._trainer_key = keyfile.load_or_create(folder / "trainer.key")[0]
        self._honest = keyfile.load_or_create(folder / "honest" / "identity.key")[0]
        self._cheater = keyfile.load_or_create(folder / "cheater" / "identity.key")[0]
        self._config = folder / "run.toml"
        self._config.write_text(
            run_file(preset, self._ports, model=self._model, eos=self._eos, trainer=self._trainer_key)
        )

    def run(self) -> dict[str, Any]:
        """Run to the end; the report."""
        environment = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": str(self._preset.verifier_threads),
            # Six processes share these cores: a thread that spins or is bound to a core stands in another's way.
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # vLLM's model runs in its engine's process, not in one more, which would poll for work even when idle.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        with Processes(self._folder / "logs", environment) as processes:
            before = self._start_evaluation(processes, "before", self._model)
            self._finish_evaluation(before)
            begun = time.monotonic()
            trainer = self._start_roles(processes)
            self._watch(processes, trainer)
            if trainer.wait(10.0) != 0:
                raise OurFault(f"the trainer failed: {trainer.last_words()} (see {trainer.log})")
            seconds = time.monotonic() - begun
            final = self._final_folder()
        with Processes(self._folder / "logs", environment) as processes:
            self._finish_evaluation(self._start_evaluation(processes, "after", final))
        report = make_report(
            self._folder / "run.db",
            self._preset,
            honest=self._honest.key_id,
            cheater=self._cheater.key_id,
            before=json.loads((self._folder / "before.json").read_text()),
            after=json.loads((self._folder / "after.json").read_text()),
            seconds=seconds,
        )
        (self._folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        plot_reward(report, self._folder / "reward.png")
        return report

    def _start_roles(self, processes: Processes) -> Process:
        """Start everything, each when what it needs is there; the trainer's process."""
        key, ports = self._trainer_key.key_id, self._ports
        origin = processes.start(
            "origin",
            ["shardcast.main", "origin", "--data-dir", str(self._folder / "origin"), "--trainer-key", key]
            + ["--port", str(ports.origin), "--keep", "2", "--coordinator", f"http://127.0.0.1:{ports.http}"],
        )
        origin.wait_ready(_START_S)
        relay = processes.start(
            "relay",
            ["shardcast.main", "relay", "--origin", f"http://127.0.0.1:{ports.origin}", "--trainer-key", key]
            + [
                "--data-dir",
                str(self._folder / "relay"),
                "--host",
                "127.0.0.1",
                "--port",
                str(ports.relay),
                "--keep",
                "4",
            ],
        )
        relay.wait_ready(_START_S)
        coordinator = processes.start("coordinator", ["coordinator.main", "serve", "--config", str(self._config)])
        coordinator.wait_ready(_START_S)
        threads = {"OMP_NUM_THREADS": str(self._preset.worker_threads)}
        trainer = processes.start(
            "trainer",
            ["trainer.main", "run", "--config", str(self._config)],
            {"OMP_NUM_THREADS": str(self._preset.trainer_threads)},
        )
        processes.start("verifier", ["coordinator.main", "verify", "--config", str(self._config)])
        processes.start(
            "honest-worker",
            ["worker.main", "join", *self._worker("honest", self._preset.concurrency)],
            threads,
            nice=_WORKER_NICE,
        )
        processes.start(
            "cheating-worker",
            [
                "tests.adversary.cheating_worker",
                "--attack",
                _ATTACK,
                "--engine",
                "reference",
                *self._worker("cheater", 4),
            ],
            threads,
            nice=_WORKER_NICE,
        )
        return trainer

    def _worker(self, name: str, concurrency: int) -> list[str]:
        preset = self._preset
        return [
            *("--coordinator", f"http://127.0.0.1:{self._ports.http}", "--home", str(self._folder / name)),
            *("--name", name, "--enforce-eager", "--concurrency", str(concurrency)),
            *("--kv-cache-gib", str(preset.kv_cache_gib), "--max-model-len", str(preset.max_model_len)),
        ]

    def _watch(self, processes: Processes, trainer: Process) -> None:
        """Show progress until the trainer ends. Raises OurFault if a role dies or time runs out."""
        names = {self._honest.key_id: "honest", self._cheater.key_id: "cheater"}
        view = View(f"Rollswarm demo: {self._preset.model_name}", self._preset.versions, names)
        url = f"http://127.0.0.1:{self._ports.http}"
        print(f"status page: {url}   logs: {self._folder / 'logs'}", flush=True)
        deadline = time.monotonic() + self._preset.time_limit_s

        def done() -> bool:
            for process in processes.all:
                expected_to_end = process is trainer or process.name in ("cheating-worker", "evaluate-before")
                if not process.running and not expected_to_end:
                    raise OurFault(f"{process.name} ended early: {process.last_words()} (see {process.log})")
            if time.monotonic() > deadline:
                raise OurFault(f"not done within {self._preset.time_limit_s:.0f} s; see {self._folder / 'logs'}")
            return not trainer.running

        token = asyncio.run(make_token(f"sqlite+aiosqlite:///{self._folder / 'run.db'}", "demo", Role.VIEWER, None))
        view.watch(lambda: _read_status(url, token), done)

    def _start_evaluation(self, processes: Processes, name: str, model: Path) -> Process:
        print(f"evaluating the policy {name} training on held-out tasks …", flush=True)
        return processes.start(
            f"evaluate-{name}",
            [
                "demo.evaluate",
                str(model),
                "--eos",
                json.dumps(self._eos),
                "--template",
                self._preset.template,
                "--max-tokens",
            ]
            + [str(self._preset.arithmetic_tokens), "--out", str(self._folder / f"{name}.json")],
            {"OMP_NUM_THREADS": "2"},
        )

    def _finish_evaluation(self, process: Process) -> None:
        if process.wait(_EVALUATION_S) != 0:
            raise OurFault(f"the evaluation failed: {process.last_words()} (see {process.log})")

    def _final_folder(self) -> Path:
        """The newest version that the origin holds."""
        versions = (self._folder / "origin" / "versions").iterdir()
        return max((path for path in versions if path.is_dir()), key=lambda path: int(path.name.split("-")[0]))


def prepare_model(preset: Preset, cache: Path) -> tuple[Path, list[int]]:
    """The initial policy's folder, made if it is not in `cache` yet, and the token ids that end an answer."""
    if preset.name == "tiny":
        return make_tiny(cache / "tiny", say=_say), list(TINY_EOS_TOKEN_IDS)
    return smollm2(cache, _say), list(SMOLLM2_EOS_TOKEN_IDS)


def _say(line: str) -> None:
    print(line, flush=True)


def _read_status(url: str, token: str) -> dict[str, Any] | None:
    request = urllib.request.Request(f"{url}/api/v1/status", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            status: dict[str, Any] = json.load(response)
            return status
    except (urllib.error.URLError, OSError, ValueError):
        return None


def print_summary(report: dict[str, Any], folder: Path) -> None:
    """The report, for a person."""
    before, after = report["eval_before"], report["eval_after"]
    formed, given = report["format_rate"], report["accuracy_given_format"]
    low, high = report["eval_gain_ci95"]
    gain = f"gain {report['eval_gain']:.2f} (95 % {low:.2f} to {high:.2f})"
    lines = [
        f"held-out accuracy over {report['eval_tasks']} tasks",
        f"  sampled         {before['sampled']:.2f} → {after['sampled']:.2f}   {gain}",
        f"  greedy          {before['greedy']:.2f} → {after['greedy']:.2f}",
        f"  right format    {formed['before']:.2f} → {formed['after']:.2f}",
        f"  right if so     {given['before']:.2f} → {given['after']:.2f}",
        f"{report['policy_versions']} policy versions, {report['rollouts_trained']} rollouts trained on, "
        f"{report['seconds']:.0f} s",
        f"{report['in_flight_swaps']} accepted rollouts span a weight swap, staleness ≤ {report['max_staleness_seen']}",
        f"honest worker   {report['honest_accepted']} accepted, {report['honest_rejected']} rejected",
        f"cheater         {report['cheater_accepted']} accepted, {report['cheater_rejected']} rejected"
        f"{', banned' if report['cheater_banned'] else ''}",
    ]
    lines += [f"  {'✓' if held else '✗'} {check}" for check, held in report["checks"].items()]
    print("\n" + "\n".join(lines))
    print(f"written: {folder / 'report.json'}, {folder / 'reward.png'}", flush=True)


def demo() -> None:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smollm2", choices=sorted(PRESETS))
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/models"), help="where the initial models are kept")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    if folder.exists():
        if not (folder / "run.toml").exists() and any(folder.iterdir()):
            raise UserError(f"{folder} holds something else than a demo run: choose another --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    report = Demo(PRESETS[arguments.preset], folder, arguments.cache.resolve()).run()
    print_summary(report, folder)
    if not all(report["checks"].values()):
        sys.exit(1)


if __name__ == "__main__":
    run_app("demo", demo)

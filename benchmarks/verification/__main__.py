"""`python -m benchmarks.verification [PART …]`: tables, and a final line of JSON.

throughput  generation with proofs and seeds beside plain vLLM
proofs      building and checking activation proofs
prefill     the verifier beside a bare transformers prefill, and beside vLLM's generation
honest      rollouts of every engine setting that are refused, and false alarms of the tests over many
attacks     every cheat of the adversary suite: what passes, how soon it is caught and banned
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tables import table

if TYPE_CHECKING:
    from coordinator.verification.thresholds import Thresholds

_MONTHS = 2_000
_LENGTHS = (8, 64, 256, 1024)
_CONCURRENCY = (16, 64)
_PARTS = ("throughput", "proofs", "prefill", "honest", "attacks")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parts asked for; each imports only what it needs."""
    import torch

    from coordinator.calibration.run import published_form
    from worker.hardware import native_dtype

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    dtype = arguments.dtype or native_dtype()
    results: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
    }
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        folder = published_form(arguments.model, Path(scratch) / "model")
        for part in arguments.parts or _PARTS:
            results[part] = _PARTS_BY_NAME[part](folder, dtype, arguments)
            print(f"\n{part}\n{table(results[part])}", flush=True)
    return results


def _throughput(folder: Path, dtype: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.verification import throughput

    load = throughput.Load(repeats=arguments.repeats)
    return [asyncio.run(throughput.measure(folder, dtype, load))]


def _proofs(folder: Path, dtype: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.verification import proofs

    return [proofs.measure(size) for size in (576, 1024, 4096)]


def _prefill(folder: Path, dtype: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from benchmarks.verification import generation, prefill

    paces = generation.measure(folder, dtype, lengths=tuple(arguments.lengths), concurrency=_CONCURRENCY)
    model = prefill.load(folder, getattr(torch, dtype))
    rows = []
    for length in arguments.lengths:
        row = prefill.measure(model, length, tokens=arguments.tokens, repeats=arguments.repeats)
        for at_once in _CONCURRENCY:
            pace = paces[f"{length} x {at_once}"]
            row[f"vllm_{at_once}_tokens_per_s"] = pace
            row[f"over_vllm_{at_once}"] = row["verifier_tokens_per_s"] / pace
        print(f"prefill, {length} tokens: {row}", flush=True)
        rows.append(row)
    return rows


def _honest(folder: Path, dtype: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.verification import honest

    thresholds, eos = _thresholds(arguments), _eos(folder)
    rows, found = honest.measure(
        folder, dtype, thresholds, rollouts=arguments.rollouts or 2_000, tokens=arguments.longest, eos=eos
    )
    alarms = honest.alarms(found, thresholds, months=_MONTHS, rollouts_per_month=1_000)
    return [*rows, {"engine": f"false alarms in {_MONTHS} simulated months of 1000 rollouts", "refused": alarms}]


def _attacks(folder: Path, dtype: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.verification import attacks

    return attacks.measure(
        folder,
        dtype,
        _thresholds(arguments),
        rollouts=arguments.rollouts or 300,
        tokens=arguments.longest,
        eos=_eos(folder),
        only=arguments.only,
    )


def _thresholds(arguments: argparse.Namespace) -> Thresholds:
    from coordinator.verification.thresholds import Thresholds

    return Thresholds.from_toml(arguments.thresholds)


def _eos(folder: Path) -> tuple[int, ...]:
    found = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return tuple(found) if isinstance(found, list) else (found,)


_PARTS_BY_NAME = {
    "throughput": _throughput,
    "proofs": _proofs,
    "prefill": _prefill,
    "honest": _honest,
    "attacks": _attacks,
}


# One process per engine, whose threads sleep while the other engine works: an idle engine's process would poll for work.
_QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verification",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; all if none is given")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of engine and verifier; what suits this machine"
    )
    parser.add_argument("--repeats", type=int, default=7, help="pairs of alternating repeats")
    parser.add_argument("--tokens", type=int, default=2048, help="completion tokens of each prefill repeat")
    parser.add_argument(
        "--thresholds",
        type=Path,
        default=Path("demo/thresholds/smollm2/thresholds.toml"),
        help="of honest and attacks: what `coordinator calibrate` wrote for the model",
    )
    parser.add_argument("--rollouts", type=int, help="of honest, in all (2000), and of each attack (300)")
    parser.add_argument(
        "--longest", type=int, default=40, help="tokens of the longest completion of honest and attacks"
    )
    parser.add_argument("--only", nargs="*", default=(), help="attacks by name; all if none is given")
    parser.add_argument("--lengths", type=int, nargs="*", default=_LENGTHS, help="of prefill: tokens of a completion")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of the prefill; torch's choice if 0")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(_PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    print(json.dumps(run(arguments)))


if __name__ == "__main__":
    main()

"""`python -m benchmarks.verification [throughput|proofs|prefill|all]`: tables, and a final line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tables import table

_PARTS = ("throughput", "proofs", "prefill")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parts asked for; each imports only what it needs."""
    import torch

    from coordinator.calibration.run import published_form
    from worker.hardware import native_dtype

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    dtype = native_dtype()
    results: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
    }
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        folder = published_form(arguments.model, Path(scratch) / "model")
        for part in _PARTS if arguments.part == "all" else (arguments.part,):
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

    from benchmarks.verification import prefill

    model = prefill.load(folder, getattr(torch, dtype))
    return [
        prefill.measure(model, length, tokens=arguments.tokens, repeats=arguments.repeats)
        for length in (8, 64, 256, 1024)
    ]


_PARTS_BY_NAME = {"throughput": _throughput, "proofs": _proofs, "prefill": _prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=(*_PARTS, "all"))
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--repeats", type=int, default=7, help="pairs of alternating repeats")
    parser.add_argument("--tokens", type=int, default=2048, help="completion tokens of each prefill repeat")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of the prefill; torch's choice if 0")
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()

"""The command: measure honest and cheating rollouts, calibrate on the one half, and say what the tests make of the other."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.pooling import store, vllm_honest
from benchmarks.pooling.attacks import ATTACKS
from benchmarks.pooling.engine import BatchEngine
from benchmarks.pooling.measure import Measured, Verifier, make_requests
from benchmarks.pooling.simulate import Delay, delays, false_alarms
from coordinator.calibration.pooled import fit_tests
from coordinator.config import model_shape
from coordinator.verification.pooled import NUMERIC, Pooled, PooledTest
from coordinator.verification.thresholds import DEFAULTS
from protocol.cli import set_up_logging

_VLLM = "vLLM"
_ROLLOUTS_MAX = 3_000
_MAX_STRIKES = 3
HONEST = {"bf16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    options = _options()
    set_up_logging()
    torch.set_num_threads(options.threads)
    measured = store.load(options.measured) if options.measured else {}
    _measure(options, measured)
    honest = {name: found for name, found in measured.items() if name in HONEST or name.startswith(_VLLM)}
    pooled = DEFAULTS.pooled
    if options.calibrate:
        pooled = replace(pooled, tests=_calibrated(honest))
        _print_bounds(pooled)
    print(json.dumps(_report(measured, honest, pooled, options)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pooling", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--rollouts", type=int, default=64, help="per honest engine and attack")
    parser.add_argument("--long-tokens", type=int, default=64, help="of the longer half")
    parser.add_argument("--batch", type=int, default=32, help="rollouts that the engine generates side by side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", help=f"workers to measure: of {', '.join((*HONEST, *ATTACKS, _VLLM))}")
    parser.add_argument("--calibrate", action="store_true", help="bounds from one half of the honest rollouts")
    parser.add_argument("--seed", type=int, default=0, help="of the issued seeds")
    parser.add_argument("--keep", type=Path, help="write what was measured to this file")
    parser.add_argument("--measured", type=Path, help="take what was measured before from this file")
    parser.add_argument("--months", type=int, default=10_000, help="honest worker-months to simulate")
    parser.add_argument("--rollouts-per-month", type=int, default=1_000)
    parser.add_argument("--workers", type=int, default=500, help="cheating workers to simulate, per attack")
    return parser.parse_args()


def _measure(options: argparse.Namespace, found: dict[str, list[Measured]]) -> None:
    """Add what each worker's rollouts are measured to be to `found`."""
    eos = json.loads((options.model / "config.json").read_text())["eos_token_id"]
    verifier = Verifier(options.model)
    for number, name in enumerate((*HONEST, *ATTACKS, _VLLM)):
        if name not in (options.only if options.only is not None else (*HONEST, *ATTACKS)):
            continue
        begun = time.perf_counter()
        requests = make_requests(
            options.model,
            count=options.rollouts,
            long_tokens=options.long_tokens,
            eos=(eos,),
            seed=1000 * options.seed + number,
        )
        if name == _VLLM:
            claims = vllm_honest.generate(
                options.model, requests, model_shape(options.model), side_by_side=options.batch
            )
        else:
            dtype = HONEST.get(name, torch.bfloat16)
            engine = BatchEngine(options.model, dtype=dtype, batch=options.batch, attack=ATTACKS.get(name))
            claims = engine.generate(requests)
        found[name] = [*found.get(name, []), *verifier.measure(claims)]
        if options.keep:
            store.save(options.keep, found)
        print(f"measured {name}: {len(claims)} rollouts, {time.perf_counter() - begun:.0f} s", flush=True)


def _calibrated(honest: Mapping[str, Sequence[Measured]]) -> tuple[PooledTest, ...]:
    """Bounds from every other rollout of each honest engine."""
    return fit_tests([[each.statistics for each in found[::2]] for found in honest.values()], alpha=0.001)


def _print_bounds(pooled: Pooled) -> None:
    for test in pooled.tests:
        for each in test.classes if test.name in NUMERIC else ():
            print(
                f"{test.name:>16} from {each.tokens_min:>2} tokens: {each.floor:.4g} .. {each.mean:.4g} .. {each.cap:.4g}"
            )


def _report(
    measured: Mapping[str, Sequence[Measured]],
    honest: Mapping[str, Sequence[Measured]],
    pooled: Pooled,
    options: argparse.Namespace,
) -> dict[str, object]:
    print(
        f"{'worker':>14} {'rollouts':>8} {'rejected':>8} | tokens until a ban, median and 90 %: by the tests alone | as run"
    )
    found: dict[str, dict[str, object]] = {}
    for name, rollouts in measured.items():
        held_out = rollouts[1::2] if name in honest else rollouts
        rejected = sum(not each.accepted for each in rollouts) / len(rollouts)
        alone, as_run = (
            delays(held_out, pooled, workers=options.workers, rollouts_max=_ROLLOUTS_MAX, max_strikes=strikes)
            for strikes in (None, _MAX_STRIKES)
        )
        tokens = sum(each.tokens for each in rollouts)
        found[name] = {"rollouts": len(rollouts), "tokens": tokens, "rejected": rejected}
        found[name] |= {"tests_alone": _numbers(alone), "as_run": _numbers(as_run)}
        print(f"{name:>14} {len(rollouts):>8} {rejected:>8.1%} | {_words(alone)} | {_words(as_run)}")
    alarms = {
        name: false_alarms(rollouts[1::2], pooled, months=options.months, rollouts_per_month=options.rollouts_per_month)
        for name, rollouts in honest.items()
    }
    for name, by_test in alarms.items():
        print(f"{name:>14}: false alarms in {options.months} worker-months of {options.rollouts_per_month}: {by_test}")
    return {"detection": found, "false_alarms": alarms, "months": options.months}


def _words(delay: Delay) -> str:
    return f"{delay.median_tokens:>7.0f} {delay.p90_tokens:>7.0f} {delay.by or 'never':<14} ({delay.banned:.0%})"


def _numbers(delay: Delay) -> dict[str, object]:
    return {
        name: _finite(value) if isinstance(value, float) else value for name, value in dataclasses.asdict(delay).items()
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main()

"""`python -m benchmarks.staleness`: held-out gain against lag, six objectives, five seeds.

    python -m benchmarks.staleness --out docs/figures/staleness.json                       everything, some minutes
    python -m benchmarks.staleness --out docs/figures/staleness.json --lags 16 --processes 2   a part; parts add up
    python -m benchmarks.staleness --out docs/figures/staleness.json --figure docs/figures/staleness.svg --draw-only

Runs that are in the file already are not made again (their setting must be the same). Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from benchmarks.staleness.lab import Setting
from benchmarks.staleness.report import draw, summary, table
from benchmarks.staleness.runs import load, missing, one

OBJECTIVES = ("pg_is", "ipo", "async_ppo", "dppo", "gspo", "m2po")
LAGS = (0, 4, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES))
    parser.add_argument("--lags", nargs="+", type=int, default=list(LAGS), help="0 to 128 batches")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=Setting().steps)
    parser.add_argument("--learning-rate", type=float, default=Setting().learning_rate)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON of all runs")
    parser.add_argument("--figure", type=Path, help="SVG or PNG")
    parser.add_argument("--draw-only", action="store_true")
    arguments = parser.parse_args()
    setting = Setting(steps=arguments.steps, learning_rate=arguments.learning_rate)
    stored = load(arguments.out, setting)
    if not arguments.draw_only:
        todo = list(missing(stored["runs"], arguments.objectives, arguments.lags, arguments.seeds))
        with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(one, *each, setting) for each in todo]):
                stored["runs"].append(done.result())
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(stored))
    stored["runs"].sort(key=lambda run: (run["objective"], run["lag"], run["seed"]))
    arguments.out.write_text(json.dumps(stored, indent=0))
    print(table(stored["runs"]))
    if arguments.figure is not None:
        draw(stored["runs"], setting, arguments.figure)
    print(json.dumps(summary(stored["runs"])))


if __name__ == "__main__":
    main()

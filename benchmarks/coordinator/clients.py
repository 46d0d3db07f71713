"""One process of simulated workers: reads what to do as lines of JSON, and answers each with a line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.coordinator.load import Swarm, Tally

_KEPT = 4000  # order statistics that are reported of each latency


async def obey(swarm: Swarm) -> None:
    """Do what standard input says until it ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if order["do"] == "register":
            await swarm.register()
            answer: dict[str, Any] = {}
        else:
            tally = (
                await swarm.open_loop(order["seconds"], order["rate"])
                if order["do"] == "open"
                else await swarm.closed_loop(order["seconds"])
            )
            answer = told(tally)
        print(json.dumps(answer), flush=True)
    await swarm.close()


def told(tally: Tally) -> dict[str, Any]:
    """A tally in bounded space: latencies as evenly spaced order statistics, receipts by second."""
    begun = min(tally.done, default=0.0)
    return {
        "lease_s": _ordered(tally.lease_s),
        "submit_s": _ordered(tally.submit_s),
        "done": [round(each, 4) for each in tally.done] if len(tally.done) < 100_000 else [],
        "begun": begun,
        "receipts": len(tally.done),
        "leases": len(tally.lease_s),
        "empty": tally.empty,
        "failures": dict(tally.failures),
    }


def _ordered(values: Sequence[float]) -> list[float]:
    if not values:
        return []
    quantiles = (np.arange(min(len(values), _KEPT)) + 0.5) / min(len(values), _KEPT)
    return [round(float(each), 5) for each in np.quantile(np.asarray(values), quantiles)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator.clients")
    parser.add_argument("--endpoint", action="append", required=True)
    parser.add_argument("--run", default="")
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--leases", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()

    async def main() -> None:
        swarm = Swarm(options.endpoint, options.run, options.first, options.count, options.leases, options.tokens)
        print("ready", flush=True)
        await obey(swarm)

    asyncio.run(main())

"""`python -m tests.adversary.fuzz --count 100000`: prints what became of the mutations; exit status 1 for any trouble."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.adversary.fuzz.corpus import build_corpus
from tests.adversary.fuzz.run import Fuzz, resident_bytes

_WARM_UP = 2_000  # until caches and arenas have their size


def main() -> int:
    """Run, and print the report."""
    import torch

    arguments = argparse.ArgumentParser(description="mutated submissions against the door and the verifier")
    arguments.add_argument("--count", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        fuzz = Fuzz(build_corpus(Path(folder)), options.seed)
        first = min(_WARM_UP, options.count)
        fuzz.run(0, first)
        before = resident_bytes()
        report = fuzz.run(first, options.count)
    print("\n".join(report.lines()))
    grown = (resident_bytes() - before) / 2**20
    print(f"{options.count} mutations, seed {options.seed}, {time.monotonic() - started:.0f} s, RSS {grown:+.1f} MiB")
    for trouble in (*report.crashes, *report.frauds):
        print(trouble, file=sys.stderr)
    return 1 if report.crashes or report.frauds else 0


if __name__ == "__main__":
    sys.exit(main())

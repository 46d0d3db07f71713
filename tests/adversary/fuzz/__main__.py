"""`python -m tests.adversary.fuzz`: prints what became of hostile input; exit status 1 for any trouble.

--count 100000               mutated submissions against the door's and the verifier's checks (nothing else asked for)
--http 50000 --grpc 50000    requests against the doors of a real coordinator
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

_WARM_UP = 2_000  # until caches and arenas have their size


def submissions(count: int, seed: int) -> list[str]:
    """Run, and print the report; what must not be."""
    import torch

    from tests.adversary.fuzz.corpus import build_corpus
    from tests.adversary.fuzz.run import Fuzz, resident_bytes

    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        fuzz = Fuzz(build_corpus(Path(folder)), seed)
        first = min(_WARM_UP, count)
        fuzz.run(0, first)
        before = resident_bytes()
        report = fuzz.run(first, count)
    print("\n".join(report.lines()))
    grown = (resident_bytes() - before) / 2**20
    print(f"{count} mutations, seed {seed}, {time.monotonic() - started:.0f} s, RSS {grown:+.1f} MiB")
    return [*report.crashes, *report.frauds]


def doors(http: int, grpc: int, seed: int, *, postgresql: bool) -> list[str]:
    """The same for requests to a coordinator of its own, on SQLite or on a PostgreSQL that is started for it."""
    from demo.postgres import Postgres, find_binaries
    from tests.adversary.fuzz.doors import fuzz_doors
    from tests.adversary.fuzz.site import Site

    binaries = find_binaries() if postgresql else None
    assert binaries is not None or not postgresql, "there is no PostgreSQL here: install it"
    server = Postgres(binaries) if binaries is not None else None
    started = time.monotonic()
    try:
        url = "" if server is None else server.create("fuzz")
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, Site(Path(folder), url) as site:
            outcome = fuzz_doors(site, http, grpc, seed)
    finally:
        if server is not None:
            server.stop()
    print("\n".join(outcome.lines()))
    kind = "PostgreSQL" if postgresql else "SQLite"
    print(f"{http} HTTP and {grpc} gRPC requests, seed {seed}, {kind}, {time.monotonic() - started:.0f} s")
    return outcome.trouble


def main() -> int:
    """Run what is asked for."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int)
    arguments.add_argument("--http", type=int, default=0)
    arguments.add_argument("--grpc", type=int, default=0)
    arguments.add_argument("--postgresql", action="store_true", help="the coordinator's database; else SQLite")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    trouble: list[str] = []
    if options.http or options.grpc:
        trouble += doors(options.http, options.grpc, options.seed, postgresql=options.postgresql)
    if options.count or not (options.http or options.grpc):
        trouble += submissions(options.count or 100_000, options.seed)
    for each in trouble:
        print(each, file=sys.stderr)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast a version reaches every worker, on seven hosts with 200 Mbit/s uplinks: `python -m benchmarks.shardcast`.

One origin, two relays and four workers, each a network namespace at one router, each limited by `tc tbf` to `--mbit`
outgoing. Hosts keep their files in memory (`--work`, /dev/shm), since one machine's disk would otherwise stand in for
seven. All hosts share this machine's cores. The clock starts when the origin is told of the version and stops when a
worker holds it verified; hashing before that is reported as `prepare_s`. Variants alternate within one run, and
medians are given.

Bounds. The origin sends every byte at least once: 256 MiB take 10.74 s at 200 Mbit/s. Without worker peers, two relays
that take part in nothing but passing on must send four copies from two uplinks: 2 x 10.74 = 21.47 s (and the three
senders together six copies: the same). Both count payload alone: Ethernet, IP and TCP headers add 4.5 %, which no
variant can avoid, and which the counted bytes include.

The file is real bf16 weights, the same for all (`weights`). `full` and `peers` are this project's relays without and with
workers that swap, the version published packed as well, as is the default; `raw` and `raw-peers` without that. `delta` is a
version published as the difference to the one before, which the workers have (a simulated Adam step at 1e-6), held against
the bound of `full`. Everything is held against the bound of the whole file, and beside that against the same links' bound for
the bytes that the variant must move (`needed`, a share of the file). `published` is the PyPI package `shardcast` 0.3.2 by
its own defaults (50 MB shards, 10 downloads at once), its relays and workers asking for news every second (a worker begins
when both relays list the version: with one relay behind the other, the package's client guesses the number of shards, and may
ask for ever for those that don't exist).

The sweep has 2 to 32 workers at `--sweep-mbit` with a smaller file: two cores can't carry 34 hosts at 200 Mbit/s. `CPU` is
the share of all cores' time that origin, relays and workers used: a row where it nears 1 is bound by this machine.
Shards shrink with files below 256 MiB, so that there are 128 of them as of 256 MiB in shards of the default size.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.shardcast import ours, published
from benchmarks.shardcast.netns import Network, network
from benchmarks.shardcast.ours import Plan
from benchmarks.shardcast.report import (
    MIB,
    Sample,
    origin_bound_s,
    shard_bytes,
    summarize,
    table,
    tree_bound_s,
    with_ratios,
)
from benchmarks.shardcast.samples import Samples
from benchmarks.shardcast.weights import make_pair
from protocol.errors import OurFault, RollswarmError, UserError

RELAYS, WORKERS = 2, 4
PUBLISHED = "published"
_GENEROUS = 4.0  # a publication may take this many times its links' bound, and 20 s, before it counts as failed
_HANGS_S = 90.0  # so long is the published package waited for: now and then some worker of it never ends
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Version:
    """What is published: a folder, the one before it, its bytes, and the seconds that the origin's uplink needs."""

    folder: Path
    before: Path
    size: int
    bound_s: float


Publish = Callable[[Network, Plan], Awaitable[Sample]]
VARIANTS: dict[str, Publish] = {
    "full": ours.publish_full,
    "peers": functools.partial(ours.publish_full, peers=True),
    "raw": functools.partial(ours.publish_full, packed=False),
    "raw-peers": functools.partial(ours.publish_full, peers=True, packed=False),
    "delta": ours.publish_delta,
    PUBLISHED: published.publish_once,
}


def main() -> None:
    """Parse, run, print the table and, last, one line of JSON."""
    arguments = _parse()
    try:
        asyncio.run(_until_told(arguments))
    except RollswarmError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("benchmark: interrupted; its namespaces are removed", file=sys.stderr)
        sys.exit(130)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the version")
    parser.add_argument("--mbit", type=float, default=200.0, help="outgoing rate of every host")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--published-repeats", type=int, default=2, help="the published package is slow")
    parser.add_argument("--only", action="append", choices=[*VARIANTS, "none"], help="only this variant; repeatable")
    parser.add_argument("--samples", type=Path, help="file that keeps each publication: a run in pieces is one run")
    parser.add_argument("--sweep", default="2,4,8,16,32", help="numbers of workers; empty for none")
    parser.add_argument("--sweep-mbit", type=float, default=4.0)
    parser.add_argument("--sweep-mib", type=int, default=64)
    parser.add_argument("--sweep-variant", choices=["peers", "raw-peers", "full", "raw"], default="peers")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="folder for all hosts' files")
    parser.add_argument("--quick", action="store_true", help="8 MiB, one repeat, no sweep: shows that it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mib, arguments.repeats, arguments.published_repeats, arguments.sweep = 8, 1, 1, ""
    return arguments


async def _until_told(arguments: argparse.Namespace) -> None:
    """Run; SIGTERM ends it as Ctrl-C does, so that the namespaces go."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await _run(arguments)


async def _run(arguments: argparse.Namespace) -> None:
    chosen = [name for name in arguments.only or VARIANTS if name != "none"]
    if PUBLISHED in chosen:
        await asyncio.to_thread(published.install)
    with _scratch(arguments.work, arguments.mib, RELAYS + WORKERS) as scratch:
        variants = await _variants(arguments, chosen, scratch)
        sweep = await _sweep(arguments, scratch)
    print(table(variants))
    if sweep:
        print(f"\nsweep at {arguments.sweep_mbit:g} Mbit/s, {arguments.sweep_mib} MiB, by number of workers")
        print(table(sweep))
    setting = {"mib": arguments.mib, "mbit": arguments.mbit, "relays": RELAYS, "workers": WORKERS}
    setting |= {"cores": os.cpu_count(), "sweep_mbit": arguments.sweep_mbit, "sweep_mib": arguments.sweep_mib}
    print(json.dumps({"setting": setting, "variants": variants, "sweep": sweep}))


async def _variants(arguments: argparse.Namespace, chosen: list[str], scratch: Path) -> dict[str, dict[str, object]]:
    version = _make_version(scratch, arguments.mib * MIB, arguments.mbit)
    size = version.size
    samples = Samples(arguments.samples)
    with network(RELAYS, WORKERS, arguments.mbit) as net:
        for repeat in range(max(arguments.repeats, arguments.published_repeats)):
            for name in chosen:
                if repeat < (arguments.published_repeats if name == PUBLISHED else arguments.repeats):
                    sample = await _try(VARIANTS[name], net, version, scratch, name)
                    if sample is not None:
                        samples.add(name, sample)
    facts = {}
    for name, found in samples.of(chosen).items():
        facts[name] = summarize(found, size, _bound(name, size, arguments.mbit, RELAYS, WORKERS))
    return with_ratios(facts, PUBLISHED)


async def _sweep(arguments: argparse.Namespace, scratch: Path) -> dict[str, dict[str, object]]:
    mbit = arguments.sweep_mbit
    name = arguments.sweep_variant
    counts = [int(text) for text in arguments.sweep.split(",") if text]
    if not counts:
        return {}
    version = _make_version(scratch, arguments.sweep_mib * MIB, mbit)
    size = version.size
    found = {}
    for workers in counts:
        with network(RELAYS, workers, mbit) as net:
            label = f"{name}, {workers} workers"
            sample = await _try(VARIANTS[name], net, version, scratch, label)
        if sample is not None:
            found[label] = summarize([sample], size, _bound(name, size, mbit, RELAYS, workers))
    return found


async def _try(publish: Publish, net: Network, version: Version, scratch: Path, label: str) -> Sample | None:
    """A publication that fails is said to have failed, counted, and tried again; None if it never works."""
    for failures in range(_TRIES):
        try:
            return replace(await _publish(publish, net, version, scratch, label), failures=failures)
        except OurFault as fault:
            print(f"{label}: failed: {fault}", file=sys.stderr, flush=True)
    return None


async def _publish(publish: Publish, net: Network, version: Version, scratch: Path, label: str) -> Sample:
    limit_s = 20.0 + _GENEROUS * max(1.0, len(net.workers) / RELAYS) * version.bound_s
    if label == PUBLISHED:
        limit_s = min(limit_s, _HANGS_S)
    with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as hosts:
        sample = await publish(
            net, Plan(version.folder, version.before, shard_bytes(version.size), Path(hosts), limit_s)
        )
    print(
        f"{label}: first {sample.first_s:.2f} s, last {sample.last_s:.2f} s, "
        f"origin sent {sample.origin_sent / version.size:.2f} copies, CPU {sample.cpu_share:.0%}",
        file=sys.stderr,
        flush=True,
    )
    return sample


def _bound(name: str, size: int, mbit: float, relays: int, workers: int) -> float:
    return origin_bound_s(size, mbit) if name.endswith("peers") else tree_bound_s(size, mbit, relays, workers)


@contextmanager
def _scratch(work: Path, mib: int, hosts: int) -> Iterator[Path]:
    """A folder that goes when the run ends. Raises UserError if the hosts' files would not fit."""
    need = mib * MIB * (2 * hosts + 4)  # a delta needs two versions everywhere
    if not work.is_dir() or shutil.disk_usage(work).free < need:
        raise UserError(
            f"{work} needs {need // MIB} MiB of room for all hosts' files: give another --work or less --mib"
        )
    with tempfile.TemporaryDirectory(dir=work, prefix="rollswarm-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _make_version(scratch: Path, size: int, mbit: float) -> Version:
    """Two versions of one file of weights."""
    folder = Path(tempfile.mkdtemp(dir=scratch, prefix="version-"))
    make_pair(folder / "before", folder / "after", size)
    made = sum(file.stat().st_size for file in (folder / "after").iterdir())
    return Version(folder / "after", folder / "before", made, origin_bound_s(made, mbit))


if __name__ == "__main__":
    main()

"""How much memory a relay and a client use for a large version: `python -m benchmarks.shardcast_memory`.

One version of `--gib` (4) GiB in a sparse file, each shard marked so that no two are equal, goes from an origin through a
relay to a client, over loopback, each a process of its own. Measured is each process's peak resident memory as the
kernel counts it (`VmHWM`), one run as the files are and one packed. Needs twice `--gib` of disk in `--work`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from protocol.errors import OurFault, UserError
from protocol.manifest import DEFAULT_SHARD_BYTES
from protocol.signing import Identity
from shardcast.publish import publish_version

LIMIT_MIB = 200
_READY_S = 60.0


def main() -> None:
    """Parse, run, print a table and one line of JSON; status 1 if a process used more than `LIMIT_MIB`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    size = int(arguments.gib * 2**30)
    if shutil.disk_usage(arguments.work).free < 2.2 * size:
        sys.exit(f"benchmark: {arguments.work} needs {2.2 * arguments.gib:.1f} GiB of room: give another --work")
    results = []
    for packed in (False, True):
        with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
            results.append(asyncio.run(run(Path(folder), size, packed=packed)))
    highest = 0.0
    for result in results:
        peaks: dict[str, float] = result["peak_mib"]  # type: ignore[assignment]
        for role, peak in peaks.items():
            print(f"{'packed' if result['packed'] else 'raw':<7} {role:<8} {peak:7.1f} MiB at most")
        highest = max(highest, *peaks.values())
    print(json.dumps(results))
    sys.exit(highest >= LIMIT_MIB)


async def run(folder: Path, size: int, *, packed: bool) -> dict[str, object]:
    """Publish, relay and fetch one version of `size` bytes. Raises OurFault if a process fails."""
    identity = Identity.from_seed(os.urandom(32))
    key = ("--trainer-key", identity.key_id)
    version = folder / "version"
    make_sparse(version, size)
    async with serving("origin", "--data-dir", str(folder / "origin"), "--port", "0", *key) as (origin, url):
        await publish_version(
            version, folder / "origin", identity, origin_url=url, run_id="memory", policy_version=0, packed=packed
        )
        relay_arguments = ("relay", "--origin", url, "--data-dir", str(folder / "relay"), "--host", "127.0.0.1")
        async with serving(*relay_arguments, "--port", "0", *key) as (relay, relay_url):
            begin = time.monotonic()
            client_peak = await fetch("--source", relay_url, "--out", str(folder / "client"), *key)
            seconds = time.monotonic() - begin
            peaks = {"origin": peak_mib(origin.pid), "relay": peak_mib(relay.pid), "client": client_peak}
    setting = {"gib": size / 2**30, "shard_mib": DEFAULT_SHARD_BYTES / 2**20, "cores": os.cpu_count(), "n": 1}
    return {
        "setting": setting,
        "packed": packed,
        "peak_mib": peaks,
        "limit_mib": LIMIT_MIB,
        "seconds": round(seconds, 1),
    }


def make_sparse(folder: Path, size: int) -> None:
    """One file of `size` bytes whose shards differ by their first eight bytes."""
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
        for at in range(0, size - 8, DEFAULT_SHARD_BYTES):
            file.seek(at)
            file.write((at + 1).to_bytes(8, "little"))


@asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server process, ended with the context; and its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shardcast.main", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_READY_S):
            line = (await process.stdout.readline()).decode().strip()
        if not line.startswith("ready url="):
            raise OurFault(f"`shardcast {arguments[0]}` did not start: {line}")
        yield process, line.removeprefix("ready url=")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def fetch(*arguments: str) -> float:
    """Run `shardcast fetch` to its end; its peak in MiB, read by itself as it ends."""
    code = (
        "import atexit, sys\n"
        "from pathlib import Path\n"
        "atexit.register(lambda: print(Path('/proc/self/status').read_text(), file=sys.stderr))\n"
        "from shardcast.main import main\n"
        "main()\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "fetch", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    if process.returncode != 0:
        raise OurFault(f"`shardcast fetch` failed: {err.decode()[-500:]}")
    return parse_peak(err.decode())


def peak_mib(pid: int) -> float:
    """The peak resident memory of a process in MiB."""
    return parse_peak(Path(f"/proc/{pid}/status").read_text())


def parse_peak(status: str) -> float:
    """`VmHWM` of a `/proc/<pid>/status`, in MiB."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise UserError("this system doesn't tell a process's peak memory: run it on Linux")


if __name__ == "__main__":
    main()

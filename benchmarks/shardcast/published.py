"""One publication by the published PyPI package `shardcast`, in a virtual environment of its own.

That package and this project's own share an import name, so it never comes near this interpreter. Every host gets a
copy of the package, since it writes a temporary file beside its code; hosts start one after the other, since at its
start it writes another under a fixed name in /tmp.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.shardcast.netns import Host, Network
from benchmarks.shardcast.ours import START_S, Plan
from benchmarks.shardcast.processes import ROOT, Process, all_say, running
from benchmarks.shardcast.report import Sample
from protocol.errors import UserError

REQUIREMENT = "shardcast==0.3.2"
_HOME = ROOT / ".cache" / "published"
_PORT = 8000
_DUMMY_BYTES = 2**20


def install() -> None:
    """Make the package's environment, once. Raises UserError if it can't be had."""
    if _package() is not None:
        return
    for command in (
        [sys.executable, "-m", "venv", str(_HOME)],
        [str(_HOME / "bin" / "python"), "-m", "pip", "install", "--quiet", REQUIREMENT],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UserError(
                f"can't install {REQUIREMENT} for comparison: {done.stderr.strip()[-200:]}; try --skip published"
            )
    if shutil.which("wget") is None:
        raise UserError("the published package downloads by wget, which is not installed: install it")


async def publish_once(net: Network, plan: Plan) -> Sample:
    """Start the package's origin, relays and workers, broadcast one file, and stop everything."""
    (file,) = plan.folder.iterdir()
    async with AsyncExitStack() as stack:

        async def start(host: Host, role: str, *sources: Host) -> Process:
            data = plan.scratch / host.role
            _prepare(data)
            process = running(
                host,
                *(str(_HOME / "bin" / "python"), str(Path(__file__).with_name("published_host.py")), role),
                *(str(data / "files"), *(f"http://{source.address}:{_PORT}" for source in sources)),
                log_folder=plan.scratch,
                environment={"PYTHONPATH": str(data / "code")},
            )
            started = await stack.enter_async_context(process)
            await started.wait_for("ready", START_S)
            return started

        origin = await start(net.origin, "origin")
        relays = [await start(host, "relay", net.origin) for host in net.relays]
        workers = [await start(host, "worker", *net.relays) for host in net.workers]
        senders = (net.origin, *net.relays)
        before = [host.sent_bytes() for host in senders]
        await origin.tell(str(file))
        announced, prepared = map(float, (await origin.wait_for("announced", START_S)).split())
        done = [float(text.split()[0]) for text in await all_say(workers, "done", plan.limit_s)]
        sent = [host.sent_bytes() - already for host, already in zip(senders, before, strict=True)]
        return Sample(
            worker_s=tuple(at - announced for at in done),
            prepare_s=prepared,
            needed=file.stat().st_size,
            origin_sent=sent[0],
            relays_sent=sum(sent[1:]),
            cpu_s={"origin": origin.cpu_seconds(), "relays": _cpu(relays), "workers": _cpu(workers)},
        )


def _prepare(data: Path) -> None:
    package = _package()
    assert package is not None, "install() comes first"
    shutil.copytree(package, data / "code" / "shardcast")
    (data / "files").mkdir()
    (data / "files" / "data1.bin").write_bytes(os.urandom(_DUMMY_BYTES))


def _package() -> Path | None:
    return next(_HOME.glob("lib/python*/site-packages/shardcast"), None)


def _cpu(processes: Sequence[Process]) -> float:
    return sum(process.cpu_seconds() for process in processes)

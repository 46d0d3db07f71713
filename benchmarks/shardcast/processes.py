"""Processes on the hosts of the network: started, waited for line by line, and always ended by their own id."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.shardcast.netns import Host
from protocol.errors import OurFault

ROOT = Path(__file__).resolve().parents[2]
_STOP_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """One process on one host. Its standard output is a list of words per line: `ready`, `done 123.4`."""

    def __init__(self, host: Host, process: asyncio.subprocess.Process, log: Path) -> None:
        self.host = host
        self._process = process
        self._log = log

    async def wait_for(self, word: str, within_s: float) -> str:
        """The rest of the first line that begins with `word`. Raises OurFault if none comes in time."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                async for line in self._process.stdout:
                    first, _, rest = line.decode().strip().partition(" ")
                    if first == word:
                        return rest
        except TimeoutError:
            raise OurFault(f"{self.host.role} didn't say {word!r} within {within_s:.0f} s: see {self._log}") from None
        raise OurFault(f"{self.host.role} ended before it said {word!r}: {self._last_words()}")

    async def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    def cpu_seconds(self) -> float:
        """User and system time so far, children that ended included."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS

    async def stop(self) -> None:
        """End it, by force if it doesn't go."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _last_words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:]) or "nothing on stderr"


@asynccontextmanager
async def running(
    host: Host, *command: str, log_folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """Run a command on a host while the context lasts; standard error goes to `log_folder/<role>.log`."""
    log = log_folder / f"{host.role}.log"
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *host.command(*command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**_environment(), **(environment or {})},
        )
    running_process = Process(host, process, log)
    try:
        yield running_process
    finally:
        await asyncio.shield(running_process.stop())


def _environment() -> dict[str, str]:
    """This process's own, without proxies: no namespace reaches one."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


async def all_say(processes: Sequence[Process], word: str, within_s: float) -> list[str]:
    """What each says after `word`, waiting for all at once."""
    return list(await asyncio.gather(*(process.wait_for(word, within_s) for process in processes)))

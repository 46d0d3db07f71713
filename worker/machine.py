"""What this machine offers: its GPUs as the driver tells them, memory, disk. Measured here, judged elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20
_QUERY = "name,memory.total,memory.free,compute_cap,driver_version"
_TIMEOUT_S = 15


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Memory in bytes; `capability`: (major, minor) of its architecture."""

    name: str
    memory: int
    free: int
    capability: tuple[int, int]
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    """`driver_problem`: why no GPU is listed, in the driver's words; "" if there is none or they are listed.

    `memory_free`: of the host, in bytes. `disk_free`: where weights are kept.
    """

    gpus: tuple[Gpu, ...]
    driver_problem: str
    cpus: int
    memory_free: int
    disk_free: int
    wsl: bool = False

    @property
    def words(self) -> str:
        """What it is, for a person."""
        if not self.gpus:
            return f"{self.cpus} CPU cores, {gib(self.memory_free)} of memory free, no GPU"
        names = [f"{gpu.name} ({gib(gpu.memory)}, {gib(gpu.free)} free)" for gpu in self.gpus]
        return ", ".join(names)


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.0f} MiB"


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """What nvidia-smi printed for _QUERY, in CSV without units. A line that reads differently is left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        try:
            name, total, free, capability, driver = fields
            major, _, minor = capability.partition(".")
            found.append(Gpu(name, int(total) * _MIB, int(free) * _MIB, (int(major), int(minor)), driver))
        except ValueError:
            continue
    return tuple(found)


def visible(gpus: tuple[Gpu, ...], chosen: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order: None leaves all, "" none. Names other than numbers leave all."""
    if chosen is None:
        return gpus
    numbers = [part.strip() for part in chosen.split(",") if part.strip()]
    if not all(number.isdigit() for number in numbers):
        return gpus
    return tuple(gpus[int(number)] for number in numbers if int(number) < len(gpus))


def measure(home: Path, chosen: str | None = None) -> Machine:
    """Look at this machine. Never raises: what can't be had is told as 0 or in `driver_problem`.

    `chosen`: what CUDA_VISIBLE_DEVICES says.
    """
    gpus, problem = _gpus()
    return Machine(
        gpus=visible(gpus, chosen),
        driver_problem=problem,
        cpus=os.cpu_count() or 1,
        memory_free=_memory_free(),
        disk_free=_disk_free(home),
        wsl=Path("/proc/sys/fs/binfmt_misc/WSLInterop").exists(),
    )


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        return (), ""  # no driver, so no GPU of theirs: a CPU worker
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"nvidia-smi does not answer ({type(error).__name__})"
    if done.returncode != 0:
        return (), (done.stdout + done.stderr).strip().splitlines()[0][
            :200
        ] if done.stdout + done.stderr else "no words"
    return parse_gpus(done.stdout), ""


def _memory_free() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def _disk_free(folder: Path) -> int:
    """Of the nearest folder that exists."""
    for each in (folder, *folder.parents):
        try:
            return shutil.disk_usage(each).free
        except OSError:
            continue
    return 0


def writable(folder: Path) -> str:
    """Why nothing can be written below `folder`; "" if something can."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""

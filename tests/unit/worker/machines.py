"""Machines of tests."""

from __future__ import annotations

from worker.machine import Gpu, Machine

GIB = 1 << 30
RTX4090 = Gpu("NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, (8, 9), "580.95.05")
T4 = Gpu("Tesla T4", 15 * GIB, 15 * GIB, (7, 5), "580.95.05")


def machine(*gpus: Gpu, problem: str = "", memory: int = 16 * GIB, disk: int = 500 * GIB, wsl: bool = False) -> Machine:
    return Machine(gpus, problem, cpus=8, memory_free=memory, disk_free=disk, wsl=wsl)

"""What a run's model asks of a machine, in bytes, and whether a machine can give it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from worker.machine import Machine, gib

# Beside the weights an engine keeps: activations and graphs (a third of the weights, at least 1 GiB), and some KV cache.
_OVERHEAD = 1.35
_LEAST_BYTES = 1 << 30
_BF16_CAPABILITY = (8, 0)
# Weights in use, those that come, and the version that they replace until it is pruned.
_VERSIONS_ON_DISK = 3


@dataclass(frozen=True, slots=True)
class Need:
    """`version_bytes`: of one policy version, as its manifest tells. `cpu_cache_bytes`: KV cache of an engine without a GPU."""

    version_bytes: int
    cpu_cache_bytes: int = 2 << 30  # worker.hardware.default_kv_cache_gib

    @property
    def engine_bytes(self) -> int:
        """Memory of the device that generates."""
        return max(int(self.version_bytes * _OVERHEAD), self.version_bytes + _LEAST_BYTES)

    @property
    def disk_bytes(self) -> int:
        return _VERSIONS_ON_DISK * self.version_bytes

    @property
    def words(self) -> str:
        return (
            f"{gib(self.version_bytes)} of weights, {gib(self.engine_bytes)} of memory, {gib(self.disk_bytes)} of disk"
        )


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a machine won't do, and what would."""

    what: str
    remedy: str


def need_of(version_bytes: int, kv_cache_gib: float | None) -> Need:
    """`kv_cache_gib`: as the worker is set, None for what suits the machine."""
    return Need(version_bytes) if kv_cache_gib is None else Need(version_bytes, int(kv_cache_gib * 2**30))


def memory_shortage(machine: Machine, need: Need) -> Shortage | None:
    """None if the engine fits where it would run: the first GPU, or the host if there is none."""
    if not machine.gpus:
        wanted = need.engine_bytes + need.cpu_cache_bytes
        if machine.memory_free >= wanted:
            return None
        return Shortage(
            f"the model needs about {gib(wanted)} of memory on a CPU, and {gib(machine.memory_free)} are free",
            "close other programs, set --kv-cache-gib lower, or join a run with a smaller model",
        )
    gpu = machine.gpus[0]
    if gpu.memory < need.engine_bytes:
        return Shortage(
            f"the model needs about {gib(need.engine_bytes)} of GPU memory, and the {gpu.name} has {gib(gpu.memory)}",
            "use a larger GPU, or join a run with a smaller model",
        )
    if gpu.free < need.engine_bytes:
        return Shortage(
            f"the model needs {gib(need.engine_bytes)}; of the {gpu.name}'s {gib(gpu.memory)} only {gib(gpu.free)} are free",
            "end what else uses the GPU (`nvidia-smi` lists it)",
        )
    return None


def bf16_shortage(machine: Machine) -> Shortage | None:
    """GPUs before Ampere have no bf16 units, and what they compute instead is not what verifiers expect."""
    old = next((gpu for gpu in machine.gpus if gpu.capability < _BF16_CAPABILITY), None)
    if old is None:
        return None
    capability = ".".join(map(str, old.capability))
    return Shortage(
        f"the {old.name} (compute capability {capability}) is too old for bf16, which the run's weights are in",
        "use a GPU of compute capability 8.0 or newer (RTX 30 series, A100), or hide it: CUDA_VISIBLE_DEVICES=",
    )


def disk_shortage(machine: Machine, need: Need, folder: str) -> Shortage | None:
    if machine.disk_free >= need.disk_bytes:
        return None
    return Shortage(
        f"{folder} has {gib(machine.disk_free)} free, and the run's weights take up to {gib(need.disk_bytes)}",
        "free some space, or put --home on a larger disk",
    )


def shortages(machine: Machine, need: Need, folder: str) -> list[Shortage]:
    """Everything that would stop this machine from working for the run."""
    found = (bf16_shortage(machine), memory_shortage(machine, need), disk_shortage(machine, need, folder))
    return [each for each in found if each is not None]

"""Each check: from what was measured to a finding. Pure, so that every remedy is tested as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.terms import PROTOCOL_MAX, PROTOCOL_MIN
from worker.doctor.findings import Finding, fail, ok, warn
from worker.machine import Machine, gib
from worker.need import Need, bf16_shortage, disk_shortage, memory_shortage
from worker.vllm_engine.installed import MISSING, REMEDY, remedy_of

_CLOCK_FAIL_S = 300.0  # certificates and tokens stop making sense
_CLOCK_WARN_S = 30.0
_LEAST_DISK = 2 << 30
_SLOW_S = 600.0  # to receive a version: longer than most runs keep one useful
_LEAST_DRIVER = 580  # CUDA 13.0, which the pinned vLLM is built with


@dataclass(frozen=True, slots=True)
class Relay:
    """What asking one relay gave. `problem`: why it is of no use, "" if it is. `rate`: bytes per second of a shard."""

    url: str
    problem: str = ""
    version: int | None = None
    rate: float | None = None


def driver(machine: Machine) -> Finding:
    if machine.driver_problem:
        remedy = "install or restart the NVIDIA driver (a reboot after an update helps often)"
        if machine.wsl:
            remedy = "update the NVIDIA driver of Windows, not inside WSL, then `wsl --shutdown` and start again"
        return fail("driver", machine.driver_problem, remedy)
    if not machine.gpus:
        return warn(
            "driver",
            "no NVIDIA GPU was found: the CPU will generate, slowly",
            "if this machine has one, install its driver until `nvidia-smi` lists it",
        )
    version = machine.gpus[0].driver
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < _LEAST_DRIVER:
        return fail(
            "driver", f"driver {version} is older than {_LEAST_DRIVER}", f"update it to {_LEAST_DRIVER} or newer"
        )
    return ok("driver", f"{machine.words}, driver {version}")


def cuda(machine: Machine, *, torch_sees: bool | None) -> Finding:
    """`torch_sees`: whether torch finds a GPU; None if it is not installed."""
    shortage = bf16_shortage(machine)
    if shortage is not None:
        return fail("cuda", shortage.what, shortage.remedy)
    if machine.gpus and torch_sees is False:
        return fail(
            "cuda",
            "the driver lists a GPU and torch sees none",
            "install the GPU build in a fresh environment: `pip install 'rollswarm[worker]'`; is CUDA_VISIBLE_DEVICES set?",
        )
    return ok("cuda", "torch sees the GPU" if torch_sees else "no GPU is used")


def memory(machine: Machine, need: Need | None) -> Finding:
    if need is None:
        return warn("memory", "the model's size is not known yet", "ask again when the run has published a version")
    shortage = memory_shortage(machine, need)
    if shortage is not None:
        return fail("memory", shortage.what, shortage.remedy)
    return ok("memory", f"the model needs about {gib(need.engine_bytes)}")


def disk(machine: Machine, need: Need | None, folder: str, unwritable: str) -> Finding:
    """`unwritable`: why nothing can be written there."""
    if unwritable:
        return fail(
            "disk", f"{folder} can't be written: {unwritable}", "choose another --home, or mend its permissions"
        )
    shortage = disk_shortage(machine, need or Need(_LEAST_DISK // 3), folder)
    if shortage is not None:
        return fail("disk", shortage.what, shortage.remedy)
    return ok("disk", f"{gib(machine.disk_free)} free in {folder}")


def clock(offset_s: float | None, *, wsl: bool = False) -> Finding:
    """`offset_s`: this machine's time less the coordinator's; None if it is not known."""
    if offset_s is None:
        return warn("clock", "the coordinator told no time", "see `coordinator` below")
    off = abs(offset_s)
    if off <= _CLOCK_WARN_S:
        return ok("clock", f"within {off:.0f} s of the coordinator's")
    text = f"this machine's clock is {off:.0f} s {'ahead of' if offset_s > 0 else 'behind'} the coordinator's"
    remedy = "`sudo hwclock -s` (WSL after sleep)" if wsl else "`sudo timedatectl set-ntp true`, or set the clock"
    return fail("clock", text, remedy) if off > _CLOCK_FAIL_S else warn("clock", text, remedy)


def name(host: str, problem: str) -> Finding:
    """DNS of the coordinator's host. `problem`: the resolver's words, "" if it was found."""
    if problem:
        remedy = "check the spelling of --coordinator, and this machine's network and DNS (`getent hosts NAME`)"
        return fail("dns", f"{host} has no address: {problem}", remedy)
    return ok("dns", f"{host} has an address")


def coordinator(url: str, problem: str) -> Finding:
    """`problem`: why the run's terms could not be had, with its remedy in its own words."""
    if problem:
        what, _, remedy = problem.rpartition(": ")
        return fail("coordinator", what or problem, remedy if what else "check the URL, and that the coordinator runs")
    return ok("coordinator", f"{url} serves the run's terms")


def grpc(endpoints: Mapping[str, str]) -> Finding:
    """`endpoints`: each with why it can't be connected to, "" if it can."""
    blocked = {endpoint: problem for endpoint, problem in endpoints.items() if problem}
    if not blocked:
        return ok("grpc", f"{', '.join(endpoints)} can be connected to")
    text = "; ".join(f"{endpoint}: {problem}" for endpoint, problem in blocked.items())
    remedy = "let this machine make outgoing TCP connections to that port; if it is refused, tell the run's operator"
    return fail("grpc", text, remedy) if len(blocked) == len(endpoints) else warn("grpc", text, remedy)


def relays(found: list[Relay]) -> Finding:
    """Weights come from any of them."""
    useful = [relay for relay in found if not relay.problem]
    dead = "; ".join(f"{relay.url}: {relay.problem}" for relay in found if relay.problem)
    if not found:
        return fail("relays", "the run names no relay", "tell its operator to set [shardcast] relays")
    if not useful:
        return fail("relays", dead, "let outgoing connections through; if all are down, tell the run's operator")
    if dead:
        return warn("relays", dead, "nothing for you to do: the others are used")
    if all(relay.version is None for relay in useful):
        return warn(
            "relays", f"{len(useful)} answer, and none has a version yet", "wait until the trainer has published one"
        )
    return ok("relays", f"{len(useful)} answer")


def bandwidth(found: list[Relay], need: Need | None) -> Finding:
    """How long a whole version would take from the fastest relay."""
    rates = [relay.rate for relay in found if relay.rate]
    if not rates or need is None:
        return warn("bandwidth", "could not be measured", "see `relays`")
    seconds = need.version_bytes / max(rates)
    text = f"{max(rates) * 8 / 1e6:.0f} Mbit/s: a whole version takes {seconds:.0f} s (most come as small differences)"
    if seconds > _SLOW_S:
        return warn("bandwidth", text, "use a faster network, lift --max-download-mbit, or try --peers")
    return ok("bandwidth", text)


def peer_port(port: int, *, asked_for: bool, problem: str) -> Finding:
    if not asked_for or port == 0:
        return ok("ports", "none is needed")
    if problem:
        return warn(
            "ports", f"port {port} for peers: {problem}", "choose another with --peer-port; 0 only makes connections"
        )
    return ok("ports", f"port {port} for peers is free")


def versions(rollswarm: str, vllm: str | None, protocol: tuple[int, int] | None) -> Finding:
    """`protocol`: lowest and highest that the coordinator speaks; None if it could not be asked."""
    ours = f"rollswarm {rollswarm}, vLLM {vllm or 'missing'}, protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}"
    if vllm is None:
        return fail("versions", MISSING, REMEDY)
    if protocol is not None and (protocol[0] > PROTOCOL_MAX or protocol[1] < PROTOCOL_MIN):
        return fail(
            "versions",
            f"the run speaks protocol {protocol[0]} to {protocol[1]}; {ours}",
            "`pip install -U rollswarm`" if protocol[0] > PROTOCOL_MAX else "tell the run's operator to update",
        )
    return ok("versions", ours)


def engine(problem: str) -> Finding:
    """`problem`: why vLLM can't be imported, "" if it can."""
    if problem:
        remedy = remedy_of(problem) or f"install in a fresh environment: {REMEDY}"
        return fail("engine", f"vLLM can't be imported: {problem}", remedy)
    return ok("engine", "vLLM can be imported")


def tool(name: str, problem: tuple[str, str] | None) -> Finding:
    """Of a run whose tasks call one. `problem`: what is wrong with ours, and the remedy."""
    if problem is not None:
        return fail("tools", f"the run's tasks call {problem[0]}", problem[1])
    return ok("tools", f"{name}, as the run has it")


def identity(problem: str, holder: int | None) -> Finding:
    """`problem`: why the key file is of no use. `holder`: process that works with it now."""
    if problem:
        what, _, remedy = problem.rpartition(": ")
        return fail("identity", what or problem, remedy or "restore it from a backup")
    if holder is not None:
        return warn(
            "identity",
            f"process {holder} works with this identity",
            "`worker leave` ends it; a second worker here needs a --home of its own",
        )
    return ok("identity", "free, and only its owner can read it")

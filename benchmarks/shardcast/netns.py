"""A network of namespaces on this machine: one router, and hosts whose outgoing rate is limited.

Nothing outside is touched: the router too lies in a namespace of its own, so addresses can't clash with the machine's.
Names carry the process id of the run that made them; they are removed when the run ends, and what a killed run left
behind is removed by the next one.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import UserError

_PREFIX = "rollswarm-bench"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-[a-z]+\d*")
_BURST_BYTES = 256 * 1024  # at least what leaves within one tick of the kernel's clock
_QUEUE = "100ms"
_NETWORK = "198.18"  # for benchmarks (RFC 2544); BitTorrent treats private networks otherwise than the Internet
# Hosts know the router alone: on one switch, 35 of them fill the kernel's table of neighbours (1024), which all namespaces
# share, and then can't reach each other.
_GATEWAY = f"{_NETWORK}.255.254"


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace with one interface `eth0`."""

    role: str
    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs something on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def sent_bytes(self) -> int:
        """Bytes that left the interface, headers included."""
        return int(_run(*self.command("cat", "/sys/class/net/eth0/statistics/tx_bytes")))


@dataclass(frozen=True, slots=True)
class Network:
    """An origin, relays and workers, each reachable by each."""

    origin: Host
    relays: tuple[Host, ...]
    workers: tuple[Host, ...]


@contextmanager
def network(relays: int, workers: int, mbit: float) -> Iterator[Network]:
    """Build the namespaces, each with `mbit` Mbit/s outgoing, and remove them whatever happens.

    Raises UserError if this process may not make namespaces.
    """
    if os.geteuid() != 0:
        raise UserError("this benchmark makes network namespaces: run it as root")
    _remove_left_over()
    made: list[str] = []
    try:
        hub = _namespace("hub", made)
        _run("ip", "netns", "exec", hub, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        roles = ["origin", *(f"relay{n}" for n in range(relays)), *(f"worker{n}" for n in range(workers))]
        hosts = [_host(role, number, hub, mbit, made) for number, role in enumerate(roles, start=1)]
        yield Network(hosts[0], tuple(hosts[1 : 1 + relays]), tuple(hosts[1 + relays :]))
    finally:
        _remove(made)


def _namespace(role: str, made: list[str]) -> str:
    name = f"{_PREFIX}-{os.getpid()}-{role}"
    made.append(name)
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    return name


def _host(role: str, number: int, hub: str, mbit: float, made: list[str]) -> Host:
    name = _namespace(role, made)
    port = f"port{number}"
    _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    address = f"{_NETWORK}.{number // 250}.{number % 250 + 1}"
    commands = (
        (hub, "link", "set", port, "up"),
        (hub, "address", "add", f"{_GATEWAY}/32", "dev", port),
        (hub, "route", "add", f"{address}/32", "dev", port),
        (name, "address", "add", f"{address}/32", "dev", "eth0"),
        (name, "link", "set", "eth0", "up"),
        (name, "route", "add", f"{_GATEWAY}/32", "dev", "eth0"),
        (name, "route", "add", "default", "via", _GATEWAY),
    )
    for namespace, *command in commands:
        _run("ip", "-n", namespace, *command)
    rate = ("rate", f"{round(mbit * 1e6)}bit", "burst", str(_BURST_BYTES), "latency", _QUEUE)
    _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
    return Host(role, name, address)


def _remove(names: Sequence[str]) -> None:
    """The interfaces go with their namespaces. Processes still inside keep theirs until they end."""
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _remove_left_over() -> None:
    """Namespaces of runs that no longer live."""
    try:
        names = [path.name for path in Path("/var/run/netns").iterdir()]
    except FileNotFoundError:
        return
    found = ((name, _NAME.fullmatch(name)) for name in names)
    _remove([name for name, match in found if match and not Path(f"/proc/{match.group(1)}").exists()])


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed: install iproute2") from None
    if done.returncode != 0:
        raise UserError(f"can't build the network: `{' '.join(command)}` says: {done.stderr.strip()}")
    return done.stdout

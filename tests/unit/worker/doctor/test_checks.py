"""Each check as a table: what was measured, how bad it is, and a word of the remedy."""

from __future__ import annotations

import pytest

from tests.unit.worker.machines import GIB, RTX4090, T4, machine
from worker.doctor import checks
from worker.doctor.checks import Relay
from worker.doctor.findings import Finding, Level
from worker.machine import Gpu
from worker.need import Need

OLD_DRIVER = Gpu("NVIDIA A10", 24 * GIB, 24 * GIB, (8, 6), "535.104")
NEED = Need(2 * GIB)
URL = "http://relay:8601"

TABLE = [
    (checks.driver(machine(RTX4090)), Level.OK, ""),
    (checks.driver(machine()), Level.WARN, "nvidia-smi"),
    (checks.driver(machine(OLD_DRIVER)), Level.FAIL, "update it to 580"),
    (checks.driver(machine(problem="Driver/library version mismatch")), Level.FAIL, "reboot"),
    (checks.driver(machine(problem="no devices", wsl=True)), Level.FAIL, "driver of Windows"),
    (checks.cuda(machine(RTX4090), torch_sees=True), Level.OK, ""),
    (checks.cuda(machine(), torch_sees=None), Level.OK, ""),
    (checks.cuda(machine(RTX4090), torch_sees=False), Level.FAIL, "CUDA_VISIBLE_DEVICES"),
    (checks.cuda(machine(T4), torch_sees=True), Level.FAIL, "8.0 or newer"),
    (checks.memory(machine(RTX4090), NEED), Level.OK, ""),
    (checks.memory(machine(RTX4090), None), Level.WARN, "ask again"),
    (checks.memory(machine(RTX4090), Need(40 * GIB)), Level.FAIL, "smaller model"),
    (checks.disk(machine(), NEED, "/w", ""), Level.OK, ""),
    (checks.disk(machine(disk=GIB), None, "/w", ""), Level.FAIL, "larger disk"),
    (checks.disk(machine(disk=GIB), NEED, "/w", ""), Level.FAIL, "free some space"),
    (checks.disk(machine(), NEED, "/w", "Read-only file system"), Level.FAIL, "--home"),
    (checks.clock(3.0), Level.OK, ""),
    (checks.clock(-45.0), Level.WARN, "timedatectl"),
    (checks.clock(600.0), Level.FAIL, "timedatectl"),
    (checks.clock(600.0, wsl=True), Level.FAIL, "hwclock"),
    (checks.clock(None), Level.WARN, "coordinator"),
    (checks.name("run.example", ""), Level.OK, ""),
    (checks.name("run.example", "Name or service not known"), Level.FAIL, "DNS"),
    (checks.coordinator("http://c", ""), Level.OK, ""),
    (checks.coordinator("http://c", "the certificate of c has expired: set the clock"), Level.FAIL, "set the clock"),
    (checks.coordinator("http://c", "nothing"), Level.FAIL, "check the URL"),
    (checks.grpc({"c:7447": ""}), Level.OK, ""),
    (checks.grpc({"c:7447": "Connection refused"}), Level.FAIL, "outgoing TCP"),
    (checks.grpc({"c:7447": "", "d:7447": "no answer"}), Level.WARN, "outgoing TCP"),
    (checks.relays([]), Level.FAIL, "operator"),
    (checks.relays([Relay(URL, version=3)]), Level.OK, ""),
    (checks.relays([Relay(URL)]), Level.WARN, "trainer"),
    (checks.relays([Relay(URL, "refused")]), Level.FAIL, "outgoing"),
    (checks.relays([Relay(URL, "refused"), Relay("http://b", version=1)]), Level.WARN, "others are used"),
    (checks.bandwidth([Relay(URL, version=3, rate=100e6)], NEED), Level.OK, ""),
    (checks.bandwidth([Relay(URL, version=3, rate=1e6)], NEED), Level.WARN, "--max-download-mbit"),
    (checks.bandwidth([], NEED), Level.WARN, "relays"),
    (checks.peer_port(8611, asked_for=False, problem="in use"), Level.OK, ""),
    (checks.peer_port(8611, asked_for=True, problem=""), Level.OK, ""),
    (checks.peer_port(8611, asked_for=True, problem="Address already in use"), Level.WARN, "--peer-port"),
    (checks.versions("0.1.0", "0.32.0", (1, 1)), Level.OK, ""),
    (checks.engine(""), Level.OK, ""),
    (checks.engine("RuntimeError: operator torchvision::nms does not exist"), Level.FAIL, "uninstall torchvision"),
    (checks.engine("ImportError: libcudart.so.13: cannot open shared object file"), Level.FAIL, "fresh environment"),
    (checks.versions("0.1.0", None, None), Level.FAIL, "pip install"),
    (checks.versions("0.1.0", "0.32.0", (9, 9)), Level.FAIL, "pip install -U"),
    (checks.versions("0.1.0", "0.32.0", (0, 0)), Level.FAIL, "operator"),
    (checks.tool("calculator", None), Level.OK, ""),
    (checks.tool("atlas", ("a tool that this worker doesn't have", "install the package")), Level.FAIL, "install"),
    (checks.identity("", None), Level.OK, ""),
    (checks.identity("", 4711), Level.WARN, "worker leave"),
    (checks.identity("the key file k can be read by others: run `chmod 600 k`", None), Level.FAIL, "chmod 600"),
]


@pytest.mark.parametrize(("finding", "level", "remedy"), TABLE)
def test_a_finding_is_as_bad_as_it_is_and_names_its_remedy(finding: Finding, level: Level, remedy: str) -> None:
    assert finding.level is level, finding
    assert remedy in finding.remedy
    assert finding.text

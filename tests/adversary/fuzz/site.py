"""A coordinator to be fuzzed: its own process, so that its memory, its files and its log can be looked at."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from coordinator.operators import Role
from demo.processes import Processes
from protocol.signing import CHALLENGE, Identity
from protocol.wire import envelope_to_wire
from protos.rollswarm.v1 import worker_pb2, worker_pb2_grpc
from tests.factories import make_identity

_READY_S = 300.0
_TIMEOUT_S = 120.0
_KEPT = 10  # of each kind of trouble: enough to mend it by
_FIRST_WORKER = 9_000_000


@dataclass(slots=True)
class Report:
    """`answers` counts each; `trouble` says what must not be, with the number of the request that did it."""

    answers: Counter[str] = field(default_factory=Counter)
    trouble: list[str] = field(default_factory=list)

    def bad(self, what: str) -> None:
        self.answers["TROUBLE"] += 1
        if len(self.trouble) < _KEPT:
            self.trouble.append(what)

    def lines(self) -> list[str]:
        return [f"{count:8d}  {answer}" for answer, count in sorted(self.answers.items())]


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds: resident bytes and open files."""

    resident: int
    files: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered worker."""

    identity: Identity
    token: str


class Site:
    """Both doors, as `served` opens them, with work for everybody. Use as a context."""

    def __init__(self, folder: Path, database: str = "") -> None:
        """`database`: a URL; SQLite in `folder` if none is given."""
        self._processes = Processes(folder / "logs")
        url = database or f"sqlite+aiosqlite:///{folder / 'run.db'}"
        self._process = self._processes.start("served", ["tests.adversary.fuzz.served", url])
        ready = self._process.wait_ready(_READY_S)
        self.http, self.grpc, self.trainer = (int(ready[name]) for name in ("http", "grpc", "trainer"))
        self.tokens = {role: ready[role.name] for role in Role}
        self.url = f"http://127.0.0.1:{self.http}"
        self._joined = 0

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__(*error)

    def join(self) -> Worker:
        """A worker that joined anew."""
        self._joined += 1
        identity = make_identity(_FIRST_WORKER + self._joined)
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc}") as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            asked = worker_pb2.GetChallengeRequest(key_id=identity.key_id, protocol_min=1, protocol_max=1)
            challenge = stub.GetChallenge(asked, timeout=_TIMEOUT_S).challenge
            signed = envelope_to_wire(identity.sign(CHALLENGE, challenge))
            answer = stub.Register(worker_pb2.RegisterRequest(challenge=signed, name="w"), timeout=_TIMEOUT_S)
        return Worker(identity, answer.token)

    def pardon(self, worker: Worker) -> None:
        headers = {"Authorization": f"Bearer {self.tokens[Role.ADMIN]}"}
        body = json.dumps({"worker": worker.identity.key_id}).encode()
        request = urllib.request.Request(f"{self.url}/api/v1/admin/pardon", body, headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            assert answer.status == 200

    def holds(self) -> Held:
        process = Path(f"/proc/{self._process.popen.pid}")
        for line in (process / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return Held(int(line.split()[1]) * 1024, sum(1 for _ in (process / "fd").iterdir()))
        raise AssertionError("the coordinator is gone")

    def own_faults(self) -> list[str]:
        """What the coordinator logged as its own fault, or failed at without a word to anybody: the end of each traceback."""
        lines = self._process.log.read_text(errors="replace").splitlines()
        begins = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
        return [" | ".join(_traceback(lines[begin:]))[-1500:] for begin in begins[:_KEPT]]


def _traceback(lines: list[str]) -> list[str]:
    """Up to the line that says what it was."""
    end = next((n for n, line in enumerate(lines) if n and not line.startswith((" ", "Traceback"))), len(lines) - 1)
    return lines[: end + 1]

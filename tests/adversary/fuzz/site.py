"""A real `coordinator serve` to be fuzzed: its own process, so that its memory, its files and its log can be looked at."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from coordinator.operators import Role
from protocol import keyfile
from protocol.signing import CHALLENGE, Identity
from protocol.terms import RunTerms, parse_terms
from protocol.wire import envelope_to_wire
from protos.rollswarm.v1 import trainer_pb2, trainer_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.factories import make_version
from tests.network import Network

_TIMEOUT_S = 60.0
_KEPT = 10  # of each kind of trouble: enough to mend it by
_SECTIONS = """
[limits]
key_rate = 1000000
key_burst = 1000000
"""


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


class Site(Network):
    """The coordinator alone, with a version announced, work for everybody, and no limit per key. Use as a context.

    `database`: a URL; SQLite in `folder` if none is given.
    """

    def __init__(self, folder: Path, database: str = "") -> None:
        self._elsewhere = database
        super().__init__(folder, settings=_SECTIONS)
        self.database = database or self.database
        self.joined = 0

    def _run_file(self, versions: int, settings: str) -> str:
        text = super()._run_file(versions, settings)
        text = text.replace("groups_per_batch = 2", "groups_per_batch = 4096").replace(
            "lease_term_s = 4.0", "lease_term_s = 600.0"
        )
        return text.replace("[model]", f'database = "{self._elsewhere}"\n[model]', 1) if self._elsewhere else text

    def open(self) -> Site:
        """Start it and give it something to do."""
        self.start("coordinator")
        self.tokens = {role: self.token(role) for role in Role}
        self.trainer_token = (self.folder / "trainer.token").read_text().strip()
        self.terms = self._read_terms()
        manifest = make_version(0, run_id=self.terms.run_id, signer=keyfile.load(self.folder / "trainer.key"))
        metadata = (("authorization", f"Bearer {self.trainer_token}"),)
        with grpc.insecure_channel(f"127.0.0.1:{self.ports.trainer}") as channel:
            trainer_pb2_grpc.TrainerServiceStub(channel).AnnounceVersion(
                trainer_pb2.AnnounceVersionRequest(manifest=envelope_to_wire(manifest)),
                metadata=metadata,
                timeout=_TIMEOUT_S,
            )
        return self

    def _read_terms(self) -> RunTerms:
        with urllib.request.urlopen(f"{self.url}/.well-known/rollswarm.json", timeout=_TIMEOUT_S) as answer:
            return parse_terms(answer.read(), self.url)

    def join(self) -> Worker:
        """A worker that joined anew."""
        self.joined += 1
        identity = Identity.from_seed((9_000_000 + self.joined).to_bytes(32, "big"))
        with grpc.insecure_channel(f"127.0.0.1:{self.ports.grpc}") as channel:
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
        process = Path(f"/proc/{self.running['coordinator'].popen.pid}")
        for line in (process / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return Held(int(line.split()[1]) * 1024, sum(1 for _ in (process / "fd").iterdir()))
        raise AssertionError("the coordinator is gone")

    def own_faults(self) -> list[str]:
        """What the coordinator logged as its own fault, or failed at without a word to anybody: the end of each traceback."""
        lines = self.running["coordinator"].log.read_text(errors="replace").splitlines()
        begins = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
        return [" | ".join(_traceback(lines[begin:]))[-1500:] for begin in begins[:_KEPT]]


def _traceback(lines: list[str]) -> list[str]:
    """Up to the line that says what it was."""
    end = next((n for n, line in enumerate(lines) if n and not line.startswith((" ", "Traceback"))), len(lines) - 1)
    return lines[: end + 1]

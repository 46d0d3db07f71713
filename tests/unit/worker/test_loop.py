"""The worker's loops against an engine, a client and a follower that do as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import worker.weights as weights_module
from coordinator.client import LeasedSample
from protocol.errors import BadSignature, OurFault, UserError, WorkerFault
from protocol.lease import Commitment
from protocol.rollout import SamplingParams, StopReason, token_digest
from protocol.signing import ROLLOUT, SignedEnvelope, open_envelope
from protocol.wire import rollout_from_payload, rollout_id
from protos.rollswarm.v1 import worker_pb2
from tests.factories import EOS, MAX_TOKENS, RUN_ID, make_identity, make_proofs, make_spans, make_terms, version_digest
from worker import handing_in, standing
from worker.console import one_line
from worker.engine import Generation, GenerationRequest, Progress, SwapFailed, SwapReport, Weights
from worker.loop import Worker
from worker.outbox import Outbox
from worker.status import Status
from worker.weights import WeightsFollower

ALICE = make_identity(11)
DEADLINE_S = 20.0
TOKENS = (1, 2, 3, EOS)


def make_lease(number: int, min_version: int = 0) -> LeasedSample:
    sampling = SamplingParams(1.0, MAX_TOKENS, (EOS,))
    return LeasedSample(f"lease-{number}", f"g0-{number}", (7, 8), sampling, 42 + number, min_version, 1e12)


def make_weights(version: int) -> Weights:
    return Weights(version, version_digest(version), Path(f"/weights/{version}"))


class FakeClient:
    """A coordinator that leases what is queued, and answers as told."""

    notice = ""

    def __init__(self, leases: Sequence[LeasedSample] = ()) -> None:
        self.queue: asyncio.Queue[LeasedSample] = asyncio.Queue()
        for lease in leases:
            self.queue.put_nowait(lease)
        self.asked_for: list[int] = []
        self.renewed: list[dict[str, Commitment]] = []
        self.given_back: list[tuple[list[str], str]] = []
        self.submitted: list[str] = []
        self.dead: dict[str, str] = {}
        self.refuse: WorkerFault | OurFault | None = None
        self.refusals = 0
        self.ban_reason = ""
        self.verdicts: list[worker_pb2.VerdictNotice] = []
        self.reachable = asyncio.Event()
        self.reachable.set()
        self.changed = asyncio.Condition()

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed, asyncio.timeout(DEADLINE_S):
            await self.changed.wait_for(condition)

    async def register(self, patience_s: float | None = None) -> None:
        await self.reachable.wait()

    async def standing(self, verdicts: int = 16, patience_s: float | None = None) -> Any:
        await self._note()
        return worker_pb2.GetStandingResponse(
            credits=7, strikes=1, banned=bool(self.ban_reason), ban_reason=self.ban_reason, verdicts=self.verdicts
        )

    async def acquire(self, count: int, policy_version: int, wait_s: float) -> tuple[list[LeasedSample], int, str]:
        self.asked_for.append(count)
        leases = [await self.queue.get()]
        while len(leases) < count and not self.queue.empty():
            leases.append(self.queue.get_nowait())
        return leases, 0, ""

    async def renew(self, progress: Mapping[str, Commitment]) -> tuple[dict[str, tuple[float, str]], int]:
        self.renewed.append(dict(progress))
        await self._note()
        return {lease_id: (1e12, self.dead.get(lease_id, "")) for lease_id in progress}, 0

    async def give_back(self, lease_ids: Sequence[str], reason: str, patience_s: float | None = None) -> int:
        if not self.reachable.is_set():
            raise OurFault("the coordinator is away")
        self.given_back.append((list(lease_ids), reason))
        await self._note()
        return len(lease_ids)

    async def submit(self, envelope: SignedEnvelope, patience_s: float | None = None) -> Any:
        await self.reachable.wait()
        if self.refuse is not None:
            self.refusals += 1
            await self._note()
            raise self.refuse
        open_envelope(envelope, ROLLOUT, pinned=(ALICE.key_id,))
        self.submitted.append(rollout_id(envelope.payload))
        await self._note()
        return worker_pb2.Receipt()


class FakeEngine:
    """Generates TOKENS for each request when `finish` is set, after saying `progress`."""

    build = "fake 1"

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.progress: tuple[int, ...] = TOKENS[:2]
        self.error: Exception | None = None
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.swapped: list[int] = []
        self.swap_errors: list[Exception] = []
        self.version = -1
        self.closed = False
        self.changed = asyncio.Condition()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed, asyncio.timeout(DEADLINE_S):
            await self.changed.wait_for(condition)

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def start(self, weights: Weights) -> None:
        self.version = weights.version

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress | Generation]:
        self.requests.append(request)
        done = False
        try:
            yield Progress(self.progress)
            await self._note()
            await self.finish.wait()
            if self.error is not None:
                raise self.error
            spans = make_spans(len(TOKENS), (self.version,))
            done = True
            yield Generation(TOKENS, (-0.5,) * len(TOKENS), spans, make_proofs(spans), StopReason.EOS)
        finally:
            if not done:
                self.aborted.append(request.request_id)

    async def swap(self, weights: Weights) -> SwapReport:
        if self.swap_errors:
            raise self.swap_errors.pop(0)
        self.version = weights.version
        self.swapped.append(weights.version)
        await self._note()
        return SwapReport(weights.version, 0.25, len(self.requests), 0)

    async def close(self) -> None:
        self.closed = True


class FakeFollower:
    """Hands on the versions that the test publishes."""

    def __init__(self, first: int | None = 0) -> None:
        self.published: asyncio.Queue[Weights] = asyncio.Queue()
        if first is not None:
            self.published.put_nowait(make_weights(first))

    async def first(self) -> Weights:
        return await self.published.get()

    async def follow(self, current: Weights, on_new: Callable[[Weights], Any]) -> None:
        while True:
            await on_new(await self.published.get())


@dataclass
class Bench:
    """A worker, and everything around it."""

    folder: Path
    client: FakeClient
    engine: FakeEngine = field(default_factory=FakeEngine)
    follower: FakeFollower | WeightsFollower = field(default_factory=FakeFollower)
    status: Status = field(default_factory=Status)
    concurrency: int = 2
    drain_s: float = 0.0
    lease_term_s: float = 0.04

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.folder / "outbox")
        self.worker = Worker(
            make_terms(lease_term_s=self.lease_term_s),
            identity=ALICE,
            client=self.client,  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
            follower=self.follower,  # type: ignore[arg-type]
            outbox=self.outbox,
            status=self.status,
            concurrency=self.concurrency,
            drain_s=self.drain_s,
        )

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.worker.run())

    async def stop(self, running: asyncio.Task[None]) -> None:
        self.worker.stop()
        async with asyncio.timeout(DEADLINE_S):
            await running


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "_EVERY_S", 0.01)
    monkeypatch.setattr(handing_in, "_DRAIN_PATIENCE_S", 0.2)


async def test_a_lease_becomes_a_signed_rollout_with_a_receipt(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    bench.engine.finish.set()
    running = bench.start()
    await bench.client.until(lambda: len(bench.client.submitted) == 1)
    await bench.stop(running)
    (request,) = bench.engine.requests
    assert (request.prompt_token_ids, request.seed, request.request_id) == ((7, 8), 42, "lease-0")
    assert bench.outbox.waiting() == []
    assert bench.client.given_back == []
    assert (bench.status.generated, bench.status.receipts, bench.status.generated_tokens) == (1, 1, len(TOKENS))
    assert (bench.status.credits, bench.status.strikes) == (7, 1)
    assert bench.engine.closed


async def test_what_is_signed_names_run_lease_and_sample(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(3)]))
    bench.engine.finish.set()
    bench.client.refuse = None
    seen: list[SignedEnvelope] = []
    put = bench.outbox.put
    bench.outbox.put = lambda envelope: (seen.append(envelope), put(envelope))[1]  # type: ignore[method-assign]
    running = bench.start()
    await bench.client.until(lambda: len(bench.client.submitted) == 1)
    await bench.stop(running)
    rollout = rollout_from_payload(open_envelope(seen[0], ROLLOUT, pinned=(ALICE.key_id,)))
    assert (rollout.run_id, rollout.lease_id, rollout.sample_id) == (RUN_ID, "lease-3", "g0-3")
    assert (rollout.token_ids, rollout.stop_reason) == (TOKENS, StopReason.EOS)


async def test_no_more_is_leased_than_fits(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(i) for i in range(5)]), concurrency=2, drain_s=10.0)
    running = bench.start()
    await bench.engine.until(lambda: len(bench.engine.requests) == 2)
    assert bench.status.in_flight == 2
    bench.engine.finish.set()
    await bench.client.until(lambda: len(bench.client.submitted) == 5)
    await bench.stop(running)
    assert max(bench.client.asked_for) == 2


async def test_renewals_commit_to_progress(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    running = bench.start()
    await bench.client.until(lambda: any(p.get("lease-0", Commitment()).length for p in bench.client.renewed))
    await bench.stop(running)
    assert bench.client.renewed[-1]["lease-0"] == Commitment(2, token_digest(TOKENS[:2]), 0)


async def test_a_lease_that_is_dead_is_aborted_and_the_others_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0), make_lease(1)]))
    running = bench.start()
    await bench.engine.until(lambda: len(bench.engine.requests) == 2)
    bench.client.dead["lease-0"] = "only versions from 3 on are still admissible"
    await bench.client.until(lambda: bench.status.aborted == 1 and bench.status.in_flight == 1)
    assert bench.engine.aborted == ["lease-0"]
    bench.engine.finish.set()
    await bench.client.until(lambda: len(bench.client.submitted) == 1)
    await bench.stop(running)
    assert bench.client.given_back == [], "what the coordinator ended is not given back"


async def test_what_is_begun_is_finished_before_it_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]), drain_s=DEADLINE_S)
    running = bench.start()
    await bench.engine.until(lambda: len(bench.engine.requests) == 1)
    bench.worker.stop()
    await bench.client.until(lambda: bench.status.phase == "finishing")
    bench.engine.finish.set()
    await bench.stop(running)
    assert len(bench.client.submitted) == 1
    assert bench.client.given_back == []


async def test_what_cannot_be_finished_is_given_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0), make_lease(1)]), drain_s=0.0)
    running = bench.start()
    await bench.engine.until(lambda: len(bench.engine.requests) == 2)
    await bench.stop(running)
    ((lease_ids, reason),) = bench.client.given_back
    assert (sorted(lease_ids), reason) == (["lease-0", "lease-1"], "shutdown")
    assert sorted(bench.engine.aborted) == ["lease-0", "lease-1"]


async def test_a_coordinator_that_is_away_does_not_stop_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    running = bench.start()
    await bench.engine.until(lambda: len(bench.engine.requests) == 1)
    bench.client.reachable.clear()
    await bench.stop(running)
    assert bench.client.given_back == []


async def test_the_outbox_is_kept_while_the_coordinator_is_away_and_sent_by_the_next_process(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]), drain_s=DEADLINE_S)
    running = bench.start()
    await bench.engine.until(lambda: len(bench.engine.requests) == 1)
    bench.client.reachable.clear()
    bench.engine.finish.set()
    await bench.stop(running)
    assert bench.client.submitted == []
    (identifier,) = bench.outbox.waiting()

    again = Bench(tmp_path, FakeClient())
    running = again.start()
    await again.client.until(lambda: again.client.submitted == [identifier])
    await again.stop(running)
    assert again.outbox.waiting() == []


async def test_a_refused_rollout_is_not_sent_for_ever(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    bench.client.refuse = WorkerFault("stale", "begun under version 0")
    bench.engine.finish.set()
    running = bench.start()
    await bench.client.until(lambda: bench.status.refused == 1)
    await bench.stop(running)
    assert bench.outbox.waiting() == []
    assert bench.status.last_reason == "stale: begun under version 0"


async def test_a_rejection_is_logged_once_with_what_was_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, FakeClient())
    measured = worker_pb2.Measurement(name="proof_mantissa_mean", value=7.25, admitted=3.6)
    bench.client.verdicts = [
        worker_pb2.VerdictNotice(rollout_id="sha256:" + "b" * 64, outcome="accepted"),
        worker_pb2.VerdictNotice(
            rollout_id="sha256:" + "a" * 64,
            outcome="rejected",
            reason="proof",
            detail="other weights",
            measurements=[measured],
        ),
    ]
    for _ in range(2):
        await bench.worker._standing.ask()
    line = "aaaaaaaaaaaa  rejected (proof: other weights); measured: proof_mantissa_mean 7.25 (at most 3.6)"
    assert [record.getMessage() for record in caplog.records] == [line]
    assert bench.status.last_reason == "proof: other weights"


async def test_a_damaged_file_in_the_outbox_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "outbox").mkdir()
    (tmp_path / "outbox" / ("0" * 64 + ".rollout")).write_bytes(b"\xff")
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    bench.engine.finish.set()
    running = bench.start()
    await bench.client.until(lambda: len(bench.client.submitted) == 1)
    await bench.stop(running)
    assert (tmp_path / "outbox" / ("0" * 64 + ".damaged")).exists()


async def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coordinator.client import Backoff

    monkeypatch.setattr(handing_in, "Backoff", lambda *_: Backoff(0.001, 0.001))
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    put, failures = bench.outbox.put, [OSError(28, "No space left on device")]

    def full_once(envelope: SignedEnvelope) -> str:
        if failures:
            raise failures.pop()
        return put(envelope)

    bench.outbox.put = full_once  # type: ignore[method-assign]
    bench.engine.finish.set()
    running = bench.start()
    await bench.client.until(lambda: len(bench.client.submitted) == 1)
    await bench.stop(running)
    assert failures == []


async def test_a_ban_ends_the_worker_with_its_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    running = bench.start()
    await bench.engine.until(lambda: len(bench.engine.requests) == 1)
    bench.client.ban_reason = "form: two proofs too few"
    with pytest.raises(UserError, match="banned from the run: form: two proofs too few"):
        async with asyncio.timeout(DEADLINE_S):
            await running
    assert bench.status.banned == "form: two proofs too few"
    assert bench.engine.closed
    assert bench.client.given_back == [(["lease-0"], "shutdown")]


async def test_a_banned_key_does_not_even_load_the_engine(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient())
    bench.client.ban_reason = "spam"
    with pytest.raises(UserError, match="spam"):
        await bench.worker.run()
    assert bench.engine.version == -1


async def test_an_engine_that_died_ends_the_worker_with_its_words(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    bench.engine.error = OurFault("the engine core died: out of memory")
    bench.engine.finish.set()
    with pytest.raises(OurFault, match="out of memory"):
        async with asyncio.timeout(DEADLINE_S):
            await bench.worker.run()
    assert bench.client.given_back == [(["lease-0"], "engine")]
    assert bench.engine.closed


async def test_new_weights_are_swapped_in_flight(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    running = bench.start()
    await bench.engine.until(lambda: len(bench.engine.requests) == 1)
    bench.follower.published.put_nowait(make_weights(1))
    await bench.engine.until(lambda: bench.engine.swapped == [1])
    bench.engine.finish.set()
    await bench.client.until(lambda: len(bench.client.submitted) == 1)
    await bench.stop(running)
    assert bench.engine.aborted == [], "a swap aborts nothing"
    assert (bench.status.policy_version, bench.status.swaps, bench.status.last_swap_s) == (1, 1, 0.25)


class OneVersion:
    """A source of version 0 first and of version 1 ever after."""

    async def head(self, after: int | None, wait_s: float) -> Any:
        if after == 1:
            return await asyncio.Event().wait()
        version = 0 if after is None else 1
        return SimpleNamespace(version=version, manifest_digest=version_digest(version))

    async def fetch(self, version: int, expected: str, on_progress: Any) -> Path:
        return Path(f"/weights/{version}")

    def prune(self, keep: set[int]) -> None:
        pass


def following(status: Status) -> WeightsFollower:
    return WeightsFollower(OneVersion(), make_terms(), status)  # type: ignore[arg-type]


async def test_a_swap_that_fails_is_tried_again_and_generation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_module, "_SWAP_RETRY_S", 0.01)
    status = Status()
    bench = Bench(tmp_path, FakeClient([make_lease(0)]), follower=following(status), status=status)
    bench.engine.swap_errors = [SwapFailed("out of memory; the engine goes on with version 0")]
    running = bench.start()
    await bench.engine.until(lambda: bench.engine.swapped == [1])
    bench.engine.finish.set()
    await bench.client.until(lambda: len(bench.client.submitted) == 1)
    await bench.stop(running)
    assert "staying with version 0: out of memory" in caplog.text
    assert bench.engine.aborted == []
    assert (status.policy_version, status.swaps, status.swap_failure) == (1, 1, "")


async def test_what_a_failed_swap_said_is_shown_until_one_succeeds(tmp_path: Path) -> None:
    status = Status()
    bench = Bench(tmp_path, FakeClient(), follower=following(status), status=status)
    bench.engine.swap_errors = [SwapFailed("out of memory")]
    running = bench.start()
    await bench.client.until(lambda: status.swap_failure != "")
    assert one_line(status).endswith("newer weights not loaded: out of memory")
    assert (status.policy_version, status.phase, running.done()) == (0, "working", False)
    await bench.stop(running)


async def test_an_engine_that_does_not_survive_a_swap_ends_the_worker(tmp_path: Path) -> None:
    status = Status()
    bench = Bench(tmp_path, FakeClient(), follower=following(status), status=status)
    bench.engine.swap_errors = [OurFault("nor could version 0 be loaded again: restart the worker")]
    with pytest.raises(OurFault, match="restart the worker"):
        async with asyncio.timeout(DEADLINE_S):
            await bench.worker.run()
    assert bench.engine.closed


async def test_a_lease_waits_for_the_version_it_asks_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0, min_version=2), make_lease(1)]))
    running = bench.start()
    await bench.engine.until(lambda: len(bench.engine.requests) == 1)
    assert bench.engine.requests[0].request_id == "lease-1"
    bench.follower.published.put_nowait(make_weights(2))
    await bench.engine.until(lambda: len(bench.engine.requests) == 2)
    await bench.stop(running)
    assert bench.engine.swapped == [2]


async def test_stopping_before_there_are_weights_ends_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient(), follower=FakeFollower(first=None))
    running = bench.start()
    await bench.client.until(lambda: bench.status.phase == "fetching weights" or bench.status.credits == 7)
    await bench.stop(running)
    assert bench.engine.version == -1


@pytest.mark.parametrize(
    "fault", [OurFault("a receipt of something else"), BadSignature("this token has expired")], ids=["receipt", "token"]
)
async def test_without_a_receipt_a_rollout_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: WorkerFault | OurFault
) -> None:
    monkeypatch.setattr(handing_in, "_RESUBMIT_S", 0.01)
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    bench.client.refuse = fault
    bench.engine.finish.set()
    running = bench.start()
    await bench.client.until(lambda: bench.client.refusals >= 2)
    assert len(bench.outbox.waiting()) == 1
    bench.client.refuse = None
    await bench.client.until(lambda: len(bench.client.submitted) == 1)
    await bench.stop(running)
    assert bench.outbox.waiting() == []
    assert bench.status.refused == 0


async def test_an_engine_that_chokes_on_one_sample_gives_it_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeClient([make_lease(0)]))
    bench.engine.error = ValueError("a prompt that it can't take")
    bench.engine.finish.set()
    running = bench.start()
    await bench.client.until(lambda: bool(bench.client.given_back))
    assert bench.client.given_back[0] == (["lease-0"], "engine")
    await bench.stop(running)


async def test_a_lease_of_turns_that_were_not_in_the_terms_is_given_back_and_ends_the_worker(tmp_path: Path) -> None:
    """The run's rules changed: what is generated by the old ones would be fraud in the coordinator's eyes."""
    bench = Bench(tmp_path, FakeClient([replace(make_lease(0), turns="sha256:other")]))
    with pytest.raises(OurFault, match="others than when this worker joined: start it again"):
        async with asyncio.timeout(DEADLINE_S):
            await bench.worker.run()
    assert bench.client.given_back == [(["lease-0"], "engine")]
    assert bench.engine.requests == [] and bench.client.submitted == []

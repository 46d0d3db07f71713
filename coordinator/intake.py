"""Executes the receipt of submissions: decide by `admission`, store, sign a receipt.

Submissions that come at the same time are stored in one transaction, each decided as if it were alone. The receipt is signed
only after that has committed (SQLite: synchronous=FULL), so a receipted rollout survives the death of any process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.exc import IntegrityError

from coordinator import admission, verdicts
from coordinator.admission import Accepted, Limits, Refused
from coordinator.store import database, leases, rollouts, versions
from coordinator.store.database import Database, Lane
from coordinator.store.leases import Held
from coordinator.store.rollouts import NewRollout
from coordinator.store.versions import Named
from coordinator.together import Together
from protocol.errors import WorkerFault
from protocol.lease import Lease, LeaseState, finish
from protocol.ledger import BLAMELESS
from protocol.rollout import RejectionReason, Rollout, SamplingParams
from protocol.signing import RECEIPT, ROLLOUT, Identity, SignedEnvelope, open_envelope
from protocol.turns import Turns
from protocol.wire import rollout_from_payload, rollout_id
from protos.rollswarm.v1 import worker_pb2

_SPANS_MAX = 128  # what a batch asks the database for is bounded
_READ_AT_ONCE_BYTES = 64 * 1024
_MOST = 128  # submissions in one transaction: what holds the others up is bounded


@dataclass(frozen=True, slots=True)
class Submission:
    """One rollout as its worker signed it."""

    worker_id: str
    rollout_id: str
    rollout: Rollout
    envelope: SignedEnvelope


@dataclass(frozen=True, slots=True)
class Refusal:
    """A submission that was refused, and why."""

    worker_id: str
    rollout_id: str
    envelope: SignedEnvelope
    fault: WorkerFault


async def _parsed(payload: bytes) -> Rollout:
    """The rollout; a large one is read in a thread, so that others are served meanwhile."""
    if len(payload) <= _READ_AT_ONCE_BYTES:
        return rollout_from_payload(payload)
    return await asyncio.to_thread(rollout_from_payload, payload)


class Intake:
    """The door for signed rollouts."""

    def __init__(
        self,
        db: Database,
        *,
        identity: Identity,
        limits: Limits,
        temperature: float,
        eos_token_ids: tuple[int, ...],
        max_strikes: int,
        max_payload_bytes: int,
        turns: Mapping[str, Turns] | None = None,
    ) -> None:
        """`turns`: by environment, of those whose tasks take several."""
        self._db = db
        self._identity = identity
        self._limits = limits
        self._temperature = temperature
        self._eos_token_ids = eos_token_ids
        self._max_strikes = max_strikes
        self._max_payload_bytes = max_payload_bytes
        self._turns = turns or {}
        self._together = Together(self._store, _MOST)
        self._refusing: Together[Refusal, None] = Together(self._refuse, _MOST)

    def use(self, limits: Limits) -> None:
        """Go by these bounds from the next call on."""
        self._limits = limits

    async def submit(self, worker_id: str, envelope: SignedEnvelope) -> SignedEnvelope:
        """Receive one submission and return the signed receipt; the same bytes get the same receipt again.

        Raises WorkerFault(reason, detail) if it is refused; the refusal is counted and, if it deserves one, struck.
        """
        # Only what the worker's own key has signed can be held against it: a bearer token may be in other hands.
        payload = open_envelope(envelope, ROLLOUT, pinned=(worker_id,))
        identifier = rollout_id(payload)
        try:
            if len(payload) > self._max_payload_bytes:
                raise WorkerFault(RejectionReason.FORM, f"larger than {self._max_payload_bytes} bytes")
            submission = Submission(worker_id, identifier, await _parsed(payload), envelope)
            if len(submission.rollout.spans) > _SPANS_MAX:
                raise WorkerFault(RejectionReason.FORM, f"more than {_SPANS_MAX} spans")
            try:
                return await self._together.do(submission)
            except IntegrityError:
                raise WorkerFault(RejectionReason.LEASE, "this sample or lease was answered already") from None
        except WorkerFault as fault:
            await self._refusing.do(Refusal(worker_id, identifier, envelope, fault))
            raise

    async def _refuse(self, refusals: Sequence[Refusal]) -> Sequence[None]:
        """Count what was refused, and strike where that is due. Only what may end in a ban makes all others wait.
        It comes first: to try again after an error strikes once."""
        blameless = [each for each in refusals if each.fault.reason in BLAMELESS]
        others = [each for each in refusals if each.fault.reason not in BLAMELESS]
        if others:
            async with self._db.read() as connection:
                new = await verdicts.strikable(connection, [(each.worker_id, each.rollout_id) for each in others])
            others = [each for each in others if (each.worker_id, each.rollout_id) in new]
            await self._count_refusals(others, Lane.ALONE)
        await self._count_refusals(blameless, Lane.VERDICTS)
        return [None] * len(refusals)

    async def _count_refusals(self, refusals: Sequence[Refusal], lane: Lane) -> None:
        if not refusals:
            return
        async with self._db.write(lane) as connection:
            at = await database.now(connection)
            for each in refusals:
                struck = await verdicts.refuse(
                    connection,
                    worker_id=each.worker_id,
                    rollout_id=each.rollout_id,
                    reason=each.fault.reason,
                    detail=each.fault.detail,
                    at=at,
                    max_strikes=self._max_strikes,
                )
                if struck and each.fault.reason == RejectionReason.COMMITMENT:
                    lease_id = rollout_from_payload(each.envelope.payload).lease_id
                    await rollouts.keep_offence(
                        connection, each.rollout_id, lease_id, each.worker_id, each.fault.detail, each.envelope, at
                    )

    async def _store(self, submissions: Sequence[Submission]) -> Sequence[SignedEnvelope | Exception]:
        """Receive several in one transaction. Raises IntegrityError if another replica took one in at the same moment."""
        async with self._db.write(Lane.ROWS) as connection:
            at = await database.now(connection)
            # Leases first, and locked: of the same bytes that another replica is taking in, the receipt is seen afterwards.
            held = await leases.held(connection, (each.rollout.lease_id for each in submissions))
            # Under a live one nothing was received: to receive it ends the lease.
            over = {key for key, mine in held.items() if mine.lease.state is not LeaseState.LIVE}
            again = [each.rollout_id for each in submissions if each.rollout.lease_id in over]
            received = await rollouts.received(connection, again) if again else {}
            named = await versions.named(
                connection, (span.version for each in submissions for span in each.rollout.spans)
            )
            decided: list[float | WorkerFault] = []
            new: list[NewRollout] = []
            ended: list[Lease] = []
            for each in submissions:
                known = received.get(each.rollout_id)
                if known is not None and known[0] == each.worker_id:  # another's is refused like any of another's
                    decided.append(known[1])
                    continue
                mine = held.get(each.rollout.lease_id)
                decision = self._admit(each, mine, named, at)
                if isinstance(decision, Refused):
                    decided.append(WorkerFault(decision.reason, decision.detail))
                    continue
                assert mine is not None
                ended.append(finish(mine.lease, LeaseState.COMPLETED))
                new.append(NewRollout(each.rollout_id, each.rollout, mine.group_id, each.worker_id, each.envelope))
                # The next in this very transaction sees it, as it would in a later one.
                held[mine.lease.lease_id] = replace(mine, lease=ended[-1])
                received[each.rollout_id] = (each.worker_id, at)
                decided.append(at)
            await leases.complete(connection, ended)
            await rollouts.insert(connection, new, at)
        return [
            outcome if isinstance(outcome, WorkerFault) else self._receipt(each, outcome)
            for each, outcome in zip(submissions, decided, strict=True)
        ]

    def _admit(self, submission: Submission, held: Held | None, named: Named, at: float) -> Accepted | Refused:
        return admission.admit(
            submission.rollout,
            worker_id=submission.worker_id,
            lease=None if held is None else held.lease,
            sampling=None if held is None else SamplingParams(self._temperature, held.max_tokens, self._eos_token_ids),
            versions=named.digests,
            withdrawn=named.withdrawn,
            head=named.head,
            now=at,
            limits=self._limits,
            turns=None if held is None else self._turns.get(held.environment),
        )

    def _receipt(self, submission: Submission, received_at: float) -> SignedEnvelope:
        receipt = worker_pb2.Receipt(
            run_id=self._limits.run_id,
            rollout_id=submission.rollout_id,
            sample_id=submission.rollout.sample_id,
            received_at_ms=int(received_at * 1000),
        )
        return self._identity.sign(RECEIPT, receipt.SerializeToString())

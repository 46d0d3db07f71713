"""Executes the receipt of submissions: decide by `admission`, store, sign a receipt.

The receipt is signed only after the transaction that stored the rollout has committed (SQLite: synchronous=FULL), so a
receipted rollout survives the death of any process.
"""

from __future__ import annotations

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import admission, verdicts
from coordinator.admission import Limits, Refused
from coordinator.store import database, groups, leases, rollouts, versions
from coordinator.store.database import Database
from protocol.errors import WorkerFault
from protocol.lease import LeaseState, finish
from protocol.rollout import RejectionReason, Rollout, SamplingParams
from protocol.signing import RECEIPT, ROLLOUT, Identity, SignedEnvelope, open_envelope
from protocol.wire import rollout_from_payload, rollout_id
from protos.rollswarm.v1 import worker_pb2


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
    ) -> None:
        self._db = db
        self._identity = identity
        self._limits = limits
        self._temperature = temperature
        self._eos_token_ids = eos_token_ids
        self._max_strikes = max_strikes
        self._max_payload_bytes = max_payload_bytes

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
            return await self._store(worker_id, identifier, rollout_from_payload(payload), envelope)
        except WorkerFault as fault:
            async with self._db.write() as connection:
                at = await database.now(connection)
                struck = await verdicts.refuse(
                    connection,
                    worker_id=worker_id,
                    rollout_id=identifier,
                    reason=fault.reason,
                    detail=fault.detail,
                    at=at,
                    max_strikes=self._max_strikes,
                )
                if struck and fault.reason == RejectionReason.COMMITMENT:
                    lease_id = rollout_from_payload(payload).lease_id
                    await rollouts.keep_offence(connection, identifier, lease_id, worker_id, fault.detail, envelope, at)
            raise

    async def _store(
        self, worker_id: str, identifier: str, rollout: Rollout, envelope: SignedEnvelope
    ) -> SignedEnvelope:
        try:
            async with self._db.write() as connection:
                known = await rollouts.get(connection, identifier)
                if known is not None and known.worker_id == worker_id:  # another's is refused like any of another's
                    return self._receipt(identifier, rollout, known.received_at)
                at = await database.now(connection)
                await self._admit(connection, worker_id, identifier, rollout, envelope, at)
        except IntegrityError:
            raise WorkerFault(RejectionReason.LEASE, "this sample or lease was answered already") from None
        return self._receipt(identifier, rollout, at)

    async def _admit(
        self,
        connection: AsyncConnection,
        worker_id: str,
        identifier: str,
        rollout: Rollout,
        envelope: SignedEnvelope,
        at: float,
    ) -> None:
        lease = await leases.get(connection, rollout.lease_id)
        group = None if lease is None else await groups.get(connection, group_of(lease.sample_id))
        head = await versions.head(connection)
        decision = admission.admit(
            rollout,
            worker_id=worker_id,
            lease=lease,
            sampling=None
            if group is None
            else SamplingParams(self._temperature, group.max_tokens, self._eos_token_ids),
            versions=await versions.digests(connection),
            withdrawn=await versions.withdrawn(connection),
            head=0 if head is None else head.version,
            now=at,
            limits=self._limits,
        )
        if isinstance(decision, Refused):
            raise WorkerFault(decision.reason, decision.detail)
        assert lease is not None and group is not None
        await leases.save(connection, finish(lease, LeaseState.COMPLETED))
        await groups.set_sample(connection, rollout.sample_id, "submitted")
        await rollouts.insert(
            connection,
            rollout_id=identifier,
            rollout=rollout,
            group_id=group.group_id,
            worker_id=worker_id,
            envelope=envelope,
            at=at,
        )

    def _receipt(self, identifier: str, rollout: Rollout, received_at: float) -> SignedEnvelope:
        receipt = worker_pb2.Receipt(
            run_id=self._limits.run_id,
            rollout_id=identifier,
            sample_id=rollout.sample_id,
            received_at_ms=int(received_at * 1000),
        )
        return self._identity.sign(RECEIPT, receipt.SerializeToString())


def group_of(sample_id: str) -> str:
    """The group that a sample id belongs to ("g7-3" → "g7")."""
    return sample_id.rpartition("-")[0]

"""A broken commitment is proof: the signed renewal and the signed submission are kept side by side."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from coordinator.store import tables as t
from coordinator.store.rollouts import unpack_payload
from protocol.errors import WorkerFault
from protocol.lease import Commitment, broken
from protocol.renewal import check_renewal, sign_renewal
from protocol.rollout import RejectionReason, token_digest
from protocol.signing import ROLLOUT, Identity, SignedEnvelope, open_envelope
from protocol.wire import rollout_from_payload
from tests.factories import RUN_ID, make_rollout, make_tokens, sign_rollout
from tests.stored_run import StoredRun


async def commit(run: StoredRun, worker: Identity, lease_id: str, tokens: tuple[int, ...]) -> Commitment:
    commitment = Commitment(len(tokens), token_digest(tokens), 0)
    commitment = replace(commitment, signature=sign_renewal(worker, RUN_ID, lease_id, commitment))
    (renewal,), _ = await run.leasing.renew(worker.key_id, [(lease_id, commitment)])
    assert renewal.problem == ""
    return commitment


async def test_whoever_breaks_a_commitment_has_signed_both(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    await commit(run, alice, lease.lease_id, (9, 8, 7))
    longer = await commit(run, alice, lease.lease_id, (9, 8, 7, 6))
    envelope = sign_rollout(make_rollout(lease.lease_id, lease.sample_id, tokens=make_tokens(6)), alice)
    for _ in range(2):  # a replay is one offence
        with pytest.raises(WorkerFault) as refused:
            await run.intake.submit(alice.key_id, envelope)
        assert refused.value.reason == RejectionReason.COMMITMENT
    offence = await run.row(t.offences)
    kept = SignedEnvelope(unpack_payload(offence.payload), offence.worker_id, offence.signature)
    rollout = rollout_from_payload(open_envelope(kept, ROLLOUT, pinned=(alice.key_id,)))
    found = re.search(r"the (\d+) tokens.* sha256 (\w+), signature (\w+)", offence.detail)
    assert found is not None
    stated = Commitment(int(found[1]), bytes.fromhex(found[2]), signature=bytes.fromhex(found[3]))
    check_renewal(alice.key_id, RUN_ID, lease.lease_id, stated)
    assert stated.length == 3 and broken(replace(lease, commitment=stated), rollout.token_ids) is not None
    assert (await run.standing(alice)).strikes == 1
    row = await run.row(t.leases, t.leases.c.lease_id == lease.lease_id)
    assert row.committed_signature == longer.signature and row.earlier_commitments[0][0] == 3


async def test_a_kept_commitment_leaves_no_trace(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    rollout = make_rollout(lease.lease_id, lease.sample_id, tokens=make_tokens(6))
    await commit(run, alice, lease.lease_id, rollout.token_ids[:4])
    await run.intake.submit(alice.key_id, sign_rollout(rollout, alice))
    assert await run.rows(t.offences) == []

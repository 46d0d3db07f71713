"""Leases: one sample, one holder, until a deadline. Transitions are functions of (lease, now).

    LIVE ── complete ──▶ COMPLETED      (a receipt was given)
      │──── give_back ─▶ RETURNED       (sample waits again, same seed)
      │──── expire ────▶ EXPIRED        (deadline passed, same seed)
      └──── revoke ────▶ REVOKED        (its holder was banned, or nothing it yields could be accepted)

`now` and deadlines are seconds by the database's clock.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, replace
from hashlib import sha256

from protocol.errors import WorkerFault
from protocol.rollout import RejectionReason

_DIGEST_BYTES = 32
# What the database can hold; anything near it is nonsense.
_LENGTH_MAX = 2**31 - 1
_COMMITMENTS_MAX = 256


class LeaseState(enum.StrEnum):
    """Only LIVE can change."""

    LIVE = "live"
    COMPLETED = "completed"
    RETURNED = "returned"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Commitment:
    """What a renewal has bound the holder to: the submission must begin with these tokens.

    `version`: as progress is reported, the version that generated the newest token; as a lease keeps it, the one of the
    first commitment, which is the one that grows too old first. `signature`: the holder's, by `protocol.renewal`.
    """

    length: int = 0
    digest: bytes = b""
    version: int = 0
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Lease:
    """A sample in a worker's hands. `min_version`: oldest policy version that may generate any of its tokens.

    `commitment` is the newest, `earlier` those before it: the submission must extend every one of them, since a digest
    by itself does not show that it extends the one before.
    """

    lease_id: str
    sample_id: str
    worker_id: str
    min_version: int
    deadline: float
    state: LeaseState = LeaseState.LIVE
    commitment: Commitment = Commitment()
    earlier: tuple[Commitment, ...] = ()


def is_live(lease: Lease, now: float) -> bool:
    """Live and not past its deadline."""
    return lease.state is LeaseState.LIVE and now < lease.deadline


def renew(
    lease: Lease,
    progress: Commitment,
    *,
    now: float,
    term: float,
    oldest: int,
    head: int,
    max_tokens: int,
    pause: float = 0.0,
) -> Lease:
    """Extend a live lease by `term` seconds and commit to `progress`.

    `oldest`, `head`: the oldest version still admissible, and the newest there is; `max_tokens` of the sample. Raises
    WorkerFault if the lease is not live, progress shrank or is impossible, or what it yields could no longer be accepted.

    What comes sooner than `pause` seconds after the renewal before it, or the grant, changes nothing: each is written with
    all commitments, and who may renew without end would also choose which of them are kept.

    All commitments are kept until there are 256, then every second one of the earlier ones: the first and the newest stay.
    """
    # What is said to be of a version that is not out yet grows too old like what is of the newest.
    progress = replace(progress, version=min(progress.version, head))
    if not is_live(lease, now):
        raise WorkerFault(RejectionReason.LEASE, f"the lease is {lease.state.value} or past its deadline")
    if lease.min_version < oldest and _born_before(lease, progress, oldest):
        raise WorkerFault(RejectionReason.STALE, f"only versions from {oldest} on are still admissible")
    if progress.length < lease.commitment.length:
        raise WorkerFault(
            RejectionReason.COMMITMENT,
            f"{progress.length} tokens now, but {lease.commitment.length} were committed before",
        )
    if progress.length > min(max_tokens, _LENGTH_MAX):
        raise WorkerFault(
            RejectionReason.COMMITMENT, f"{progress.length} tokens, where a completion has {max_tokens} at most"
        )
    if progress.length and len(progress.digest) != _DIGEST_BYTES:
        raise WorkerFault(RejectionReason.COMMITMENT, f"a digest of {len(progress.digest)} bytes commits to nothing")
    if progress.length == lease.commitment.length and progress.length and progress.digest != lease.commitment.digest:
        raise WorkerFault(RejectionReason.COMMITMENT, "other tokens than those committed before")
    if pause and now < lease.deadline - term + pause:
        return lease
    earlier = lease.earlier
    if 0 < lease.commitment.length < progress.length:
        earlier = (*earlier, lease.commitment)
    if len(earlier) >= _COMMITMENTS_MAX:
        earlier = earlier[::2]
    # A digest of nothing is not kept: it may be of any size.
    digest = progress.digest if progress.length else b""
    signature = progress.signature if progress.length else b""
    newest = Commitment(progress.length, digest, _first(lease, progress).version, signature)
    return replace(lease, deadline=now + term, commitment=newest, earlier=earlier)


def _first(lease: Lease, progress: Commitment) -> Commitment:
    return lease.commitment if lease.commitment.length else progress


def _born_before(lease: Lease, progress: Commitment, oldest: int) -> bool:
    """Was anything committed under a version that is no longer admissible?"""
    first = _first(lease, progress)
    return first.length > 0 and first.version < oldest


def broken(lease: Lease, token_ids: tuple[int, ...]) -> Commitment | None:
    """The first commitment under this lease that these tokens do not extend, None if they do. Hashes every token once."""
    hashed, done = sha256(), 0
    for commitment in (*lease.earlier, lease.commitment):  # lengths ascend
        if commitment.length > len(token_ids):
            return commitment
        added = token_ids[done : commitment.length]
        hashed.update(struct.pack(f"<{len(added)}I", *added))
        done = commitment.length
        if commitment.length and hashed.digest() != commitment.digest:
            return commitment
    return None


def expire(lease: Lease, now: float) -> Lease:
    """EXPIRED if live and past the deadline, else unchanged."""
    if lease.state is LeaseState.LIVE and now >= lease.deadline:
        return replace(lease, state=LeaseState.EXPIRED)
    return lease


def finish(lease: Lease, state: LeaseState) -> Lease:
    """Leave LIVE for `state`. Raises WorkerFault if the lease is not live any more."""
    if lease.state is not LeaseState.LIVE:
        raise WorkerFault(RejectionReason.LEASE, f"the lease is {lease.state.value} already")
    return replace(lease, state=state)

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import WorkerFault
from protocol.lease import Commitment, Lease, LeaseState, broken, expire, finish, is_live, renew
from protocol.rollout import RejectionReason, token_digest

LEASE = Lease("lease", "g0-0", "worker", min_version=0, deadline=100.0)


def honours(lease: Lease, tokens: tuple[int, ...]) -> bool:
    return broken(lease, tokens) is None


def extends(commitment: Commitment, tokens: tuple[int, ...]) -> bool:
    return honours(replace(LEASE, commitment=commitment), tokens)


def commit(tokens: tuple[int, ...], version: int = 0) -> Commitment:
    return Commitment(len(tokens), token_digest(tokens) if tokens else b"", version)


def renewed(lease: Lease, progress: Commitment, *, now: float = 50.0, oldest: int = 0) -> Lease:
    return renew(lease, progress, now=now, term=60.0, oldest=oldest, head=1000, max_tokens=10_000)


def test_a_renewal_extends_and_commits() -> None:
    lease = renewed(LEASE, commit((1, 2, 3)))
    assert lease.deadline == 110.0
    assert lease.commitment == commit((1, 2, 3))


@pytest.mark.parametrize(("now", "live"), [(99.9, True), (100.0, False), (101.0, False)])
def test_a_lease_lives_until_its_deadline(now: float, live: bool) -> None:
    assert is_live(LEASE, now) is live
    assert (expire(LEASE, now).state is LeaseState.LIVE) is live


@pytest.mark.parametrize("state", [state for state in LeaseState if state is not LeaseState.LIVE])
def test_only_a_live_lease_changes(state: LeaseState) -> None:
    ended = replace(LEASE, state=state)
    assert expire(ended, 1e9) is ended
    assert not is_live(ended, 0.0)
    for attempt in (lambda: finish(ended, LeaseState.COMPLETED), lambda: renewed(ended, Commitment())):
        with pytest.raises(WorkerFault) as caught:
            attempt()
        assert caught.value.reason == RejectionReason.LEASE


def test_an_overdue_lease_cannot_be_renewed() -> None:
    with pytest.raises(WorkerFault, match="deadline"):
        renewed(LEASE, Commitment(), now=100.0)


@pytest.mark.parametrize(
    ("first", "second"), [((1, 2, 3), (1, 2)), ((1, 2, 3), ()), ((1, 2, 3), (1, 2, 4))], ids=["less", "none", "other"]
)
def test_progress_never_shrinks_nor_changes(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    with pytest.raises(WorkerFault) as caught:
        renewed(renewed(LEASE, commit(first)), commit(second))
    assert caught.value.reason == RejectionReason.COMMITMENT


def test_the_same_progress_may_be_committed_again() -> None:
    once = renewed(LEASE, commit((1, 2)))
    assert renewed(once, commit((1, 2)), now=60.0).commitment == once.commitment


@pytest.mark.parametrize("length", [1, 5])
def test_a_commitment_to_tokens_has_a_digest(length: int) -> None:
    with pytest.raises(WorkerFault) as caught:
        renewed(LEASE, Commitment(length, b"short", 0))
    assert caught.value.reason == RejectionReason.COMMITMENT


def test_what_began_too_long_ago_is_not_renewed() -> None:
    begun = renewed(LEASE, commit((1,), version=0))
    assert renewed(begun, commit((1, 2), version=0), oldest=0)
    with pytest.raises(WorkerFault) as caught:
        renewed(begun, commit((1, 2), version=3), oldest=1)
    assert caught.value.reason == RejectionReason.STALE


def test_the_first_version_is_remembered_through_later_renewals() -> None:
    lease = renewed(LEASE, commit((1,), version=0))
    lease = renewed(lease, commit((1, 2), version=3))
    with pytest.raises(WorkerFault) as caught:
        renewed(lease, commit((1, 2, 3), version=3), oldest=1)
    assert caught.value.reason == RejectionReason.STALE


def test_a_lease_that_has_no_token_yet_never_grows_stale() -> None:
    assert renewed(LEASE, Commitment(), oldest=7).deadline == 110.0
    assert renewed(LEASE, commit((1,), version=7), oldest=7).commitment.version == 7


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_a_submission_must_begin_with_what_was_committed(tokens: list[int], length: int, other: int) -> None:
    whole = tuple(tokens)
    committed = commit(whole[:length])
    assert extends(committed, whole)
    if committed.length > 0:
        assert not extends(committed, whole[: committed.length - 1])
        changed = (*whole[: committed.length - 1], other, *whole[committed.length :])
        assert extends(committed, changed) == (changed == whole)


def test_every_commitment_binds_not_only_the_newest() -> None:
    once = renewed(LEASE, commit((1, 2)))
    other = renewed(once, commit((9, 9, 3)), now=60.0)  # no digest shows by itself that it extends the one before
    assert not honours(other, (9, 9, 3, 4))
    assert not honours(other, (1, 2, 3, 4))
    honest = renewed(once, commit((1, 2, 3)), now=60.0)
    assert honours(honest, (1, 2, 3, 4))
    assert honest.earlier == (once.commitment,)


def test_a_digest_of_nothing_is_not_kept() -> None:
    assert renewed(LEASE, Commitment(0, bytes(1 << 20), 0)).commitment.digest == b""


def test_every_commitment_of_many_is_looked_at() -> None:
    tokens = tuple(range(1, 9))
    lease = LEASE
    for length in range(1, 8):
        lease = renewed(lease, commit(tokens[:length]))
    assert honours(lease, tokens)
    assert honours(lease, tokens[:7])
    assert not honours(lease, tokens[:6])
    assert not honours(replace(lease, earlier=(commit((9,)), *lease.earlier[1:])), tokens)


commitments = st.builds(
    Commitment,
    st.one_of(st.integers(0, 12), st.integers(0, 2**32 - 1)),
    st.one_of(st.binary(max_size=40), st.integers(0, 12).map(lambda n: token_digest(range(n)))),
    st.one_of(st.integers(0, 4), st.integers(0, 2**64 - 1)),
)


@settings(deadline=None)
@given(st.lists(st.tuples(commitments, st.floats(0, 400), st.integers(0, 4)), max_size=12))
def test_whatever_a_renewal_says_it_is_refused_or_binds_for_good(renewals: list[tuple[Commitment, float, int]]) -> None:
    """Any field that the wire can carry, in any order and at any time."""
    lease = LEASE
    for progress, now, oldest in renewals:
        try:
            after = renew(lease, progress, now=now, term=60.0, oldest=oldest, head=1000, max_tokens=2**31)
        except WorkerFault as fault:
            assert fault.reason in (RejectionReason.LEASE, RejectionReason.STALE, RejectionReason.COMMITMENT)
            continue
        assert now < lease.deadline and after.deadline == now + 60.0
        assert after.commitment.length >= lease.commitment.length
        lengths = [commitment.length for commitment in (*after.earlier, after.commitment)]
        assert lengths == sorted(set(lengths))
        assert set(lease.earlier) <= set(after.earlier)
        assert after.commitment.length == 0 or len(after.commitment.digest) == 32
        assert after.commitment.version <= 1000 and after.commitment.length < 2**31
        lease = after
    assert not honours(lease, ()) or lease.commitment.length == 0


def test_more_than_a_completion_can_hold_is_no_progress() -> None:
    assert renew(LEASE, commit((1,) * 10), now=1.0, term=60.0, oldest=0, head=0, max_tokens=10).commitment.length == 10
    with pytest.raises(WorkerFault, match="10 at most"):
        renew(LEASE, commit((1,) * 11), now=1.0, term=60.0, oldest=0, head=0, max_tokens=10)


def test_a_version_that_is_not_out_yet_grows_old_like_the_newest() -> None:
    lease = renew(LEASE, commit((1,), version=2**62), now=1.0, term=60.0, oldest=0, head=4, max_tokens=10)
    assert lease.commitment.version == 4
    with pytest.raises(WorkerFault, match="from 5 on"):
        renew(lease, commit((1, 2), version=9), now=2.0, term=60.0, oldest=5, head=9, max_tokens=10)


def test_commitments_are_thinned_and_never_end_a_long_sample() -> None:
    tokens, lease = tuple(range(2_000)), LEASE
    for length in range(1, 2_001):
        lease = renewed(replace(lease, deadline=100.0), commit(tokens[:length]))
    assert len(lease.earlier) <= 256 and lease.earlier[0].length == 1 and lease.commitment.length == 2_000
    assert honours(lease, tokens)
    assert not honours(lease, (9, *tokens[1:]))

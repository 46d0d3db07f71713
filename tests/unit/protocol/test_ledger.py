from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ledger import (
    BLAMELESS,
    FRAUD,
    Entry,
    EntryKind,
    Standing,
    entries_for_rejection,
    fold,
    is_gross,
    is_newcomer,
)
from protocol.rollout import SEED_MARGIN_MEAN, Outcome, RejectionReason, Verdict

UNKNOWN = Standing()


def rejection(reason: RejectionReason, standing: Standing = UNKNOWN, max_strikes: int = 3) -> list[EntryKind]:
    return [entry.kind for entry in entries_for_rejection("w", "r", reason, "why", standing, max_strikes)]


@pytest.mark.parametrize("reason", list(RejectionReason))
def test_what_each_rejection_costs(reason: RejectionReason) -> None:
    kinds = rejection(reason)
    if reason in BLAMELESS:
        assert kinds == []
    elif reason in FRAUD:
        assert kinds == [EntryKind.STRIKE, EntryKind.BAN]
    else:
        assert kinds == [EntryKind.STRIKE]


@pytest.mark.parametrize(("strikes", "banned"), [(0, False), (1, False), (2, True), (7, True)])
def test_enough_strikes_ban(strikes: int, banned: bool) -> None:
    kinds = rejection(RejectionReason.PROOF, Standing(strikes=strikes))
    assert (EntryKind.BAN in kinds) is banned


def test_who_is_banned_is_not_banned_again_by_strikes() -> None:
    assert rejection(RejectionReason.PROOF, Standing(strikes=5, banned=True)) == [EntryKind.STRIKE]


def test_a_ban_says_why() -> None:
    entries = entries_for_rejection("w", "r", RejectionReason.SEED, "44 % match", Standing(strikes=2), 3)
    assert entries[-1].note == "3 strikes, last seed: 44 % match"


def test_a_pardon_clears_strikes_and_ban_but_never_credits() -> None:
    entries = [
        Entry("w", EntryKind.CREDIT, 100, "a"),
        Entry("w", EntryKind.STRIKE, 1, "b"),
        Entry("w", EntryKind.BAN, 0, "b", "fraud"),
        Entry("w", EntryKind.PARDON, 0),
        Entry("w", EntryKind.CREDIT, 20, "c"),
    ]
    assert fold(entries[:3]) == Standing(100, 1, 1, True, "fraud")
    assert fold(entries) == Standing(120, 0, 2, False, "", clean_tokens=20)


@given(st.lists(st.tuples(st.sampled_from([EntryKind.CREDIT, EntryKind.STRIKE]), st.integers(0, 1000)), max_size=30))
def test_credits_are_the_sum_of_credit_entries(lines: list[tuple[EntryKind, int]]) -> None:
    standing = fold(Entry("w", kind, amount, str(i)) for i, (kind, amount) in enumerate(lines))
    assert standing.credits == sum(amount for kind, amount in lines if kind is EntryKind.CREDIT)
    assert standing.accepted == sum(kind is EntryKind.CREDIT for kind, _ in lines)


def test_probation_ends_with_accepted_rollouts() -> None:
    assert is_newcomer(Standing(accepted=31), 32)
    assert not is_newcomer(Standing(accepted=32), 32)
    assert not is_newcomer(Standing(), 0)


@pytest.mark.parametrize(
    ("reason", "mean", "tokens", "gross"),
    [
        (RejectionReason.SEED, 1.9, 8, True),
        (RejectionReason.SEED, 1.9, 2, False),  # one unlucky token of few
        (RejectionReason.SEED, 0.5, 64, False),  # six times what is admitted would be
        (RejectionReason.PROOF, 1.9, 8, False),
        (RejectionReason.SEED, float("nan"), 8, False),
    ],
)
def test_a_seed_that_is_grossly_wrong_is_fraud(reason: RejectionReason, mean: float, tokens: int, gross: bool) -> None:
    verdict = Verdict(Outcome.REJECTED, reason, metrics={SEED_MARGIN_MEAN: mean}, admitted={SEED_MARGIN_MEAN: 0.11})
    assert is_gross(verdict, tokens) is gross
    entries = entries_for_rejection("w", "r", reason, "d", Standing(), 3, gross=is_gross(verdict, tokens))
    assert (EntryKind.BAN in {entry.kind for entry in entries}) is gross


def test_without_a_bound_nothing_is_gross() -> None:
    assert not is_gross(Verdict(Outcome.REJECTED, RejectionReason.SEED, metrics={SEED_MARGIN_MEAN: 9.0}), 64)

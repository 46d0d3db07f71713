"""Credits and strikes are entries that are only ever added; standing is folded from them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.rollout import SEED_MARGIN_MEAN, RejectionReason, Verdict


class EntryKind(enum.StrEnum):
    """CREDIT counts verified tokens; STRIKE counts evidence of cheating; BAN and PARDON are decisions."""

    CREDIT = "credit"
    STRIKE = "strike"
    BAN = "ban"
    PARDON = "pardon"


# Failures that no honest worker can produce, or (pooled) one in a stated number of worker-months: they ban at once.
FRAUD: frozenset[str] = frozenset({RejectionReason.FORM, RejectionReason.SIGNATURE, RejectionReason.POOLED})
# Failures that are the fault of timing, not of intent: they cost nothing but the work.
BLAMELESS: frozenset[str] = frozenset({RejectionReason.STALE, RejectionReason.LEASE, RejectionReason.PRECISION})
# All tokens together lose the replay by so many nats, and by so many times what is admitted.
GROSS_NATS = 4.0
GROSS_TIMES = 5.0
# Failures that numerics alone might explain: an engine or a device that nobody measured may be to blame.
STATISTICAL: frozenset[str] = frozenset(
    {RejectionReason.PROOF, RejectionReason.LOGPROB, RejectionReason.SEED, RejectionReason.TERMINATION}
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger. `amount`: tokens for CREDIT, weight for STRIKE, 0 otherwise."""

    worker_id: str
    kind: EntryKind
    amount: int
    rollout_id: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a worker's entries add up to. `clean_tokens`: those credited since the last strike or pardon."""

    credits: int = 0
    strikes: int = 0
    accepted: int = 0
    banned: bool = False
    ban_reason: str = ""
    clean_tokens: int = 0


def fold(entries: Iterable[Entry]) -> Standing:
    """The standing that these entries, in order, amount to. A pardon clears strikes and ban, never credits."""
    credits = strikes = accepted = clean = 0
    banned, reason = False, ""
    for entry in entries:
        if entry.kind is EntryKind.CREDIT:
            credits += entry.amount
            accepted += 1
            clean += entry.amount
        elif entry.kind is EntryKind.STRIKE:
            strikes += entry.amount
            clean = 0
        elif entry.kind is EntryKind.BAN:
            banned, reason = True, entry.note
        else:
            strikes, clean, banned, reason = 0, 0, False, ""
    return Standing(credits, strikes, accepted, banned, reason, clean)


def is_newcomer(standing: Standing, probation_rollouts: int) -> bool:
    """On probation until this many rollouts were accepted."""
    return standing.accepted < probation_rollouts


def is_gross(verdict: Verdict, tokens: int) -> bool:
    """Whether the tokens were chosen by another rule, beyond what any numerics explain: then a failed seed replay is fraud.

    The proofs held by then, so that weights and prompt are the right ones.
    """
    mean = verdict.metrics.get(SEED_MARGIN_MEAN, 0.0)
    admitted = verdict.admitted.get(SEED_MARGIN_MEAN, 0.0)
    far = mean >= GROSS_TIMES * admitted and mean * tokens >= GROSS_NATS
    return verdict.reason is RejectionReason.SEED and admitted > 0.0 and far


def entries_for_rejection(
    worker_id: str,
    rollout_id: str | None,
    reason: RejectionReason,
    detail: str,
    standing: Standing,
    max_strikes: int,
    *,
    gross: bool = False,
) -> tuple[Entry, ...]:
    """What a rejection adds: nothing if blameless, a ban if fraud or `gross`, else a strike, and a ban at `max_strikes`."""
    if reason in BLAMELESS:
        return ()
    strike = Entry(worker_id, EntryKind.STRIKE, 1, rollout_id, f"{reason}: {detail}")
    if reason in FRAUD or gross:
        return strike, Entry(worker_id, EntryKind.BAN, 0, rollout_id, f"{reason}: {detail}")
    if standing.strikes + 1 >= max_strikes and not standing.banned:
        return strike, Entry(worker_id, EntryKind.BAN, 0, rollout_id, f"{max_strikes} strikes, last {reason}: {detail}")
    return (strike,)

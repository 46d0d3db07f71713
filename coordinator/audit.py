"""Who is audited how much, as pure decisions. Audited: prefilled and compared; the other checks run always.

Newcomers, and workers whom the tests over many rollouts watch, are audited in full. For the others the share falls with
standing: it halves with every `HALVING_TOKENS` accepted since the last strike, down to the run's floor, and never to zero.
A strike or a pardon makes it begin again at all. The draw depends on the run's secret and on the rollout, which is
received by then: no worker can know it.
"""

from __future__ import annotations

import enum
import hmac
from hashlib import sha256

from protocol.ledger import Standing, is_newcomer

HALVING_TOKENS = 100_000


class WorkerClass(enum.StrEnum):
    """How far a worker is trusted. Every change is an audit event."""

    BANNED = "banned"
    PROBATION = "probation"
    WATCHED = "watched"
    ESTABLISHED = "established"


def classify(standing: Standing, *, watched: bool, probation_rollouts: int) -> WorkerClass:
    """`watched`: the tests over many rollouts hold something against the worker."""
    if standing.banned:
        return WorkerClass.BANNED
    if is_newcomer(standing, probation_rollouts):
        return WorkerClass.PROBATION
    return WorkerClass.WATCHED if watched else WorkerClass.ESTABLISHED


def fraction(*, newcomer: bool, watched: bool, clean_tokens: int, floor: float) -> float:
    """The share of a worker's rollouts that is audited, in [floor, 1]."""
    if newcomer or watched:
        return 1.0
    return max(floor, 0.5 ** (clean_tokens / HALVING_TOKENS))


def is_drawn(secret: bytes, rollout_id: str, share: float) -> bool:
    """Whether this rollout is among the share. The same at every call."""
    drawn = hmac.new(secret, b"audit\0" + rollout_id.encode(), sha256).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2**64

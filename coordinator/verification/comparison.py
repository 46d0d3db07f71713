"""What a complete group says about the workers that wrote it: statistics whose honest mean is 0, by symmetry.

The samples of a group are exchangeable: same prompt, seeds from the run's secret, leased in an order that no worker
chooses. So for honest workers, whatever the task,

    reward     own mean reward - that of the others, on the same task                  (too high or too low)
    near tie   (near ties lost - share · near ties) · (reward - that of the others)    (steered towards reward)
    given up   reward that is usual - reward of the samples that it gave up            (hard ones left to others)

have mean 0: which way a near tie falls is decided by rounding, and a lease that runs out by a shutdown or a slow machine.
They can lean a little without any fraud. If long answers score otherwise than short ones: a slow machine gives up long
answers, and long answers have more near ties. While the policy improves: a slow machine's is older. Hence `mean` leaves
some room, and they alert, but ban nobody by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.verification.pooled import GIVEN_UP, NEAR_TIE, REWARD_HIGH, REWARD_LOW
from coordinator.verification.pooling import Statistic


@dataclass(frozen=True, slots=True)
class Member:
    """One accepted rollout of the group. `near_ties` is None if it was not audited."""

    sample_id: str
    worker_id: str
    tokens: int
    reward: float
    near_ties: float | None
    near_ties_lost: float


def compare(
    members: Sequence[Member], given_up: Iterable[tuple[str, str]], *, usual_reward: float | None, near_tie_share: float
) -> dict[str, list[Statistic]]:
    """Statistics by worker. `given_up`: (worker, sample) of leases that ended without a rollout through the worker.
    `usual_reward`: the mean of the environment's groups before this one, None if there are none."""
    found: dict[str, list[Statistic]] = {}
    for worker_id in sorted({member.worker_id for member in members}):
        found[worker_id] = [*_rewards(members, worker_id), *_near_ties(members, worker_id, near_tie_share)]
    if usual_reward is not None:
        for worker_id, rewards in _left_to_others(members, given_up).items():
            value = usual_reward - sum(rewards) / len(rewards)
            found.setdefault(worker_id, []).append(Statistic(GIVEN_UP, value, 1))
    return {worker_id: statistics for worker_id, statistics in found.items() if statistics}


def _rewards(members: Sequence[Member], worker_id: str) -> list[Statistic]:
    own = [member for member in members if member.worker_id == worker_id]
    others = [member.reward for member in members if member.worker_id != worker_id]
    if not others:
        return []
    excess = sum(member.reward for member in own) / len(own) - sum(others) / len(others)
    tokens = sum(member.tokens for member in own)
    return [Statistic(REWARD_HIGH, excess, tokens), Statistic(REWARD_LOW, -excess, tokens)]


def _near_ties(members: Sequence[Member], worker_id: str, share: float) -> list[Statistic]:
    total = sum(member.reward for member in members)
    values: list[float] = []
    tokens = 0
    for member in members:
        if member.worker_id == worker_id and member.near_ties and len(members) > 1:
            others = (total - member.reward) / (len(members) - 1)
            surplus = min(max(member.near_ties_lost - share * member.near_ties, -1.0), 1.0)
            values.append(surplus * (member.reward - others))
            tokens += member.tokens
    return [Statistic(NEAR_TIE, sum(values) / len(values), tokens)] if values else []


def _left_to_others(members: Sequence[Member], given_up: Iterable[tuple[str, str]]) -> dict[str, list[float]]:
    """Rewards of the samples that others finished, by the worker that gave them up."""
    by_sample = {member.sample_id: member for member in members}
    found: dict[str, list[float]] = {}
    for worker_id, sample_id in sorted(set(given_up)):
        member = by_sample.get(sample_id)
        if member is not None and member.worker_id != worker_id:
            found.setdefault(worker_id, []).append(member.reward)
    return found

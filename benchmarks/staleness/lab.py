"""One training under a controlled lag.

The protocol is AsyncOPD's: first k batches are sampled by the initial policy, then every step trains on the oldest batch of
a first-in-first-out queue and puts in one sampled by the policy as it is now. The lag grows from 0 to k and stays there; every
run makes the same number of steps. Shares and means are over the steps at the full lag (the ramp is excluded); the gain is
the held-out reward at the end minus that at the beginning.

Shapes: N completions, T tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean

import torch

from benchmarks.staleness.policy import Policy
from benchmarks.staleness.task import TOKENS, Task, rewards, tasks
from trainer.losses import LossInputs, Objective
from trainer.metrics import StepTokens

_HELD_OUT_SAMPLES = 16
_EVALUATIONS = 5  # of the last steps, averaged: one policy is a noisy measure of a run that oscillates


@dataclass(frozen=True, slots=True)
class Setting:
    """`steps`: optimizer steps, one version each. `groups` × `samples` completions make a batch."""

    steps: int = 200
    groups: int = 16
    samples: int = 8
    learning_rate: float = 6e-2


@dataclass(frozen=True, slots=True)
class Outcome:
    """`gain`: held-out reward at the end minus at the beginning. `metrics`: means at the full lag."""

    gain: float
    reward: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Batch:
    """Completions of one version with their advantages."""

    pairs_N2: torch.Tensor
    tokens_NT: torch.Tensor
    old_NT: torch.Tensor
    advantage_N: torch.Tensor
    version: int


def train(objective: Objective, lag: int, seed: int, setting: Setting) -> Outcome:
    """Train one policy; the same for the same arguments."""
    policy, generator = Policy(seed), torch.Generator().manual_seed(seed)
    training, held_out = tasks()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=setting.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    queue = deque(sample(policy, training, setting, generator, version=0) for _ in range(lag))
    before = held_out_reward(policy, held_out, seed)
    at_lag: list[dict[str, float]] = []
    last: list[float] = []
    for step in range(setting.steps):
        queue.append(sample(policy, training, setting, generator, version=step))
        numbers = update(policy, optimizer, objective, queue.popleft(), step)
        if step >= lag:
            at_lag.append(numbers)
        if step >= setting.steps - _EVALUATIONS:
            last.append(held_out_reward(policy, held_out, seed))
    return Outcome(fmean(last) - before, fmean(last), _means(at_lag))


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of every metric, over the steps that had it (a batch without an advantage has few)."""
    names = {name for numbers in steps for name in numbers}
    return {name: fmean(numbers[name] for numbers in steps if name in numbers) for name in sorted(names)}


def sample(policy: Policy, task: Task, setting: Setting, generator: torch.Generator, version: int) -> Batch:
    """A batch by the policy as it is."""
    chosen = torch.randint(len(task.pairs_P2), (setting.groups,), generator=generator)
    chosen = chosen.repeat_interleave(setting.samples)
    pairs_N2 = task.pairs_P2[chosen]
    tokens_NT, old_NT = policy.sample(pairs_N2, generator)
    reward_N = rewards(tokens_NT, task.answers_PT[chosen])
    groups = reward_N.view(setting.groups, setting.samples)
    advantage_N = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    return Batch(pairs_N2, tokens_NT, old_NT, advantage_N, version)


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, objective: Objective, batch: Batch, version: int
) -> dict[str, float]:
    """One optimizer step at `version`, and its metrics."""
    new_NT, entropy_NT = policy.of_tokens(batch.pairs_N2, batch.tokens_NT)
    mask_NT = (batch.advantage_N != 0.0)[:, None].expand(-1, TOKENS)
    inputs = LossInputs(
        new_BT=new_NT,
        old_BT=batch.old_NT,
        behaviour_BT=batch.old_NT,
        advantage_BT=batch.advantage_N[:, None].expand(-1, TOKENS),
        mask_BT=mask_NT,
        staleness_BT=torch.full_like(batch.tokens_NT, version - batch.version),
    )
    output = objective(inputs)
    optimizer.zero_grad()
    output.loss.backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0) if gradients else torch.zeros(())
    if bool(torch.isfinite(norm)):
        optimizer.step()
    tokens = StepTokens()
    tokens.add(inputs, output, entropy_NT)
    return tokens.metrics() | {"grad_norm": float(norm)}


def held_out_reward(policy: Policy, task: Task, seed: int) -> float:
    """Mean reward on tasks that were never trained on."""
    generator = torch.Generator().manual_seed(1000 + seed)
    pairs_N2 = task.pairs_P2.repeat(_HELD_OUT_SAMPLES, 1)
    tokens_NT, _ = policy.sample(pairs_N2, generator)
    return float(rewards(tokens_NT, task.answers_PT.repeat(_HELD_OUT_SAMPLES, 1)).mean())

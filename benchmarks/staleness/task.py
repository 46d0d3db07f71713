"""A task that a tiny policy learns in seconds: write the sum of two numbers, digit by digit, with a checksum behind it.

A prompt is a pair (a, b), 0 ≤ a, b < BASE; the right completion has TOKENS tokens, each a fixed function of a + b and its
place. A completion's reward is the share of tokens that are right. A quarter of the pairs is held out.

Shapes: N completions, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BASE = 8
TOKENS = 6
VOCABULARY = 16
_HELD_OUT = 4  # every so-manyth pair


@dataclass(frozen=True, slots=True)
class Task:
    """`pairs_P2`: prompts. `answers_PT`: right tokens."""

    pairs_P2: torch.Tensor
    answers_PT: torch.Tensor


def tasks() -> tuple[Task, Task]:
    """(to train on, held out)."""
    pairs = torch.cartesian_prod(torch.arange(BASE), torch.arange(BASE))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(1))
    place = torch.arange(TOKENS)
    total = pairs.sum(dim=1, keepdim=True)
    answers = (total * (place % 3 + 1) + 5 * place) % VOCABULARY
    held = order % _HELD_OUT == 0
    return Task(pairs[~held], answers[~held]), Task(pairs[held], answers[held])


def rewards(tokens_NT: torch.Tensor, answers_NT: torch.Tensor) -> torch.Tensor:
    """[N]: share of tokens that are right."""
    return (tokens_NT == answers_NT).float().mean(dim=1)

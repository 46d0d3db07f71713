"""Advantages per token from a critic's values. Pure, lists in, lists out; γ = 1, since completions end.

V_t is the value before token t is taken, T tokens, one reward at the end.
"""

from __future__ import annotations

from collections.abc import Sequence


def gae(reward: float, values: Sequence[float], lam: float, ended: bool = True) -> list[float]:
    """Σ_k λ^k δ_{t+k}, δ_t = r_t + V_{t+1} − V_t.

    `ended` False: the completion was cut off, and its last value stands for what would have come (truncated GAE); the
    reward, if any, is added to that. Source: Schulman et al. 2016.
    """
    advantages = [0.0] * len(values)
    following = 0.0
    for t in range(len(values) - 1, -1, -1):
        last = t == len(values) - 1
        after = (0.0 if ended else values[t]) if last else values[t + 1]
        delta = (reward if last else 0.0) + after - values[t]
        following = delta + lam * following
        advantages[t] = following
    return advantages


def length_lambda(length: int) -> float:
    """1 − 1/(1.5 L): λ that looks about one and a half completions ahead. Source: SAO (2026)."""
    return max(0.0, 1.0 - 1.0 / (1.5 * max(length, 1)))

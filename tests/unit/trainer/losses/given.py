"""Inputs of a loss from lists of probabilities, so that tests can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.losses import Alternatives, LossInputs


def given(
    new: Sequence[float],
    behaviour: Sequence[float],
    advantage: Sequence[float],
    *,
    old: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
    staleness: Sequence[int] | None = None,
    others: tuple[Sequence[Sequence[float]], ...] | None = None,
    **extra: Sequence[float],
) -> LossInputs:
    """One completion. `others`: probabilities [T][M] by new, sampler and teacher; `extra`: prox, ewma, … by name."""
    return LossInputs(
        log(new).requires_grad_(),
        log(behaviour if old is None else old),
        log(behaviour),
        torch.tensor([advantage]),
        torch.tensor([mask if mask is not None else [True] * len(new)]),
        torch.tensor([staleness if staleness is not None else [0] * len(new)]),
        others=None if others is None else Alternatives(log(others[0]).requires_grad_(), *map(log, others[1:])),
        **{f"{name}_BT": log(values) for name, values in extra.items()},
    )


def log(probabilities: Sequence) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def constant(aggregation: str, length: int) -> dict[str, int]:
    """The parameter that aggregation `constant` needs and no other takes."""
    return {"constant_length": length} if aggregation == "constant" else {}

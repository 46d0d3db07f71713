"""What every objective reports about a step: how far the policy moved, how stale the data was, how the engines differ.

Kept apart from the losses, so that runs with different objectives are compared by the same numbers. N tokens, all of
them trained on, collected over the microbatches of a step; log-probs in nats.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trainer.losses.base import LossOutput
from trainer.losses.inputs import LossInputs, ratio

_AGES = (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5-8", 5, 8), ("9+", 9, 1 << 62))


@dataclass
class StepTokens:
    """Collects a step's tokens, microbatch by microbatch, for `step_metrics`."""

    parts: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def add(
        self,
        inputs: LossInputs,
        output: LossOutput,
        entropy_BT: torch.Tensor,
        against_BT: torch.Tensor | None = None,
        *,
        moved: bool = False,
    ) -> None:
        """Take a microbatch's tokens. `inputs` carries trusted values as `old` and the worker's claims as `behaviour`,
        before any clamping; `against_BT` is what the loss takes its ratio against (None: `old`); `moved`: the weights
        have been updated since they were a version, so that no token is of this very policy."""
        mask_BT = inputs.mask_BT
        fresh_BT = torch.zeros_like(mask_BT) if moved else inputs.staleness_BT == 0
        columns = {
            "new": inputs.new_BT.detach(),
            "old": inputs.old_BT,
            "behaviour": inputs.behaviour_BT,
            "advantage": inputs.advantage_BT,
            "staleness": inputs.staleness_BT,
            "fresh": fresh_BT,
            "kept": output.kept_BT,
            "entropy": entropy_BT.detach(),
            "against": inputs.old_BT if against_BT is None else against_BT,
            "share": output.loss_BT.abs(),
        }
        self.parts.append({name: column[mask_BT].cpu() for name, column in columns.items()})

    def metrics(self) -> dict[str, float]:
        """The step's metrics; empty if nothing was added."""
        if not self.parts:
            return {}
        return step_metrics(**{name: torch.cat([part[name] for part in self.parts]) for name in self.parts[0]})


def step_metrics(
    *,
    new: torch.Tensor,
    old: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    staleness: torch.Tensor,
    fresh: torch.Tensor,
    kept: torch.Tensor,
    entropy: torch.Tensor,
    against: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
) -> dict[str, float]:
    """All [N]. Means are over tokens; a mean over none is 0.

    `approx_kl_*`: how far the policy moved since the tokens were generated (new against old), by k3 and without a cap,
    on `fresh` tokens (bool) apart from the others. Fresh are those that the very weights generated which are trained:
    staleness 0, and no update since that version. On them it must be about 0: if it is not, `old` was computed by other
    numerics than `new`, which less staleness does not cure.
    `engine_kl`: k3 of old against the worker's claim: the inference engine's deviation, not the policy's movement.
    `loss_kl_*`: the same k3 of new against what the loss takes its ratio against. Where that is high on fresh tokens and
    `approx_kl_fresh` is not, the loss is fed log-probs of other numerics.
    `effective_sample_size`: (Σ ρ)² / (N Σ ρ²) in (0, 1].
    `loss_share/…`: share of Σ |loss| that tokens of this staleness (versions) have.
    """
    count = new.numel()
    if count == 0:
        return {"tokens": 0.0}
    rho = ratio(new, old)
    kl = k3(new, old)
    loss_kl = kl if against is None else k3(new, against)
    up, down = advantage > 0, advantage < 0
    return {
        "tokens": float(count),
        "approx_kl": _mean(kl),
        "approx_kl_fresh": _mean(kl[fresh]),
        "approx_kl_stale": _mean(kl[~fresh]),
        "loss_kl_fresh": _mean(loss_kl[fresh]),
        "loss_kl_stale": _mean(loss_kl[~fresh]),
        "chi_squared": _mean((rho - 1.0).square()),
        "cut_fraction": _mean(~kept),
        "cut_fraction_positive": _mean(~kept[up]),
        "cut_fraction_negative": _mean(~kept[down]),
        "staleness_mean": _mean(staleness),
        "staleness_max": float(staleness.max()),
        "importance_mean": _mean(rho),
        "importance_std": float(rho.double().std(correction=0)),
        "importance_max": float(rho.max()),
        "effective_sample_size": float(rho.double().sum().square() / (count * rho.double().square().sum())),
        "engine_kl": _mean(k3(old, behaviour)),
        "engine_gap_max": float((old - behaviour).abs().max()),
        "entropy": _mean(entropy),
        **({} if share is None else loss_shares(share, staleness)),
    }


def loss_shares(share: torch.Tensor, staleness: torch.Tensor) -> dict[str, float]:
    """How Σ share [N] divides among classes of staleness; only classes that have tokens are named."""
    total = float(share.double().sum())
    parts: dict[str, float] = {}
    for name, low, high in _AGES:
        inside = (staleness >= low) & (staleness <= high)
        if bool(inside.any()):
            parts[f"loss_share/{name}"] = float(share[inside].double().sum()) / total if total > 0.0 else 0.0
    return parts


def k3(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 = ρ − 1 − ln ρ ≥ 0, ρ = exp(policy − reference): estimates KL(reference ‖ policy) on its samples."""
    rho = ratio(policy, reference).double()
    return rho - 1.0 - rho.log()


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0

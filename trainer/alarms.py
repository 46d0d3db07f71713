"""Signs of a collapse in a step's metrics. They warn and never act: what to do is a person's decision.

    effective_sample_size  (Σρ)²/(NΣρ²) below 0.3: a few tokens dominate the step
    kl                     approx_kl above 0.3 nats: the data is not the policy's any more
    fresh_kl               approx_kl_fresh above 0.01 nats: verifier and trainer compute different log-probs
    entropy                below a tenth of what the run began with: the policy has stopped exploring
    skipped                the step's gradient was not finite, or too large

    gave_up                too many steps in a row were skipped: the trainer has ended

An alarm is logged when it begins and when it ends, and is among the step's metrics as `alarm/<name>` while it lasts. The
coordinator, which is told its sentence, makes an audit event of its beginning and its end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

log = logging.getLogger(__name__)

_FIRST_STEPS = 5  # whose mean entropy is what the run began with


@dataclass(frozen=True, slots=True)
class Alarms:
    """Bounds, as above."""

    effective_sample_size: float = 0.3
    kl: float = 0.3
    fresh_kl: float = 0.01
    entropy_share: float = 0.1


def raised(metrics: Mapping[str, float], first_entropy: float | None, bounds: Alarms) -> dict[str, str]:
    """Alarm by name, each with a sentence. `first_entropy`: None while it is not known."""
    found = {}
    size, kl, fresh = (metrics.get(name) for name in ("effective_sample_size", "approx_kl", "approx_kl_fresh"))
    entropy = metrics.get("entropy")
    if size is not None and size < bounds.effective_sample_size:
        found["effective_sample_size"] = f"the effective sample size is {size:.2f} of 1: a few tokens dominate the step"
    if kl is not None and kl > bounds.kl:
        found["kl"] = f"the policy is {kl:.3f} nats from its data: lower max_staleness or the learning rate"
    if fresh is not None and fresh > bounds.fresh_kl:
        found["fresh_kl"] = f"fresh data shows {fresh:.4f} nats: verifier and trainer compute other log-probs"
    if entropy is not None and first_entropy is not None and entropy < bounds.entropy_share * first_entropy:
        found["entropy"] = f"the entropy fell from {first_entropy:.3f} to {entropy:.3f} nats: the policy collapses"
    if metrics.get("applied") == 0.0:
        found["skipped"] = "the step was skipped: its gradient was not finite, or too large"
    return found


@dataclass
class Watch:
    """Looks at every step; knows which alarms last and what the entropy was at first.

    `entropies`: of the run's first steps. They belong to its checkpoints: after a resume an entropy that has long collapsed
    must not pass for what the run began with.
    """

    bounds: Alarms = Alarms()
    entropies: list[float] = field(default_factory=list)
    _lasting: frozenset[str] = frozenset()

    def look(self, metrics: dict[str, float]) -> dict[str, str]:
        """The alarms with a sentence each; adds `alarm/<name>` = 1 to the metrics, and logs those that begin or end."""
        first = fmean(self.entropies) if len(self.entropies) == _FIRST_STEPS else None
        found = raised(metrics, first, self.bounds)
        if len(self.entropies) < _FIRST_STEPS and metrics.get("entropy", 0.0) > 0.0:
            self.entropies.append(metrics["entropy"])
        for name in sorted(set(found) - self._lasting):
            log.warning("%s", found[name], extra={"action": "alarm", "alarm": name})
        for name in sorted(self._lasting - set(found)):
            log.info("alarm %s is over", name, extra={"action": "alarm_over", "alarm": name})
        self._lasting = frozenset(found)
        metrics.update({f"alarm/{name}": 1.0 for name in found})
        return found

"""Is a submission received? A pure decision: `admit(…) -> Accepted | Refused`, executed by `coordinator.intake`.

Received is not accepted: everything here needs no model. What a model must judge is the verifier's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.verification.checks.base import Claim
from coordinator.verification.checks.form import FormCheck
from protocol import lease as lease_rules
from protocol import policy
from protocol.declaration import BF16
from protocol.lease import Lease
from protocol.rollout import RejectionReason, Rollout, SamplingParams
from protocol.turns import Turns

_FORM = FormCheck()  # looks at neither the prompt nor the seed


@dataclass(frozen=True, slots=True)
class Accepted:
    """Store it and give a receipt."""


@dataclass(frozen=True, slots=True)
class Refused:
    """No receipt. `reason` counts it, `detail` tells the worker."""

    reason: RejectionReason
    detail: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The run's bounds. `hidden_size` fixes how long a proof must be; `precisions` are the classes admitted."""

    run_id: str
    vocab_size: int
    hidden_size: int
    max_staleness: int
    precisions: tuple[str, ...] = (BF16,)


def admit(
    rollout: Rollout,
    *,
    worker_id: str,
    lease: Lease | None,
    sampling: SamplingParams | None,
    versions: Mapping[int, str],
    head: int,
    now: float,
    limits: Limits,
    withdrawn: frozenset[int] = frozenset(),
    turns: Turns | None = None,
) -> Accepted | Refused:
    """Decide on one submission.

    `versions`: manifest digest of each version that is published and not withdrawn; `head`: the newest of them;
    `withdrawn`: versions that were taken back, which is nobody's fault but ours;
    `sampling`: what the lease asked for (None only if there is no such lease); `turns`: how its task's turns are taken.
    """
    if rollout.run_id != limits.run_id:
        return Refused(RejectionReason.LEASE, f"made for run {rollout.run_id!r:.40}, this is {limits.run_id}")
    if lease is None or sampling is None:
        return Refused(RejectionReason.LEASE, "there is no such lease in this run")
    if lease.worker_id != worker_id:
        return Refused(RejectionReason.LEASE, "the lease is another worker's")
    if lease.sample_id != rollout.sample_id:
        return Refused(RejectionReason.LEASE, "the lease is of another sample")
    if not lease_rules.is_live(lease, now):
        return Refused(RejectionReason.LEASE, f"the lease is {lease_rules.expire(lease, now).state.value}")
    if rollout.precision not in limits.precisions:
        admitted = ", ".join(limits.precisions)
        return Refused(RejectionReason.PRECISION, f"made in {rollout.precision!r}; this run admits {admitted}")
    if rollout.turns != ("" if turns is None else turns.rules.digest):
        return Refused(
            RejectionReason.LEASE, "its turns go by other rules than the run has now: start the worker again"
        )
    form = _FORM(Claim(rollout, (), sampling, 0, limits.vocab_size, limits.hidden_size, turns))
    if not form.passed:
        return Refused(RejectionReason.FORM, form.detail)
    broken = lease_rules.broken(lease, rollout.token_ids)
    if broken is not None:
        return Refused(
            RejectionReason.COMMITMENT,
            f"does not begin with the {broken.length} tokens committed before: lease {lease.lease_id}, sha256 "
            f"{broken.digest.hex()}, signature {broken.signature.hex() or 'none'}",
        )
    if withdrawn.intersection(span.version for span in rollout.spans):
        return Refused(RejectionReason.STALE, "made with a version that was withdrawn since")
    return _admit_versions(rollout, lease, versions, head, limits.max_staleness)


def _admit_versions(
    rollout: Rollout, lease: Lease, versions: Mapping[int, str], head: int, max_staleness: int
) -> Accepted | Refused:
    for span in rollout.spans:
        if versions.get(span.version) != span.manifest_digest:
            return Refused(
                RejectionReason.VERSION,
                f"version {span.version} with digest {span.manifest_digest[:19]!r}… is not published",
            )
    if rollout.oldest_version < lease.min_version:
        return Refused(
            RejectionReason.STALE, f"version {rollout.oldest_version}; the lease asks for ≥ {lease.min_version}"
        )
    oldest = policy.oldest_admissible(head, max_staleness)
    if rollout.oldest_version < oldest:
        return Refused(
            RejectionReason.STALE, f"begun under version {rollout.oldest_version}; the oldest admissible is {oldest}"
        )
    return Accepted()

"""One batch of claimed rollouts in, one verdict each out. Every failure here is ours: INCONCLUSIVE, never a rejection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coordinator import audit
from coordinator.config import RunFile, model_shape
from coordinator.store.rollouts import PendingRollout
from coordinator.verification.checks import Claim, run_checks
from coordinator.verification.pooled import Pooled
from coordinator.verification.prefill import PrefillResult
from coordinator.verification.resident import PrefillRequest, ResidentModels, prefill_rollouts
from coordinator.verification.thresholds import thresholds_of
from environments.sandbox import Scorer
from protocol.errors import OurFault, RollswarmError, SourceFault, UserError
from protocol.rollout import Author, Outcome, RejectionReason, SamplingParams, Task, Verdict, VersionSpan

log = logging.getLogger(__name__)

# Failures that numerics alone might explain.
_STATISTICAL = frozenset(
    {RejectionReason.PROOF, RejectionReason.LOGPROB, RejectionReason.SEED, RejectionReason.TERMINATION}
)

_SECOND_LOOKS = 2

Fetch = Callable[[int, str], Awaitable[Path]]


class Judge:
    """Measures and checks rollouts. `fetch(version, manifest_digest)` gives a verified folder of that version."""

    def __init__(
        self,
        run_file: RunFile,
        *,
        secret: bytes,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        fetch: Fetch,
        device: str = "cpu",
    ) -> None:
        self._secret = secret
        self._scorer = scorer
        self._decode = decode
        self._fetch = fetch
        self._settings = run_file.verification
        self.audit_floor = run_file.verification.audit_fraction  # an operator may change it while the run goes on
        self._sampling = run_file.sampling
        self._environments = {section.name: section for section in run_file.environments}
        self._vocab_size, self._hidden_size = model_shape(run_file.model.path)
        self._thresholds = thresholds_of(self._settings)
        self._folders: dict[str, Path] = {}
        self._models = self._resident(getattr(torch, self._settings.dtype), self._settings.resident_versions, device)
        self._exact_models = self._resident(torch.float32, 1, device)

    def _resident(self, dtype: torch.dtype, versions: int, device: str) -> ResidentModels:
        """Nothing is loaded before it is needed."""
        return ResidentModels(lambda digest: self._folders[digest], max_resident=versions, dtype=dtype, device=device)

    @property
    def pooled(self) -> Pooled:
        """The tests over many rollouts."""
        return self._thresholds.pooled

    async def warm_up(self, version: int, manifest_digest: str) -> None:
        """Load a version before the first rollout asks for it. Raises SourceFault or OurFault if it can't be had."""
        await self._fetch_span(VersionSpan(version, manifest_digest, 0, 1))
        await asyncio.to_thread(self._models.activate, manifest_digest)

    async def judge(self, pending: Sequence[PendingRollout]) -> dict[str, Verdict]:
        """A verdict for each rollout id."""
        found: dict[str, Verdict] = {}
        audited: list[PendingRollout] = []
        for item in pending:
            try:
                screened = run_checks(self.claim(item), None, self._thresholds)
            except RollswarmError as error:
                screened = inconclusive(error)
            if screened.outcome is Outcome.ACCEPTED and self.is_audited(item):
                audited.append(item)
            else:
                found[item.rollout_id] = screened
        found |= await self._audit(audited)
        return await self._with_rewards(pending, found)

    def claim(self, item: PendingRollout) -> Claim:
        """The rollout beside what our side knows of it."""
        return Claim(
            rollout=item.rollout,
            prompt_token_ids=item.prompt_token_ids,
            sampling=SamplingParams(self._sampling.temperature, item.max_tokens, self._sampling.eos_token_ids),
            seed=item.seed,
            vocab_size=self._vocab_size,
            hidden_size=self._hidden_size,
        )

    def is_audited(self, item: PendingRollout) -> bool:
        """By the worker's standing, and drawn by a secret that no worker can know before its receipt."""
        share = audit.fraction(
            newcomer=item.newcomer,
            watched=item.watched,
            clean_tokens=item.clean_tokens,
            floor=self.audit_floor,
        )
        return audit.is_drawn(self._secret, item.rollout_id, share)

    async def _audit(self, items: Sequence[PendingRollout]) -> dict[str, Verdict]:
        """Prefill and check; the verdicts of those whose weights can't be had are INCONCLUSIVE."""
        ready, found = await self._with_weights(items)
        if not ready:
            return found
        found |= await self._measured(ready, self._models)
        for doubtful in _by_worker(item for item in ready if found[item.rollout_id].reason in _STATISTICAL):
            found |= await self._second_look(doubtful)
        return found

    async def _second_look(self, doubtful: Sequence[PendingRollout]) -> dict[str, Verdict]:
        """A statistical failure counts as evidence only if exact arithmetic (float32) fails it too.

        A cheat's failures are many and alike: where the first few of one worker stand, the others stand unseen.
        """
        found = await self._measured(doubtful[:_SECOND_LOOKS], self._exact_models)
        rest = doubtful[_SECOND_LOOKS:]
        if rest and any(verdict.outcome is not Outcome.REJECTED for verdict in found.values()):
            found |= await self._measured(rest, self._exact_models)
        return found

    async def _measured(self, items: Sequence[PendingRollout], models: ResidentModels) -> dict[str, Verdict]:
        """Verdicts by these models. If the batch fails, each is tried alone, so that none takes others down with it."""
        try:
            measured = await asyncio.to_thread(self._prefill, items, models)
        except OurFault as error:
            if len(items) == 1:
                return {items[0].rollout_id: inconclusive(error)}
            log.warning("a batch failed (%s); trying its rollouts one by one", error, extra={"action": "prefill_error"})
            alone: dict[str, Verdict] = {}
            for item in items:
                alone |= await self._measured([item], models)
            return alone
        return {item.rollout_id: self._check(item, measured[item.rollout_id]) for item in items}

    async def _with_weights(self, items: Sequence[PendingRollout]) -> tuple[list[PendingRollout], dict[str, Verdict]]:
        """Those whose versions are on disk now, and verdicts for the others."""
        ready: list[PendingRollout] = []
        found: dict[str, Verdict] = {}
        missing: dict[str, Exception] = {}  # waited for once, not once per rollout
        for item in items:
            for span in item.rollout.spans:
                if span.manifest_digest not in missing:
                    try:
                        await self._fetch_span(span)
                    except (SourceFault, OurFault, OSError) as error:
                        missing[span.manifest_digest] = error
            lacking = [span.manifest_digest for span in item.rollout.spans if span.manifest_digest in missing]
            if lacking:
                found[item.rollout_id] = inconclusive(missing[lacking[0]])
            else:
                ready.append(item)
        return ready, found

    async def _fetch_span(self, span: VersionSpan) -> None:
        """Always asks: the folder may have been pruned since. (A version that is there costs no network.)"""
        known = self._folders.get(span.manifest_digest)
        if known is None or not known.exists():
            try:
                self._folders[span.manifest_digest] = await self._fetch(span.version, span.manifest_digest)
            except UserError as error:  # the disk is full: the operator's to mend, and no reason to end
                raise OurFault(str(error)) from error

    def _prefill(self, items: Sequence[PendingRollout], models: ResidentModels) -> Mapping[Any, PrefillResult]:
        requests = [
            PrefillRequest(
                item.rollout_id,
                item.prompt_token_ids,
                item.rollout.token_ids,
                item.seed,
                self._sampling.temperature,
                item.rollout.spans,
            )
            for item in items
        ]
        return prefill_rollouts(requests, models)

    def _check(self, item: PendingRollout, measured: PrefillResult) -> Verdict:
        try:
            return run_checks(self.claim(item), measured, self._thresholds)
        except RollswarmError as error:
            return inconclusive(error)

    async def _with_rewards(
        self, pending: Sequence[PendingRollout], found: Mapping[str, Verdict]
    ) -> dict[str, Verdict]:
        """Fill in the recomputed reward of everything accepted; an environment that fails makes it INCONCLUSIVE."""
        rewarded = dict(found)
        for item in pending:
            verdict = found[item.rollout_id]
            if verdict.outcome is not Outcome.ACCEPTED:
                continue
            try:
                rewarded[item.rollout_id] = replace(verdict, reward=await self._reward(item))
            except RollswarmError as error:
                rewarded[item.rollout_id] = inconclusive(error)
        return rewarded

    async def _reward(self, item: PendingRollout) -> float:
        section = self._environments.get(item.environment)
        if section is None:
            raise OurFault(f"the run file names no environment {item.environment!r} any more: put it back")
        kind = section.kind or section.name
        task = Task(kind, item.task_index, item.prompt, item.reference)
        written = [segment.token_ids for segment in item.rollout.segments if segment.author is Author.MODEL]
        text = self._decode([token for token_ids in written for token in token_ids])
        return await self._scorer.score(kind, section.params, task, text)


def inconclusive(error: Exception) -> Verdict:
    """Ours or an environment's failure."""
    return Verdict(Outcome.INCONCLUSIVE, detail=f"{getattr(error, 'fault', 'us')}: {error}", audited=False)


def _by_worker(items: Iterable[PendingRollout]) -> list[list[PendingRollout]]:
    workers: dict[str, list[PendingRollout]] = {}
    for item in items:
        workers.setdefault(item.worker_id, []).append(item)
    return list(workers.values())

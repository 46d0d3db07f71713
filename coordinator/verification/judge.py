"""One batch of claimed rollouts in, one verdict each out. Every failure here is ours: INCONCLUSIVE, never a rejection."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator import audit
from coordinator.config import RunFile, VerificationSection, model_shape
from coordinator.store.rollouts import PendingRollout
from coordinator.verification.checks import run_checks
from coordinator.verification.classes import classes_of
from coordinator.verification.examination import ExaminerSettings, inconclusive
from coordinator.verification.guard import Guard, GuardLimits
from coordinator.verification.pooled import Pooled
from environments.sandbox import Scorer
from protocol.errors import OurFault, RollswarmError, SourceFault, UserError
from protocol.ledger import STATISTICAL
from protocol.rollout import Outcome, Task, Verdict, VersionSpan
from protocol.turns import Turns

log = logging.getLogger(__name__)

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
        turns: Mapping[str, Turns] | None = None,
    ) -> None:
        """`turns`: by environment, of those whose tasks take several."""
        self._secret = secret
        self._scorer = scorer
        self._decode = decode
        self._fetch = fetch
        self.audit_floor = run_file.verification.audit_fraction  # an operator may change it while the run goes on
        self._environments = {section.name: section for section in run_file.environments}
        self._examined_by = examiner_settings(run_file, device, turns or {})
        self._guard = Guard(self._examined_by, guard_limits(run_file.verification))
        self._folders: dict[str, Path] = {}

    @property
    def pooled(self) -> dict[str, Pooled]:
        """For each precision class, the tests over many rollouts."""
        return {name: thresholds.pooled for name, thresholds in self._examined_by.classes.items()}

    async def close(self) -> None:
        """End the process that examines. Safe to call twice."""
        await self._guard.close()

    async def warm_up(self, version: int, manifest_digest: str) -> None:
        """Load a version before the first rollout asks for it. Raises SourceFault or OurFault if it can't be had."""
        await self._fetch_span(VersionSpan(version, manifest_digest, 0, 1))
        await self._guard.warm_up(manifest_digest, self._folders[manifest_digest])

    async def judge(self, pending: Sequence[PendingRollout]) -> dict[str, Verdict]:
        """A verdict for each rollout id."""
        found: dict[str, Verdict] = {}
        audited: list[PendingRollout] = []
        for item in pending:
            try:
                screened = run_checks(self._examined_by.claim(item), None, self._examined_by.thresholds(item))
            except RollswarmError as error:
                screened = inconclusive(error)
            if screened.outcome is Outcome.ACCEPTED and self.is_audited(item):
                audited.append(item)
            else:
                found[item.rollout_id] = screened
        found |= await self._audit(audited)
        return await self._with_rewards(pending, found)

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
        found |= await self._guard.examine(ready, self._folders_of(ready))
        for doubtful in _by_worker(item for item in ready if found[item.rollout_id].reason in STATISTICAL):
            found |= await self._second_look(doubtful)
        return found

    async def _second_look(self, doubtful: Sequence[PendingRollout]) -> dict[str, Verdict]:
        """A statistical failure counts as evidence only if exact arithmetic (float32; vLLM: another batch) fails it too.

        A cheat's failures are many and alike: where the first few of one worker stand, the others stand unseen.
        """
        folders = self._folders_of(doubtful)
        found = await self._guard.examine(doubtful[:_SECOND_LOOKS], folders, exact=True)
        rest = doubtful[_SECOND_LOOKS:]
        if rest and any(verdict.outcome is not Outcome.REJECTED for verdict in found.values()):
            found |= await self._guard.examine(rest, folders, exact=True)
        return found

    def _folders_of(self, items: Sequence[PendingRollout]) -> dict[str, Path]:
        digests = {span.manifest_digest for item in items for span in item.rollout.spans}
        return {digest: self._folders[digest] for digest in digests}

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
        text = self._decode(item.rollout.model_token_ids)
        return await self._scorer.score(kind, section.params, task, text)


def examiner_settings(run_file: RunFile, device: str, turns: Mapping[str, Turns]) -> ExaminerSettings:
    """What a run's rollouts are measured with and held to. Raises UserError if thresholds or the model can't be read."""
    settings = run_file.verification
    vocab_size, hidden_size = model_shape(run_file.model.path)
    return ExaminerSettings(
        temperature=run_file.sampling.temperature,
        eos_token_ids=run_file.sampling.eos_token_ids,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        classes=classes_of(settings),
        dtype=settings.dtype,
        resident_versions=settings.resident_versions,
        threads=settings.threads,
        device=device,
        engine=settings.engine,
        max_model_len=run_file.server.max_prompt_tokens + run_file.max_tokens,
        kv_cache_gib=settings.kv_cache_gib,
        tensor_parallel=settings.tensor_parallel,
        turns=turns,
    )


def guard_limits(settings: VerificationSection) -> GuardLimits:
    """The limits that a run sets to one examination."""
    memory = None if settings.memory_gib is None else int(settings.memory_gib * (1 << 30))
    return GuardLimits(settings.time_limit_s, memory)


def _by_worker(items: Iterable[PendingRollout]) -> list[list[PendingRollout]]:
    workers: dict[str, list[PendingRollout]] = {}
    for item in items:
        workers.setdefault(item.worker_id, []).append(item)
    return list(workers.values())

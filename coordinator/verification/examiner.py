"""Prefills rollouts whose weights are on disk, and checks them: all of the verifying that computes on what strangers sent.

It runs in a child of the verifier (`guard`), so everything that goes in and comes out is a plain value.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coordinator.store.rollouts import PendingRollout
from coordinator.verification.checks import run_checks
from coordinator.verification.examination import VLLM, ExaminerSettings, inconclusive
from coordinator.verification.prefill import PrefillResult
from coordinator.verification.resident import PrefillRequest, Prefills, ResidentModels, prefill_rollouts
from protocol.errors import OurFault, RollswarmError
from protocol.rollout import Verdict

log = logging.getLogger(__name__)


class Examiner:
    """One verdict for each rollout. Nothing is loaded before it is needed."""

    def __init__(self, settings: ExaminerSettings) -> None:
        self._settings = settings
        self._folders: dict[str, Path] = {}
        torch.set_num_threads(settings.threads)
        if settings.engine == VLLM:
            # One engine fills its accelerators: the second look is its own again, at each rollout alone.
            self._models = self._exact_models = ResidentModels(self._folder_of, max_resident=1, build=self._vllm)
        else:
            self._models = self._resident(getattr(torch, settings.dtype), settings.resident_versions)
            self._exact_models = self._resident(torch.float32, 1)

    def _folder_of(self, digest: str) -> Path:
        return self._folders[digest]

    def _resident(self, dtype: torch.dtype, versions: int) -> ResidentModels:
        return ResidentModels(self._folder_of, max_resident=versions, dtype=dtype, device=self._settings.device)

    def _vllm(self, folder: Path) -> Prefills:
        from coordinator.verification.vllm_prefill import VllmPrefill, VllmPrefillConfig

        settings = self._settings
        config = VllmPrefillConfig(
            settings.max_model_len,
            dtype=settings.dtype,
            kv_cache_gib=settings.kv_cache_gib,
            tensor_parallel=settings.tensor_parallel,
        )
        return VllmPrefill(folder, config)

    def warm_up(self, digest: str, folder: Path) -> None:
        """Load a version. Raises a RollswarmError if it can't be."""
        self._folders[digest] = folder
        self._models.activate(digest)

    def examine(
        self, items: Sequence[PendingRollout], folders: Mapping[str, Path], *, exact: bool = False
    ) -> dict[str, Verdict]:
        """Verdicts by id. `folders`: of every version that a span names, by digest. `exact`: a second look.

        If the batch fails, each is tried alone, so that none takes others down with it; who fails alone is INCONCLUSIVE.
        """
        self._folders.update(folders)
        if exact and len(items) > 1 and self._exact_models is self._models:
            return {key: each for item in items for key, each in self.examine([item], folders, exact=True).items()}
        models = self._exact_models if exact else self._models
        try:
            measured = self._prefill(items, models)
        except OurFault as error:
            if len(items) == 1:
                return {items[0].rollout_id: inconclusive(error)}
            log.warning("a batch failed (%s); trying its rollouts one by one", error, extra={"action": "prefill_error"})
            alone: dict[str, Verdict] = {}
            for item in items:
                alone |= self.examine([item], folders, exact=exact)
            return alone
        return {item.rollout_id: self._check(item, measured[item.rollout_id]) for item in items}

    def _prefill(self, items: Sequence[PendingRollout], models: ResidentModels) -> Mapping[Any, PrefillResult]:
        requests = [
            PrefillRequest(
                item.rollout_id,
                item.prompt_token_ids,
                item.rollout.token_ids,
                item.seed,
                self._settings.temperature,
                item.rollout.spans,
            )
            for item in items
        ]
        return prefill_rollouts(requests, models)

    def _check(self, item: PendingRollout, measured: PrefillResult) -> Verdict:
        try:
            return run_checks(self._settings.claim(item), measured, self._settings.thresholds(item))
        except RollswarmError as error:
            return inconclusive(error)

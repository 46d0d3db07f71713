"""`coordinator calibrate`: honest rollouts of the run's own model by vLLM in many settings, verified in many, fitted."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coordinator.calibration import collect, report
from coordinator.calibration.collect import Asked
from coordinator.calibration.fit import Fit, fit, split
from coordinator.calibration.measures import Measure
from coordinator.calibration.pooled import fit_pooled, mean_in_trial
from coordinator.calibration.tails import strike_probability
from coordinator.config import RunFile
from coordinator.verification.weights import build_module
from environments.registry import make_environment
from protocol.declaration import BF16, PRECISIONS, hardware_class
from protocol.errors import UserError
from protocol.tokenizer import RunTokenizer
from trainer.publish import snapshot, write_version
from worker.calibration import EngineSetting, engine_settings, honest_generations
from worker.engine import Generation, GenerationRequest
from worker.hardware import devices, native_dtype
from worker.vllm_engine.engine import installed_build


@dataclass(frozen=True, slots=True)
class Bound:
    """An honest worker of `rollouts_per_month` is banned falsely within a month with probability `false_bans`."""

    false_bans: float = 1e-3
    rollouts_per_month: float = 100_000.0


@dataclass(frozen=True, slots=True)
class Options:
    """`rollouts`: of each engine setting. `kv_cache_gib`: None for what suits this machine. `compiled`: try that as well.
    `precision`: the class that the engines compute in."""

    rollouts: int = 256
    kv_cache_gib: float | None = None
    compiled: bool = False
    device: str = "cpu"
    precision: str = BF16


def calibrate(run_file: RunFile, out: Path, bound: Bound, options: Options, progress: Callable[[str], None]) -> Fit:
    """Measure, fit, and write thresholds.toml, evidence.json and tails.png into `out`.

    Raises UserError if there is too little to fit, OurFault if the engine fails.
    """
    if options.precision not in PRECISIONS:
        raise UserError(f"--precision {options.precision}: known are {', '.join(PRECISIONS)}")
    torch.set_num_threads(max(run_file.verification.threads, torch.get_num_threads()))
    probability = strike_probability(
        false_bans=bound.false_bans,
        rollouts=bound.rollouts_per_month,
        max_strikes=run_file.verification.max_strikes,
    )
    with tempfile.TemporaryDirectory(prefix="calibrate-") as scratch:
        folder = published_form(run_file.model.path, Path(scratch) / "model")
        found = list(_measure_all(run_file, folder, options, progress))
    keys, measures = [key for key, _ in found], [measure for _, measure in found]
    mine, others = split(keys)
    fitted = fit(
        [measures[index] for index in mine],
        [measures[index] for index in others],
        probability=probability,
        source=_source(run_file, measures, bound, options.precision),
    )
    pooled = fit_pooled(
        [measures[index] for index in mine],
        false_bans=bound.false_bans,
        rollouts_per_month=bound.rollouts_per_month,
        source=fitted.thresholds.source,
    )
    covered = (hardware_class(devices(), installed_build()),)
    fitted = replace(fitted, thresholds=replace(fitted.thresholds, pooled=pooled, hardware=covered))
    facts: dict[str, Any] = {
        "precision": options.precision,
        "hardware": list(covered),
        "pooled_mean_in_trial": mean_in_trial(pooled, [measures[index] for index in others]),
        "false_bans_per_worker_month": bound.false_bans,
        "rollouts_per_worker_month": bound.rollouts_per_month,
        "max_strikes": run_file.verification.max_strikes,
        "false_rejects_per_rollout": probability,
    }
    report.write(out, fitted, report.evidence(fitted, measures, facts))
    return fitted


def published_form(model: Path, target: Path) -> Path:
    """A copy of a model folder as a policy version has it: bf16, one file, the LM head written out."""
    write_version(snapshot(build_module(model, torch.bfloat16, "cpu")), model, target)
    return target


def _measure_all(
    run_file: RunFile, folder: Path, options: Options, progress: Callable[[str], None]
) -> Iterator[tuple[str, Measure]]:
    verifiers = collect.verifier_settings(getattr(torch, run_file.verification.dtype), run_file.verification.engine)
    prompts = _prompts(run_file)
    settings = engine_settings(native_dtype(), compiled=options.compiled, precision=options.precision)
    for number, setting in enumerate(settings, start=1):
        asked = collect.ask(
            prompts,
            setting=setting.name,
            count=max(1, int(options.rollouts * setting.share)),
            group_size=run_file.scheduling.group_size,
            temperature=run_file.sampling.temperature,
            eos_token_ids=run_file.sampling.eos_token_ids,
        )
        progress(f"{number} of {len(settings)}: engine {setting.name}: generating {len(asked)} rollouts")
        written = asyncio.run(_generate(folder, setting, asked, options.kv_cache_gib))
        yield from collect.compare(
            folder,
            asked,
            written,
            engine=setting.name,
            verifiers=verifiers,
            device=options.device,
            progress=progress,
        )


async def _generate(
    folder: Path, setting: EngineSetting, asked: Sequence[Asked], kv_cache_gib: float | None
) -> list[Generation]:
    requests = [GenerationRequest(each.key, each.prompt_token_ids, each.sampling, each.seed) for each in asked]
    return await honest_generations(folder, setting, requests, kv_cache_gib=kv_cache_gib)


def _prompts(run_file: RunFile) -> Iterator[tuple[tuple[int, ...], int]]:
    """(prompt tokens, max_tokens) of the run's tasks, one environment after the other."""
    encode = RunTokenizer(run_file.model.path).encode
    sections = [
        (section, make_environment(section.kind or section.name, section.params)) for section in run_file.environments
    ]
    for index in itertools.count():
        for section, environment in sections:
            yield tuple(encode(environment.task(index).prompt)), section.max_tokens


def _source(run_file: RunFile, measures: Sequence[Measure], bound: Bound, precision: str) -> str:
    engines = {item.engine for item in measures}
    verifiers = {item.verifier for item in measures}
    return (
        f"{run_file.model.name} in {precision}: {len(measures)} comparisons of honest rollouts, "
        f"{sum(item.tokens for item in measures)} tokens at temperature {run_file.sampling.temperature:g}; engines: "
        f"{', '.join(sorted(engines))}; verifiers: {', '.join(sorted(verifiers))}. At most {bound.false_bans:g} false bans "
        f"per worker and month of {bound.rollouts_per_month:g} rollouts."
    )

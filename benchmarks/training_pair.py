"""Two consecutive policy versions of a real training: SmolLM2-135M-Instruct on sums, by the trainer's own parts.

`make_pair` samples answers from the current policy, scores them by the arithmetic environment, takes real AdamW steps
on float32 masters with the trainer's stepper, and writes the versions before and after the last step as the trainer's
publisher does. Both are cached: a rerun reads them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo.models import SMOLLM2_EOS_TOKEN_IDS
from environments.arithmetic import Arithmetic
from protocol.errors import UserError
from protocol.rollout import Rollout, RolloutGroup, Segment, StopReason, VerifiedRollout, VersionSpan
from trainer.config import TrainerConfig
from trainer.crew import load_model
from trainer.losses import make_loss
from trainer.optim import Optimizer, OptimizerSettings
from trainer.publish import snapshot, write_version
from trainer.step import Stepper

_TEMPLATE = "What is {a} + {b}?\n{a} + {b} ="
_ANY_DIGEST = "sha256:" + "0" * 64


@dataclass(frozen=True, slots=True)
class Recipe:
    """`steps` optimizer steps; the pair is the versions before and after the last. Sizes of each step's batch."""

    learning_rate: float
    steps: int = 5
    groups: int = 8
    group_size: int = 16
    max_tokens: int = 6
    seed: int = 0


def make_pair(model_folder: Path, cache: Path, recipe: Recipe) -> tuple[Path, Path]:
    """Folders of the version before the last step and of the one after it. Takes minutes if they aren't cached."""
    name = f"lr{recipe.learning_rate:g}-steps{recipe.steps}-{recipe.groups}x{recipe.group_size}-seed{recipe.seed}"
    target = cache / name
    if not target.is_dir():
        if not model_folder.is_dir():
            raise UserError(f"{model_folder} is not here: `make demo` makes it")
        partial = cache / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        _train(model_folder, partial, recipe)
        partial.rename(target)
    return target / "before", target / "after"


def _train(model_folder: Path, target: Path, recipe: Recipe) -> None:
    from transformers import AutoTokenizer

    torch.manual_seed(recipe.seed)
    model = load_model(model_folder, "float32", "cpu")
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    optimizer = Optimizer(model.parameters(), OptimizerSettings(lr=recipe.learning_rate))
    stepper = Stepper(model, make_loss("ipo"), optimizer, TrainerConfig(), temperature=1.0)
    environment = Arithmetic(seed=recipe.seed, template=_TEMPLATE)
    applied = task = 0
    while applied < recipe.steps:
        groups = [_group(model, tokenizer, environment, task + i, applied, recipe) for i in range(recipe.groups)]
        task += recipe.groups
        before = snapshot(model) if applied == recipe.steps - 1 else None
        report = stepper.step(groups, applied).report
        if report is None or not report.applied:
            continue  # no group had an advantage: sample others
        applied += 1
        print(f"lr {recipe.learning_rate:g}: step {applied}, gradient norm {report.grad_norm:.3f}", flush=True)
        if before is not None:
            write_version(before, model_folder, target / "before")
    write_version(snapshot(model), model_folder, target / "after")


def _group(
    model: Any, tokenizer: Any, environment: Arithmetic, index: int, version: int, recipe: Recipe
) -> RolloutGroup:
    """Answers of the current policy to one sum, at temperature 1, with their rewards."""
    task = environment.task(index)
    prompt = tokenizer(task.prompt, return_tensors="pt")
    model.eval()
    with torch.no_grad():
        output = model.generate(
            **prompt,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=recipe.group_size,
            max_new_tokens=recipe.max_tokens,
            eos_token_id=list(SMOLLM2_EOS_TOKEN_IDS),
            pad_token_id=tokenizer.eos_token_id,
        )
    prompt_ids = tuple(prompt["input_ids"][0].tolist())
    rollouts = tuple(
        _rollout(f"{index}-{i}", row.tolist()[len(prompt_ids) :], tokenizer, environment, task, version)
        for i, row in enumerate(output)
    )
    return RolloutGroup(str(index), f"sums/{index}", "arithmetic", prompt_ids, len(rollouts), rollouts)


def _rollout(
    name: str, tokens: list[int], tokenizer: Any, environment: Arithmetic, task: Any, version: int
) -> VerifiedRollout:
    """Unaudited, so that the step-start policy's log-probs are the old ones: the answers are that policy's own."""
    ends = [place for place, token in enumerate(tokens) if token in SMOLLM2_EOS_TOKEN_IDS]
    token_ids = tuple(tokens[: ends[0] + 1] if ends else tokens)
    rollout = Rollout(
        run_id="",
        lease_id="",
        sample_id=name,
        segments=(Segment.by_model(token_ids),),
        logprobs=(0.0,) * len(token_ids),
        spans=(VersionSpan(version, _ANY_DIGEST, 0, len(token_ids)),),
        proofs=(),
        stop_reason=StopReason.EOS if ends else StopReason.LENGTH,
    )
    reward = environment.score(task, tokenizer.decode(token_ids, skip_special_tokens=True))
    return VerifiedRollout(name, name, "worker", rollout, reward, (), audited=False)

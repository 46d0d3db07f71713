"""`trainer evaluate`: avg@n and pass@k of a policy on held-out tasks, resumable, in one JSON file.

    tasks ─ chunks of _CHUNK ─▶ completions (a Sampler) ─▶ scores (unprivileged scorer) ─▶ progress file ─▶ result

A chunk's draws depend on the seed and the chunk alone, and its scores are appended to `<out>.partial` before the next
begins: an evaluation that was interrupted goes on where it was and comes out as if it had not been (with vLLM: but for
near ties, which batching decides). The partial file names
what it is of, and one of something else is refused. Held-out tasks are never trained on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from environments.base import Environment
from environments.registry import make_environment
from environments.sandbox import Scorer
from environments.turns import turns_of
from protocol.disk import sync
from protocol.errors import UserError
from protocol.rollout import Task
from protocol.runfile import read_run_file
from protocol.tokenizer import RunTokenizer
from protocol.turns import Turns
from trainer.sampling import Sampler, TransformersSampler
from trainer.scoring import average_at_n, interval, pass_at_k
from trainer.turns import complete_turns

_CHUNK = 16  # tasks
BUILTIN = "builtin"


@dataclass(frozen=True, slots=True)
class Plan:
    """`tasks`: at most so many of each environment. `samples`: n per task; pass@k for every k in `ks` up to n.

    `engine`: who writes; the scores depend on it, since numerics do.
    """

    model: Path
    tasks: int = 200
    samples: int = 4
    ks: tuple[int, ...] = (1, 4)
    temperature: float = 1.0
    seed: int = 0
    engine: str = BUILTIN

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.samples < 1:
            raise UserError(f"--tasks and --samples must be at least 1, got {self.tasks} and {self.samples}")
        if not self.ks or not all(1 <= k <= self.samples for k in self.ks):
            raise UserError(f"every k must be between 1 and --samples = {self.samples}, got {list(self.ks)}")
        if not 0.0 <= self.temperature < math.inf:
            raise UserError(f"--temperature must be at least 0 and finite, got {self.temperature}")
        if self.temperature == 0.0 and self.engine != BUILTIN:
            raise UserError(
                f"--engine {self.engine} samples, as workers do: take a --temperature above 0, or --engine {BUILTIN}"
            )


@dataclass(frozen=True, slots=True)
class Section:
    """An environment as the run file has it."""

    name: str
    kind: str
    params: dict[str, Any]
    environment: Environment
    max_tokens: int
    turns: Turns | None = None


def sections_of(path: Path) -> tuple[list[Section], tuple[int, ...]]:
    """Environments and EOS ids of a run file. Raises UserError for one that has none."""
    values = read_run_file(path)
    try:
        eos = tuple(int(token) for token in values["sampling"]["eos_token_ids"])
        found = [_section(entry) for entry in values["environments"]]
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: [sampling] eos_token_ids and [[environments]] (name, max_tokens) are needed ({error!r})"
        ) from None
    names = [section.name for section in found]
    if not names or len(set(names)) < len(names) or any(section.max_tokens < 1 for section in found):
        raise UserError(f"{path}: [[environments]] must be there, with names of their own and max_tokens of at least 1")
    return found, eos


def temperature_of(path: Path) -> float:
    """What a run file samples at, and so what its policies are evaluated at. Raises UserError if it is no number."""
    sampling = read_run_file(path).get("sampling", {})
    try:
        return float(sampling.get("temperature", 1.0))
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"{path}: [sampling] temperature must be a number") from None


def _check_place(out: Path) -> None:
    """Raise UserError, before hours of work, if no result can be written there."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror} ({out.parent}); choose another file") from None
    if out.is_dir():
        raise UserError(f"--out {out} is a folder: name a file in it")


def _section(entry: dict[str, Any]) -> Section:
    name = str(entry["name"])
    kind, params = str(entry.get("kind", name)), dict(entry.get("params", {}))
    environment = make_environment(kind, params)
    return Section(name, kind, params, environment, int(entry["max_tokens"]))


class Progress:
    """Scores per environment and task, on the disk chunk by chunk. Raises UserError for a file of another evaluation, or a
    damaged one."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self.scores: dict[str, dict[int, list[float]]] = {}
        if not path.exists() or not self._read(fingerprint):
            self._append({"fingerprint": fingerprint})

    def add(self, environment: str, scores: dict[int, list[float]]) -> None:
        """Make a chunk durable."""
        self._append({"environment": environment, "scores": scores})
        self.scores.setdefault(environment, {}).update(scores)

    def done(self) -> None:
        """The result is written: forget the way there."""
        self._path.unlink()

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, fingerprint: str) -> bool:
        """Take in what is there; whether there is a whole line at all."""
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a line that was being written when it was interrupted
            os.truncate(self._path, whole)
        try:
            lines = [json.loads(line) for line in data[:whole].decode().splitlines()]
            if lines and lines[0]["fingerprint"] != fingerprint:
                raise UserError(f"{self._path} is of another evaluation: delete it, or choose another --out")
            for line in lines[1:]:
                chunk = {int(index): list(scores) for index, scores in line["scores"].items()}
                self.scores.setdefault(line["environment"], {}).update(chunk)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self._path} is damaged ({error!r}): delete it to begin anew") from None
        return bool(lines)


def fingerprint(plan: Plan, sections: Sequence[Section], eos: Sequence[int]) -> str:
    """A digest of everything that the scores depend on, the weights included."""
    digest = hashlib.sha256()
    for file in sorted((*plan.model.glob("*.safetensors"), *plan.model.glob("*.json"))):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    described = {
        **asdict(plan),
        "model": "",
        "ks": [],
        "eos": list(eos),
        "environments": [_described(each) for each in sections],
    }
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _described(section: Section) -> list[Any]:
    rules = [] if section.turns is None else [section.turns.rules.digest]
    return [section.name, section.kind, section.params, section.max_tokens, *rules]


def summary(scores: Sequence[Sequence[float]], ks: Sequence[int]) -> dict[str, Any]:
    """avg@n and pass@k with 95 % intervals over tasks."""
    n = min(len(samples) for samples in scores)
    averages = interval([average_at_n([samples]) for samples in scores])
    result: dict[str, Any] = {"tasks": len(scores), "samples": n, f"avg@{n}": asdict(averages)}
    for k in ks:
        result[f"pass@{k}"] = asdict(interval([pass_at_k([samples], k) for samples in scores]))
    return result


async def run_evaluation(config: Path, plan: Plan, out: Path, sampler: Sampler | None = None) -> dict[str, Any]:
    """Evaluate and write `out`; what was written. Raises UserError for what can't be evaluated.

    `sampler`: the one that `plan.engine` names, if it is not the built-in one.
    """
    sections, eos = sections_of(config)
    if not (plan.model / "tokenizer.json").is_file():
        raise UserError(f"{plan.model} holds no tokenizer.json: --model must be a Hugging Face folder")
    _check_place(out)
    tokenizer = RunTokenizer(plan.model)
    sections = [_with_turns(section, tokenizer, eos) for section in sections]
    progress = Progress(out.with_name(out.name + ".partial"), fingerprint(plan, sections, eos))
    sampler = sampler or TransformersSampler()
    scorer = Scorer(preload=[(section.kind, section.params) for section in sections])
    try:
        await sampler.start(plan.model, _longest(sections, plan, tokenizer))
        for section in sections:
            await _section_scores(section, plan, eos, sampler, tokenizer, scorer, progress)
    finally:
        await scorer.close()
        await sampler.close()
    result = {
        "model": str(plan.model),
        "engine": plan.engine,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "environments": {
            section.name: summary([scores for _, scores in sorted(progress.scores[section.name].items())], plan.ks)
            | {"scores": progress.scores[section.name]}
            for section in sections
        },
    }
    _write(out, result)
    progress.done()
    return result


async def _section_scores(
    section: Section,
    plan: Plan,
    eos: Sequence[int],
    sampler: Sampler,
    tokenizer: RunTokenizer,
    scorer: Scorer,
    progress: Progress,
) -> None:
    count = _count(section, plan)
    for start in range(0, count, _CHUNK):
        chosen = range(start, min(start + _CHUNK, count))
        if all(index in progress.scores.get(section.name, {}) for index in chosen):
            continue
        tasks = [section.environment.eval_task(index) for index in chosen]
        completions = await complete_turns(
            sampler,
            [_prompt(task, tokenizer) for task in tasks],
            section.turns,
            temperature=plan.temperature,
            max_tokens=section.max_tokens,
            eos_token_ids=eos,
            seed=plan.seed + start,
            samples=plan.samples,
        )
        texts = [[tokenizer.decode(tokens) for tokens in each] for each in completions]
        scored = [await _score(section, task, each, scorer) for task, each in zip(tasks, texts, strict=True)]
        progress.add(section.name, dict(zip(chosen, scored, strict=True)))


def _count(section: Section, plan: Plan) -> int:
    return min(plan.tasks, section.environment.eval_size)


def _prompt(task: Task, tokenizer: RunTokenizer) -> list[int]:
    return tokenizer.encode(task.prompt)


def _with_turns(section: Section, tokenizer: RunTokenizer, eos: Sequence[int]) -> Section:
    return replace(section, turns=turns_of(section.environment, tokenizer, eos, section.max_tokens))


def _longest(sections: Sequence[Section], plan: Plan, tokenizer: RunTokenizer) -> int:
    """Tokens of the longest prompt with a completion as long as its environment lets it be."""
    return max(
        len(_prompt(section.environment.eval_task(index), tokenizer)) + section.max_tokens
        for section in sections
        for index in range(_count(section, plan))
    )


async def _score(section: Section, task: Task, texts: Sequence[str], scorer: Scorer) -> list[float]:
    return [await scorer.score(section.kind, section.params, task, text) for text in texts]


def _write(out: Path, result: dict[str, Any]) -> None:
    """Whole or not at all."""
    scratch = out.with_name(out.name + ".new")
    scratch.write_text(json.dumps(result, indent=1) + "\n")
    sync(scratch)
    scratch.rename(out)
    sync(out.parent)

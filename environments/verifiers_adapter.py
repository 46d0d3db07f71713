"""Single-turn tasksets of the `verifiers` library (0.4, its v1 API): its tasks, and its rewards where they are full."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from environments.base import check_index, digest_order, epoch_choice, eval_index, held_out
from protocol.errors import EnvironmentFault, UserError
from protocol.rollout import Task

_FULL = 1.0 - 1e-9


@dataclass(frozen=True)
class Verifiers:
    """The installed taskset `taskset` with its own `options`; `limit` bounds how many of its tasks are taken.

    A completion is right if the taskset's rewards, weighted as it says, sum to 1 or more: partial credit counts as 0.
    Tasks that need tools, an image, judges or a runtime are refused: what a verifier can't repeat can't be paid for.
    """

    name: ClassVar[str] = "verifiers"

    taskset: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    template: str = "{prompt}"
    limit: int = 10_000
    seed: int = 0
    eval_one_in: int = 10

    def __post_init__(self) -> None:
        if not self.taskset or self.limit < 2 or self.eval_one_in < 2:
            raise UserError("verifiers: give taskset; limit and eval_one_in must be at least 2")

    @cached_property
    def _tasks(self) -> list[Any]:
        """The library's tasks, each prompt once, in its own order."""
        try:
            from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
        except ImportError as error:
            raise UserError(f"verifiers is not installed ({error}): pip install 'verifiers>=0.4,<0.5'") from error
        try:
            config = taskset_config_type(self.taskset).model_validate({**self.options, "id": self.taskset})
            found = list(itertools.islice(load_taskset(config), self.limit))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"verifiers: taskset {self.taskset!r} can't be loaded: {error}") from error
        for task in found:
            _check(task, self.taskset)
        return list({task.data.prompt_text: task for task in found}.values())

    @cached_property
    def _sides(self) -> tuple[list[int], list[int]]:
        """Positions in `_tasks` to train on, and held-out ones."""
        prompts = [task.data.prompt_text for task in self._tasks]
        order = sorted(range(len(prompts)), key=lambda place: digest_order(prompts[place]))
        training = [place for place in order if not held_out(prompts[place], self.eval_one_in)]
        kept = [place for place in order if held_out(prompts[place], self.eval_one_in)]
        if not training or not kept:
            raise UserError(f"verifiers: {len(prompts)} tasks are too few for eval_one_in = {self.eval_one_in}")
        return training, kept

    @property
    def eval_size(self) -> int:
        return len(self._sides[1])

    def task(self, index: int) -> Task:
        training = self._sides[0]
        return self._task(index, training[epoch_choice(self.seed, check_index(index), len(training))])

    def eval_task(self, index: int) -> Task:
        return self._task(eval_index(index), self._sides[1][check_index(index, self.eval_size)])

    def score(self, task: Task, completion: str) -> float:
        try:
            reward = asyncio.run(_reward(self._tasks[int(task.reference)], completion))
        except Exception as error:  # the taskset's own code, whatever it raises
            raise EnvironmentFault(f"verifiers {self.taskset}: {type(error).__name__}: {error}") from error
        return float(reward >= _FULL)

    def well_formed(self, completion: str) -> bool:
        return bool(completion.strip())

    def _task(self, index: int, place: int) -> Task:
        data = self._tasks[place].data
        prompt = "\n\n".join(text for text in (data.system_prompt, data.prompt_text) if text)
        return Task(self.name, index, self.template.replace("{prompt}", prompt), str(place))


def _check(task: Any, taskset: str) -> None:
    """Raises UserError for a task that one completion does not settle."""
    rewards = task.hooks("reward")
    needs = [
        what
        for what, there in (
            ("tools", bool(type(task).toolsets(task.config))),
            ("an image", task.data.image is not None),
            ("a judge", bool(task.plugged_judges())),
            ("a runtime", any(_needs_runtime(reward) for reward in rewards)),
            ("a prompt, which it lacks,", not task.data.prompt_text),
            ("a reward, which it lacks,", not rewards),
        )
        if there
    ]
    if needs:
        raise UserError(
            f"verifiers: taskset {taskset!r} needs {needs[0]} and so can't be verified: see docs/environments.md"
        )


def _needs_runtime(reward: Any) -> bool:
    parameter = inspect.signature(reward).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


async def _reward(task: Any, completion: str) -> float:
    """The weighted sum of a task's rewards for one answer to its prompt."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage

    asked = MessageNode(message=UserMessage(content=task.data.prompt_text))
    answered = MessageNode(parent=0, message=AssistantMessage(content=completion), sampled=True)
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data),
        agent=AgentInfo(config=AgentConfig()),
        nodes=[asked, answered],
        is_completed=True,
        ok=True,
    )
    await task.score(trace)
    return float(trace.reward)

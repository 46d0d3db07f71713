"""Holds the adapter to the real `verifiers` library, in an environment of its own: what it needs may not fit beside vLLM.

Run by tests/integration/test_verifiers_adapter.py in a fresh virtual environment; exit status 0 if everything holds.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable

import verifiers.v1 as vf

from environments.registry import make_environment
from protocol.errors import EnvironmentFault, UserError


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        said = trace.nodes[-1].message.content or ""
        if said == "boom":
            raise RuntimeError("a reward of theirs that raises")
        return 1.0 if said.strip() == str(self.data.answer) else 0.5


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        for number in range(60):
            yield SumTask(SumData(prompt=f"What is {number} + 1?", answer=number + 1), self.config.task)


def main() -> None:
    module = types.ModuleType("sum_taskset")
    module.SumTaskset, module.__all__ = SumTaskset, ["SumTaskset"]
    sys.modules["sum_taskset"] = module
    module.__spec__ = types.SimpleNamespace(name="sum_taskset", submodule_search_locations=None)  # type: ignore[assignment]

    environment = make_environment("verifiers", {"taskset": "sum_taskset", "eval_one_in": 5})
    task = environment.task(0)
    number = int(task.prompt.removeprefix("What is ").removesuffix(" + 1?"))
    assert environment.score(task, f" {number + 1}") == 1.0
    assert environment.score(task, "7777") == 0.0, "half a reward is none"
    held = {environment.eval_task(place).prompt for place in range(environment.eval_size)}
    assert held and held.isdisjoint(environment.task(place).prompt for place in range(100))
    again = make_environment("verifiers", {"taskset": "sum_taskset", "eval_one_in": 5})
    assert [again.task(place) for place in range(20)] == [environment.task(place) for place in range(20)]
    try:
        environment.score(task, "boom")
    except EnvironmentFault as error:
        assert "raises" in str(error) or "TaskError" in str(error)
    else:
        raise AssertionError("a reward that raises is the environment's fault")
    try:
        make_environment("verifiers", {"taskset": "no_such_taskset"}).task(0)
    except UserError as error:
        assert "no_such_taskset" in str(error)
    else:
        raise AssertionError("an unknown taskset is the user's mistake")
    print("holds")


if __name__ == "__main__":
    main()

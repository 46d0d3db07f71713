"""Makes groups of samples: the environment's next tasks, in an order that is the coordinator's alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import dispatch
from coordinator.store import events, groups
from coordinator.store.groups import LeasableSample, NewGroup
from protocol.errors import EnvironmentFault, OurFault
from protocol.rollout import Task

_BAD_TASKS_MAX = 32


@dataclass(frozen=True, slots=True)
class EnvironmentShare:
    """One environment of the run's mixture. `make_task(index)` and `max_tokens` come from the environment."""

    name: str
    weight: float
    max_tokens: int
    make_task: Callable[[int], Task]


class GroupMaker:
    """Knows the run's environments, and remembers how far their tasks were dispatched, so that only news is read."""

    def __init__(
        self,
        *,
        secret: bytes,
        environments: Sequence[EnvironmentShare],
        tokenize: Callable[[str], Sequence[int]],
        max_prompt_tokens: int,
    ) -> None:
        self._secret = secret
        self._environments = {share.name: share for share in environments}
        self._weights = {name: share.weight for name, share in self._environments.items()}
        self._tokenize = tokenize
        self._max_prompt_tokens = max_prompt_tokens
        self._ordinal = 0
        self._dispatched: dict[str, int] = {}  # of groups before that ordinal

    async def make(
        self, connection: AsyncConnection, count: int, at: float, *, size: int, deadline: float
    ) -> list[LeasableSample]:
        """Store the next groups, of `size` samples each; their samples. A task that can't be made or asked is passed over,
        with an audit event.

        Raises OurFault if too many in a row are: then the environment is broken, and its operator must look.
        """
        ordinal, dispatched = await self._order(connection)
        new: list[NewGroup] = []
        bad = 0
        while len(new) < count:
            share = self._environments[dispatch.choose_environment(self._weights, dispatched)]
            index = dispatched.get(share.name, 0)
            group_id = f"g{ordinal}"
            try:
                task, prompt = self._make_task(share, index)
            except EnvironmentFault as fault:
                bad += 1
                if bad >= _BAD_TASKS_MAX:
                    raise OurFault(f"{bad} tasks in a row could not be made, the last because {fault}") from None
                await self._skip(connection, group_id, ordinal, share.name, index, at, str(fault))
            else:
                bad = 0
                seeds = tuple(dispatch.sample_seed(self._secret, f"{group_id}-{i}") for i in range(size))
                new.append(
                    NewGroup(
                        group_id=group_id,
                        ordinal=ordinal,
                        environment=share.name,
                        task_index=index,
                        prompt=task.prompt,
                        prompt_token_ids=prompt,
                        reference=task.reference,
                        max_tokens=share.max_tokens,
                        seeds=seeds,
                        deadline=deadline,
                    )
                )
            ordinal += 1
            dispatched[share.name] = index + 1
        return await groups.insert(connection, new, at)

    async def _order(self, connection: AsyncConnection) -> tuple[int, dict[str, int]]:
        """The next ordinal, and how many groups each environment has had.

        What is remembered is only what a transaction found when it began to make groups, minus its own: a transaction that
        is rolled back leaves nothing here that is not so.
        """
        ordinal = await groups.next_ordinal(connection)
        if ordinal < self._ordinal:
            self._ordinal, self._dispatched = 0, {}
        if ordinal == self._ordinal:
            return ordinal, dict(self._dispatched)
        news = await groups.count_by_environment(connection, self._ordinal)
        dispatched = {name: self._dispatched.get(name, 0) + news.get(name, 0) for name in {*self._dispatched, *news}}
        self._ordinal, self._dispatched = ordinal, dispatched
        return ordinal, dict(dispatched)

    async def _skip(
        self,
        connection: AsyncConnection,
        group_id: str,
        ordinal: int,
        environment: str,
        index: int,
        at: float,
        problem: str,
    ) -> None:
        await groups.insert_skipped(connection, group_id, ordinal, environment, index, at)
        await events.record(
            connection,
            at=at,
            actor="coordinator",
            action="bad_task",
            subject=f"{environment}/{index}",
            detail=problem,
        )

    def _make_task(self, share: EnvironmentShare, index: int) -> tuple[Task, tuple[int, ...]]:
        """A task and its prompt's tokens. Raises EnvironmentFault, whatever the environment raised, and for what no database
        holds: nobody could lease anything as long as that task is the next."""
        try:
            task = share.make_task(index)
            prompt = tuple(self._tokenize(task.prompt))
            json.dumps(task.reference, allow_nan=False)
        except Exception as error:
            raise EnvironmentFault(f"task {index} of {share.name} raised {type(error).__name__}: {error}") from error
        if events.storable(task.prompt) != task.prompt:
            raise EnvironmentFault(f"the prompt of task {index} of {share.name} holds what nobody could store")
        if not 0 < len(prompt) <= self._max_prompt_tokens:
            raise EnvironmentFault(
                f"the prompt of task {index} of {share.name} has {len(prompt)} tokens; server.max_prompt_tokens admits "
                f"1 to {self._max_prompt_tokens}"
            )
        return task, prompt

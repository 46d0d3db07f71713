"""What operators do, over the API: the bodies are made from `coordinator.actions.ACTIONS`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from coordinator import actions
from coordinator.dashboard.api import answers
from coordinator.dashboard.api.endpoint import PREFIX, Asked, Endpoint
from coordinator.store import database
from coordinator.store.database import Database


class Acts:
    """One endpoint for each action."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "POST",
                f"{PREFIX}/admin/{name}",
                action.text,
                answers.Done,
                self._doing(name),
                needs=action.needs,
                body=body_of(name, action),
            )
            for name, action in actions.ACTIONS.items()
        ]

    def _doing(self, name: str) -> Callable[[Asked], Awaitable[answers.Done]]:
        async def do(asked: Asked) -> answers.Done:
            assert asked.caller is not None
            arguments = actions.clean(name, asked.body.model_dump())
            return answers.Done(await perform(self._db, name, arguments, actor=asked.caller.operator.name))

        return do


async def perform(db: Database, action: str, arguments: dict[str, str], *, actor: str) -> str:
    """Do it in one transaction. Raises UserError."""
    async with db.write() as connection:
        at = await database.now(connection)
        return await actions.perform(connection, action, arguments, actor=actor, at=at)


def body_of(name: str, action: actions.Action) -> type[BaseModel]:
    """The body that an action takes."""
    fields: dict[str, Any] = {}
    for each, argument in action.arguments.items():
        if argument.number:
            kind: Any = Annotated[float, Field(allow_inf_nan=False, description=argument.label)]
        else:
            least = 1 if argument.required else 0
            kind = Annotated[str, Field(min_length=least, max_length=argument.most, description=argument.label)]
        standard: Any = float(argument.standard) if argument.standard else ""
        fields[each] = (kind, ... if argument.required and not argument.standard else standard)
    return create_model(f"{name.capitalize()}Body", __config__=ConfigDict(extra="forbid"), **fields)

"""What operators do to a run: each action in one transaction with its audit event, whoever asks (page, API, command).

pause    no more leases are granted; what is out may come in         operator
drain    no new groups are begun; those that are open are finished   operator
resume   go on after either                                          operator
ban      take nothing more from a worker, purge what is untrained    operator
pardon   lift a ban, clear strikes and evidence                      operator
admit    take a hardware class at its word                           operator
refuse   lease nothing to a hardware class                           operator
invite   let in so many new keys                                     operator
set      turn one of `coordinator.knobs.KNOBS`                       admin

`ACTIONS` declares them once: the page's forms and the API's bodies are made from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import joining, knobs, verdicts
from coordinator.hardware import HardwareState
from coordinator.operators import Role
from coordinator.store import events, evidence, hardware, invites, workers
from coordinator.store import knobs as knob_store
from coordinator.store import tables as t
from protocol.declaration import HARDWARE_LENGTH, printable
from protocol.errors import UserError
from protocol.ledger import Entry, EntryKind
from protocol.signing import KEY_ID_PREFIX

_DAY_S = 86_400
_USES_MAX = 10_000
_DAYS_MAX = 3650.0


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an action. `label`: for people. Text of at most `most` characters, or a number."""

    label: str
    required: bool = True
    most: int = 500
    number: bool = False
    standard: str = ""  # what a form offers


@dataclass(frozen=True, slots=True)
class Action:
    """`needs`: the least role that may. `text`: what it does, for people."""

    needs: Role
    text: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)


_WORKER = {
    "worker": Argument("Key id, or its first digits", most=80),
    "reason": Argument("Reason, for the worker and the audit log", required=False),
}
_HARDWARE = {"hardware": Argument("Hardware class, as it is listed", most=HARDWARE_LENGTH)}
ACTIONS: Mapping[str, Action] = {
    "pause": Action(Role.OPERATOR, "Grant no more leases"),
    "drain": Action(Role.OPERATOR, "Finish open groups, begin none"),
    "resume": Action(Role.OPERATOR, "Go on"),
    "ban": Action(Role.OPERATOR, "Take nothing more from a worker, and purge what is untrained", _WORKER),
    "pardon": Action(Role.OPERATOR, "Lift a ban, clear strikes and evidence", _WORKER),
    "admit": Action(Role.OPERATOR, "Take a hardware class at its word", _HARDWARE),
    "refuse": Action(Role.OPERATOR, "Lease nothing to a hardware class", _HARDWARE),
    "invite": Action(
        Role.OPERATOR,
        "Make an invitation: it is shown once, only its hash is stored",
        {
            "uses": Argument("New keys that it lets in", most=12, number=True, standard="1"),
            "days": Argument("Days that it is good", most=12, number=True, standard="7"),
            "note": Argument("For whom, for the audit log", required=False, most=120),
        },
    ),
    "set": Action(
        Role.ADMIN,
        "Change a setting while the run goes on",
        {"name": Argument("Setting", most=40), "value": Argument("Value", most=40, number=True)},
    ),
}


def clean(action: str, fields: Mapping[str, object]) -> dict[str, str]:
    """The arguments that an action takes, as text: bounded, and without what a database refuses."""
    declared = ACTIONS[action].arguments if action in ACTIONS else {}
    return {
        name: printable(str(fields[name]), argument.most)
        for name, argument in declared.items()
        if fields.get(name) not in (None, "")
    }


async def perform(
    connection: AsyncConnection, action: str, arguments: Mapping[str, str], *, actor: str, at: float
) -> str:
    """Do it, and say what was done. Raises UserError for an action or an argument that is none."""
    if action in ("pause", "drain", "resume"):
        return await set_granting(connection, action, actor=actor, at=at)
    if action in ("ban", "pardon"):
        worker = await find_worker(connection, arguments.get("worker", ""))
        reason = arguments.get("reason", "").strip()[:500] or f"by {actor}"
        await set_standing(connection, worker, reason, banned=action == "ban", actor=actor, at=at)
        return f"{worker} is {'banned' if action == 'ban' else 'pardoned'}"
    if action in ("admit", "refuse"):
        return await decide_hardware(connection, action, arguments.get("hardware", ""), actor=actor, at=at)
    if action == "invite":
        numbers = (_number("uses", arguments.get("uses", "1")), _number("days", arguments.get("days", "7")))
        token = await invite(connection, *numbers, arguments.get("note", ""), actor=actor, at=at)
        return f"the invitation is {token}"
    if action == "set":
        return await turn(connection, arguments.get("name", ""), arguments.get("value", ""), actor=actor, at=at)
    raise UserError(f"there is no action {action!r:.40}: {', '.join(ACTIONS)}")


async def decide_hardware(connection: AsyncConnection, action: str, name: str, *, actor: str, at: float) -> str:
    """Admit or refuse a hardware class, exactly as it is named, whether it was seen or not.

    From then on rollouts of an admitted class are judged like all others, and of a refused one nothing is leased out.
    """
    if name != printable(name, HARDWARE_LENGTH) or not name:
        raise UserError(f"no hardware class is named {name!r:.140}: `coordinator classes` lists them")
    state = HardwareState.ADMITTED if action == "admit" else HardwareState.REFUSED
    await hardware.decide(connection, name, state.value, at)
    await events.record(connection, at=at, actor=actor, action=action, subject=name, detail="hardware class")
    return f"{name} is {state}"


async def invite(connection: AsyncConnection, uses: float, days: float, note: str, *, actor: str, at: float) -> str:
    """An invitation for `uses` new keys within `days`; the token, which is stored nowhere."""
    if uses != int(uses) or not 1 <= uses <= _USES_MAX:
        raise UserError(f"an invitation is for 1 to {_USES_MAX} keys, got {uses:g}")
    if not 0 < days <= _DAYS_MAX:
        raise UserError(f"an invitation is good for more than 0 and at most {_DAYS_MAX:g} days, got {days:g}")
    token = joining.make_invite()
    await invites.add(
        connection,
        joining.hash_token(token),
        uses=int(uses),
        note=note,
        created_at=at,
        expires_at=at + days * _DAY_S,
    )
    detail = f"{int(uses)} uses within {days:g} days{': ' + note if note else ''}"
    await events.record(connection, at=at, actor=actor, action="invite", subject="run", detail=detail)
    return token


async def set_granting(connection: AsyncConnection, action: str, *, actor: str, at: float) -> str:
    """Pause, drain or resume."""
    await connection.execute(update(t.runs).values(paused=action == "pause"))
    await knob_store.write(connection, knobs.DRAINING, float(action == "drain"), at)
    await events.record(connection, at=at, actor=actor, action=action, subject="run", detail="")
    return {
        "pause": "paused: no leases are granted",
        "drain": "draining: open groups are finished, none is begun",
        "resume": "leases are granted again",
    }[action]


async def turn(connection: AsyncConnection, name: str, text: str, *, actor: str, at: float) -> str:
    """Turn a knob."""
    value = knobs.check(name, _number(name, text))
    before = (await knob_store.read(connection)).get(name)
    await knob_store.write(connection, name, value, at)
    was = "as in the run file" if before is None else f"{before:g}"
    await events.record(
        connection, at=at, actor=actor, action="set", subject=name, detail=f"{name} = {value:g} (was {was})"
    )
    return f"{name} is {value:g}"


async def find_worker(connection: AsyncConnection, worker: str) -> str:
    """The one worker whose key id begins with `worker`. Raises UserError if none or several do."""
    prefix = worker if worker.startswith(KEY_ID_PREFIX) else KEY_ID_PREFIX + worker
    if "\0" in prefix or not worker:
        raise UserError(f"{worker!r:.90} names no worker: give more digits of its key id")
    begins = t.workers.c.worker_id.startswith(prefix, autoescape=True)
    found = (await connection.execute(select(t.workers.c.worker_id).where(begins).limit(2))).scalars().all()
    if len(found) != 1:
        many = "no worker has" if not found else "several workers have"
        raise UserError(f"{many} a key id that begins with {worker!r:.90}: give more digits of one")
    return str(found[0])


async def set_standing(
    connection: AsyncConnection, worker_id: str, reason: str, *, banned: bool, actor: str, at: float
) -> None:
    """Ban, which purges; or pardon, which forgets strikes and evidence and leaves credits alone."""
    kind = EntryKind.BAN if banned else EntryKind.PARDON
    await workers.add_entries(connection, [Entry(worker_id, kind, 0, None, reason)], at)
    if banned:
        await verdicts.purge(connection, worker_id, at=at, actor=actor, why=reason)
        return
    await evidence.reset(connection, worker_id)
    await events.record(connection, at=at, actor=actor, action="pardon", subject=worker_id, detail=reason)


def _number(name: str, text: str) -> float:
    """Raises UserError for text that is no finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{name or 'a setting'} must be a number, got {text!r:.40}")
    return number

"""What operators do to a run: each action in one transaction with its audit event, whoever asks (page, API, command).

pause    no more leases are granted; what is out may come in         operator
drain    no new groups are begun; those that are open are finished   operator
resume   go on after either                                          operator
ban      take nothing more from a worker, purge what is untrained    operator
pardon   lift a ban, clear strikes and evidence                      operator
admit    take a hardware class at its word                           operator
refuse   lease nothing to a hardware class                           operator
set      turn one of `coordinator.knobs.KNOBS`                       admin
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import knobs, verdicts
from coordinator.hardware import HardwareState
from coordinator.operators import Role
from coordinator.store import events, evidence, hardware, workers
from coordinator.store import knobs as knob_store
from coordinator.store import tables as t
from protocol.declaration import HARDWARE_LENGTH, printable
from protocol.errors import UserError
from protocol.ledger import Entry, EntryKind
from protocol.signing import KEY_ID_PREFIX

NEEDS: Mapping[str, Role] = {
    "pause": Role.OPERATOR,
    "drain": Role.OPERATOR,
    "resume": Role.OPERATOR,
    "ban": Role.OPERATOR,
    "pardon": Role.OPERATOR,
    "admit": Role.OPERATOR,
    "refuse": Role.OPERATOR,
    "set": Role.ADMIN,
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
    if action == "set":
        return await turn(connection, arguments.get("name", ""), arguments.get("value", ""), actor=actor, at=at)
    raise UserError(f"there is no action {action!r:.40}: {', '.join(NEEDS)}")


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
    try:
        number = float(text)
    except ValueError:
        raise UserError(f"{name} must be a number, got {text!r:.40}") from None
    value = knobs.check(name, number)
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

"""Executes registration: proves the key, asks a new one for what the door asks, notes what the worker declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import tokens
from coordinator.hardware import HardwareRules, HardwareState, state_of
from coordinator.joining import ANYONE, JoinRule, check
from coordinator.store import database, events, hardware, workers
from coordinator.store.database import Database, Lane
from coordinator.together import Together
from protocol.declaration import Declaration
from protocol.errors import RollswarmError, UserError
from protocol.signing import CHALLENGE, DECLARATION, SignedEnvelope, open_envelope
from protocol.wire import declaration_from_payload

_MOST = 32  # in one transaction


@dataclass(frozen=True, slots=True)
class About:
    """What a worker says of itself for people to read, and where it calls from; printable and short already."""

    name: str
    hardware: str
    software: str
    address: str
    invite: str = ""
    work_nonce: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """A bearer token, and what the worker should know of how it is judged, in words."""

    token: str
    notice: str = ""


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """Whose key has signed the challenge."""

    challenge: bytes
    worker_id: str
    declared: Declaration | None
    about: About


class Joining:
    """The door for workers. `precisions`: the classes that the run admits; `rule`: what it asks of a key that is new."""

    def __init__(
        self,
        db: Database,
        *,
        run_id: str,
        secret: bytes,
        precisions: tuple[str, ...],
        hardware_rules: HardwareRules,
        rule: JoinRule = ANYONE,
    ) -> None:
        self._db = db
        self._run_id = run_id
        self._rule = rule
        self._secret = secret
        self._precisions = precisions
        self._rules = hardware_rules
        self._together = Together(self._join_many, _MOST)

    async def join(self, challenge: SignedEnvelope, declaration: SignedEnvelope | None, about: About) -> Joined:
        """Register. Without a declaration, what the worker declared before stays.

        Raises BadSignature or WorkerFault for what is not signed or formed as it must be, UserError for a precision or a
        kind of hardware that the run does not take. (A banned key may register: it can still ask for its standing.)
        """
        issued, worker_id = open_envelope(challenge, CHALLENGE), challenge.key_id
        declared = None
        if declaration is not None:
            signed = open_envelope(declaration, DECLARATION, pinned=(worker_id,))
            declared = declaration_from_payload(signed, issued)
            require_precision(declared.precision, self._precisions)
        return await self._together.do(_Newcomer(issued, worker_id, declared, about))

    async def _join_many(self, newcomers: Sequence[_Newcomer]) -> list[Joined | Exception]:
        """Several in one transaction; what one is refused for undoes nothing of the others."""
        answers: list[Joined | Exception] = []
        async with self._db.write(Lane.VERDICTS) as connection:
            at = await database.now(connection)
            for newcomer in newcomers:
                try:
                    async with connection.begin_nested():
                        answers.append(await self._let_in(connection, newcomer, at))
                except RollswarmError as error:
                    answers.append(error)
        return answers

    async def _let_in(self, connection: AsyncConnection, newcomer: _Newcomer, at: float) -> Joined:
        worker_id, about, declared = newcomer.worker_id, newcomer.about, newcomer.declared
        tokens.check_challenge(self._secret, newcomer.challenge, worker_id, at)
        if await workers.standing(connection, worker_id) is None:
            await check(
                connection,
                self._rule,
                run_id=self._run_id,
                key_id=worker_id,
                invite=about.invite,
                nonce=about.work_nonce,
                at=at,
            )
        notice = "" if declared is None else await self._note(connection, worker_id, declared, at)
        await workers.register(
            connection,
            worker_id=worker_id,
            name=about.name,
            hardware=about.hardware,
            software=about.software,
            address=about.address,
            at=at,
            declared=declared,
        )
        return Joined(tokens.make_token(self._secret, worker_id, at), notice)

    async def _note(self, connection: AsyncConnection, worker_id: str, declared: Declaration, at: float) -> str:
        """Note a change of what the worker declares; what there is to tell it."""
        if await workers.declared(connection, worker_id) != declared:
            detail = f"{declared.precision} on {declared.hardware}"
            await events.record(connection, at=at, actor="worker", action="declare", subject=worker_id, detail=detail)
        name = declared.hardware
        state = state_of(name, declared.precision, await hardware.decision(connection, name), self._rules)
        if state is HardwareState.REFUSED:
            raise UserError(f"the operator of this run takes no rollouts from {name!r}: join with other hardware")
        if state is HardwareState.ADMITTED:
            return ""
        await self._open_shadow(connection, name, at)
        return (
            f"{name} is new to this run: until its operator admits it, at most {self._rules.shadow_rollouts} rollouts of it "
            "are taken, and those that fail where numerics may be to blame are not held against you"
        )

    async def _open_shadow(self, connection: AsyncConnection, name: str, at: float) -> None:
        if await hardware.is_known(connection, name):
            return
        if await hardware.count_open(connection) >= self._rules.shadow_classes:
            raise UserError(
                f"this run tries out {self._rules.shadow_classes} kinds of hardware already, and {name!r} is not among them: "
                "ask its operator to admit it, or come back later"
            )
        await hardware.add(connection, name, at)
        detail = "a kind of hardware that calibration did not cover: `coordinator classes` shows how it does, "
        detail += "`coordinator admit` and `coordinator refuse` decide"
        await events.record(connection, at=at, actor="coordinator", action="shadow", subject=name, detail=detail)


def require_precision(precision: str, admitted: tuple[str, ...]) -> None:
    """Raise UserError unless the run admits this class."""
    if precision not in admitted:
        raise UserError(
            f"this run admits precision {', '.join(admitted)}, not {precision!r:.32}: join with --precision {admitted[0]}, or "
            "ask its operator to calibrate and admit the other"
        )

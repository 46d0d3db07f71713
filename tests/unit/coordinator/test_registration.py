"""Registration: what is declared is signed, kept, and refused if the run does not admit it."""

from __future__ import annotations

import pytest

from coordinator import tokens
from coordinator.registration import About, Joined
from coordinator.store import tables as t
from protocol.declaration import UNDECLARED, Declaration
from protocol.errors import BadSignature, UserError
from protocol.signing import CHALLENGE, DECLARATION, Identity
from protocol.wire import declaration_to_payload
from tests.factories import SECRET, make_identity
from tests.stored_run import DECLARED, StoredRun

CAROL = make_identity(77)
H200 = Declaration(hardware="NVIDIA H200, vllm 0.32.0")


async def join(
    run: StoredRun, declaration: Declaration | None, identity: Identity = CAROL, signer: Identity | None = None
) -> Joined:
    row = (await run.rows(t.runs))[0]
    challenge = tokens.make_challenge(SECRET, identity.key_id, row.created_at)
    declared = None
    if declaration is not None:
        declared = (signer or identity).sign(DECLARATION, declaration_to_payload(declaration, challenge))
    return await run.joining.join(identity.sign(CHALLENGE, challenge), declared, About("c", "h", "s", "127.0.0.1"))


async def kept(run: StoredRun, identity: Identity = CAROL) -> tuple[str, str]:
    row = await run.row(t.workers, t.workers.c.worker_id == identity.key_id)
    return row.precision, row.hardware_class


async def events(run: StoredRun, *actions: str) -> list[str]:
    return [row.subject for row in await run.rows(t.events) if row.action in actions]


async def test_what_is_declared_is_kept_and_every_change_is_an_event(run: StoredRun) -> None:
    assert (await join(run, DECLARED)).notice == ""
    assert await kept(run) == ("bf16", DECLARED.hardware)
    await join(run, DECLARED)
    assert await events(run, "declare") == [CAROL.key_id]
    await join(run, H200)
    assert await events(run, "declare") == [CAROL.key_id] * 2
    assert await kept(run) == ("bf16", H200.hardware)


async def test_who_only_looks_declares_nothing_new(run: StoredRun) -> None:
    await join(run, None)
    assert await kept(run) == ("bf16", UNDECLARED)
    await join(run, DECLARED)
    await join(run, None)
    assert await kept(run) == ("bf16", DECLARED.hardware)


async def test_a_class_that_is_not_admitted_is_refused_with_what_to_do(run: StoredRun) -> None:
    with pytest.raises(UserError, match=r"admits precision bf16, not 'fp8': join with --precision bf16"):
        await join(run, Declaration("fp8", DECLARED.hardware))
    assert await run.rows(t.workers, t.workers.c.worker_id == CAROL.key_id) == []


async def test_nobody_declares_for_another(run: StoredRun) -> None:
    with pytest.raises(BadSignature):
        await join(run, DECLARED, signer=make_identity(78))


async def test_new_hardware_is_let_in_with_a_notice_and_one_alert(run: StoredRun) -> None:
    notice = (await join(run, H200)).notice
    assert notice.startswith("NVIDIA H200, vllm 0.32.0 is new to this run") and "at most 4 rollouts" in notice
    await join(run, H200, make_identity(79))
    assert await events(run, "shadow") == [H200.hardware]


async def test_so_many_kinds_are_tried_at_a_time(run: StoredRun, database_url: str) -> None:
    for number in range(2):
        await join(run, Declaration(hardware=f"NVIDIA X{number}, vllm 1"))
    with pytest.raises(UserError, match="tries out 2 kinds of hardware already"):
        await join(run, Declaration(hardware="NVIDIA X2, vllm 1"))
    await join(run, Declaration(hardware="NVIDIA X1, vllm 1"))
    await run.change(t.hardware, t.hardware.c.name == "NVIDIA X0, vllm 1", decision="refused")
    await join(run, Declaration(hardware="NVIDIA X2, vllm 1"))
    with pytest.raises(UserError, match="takes no rollouts from 'NVIDIA X0, vllm 1'"):
        await join(run, Declaration(hardware="NVIDIA X0, vllm 1"))

"""Registration: what is declared is signed, kept, and refused if the run does not admit it."""

from __future__ import annotations

import pytest

from coordinator.store import tables as t
from protocol.declaration import UNDECLARED, Declaration
from protocol.errors import BadSignature, UserError
from protocol.signing import Identity
from tests.factories import make_identity
from tests.stored_run import DECLARED, StoredRun

CAROL = make_identity(77)
H200 = Declaration(hardware="NVIDIA H200, vllm 0.32.0")


async def kept(run: StoredRun, identity: Identity = CAROL) -> tuple[str, str]:
    row = await run.row(t.workers, t.workers.c.worker_id == identity.key_id)
    return row.precision, row.hardware_class


async def events(run: StoredRun, *actions: str) -> list[str]:
    return [row.subject for row in await run.rows(t.events) if row.action in actions]


async def test_what_is_declared_is_kept_and_every_change_is_an_event(run: StoredRun) -> None:
    assert (await run.register(CAROL, DECLARED)).notice == ""
    assert await kept(run) == ("bf16", DECLARED.hardware)
    await run.register(CAROL, DECLARED)
    assert await events(run, "declare") == [CAROL.key_id]
    await run.register(CAROL, H200)
    assert await events(run, "declare") == [CAROL.key_id] * 2
    assert await kept(run) == ("bf16", H200.hardware)


async def test_who_only_looks_declares_nothing_new(run: StoredRun) -> None:
    await run.register(CAROL)
    assert await kept(run) == ("bf16", UNDECLARED)
    await run.register(CAROL, DECLARED)
    await run.register(CAROL)
    assert await kept(run) == ("bf16", DECLARED.hardware)


async def test_a_class_that_is_not_admitted_is_refused_with_what_to_do(run: StoredRun) -> None:
    with pytest.raises(UserError, match=r"admits precision bf16, not 'fp8': join with --precision bf16"):
        await run.register(CAROL, Declaration("fp8", DECLARED.hardware))
    assert await run.rows(t.workers, t.workers.c.worker_id == CAROL.key_id) == []


async def test_nobody_declares_for_another(run: StoredRun) -> None:
    with pytest.raises(BadSignature):
        await run.register(CAROL, DECLARED, signer=make_identity(78))


async def test_new_hardware_is_let_in_with_a_notice_and_one_alert(run: StoredRun) -> None:
    notice = (await run.register(CAROL, H200)).notice
    assert notice.startswith("NVIDIA H200, vllm 0.32.0 is new to this run") and "at most 4 rollouts" in notice
    await run.register(make_identity(79), H200)
    assert await events(run, "shadow") == [H200.hardware]


async def test_so_many_kinds_are_tried_at_a_time(run: StoredRun, database_url: str) -> None:
    for number in range(2):
        await run.register(CAROL, Declaration(hardware=f"NVIDIA X{number}, vllm 1"))
    with pytest.raises(UserError, match="tries out 2 kinds of hardware already"):
        await run.register(CAROL, Declaration(hardware="NVIDIA X2, vllm 1"))
    await run.register(CAROL, Declaration(hardware="NVIDIA X1, vllm 1"))
    await run.change(t.hardware, t.hardware.c.name == "NVIDIA X0, vllm 1", decision="refused")
    await run.register(CAROL, Declaration(hardware="NVIDIA X2, vllm 1"))
    with pytest.raises(UserError, match="takes no rollouts from 'NVIDIA X0, vllm 1'"):
        await run.register(CAROL, Declaration(hardware="NVIDIA X0, vllm 1"))

"""Hardware that calibration did not cover: its rejections are recorded and not punished, and what that buys is bounded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import pytest_asyncio

from coordinator.operate import list_hardware, perform
from coordinator.store import hardware
from coordinator.store import tables as t
from coordinator.verification.pooled import COMPARISONS, PROOF_MANTISSA, STRIKE, PooledClass, PooledTest
from protocol.declaration import Declaration
from protocol.errors import UserError
from protocol.rollout import SEED_MARGIN_MEAN, RejectionReason
from protocol.signing import Identity
from tests.factories import make_identity
from tests.stored_run import DECLARED, StoredRun, accepted, rejected

Begin = Callable[..., Awaitable[StoredRun]]
NAME = "NVIDIA H200, vllm 0.32.0"
H200 = Declaration(hardware=NAME)
DAVE = make_identity(91)


@pytest_asyncio.fixture
async def tried(run: StoredRun) -> StoredRun:
    """A run that tries out NAME, with Dave on it."""
    await open_shadow(run)
    return run


async def open_shadow(run: StoredRun) -> None:
    await run.join(DAVE, declared=H200)
    async with run.db.write() as connection:
        await hardware.add(connection, NAME, 1.0)


def url_of(run: StoredRun) -> str:
    return run.db.engine.url.render_as_string(hide_password=False)


async def subjects(run: StoredRun, action: str) -> list[str]:
    return [row.subject for row in await run.rows(t.events) if row.action == action]


@pytest.mark.parametrize("reason", ["proof", "logprob", "seed", "termination"])
async def test_what_numerics_may_explain_is_recorded_and_not_punished(tried: StoredRun, reason: str) -> None:
    (rollout,) = await tried.work(DAVE, 1)
    await tried.judge(rejected(RejectionReason(reason), "far off"))
    standing = await tried.standing(DAVE)
    assert (standing.strikes, standing.banned, standing.credits) == (0, False, 0)
    assert await tried.rollout_state(rollout) == "rejected", "it is never trained on"
    assert (await tried.drops())[f"rejected:{reason}"] == (1, 6)
    assert await subjects(tried, "shadow_reject") == [DAVE.key_id]
    assert await subjects(tried, "shadow") == [NAME], "an alert"
    (line,) = [line for line in await list_hardware(url_of(tried)) if line.name == NAME]
    assert (line.state, line.workers, line.rejected, line.rejections) == ("shadow", 1, 1, {reason: 1})


async def test_fraud_bans_in_shadow_as_anywhere(tried: StoredRun) -> None:
    await tried.work(DAVE, 1)
    await tried.judge(rejected(RejectionReason.FORM, "no proofs"))
    assert (await tried.standing(DAVE)).banned


async def test_tokens_by_another_rule_are_fraud_whatever_the_hardware(tried: StoredRun) -> None:
    await tried.work(DAVE, 1)
    numbers = {"metrics": {SEED_MARGIN_MEAN: 1.9}, "admitted": {SEED_MARGIN_MEAN: 0.11}}
    await tried.judge(replace(rejected(RejectionReason.SEED, "another seed"), **numbers))  # type: ignore[arg-type]
    standing = await tried.standing(DAVE)
    assert standing.banned and standing.ban_reason.startswith("seed: another seed")


async def test_what_is_accepted_counts_as_usual(tried: StoredRun) -> None:
    (rollout,) = await tried.work(DAVE, 1)
    await tried.judge()
    assert (await tried.standing(DAVE)).credits == 6
    assert await tried.rollout_state(rollout) == "accepted"
    assert (await tried.row(t.hardware)).accepted == 1


async def test_so_many_rollouts_of_a_kind_are_tried(tried: StoredRun) -> None:
    eve = make_identity(92)
    await tried.join(eve, declared=H200)
    first = await tried.lease(DAVE, 3)
    assert len(first) == 3 and len(await tried.lease(eve, 3)) == 1
    granted = await tried.leasing.acquire(eve.key_id, 1)
    assert (granted.leases, granted.reason) == ((), "hardware")
    await tried.let_lease_expire(first[0])
    assert len(await tried.lease(eve, 3)) == 1, "what expired may be tried again"


async def test_it_counts_as_a_newcomer_however_long_it_has_been_here(begin: Begin, alice: Identity) -> None:
    run = await begin(newcomer_share=0.25, probation_rollouts=0)
    assert len(await run.lease(alice, 2)) == 2
    await open_shadow(run)
    assert len(await run.lease(DAVE, 4)) == 2, "a quarter of 8"
    assert (await run.leasing.acquire(DAVE.key_id, 1)).reason == "newcomers"


async def test_its_rollouts_are_audited_in_full(begin: Begin) -> None:
    run = await begin(probation_rollouts=0)
    await open_shadow(run)
    await run.work(DAVE, 1)
    (pending,) = await run.claim()
    assert pending.newcomer


async def test_a_later_declaration_changes_nothing_about_what_is_leased(tried: StoredRun, alice: Identity) -> None:
    await tried.work(alice, 1)
    await tried.join(alice, declared=H200)
    await tried.judge(rejected())
    assert (await tried.standing(alice)).strikes == 1, "leased while its hardware was admitted"
    await tried.work(DAVE, 1)
    await tried.join(DAVE, declared=DECLARED)
    await tried.judge(rejected())
    assert (await tried.standing(DAVE)).strikes == 0


async def test_an_admitted_class_is_judged_like_all_others(tried: StoredRun) -> None:
    await perform(url_of(tried), "admit", {"hardware": NAME})
    await tried.work(DAVE, 1)
    await tried.judge(rejected())
    assert (await tried.standing(DAVE)).strikes == 1
    assert await subjects(tried, "admit") == [NAME]


async def test_a_refused_class_gets_no_leases(tried: StoredRun) -> None:
    await perform(url_of(tried), "refuse", {"hardware": NAME})
    assert (await tried.leasing.acquire(DAVE.key_id, 1)).reason == "hardware"
    assert await subjects(tried, "refuse") == [NAME]


async def test_a_class_may_be_admitted_before_anyone_has_it(run: StoredRun) -> None:
    await perform(url_of(run), "admit", {"hardware": NAME})
    await run.join(DAVE, declared=H200)
    (lease,) = await run.lease(DAVE, 1)
    row = await run.row(t.leases, t.leases.c.lease_id == lease.lease_id)
    assert (row.hardware, row.shadow) == (NAME, False)


@pytest.mark.parametrize("name", ["", "a\x1bb", "x" * 129])
async def test_a_name_that_no_worker_can_have_is_refused(run: StoredRun, name: str) -> None:
    with pytest.raises(UserError, match="no hardware class is named"):
        await perform(url_of(run), "admit", {"hardware": name})


async def test_evidence_in_shadow_alerts_and_leaves_other_evidence_alone(tried: StoredRun) -> None:
    test = PooledTest(PROOF_MANTISSA, STRIKE, 1.0, (PooledClass(1, 0.0, 1.0, 8.0),))
    tried.pooled = replace(COMPARISONS, observations_per_month=20.0, tests=(test,))

    async def work(value: float) -> None:
        await tried.work(DAVE, 1)
        for pending in await tried.claim():
            await tried.record(pending.rollout_id, replace(accepted(pending), observations={PROOF_MANTISSA: value}))

    await tried.join(DAVE, declared=DECLARED)
    await work(1.5)
    before = await tried.row(t.evidence, t.evidence.c.test == PROOF_MANTISSA)
    await tried.join(DAVE, declared=H200)
    while not await subjects(tried, "alarm"):
        await work(8.0)
    assert not (await tried.standing(DAVE)).banned
    assert await tried.row(t.evidence, t.evidence.c.test == PROOF_MANTISSA) == before
    assert (await tried.row(t.evidence, t.evidence.c.test == f"shadow:{PROOF_MANTISSA}")).alarmed_at is not None

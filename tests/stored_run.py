"""A run on a real database, driven through the coordinator's rooms without gRPC; and hands on its clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import select, update

from coordinator import tokens, verdicts
from coordinator.acceptance import record, record_all
from coordinator.admission import Limits
from coordinator.feeding import Feeding
from coordinator.grouping import EnvironmentShare
from coordinator.hardware import HardwareRules
from coordinator.intake import Intake
from coordinator.leasing import Leasing
from coordinator.metrics import Metrics
from coordinator.registration import About, Joined, Joining
from coordinator.scheduling import EXACT, Freshness, Scheduling
from coordinator.service import WorkerService
from coordinator.store import database, rollouts, workers
from coordinator.store import run as run_store
from coordinator.store import tables as t
from coordinator.store.database import Database, Lane
from coordinator.store.rollouts import PendingRollout
from coordinator.verification.pooled import COMPARISONS
from protocol.declaration import BF16, Declaration
from protocol.lease import Lease
from protocol.ledger import Standing
from protocol.rollout import Outcome, RejectionReason, Task, Verdict
from protocol.signing import CHALLENGE, DECLARATION, Identity, SignedEnvelope
from protocol.turns import Turns
from protocol.wire import declaration_to_payload, group_from_wire, rollout_id
from tests.factories import (
    COORDINATOR,
    EOS,
    HIDDEN_SIZE,
    MAX_TOKENS,
    RUN_ID,
    SECRET,
    TEMPERATURE,
    TRAINER,
    VOCAB_SIZE,
    make_rollout,
    make_version,
    sign_rollout,
)

SCHEDULING = Scheduling(
    groups_per_batch=2,
    group_size=2,
    min_group=2,
    max_staleness=1,
    lease_term_s=60.0,
    group_deadline_s=300.0,
    newcomer_share=1.0,
    probation_rollouts=2,
)
MAX_STRIKES = 3
Service = TypeVar("Service", bound=WorkerService)
VERIFIER = "verifier-1"
DECLARED = Declaration(hardware="test CPU, reference 1")


def make_task(index: int) -> Task:
    return Task("sums", index, f"{index} + 1 =", str(index + 1))


class StoredRun:
    """One run: rooms, and short cuts for what a worker, a verifier and the trainer do."""

    def __init__(
        self, db: Database, scheduling: Scheduling, freshness: Freshness = EXACT, turns: Turns | None = None
    ) -> None:
        """`turns`: how the tasks' turns are taken, None if they have one."""
        self.turns = {} if turns is None else {"sums": turns}
        self.db = db
        self.scheduling = scheduling
        self.pooled = COMPARISONS
        self.hardware_rules = HardwareRules(shadow_rollouts=4, shadow_classes=2)
        self.leasing = Leasing(
            db,
            secret=SECRET,
            scheduling=scheduling,
            environments=[EnvironmentShare("sums", 1.0, MAX_TOKENS, make_task)],
            tokenize=lambda text: list(text.encode()),
            hardware_rules=self.hardware_rules,
            freshness=freshness,
        )
        self.intake = Intake(
            db,
            identity=COORDINATOR,
            limits=Limits(RUN_ID, VOCAB_SIZE, HIDDEN_SIZE, scheduling.max_staleness),
            temperature=TEMPERATURE,
            eos_token_ids=(EOS,),
            max_strikes=MAX_STRIKES,
            max_payload_bytes=1 << 20,
            turns=self.turns,
        )
        self.joining = Joining(db, run_id=RUN_ID, secret=SECRET, precisions=(BF16,), hardware_rules=self.hardware_rules)
        self.feeding = Feeding(db, run_id=RUN_ID, trainer_key=TRAINER.key_id, scheduling=scheduling)

    @classmethod
    async def begin(
        cls,
        url: str,
        *,
        versions: int = 1,
        freshness: Freshness = EXACT,
        turns: Turns | None = None,
        **changes: Any,
    ) -> StoredRun:
        """Begin the run and announce versions 0 … versions - 1."""
        db = Database.open(url)
        await run_store.load_or_begin(db, run_id=RUN_ID, name="test", secret=SECRET, trainer_key=TRAINER.key_id)
        run = cls(db, replace(SCHEDULING, **changes), freshness, turns)
        for version in range(versions):
            await run.announce(version)
        return run

    # What the trainer does

    async def announce(self, version: int) -> int:
        return await self.feeding.announce(make_version(version))

    async def pull(self, batch: int = 0, version: int = 0, held: Sequence[str] = (), max_groups: int = 2) -> list[Any]:
        """The groups as the trainer reads them."""
        found = await self.feeding.pull(batch=batch, trainer_version=version, held=held, max_groups=max_groups)
        return [group_from_wire(group) for group in found]

    # What a worker does

    async def step(self, batch: int = 0, version: int = 0, trained: Sequence[str] = ()) -> None:
        """The trainer reports that it stepped on this batch."""
        await self.feeding.report(
            batch=batch, trainer_version=version, optimizer_steps=batch + 1, metrics={}, dropped={}, trained=trained
        )

    async def join(self, *identities: Identity, declared: Declaration = DECLARED) -> None:
        async with self.db.write() as connection:
            for identity in identities:
                await workers.register(
                    connection,
                    worker_id=identity.key_id,
                    name="w",
                    hardware="h",
                    software="s",
                    address="127.0.0.1",
                    at=await database.now(connection),
                    declared=declared,
                )

    async def register(
        self, worker: Identity, declaration: Declaration | None = None, signer: Identity | None = None
    ) -> Joined:
        """By the door: a challenge is answered, and what is declared (`signer`: by another key) is signed with it."""
        challenge = tokens.make_challenge(SECRET, worker.key_id, (await self.row(t.runs)).created_at)
        declared = None
        if declaration is not None:
            declared = (signer or worker).sign(DECLARATION, declaration_to_payload(declaration, challenge))
        return await self.joining.join(worker.sign(CHALLENGE, challenge), declared, About("w", "h", "s", "127.0.0.1"))

    async def lease(self, worker: Identity, count: int = 1) -> list[Lease]:
        granted = await self.leasing.acquire(worker.key_id, count)
        return [lease for lease, _ in granted.leases]

    async def lease_one(self, worker: Identity) -> Lease:
        (lease,) = await self.lease(worker, 1)
        return lease

    async def submit(self, worker: Identity, lease: Lease, **form: Any) -> str:
        """Hand in a valid rollout for the lease; its id."""
        envelope = self.envelope(worker, lease, **form)
        await self.intake.submit(worker.key_id, envelope)
        return rollout_id(envelope.payload)

    def envelope(self, worker: Identity, lease: Lease, **form: Any) -> SignedEnvelope:
        return sign_rollout(make_rollout(lease.lease_id, lease.sample_id, **form), worker)

    async def work(self, worker: Identity, count: int = 1, **form: Any) -> list[str]:
        """Lease and hand in."""
        return [await self.submit(worker, lease, **form) for lease in await self.lease(worker, count)]

    # What a verifier does

    async def claim(self, verifier: str = VERIFIER, limit: int = 64, term: float = 60.0) -> list[PendingRollout]:
        async with self.db.write(Lane.ROWS) as connection:
            at = await database.now(connection)
            ids = await rollouts.claim(connection, verifier=verifier, limit=limit, at=at, term=term)
            return await rollouts.pending(connection, ids, self.scheduling.probation_rollouts)

    async def record(self, rollout: str, verdict: Verdict, verifier: str = VERIFIER) -> bool:
        async with self.db.write() as connection:
            written = await record_all(
                connection,
                {rollout: verdict},
                verifier=verifier,
                at=await database.now(connection),
                rules=verdicts.Rules(MAX_STRIKES, self.scheduling.probation_rollouts, {BF16: self.pooled}),
            )
            return written == 1

    async def record_all(self, found: Mapping[str, Verdict], verifier: str = VERIFIER) -> None:
        """As a verifier does."""
        rules = verdicts.Rules(MAX_STRIKES, self.scheduling.probation_rollouts, {BF16: self.pooled})
        await record(self.db, found, verifier=verifier, rules=rules)

    def service(self, kind: type[Service], metrics: Metrics | None = None) -> Service:
        """The rooms as workers reach them by gRPC."""
        return kind(
            self.db,
            run_id=RUN_ID,
            secret=SECRET,
            joining=self.joining,
            leasing=self.leasing,
            intake=self.intake,
            temperature=TEMPERATURE,
            eos_token_ids=(EOS,),
            metrics=metrics or Metrics(),
            turns=self.turns,
        )

    async def judge(self, verdict: Verdict | None = None) -> list[str]:
        """Claim everything and give it this verdict, accepted if none is given; the ids."""
        claimed = await self.claim()
        for pending in claimed:
            assert await self.record(pending.rollout_id, verdict or accepted(pending))
        return [pending.rollout_id for pending in claimed]

    # Looking and turning clocks

    async def standing(self, worker: Identity) -> Standing:
        async with self.db.read() as connection:
            standing = await workers.standing(connection, worker.key_id)
        assert standing is not None
        return standing

    async def rows(self, table: Any, *where: Any) -> list[Any]:
        """In the order of their keys: PostgreSQL gives rows back as they lie on its pages, not as they came."""
        async with self.db.read() as connection:
            return list(await connection.execute(select(table).where(*where).order_by(*table.primary_key.columns)))

    async def row(self, table: Any, *where: Any) -> Any:
        (row,) = await self.rows(table, *where)
        return row

    async def change(self, table: Any, *where: Any, **values: Any) -> None:
        async with self.db.write() as connection:
            await connection.execute(update(table).where(*where).values(**values))

    async def rollout_state(self, rollout: str) -> str:
        return str((await self.row(t.rollouts, t.rollouts.c.rollout_id == rollout)).state)

    async def sample_state(self, sample: str) -> str:
        return str((await self.row(t.samples, t.samples.c.sample_id == sample)).state)

    async def group_state(self, group: str) -> str:
        return str((await self.row(t.groups, t.groups.c.group_id == group)).state)

    async def drops(self) -> dict[str, tuple[int, int]]:
        """(count, tokens) of drops by reason."""
        found: dict[str, tuple[int, int]] = {}
        for row in await self.rows(t.drops):
            count, tokens = found.get(row.reason, (0, 0))
            found[row.reason] = (count + row.count, tokens + row.tokens)
        return found

    async def let_lease_expire(self, lease: Lease) -> None:
        await self.change(t.leases, t.leases.c.lease_id == lease.lease_id, deadline=1.0)

    async def let_group_expire(self, group: str = "g0") -> None:
        await self.change(t.groups, t.groups.c.group_id == group, deadline=1.0)

    async def let_claims_expire(self) -> None:
        await self.change(t.rollouts, t.rollouts.c.state == "verifying", claim_deadline=1.0)


def accepted(pending: PendingRollout, reward: float = 1.0) -> Verdict:
    """An acceptance with trusted log-probs of the right length."""
    length = len(pending.rollout.token_ids)
    return Verdict(Outcome.ACCEPTED, reward=reward, old_logprobs=(-0.5,) * length, entropies=(0.25,) * length)


def rejected(reason: RejectionReason = RejectionReason.PROOF, detail: str = "another model") -> Verdict:
    return Verdict(Outcome.REJECTED, reason=reason, detail=detail)


def inconclusive() -> Verdict:
    return Verdict(Outcome.INCONCLUSIVE, detail="the prefill failed")

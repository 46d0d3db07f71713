"""`coordinator verify`: claims rollouts from the database, judges them, writes verdicts. Start as many as you like.

claim    consumes pending rollouts (and those whose verifier died)   waits for the database, asked again
weights  fetches the versions that the claim names, by SHARDCAST     a version that can't be had: INCONCLUSIVE
examine  prefills and checks the claim's rollouts, in a child        a failure or a death of it is ours: INCONCLUSIVE
reward   asks the scorer, a process without privileges or secrets    an environment that fails: INCONCLUSIVE
write    verdicts, several in a transaction                          only while the claim is still ours
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from pathlib import Path

from coordinator import verdicts
from coordinator.acceptance import record
from coordinator.config import RunFile, start_tracing
from coordinator.multi_turn import run_turns
from coordinator.store import database, knobs, rollouts, versions
from coordinator.store import run as run_store
from coordinator.store.database import Database, Lane
from coordinator.store.rollouts import PendingRollout
from coordinator.store.run import Run
from coordinator.verification.judge import Judge
from environments.sandbox import Scorer
from protocol.errors import OurFault, RollswarmError, SourceFault, UserError
from protocol.rollout import Outcome, Verdict
from protocol.tokenizer import RunTokenizer
from shardcast.client import ShardcastClient

log = logging.getLogger(__name__)

_IDLE_S = 0.1
_REST_S = 0.2  # after a claim of all that waited: a round asks as much for one rollout as for many
_DATABASE_RETRY_S = 1.0
_HOLDS = 48  # of a claim, each for a third of its term
_PRUNE_EVERY_S = 10.0  # to ask what is needed reads all that is under way
_KEEP_VERSIONS = 2  # beyond those that staleness admits


async def run_verifier(run_file: RunFile, *, cache: Path, device: str, stop: asyncio.Event) -> None:
    """Verify until `stop` is set. Raises UserError if the run or the model can't be used."""
    db = Database.open(run_file.run.database)
    try:
        run = await _wait_for_run(db, stop)
        if run is None:
            return
        sources = run_file.shardcast.sources or run_file.shardcast.relays
        if not sources:
            raise UserError("shardcast.relays is empty: the verifier takes weights from there too")
        async with ShardcastClient(sources, (run.trainer_key,), cache, run_id=run.run_id) as client:
            scorer = Scorer(
                preload=[(section.kind or section.name, section.params) for section in run_file.environments]
            )
            try:
                tokenizer = RunTokenizer(run_file.model.path)
                judge = Judge(
                    run_file,
                    secret=run.secret,
                    scorer=scorer,
                    decode=tokenizer.decode,
                    fetch=client.fetch,
                    device=device,
                    turns=run_turns(run_file, tokenizer),
                )
                try:
                    verifier = Verifier(db, judge, run_file)
                    print(f"ready verifier={verifier.name}", flush=True)
                    try:
                        await verifier.run(stop, client)
                    finally:
                        await verifier.close()
                finally:
                    await judge.close()
            finally:
                await scorer.close()
    finally:
        await db.close()


async def _wait_for_run(db: Database, stop: asyncio.Event) -> Run | None:
    """The run, once `coordinator serve` has begun it; None if told to stop first."""
    told = False
    while not stop.is_set():
        try:
            run = await run_store.load(db)
        except Exception as error:
            run = None
            if not told:
                log.warning("no run in the database yet (%s)", type(error).__name__, extra={"action": "wait"})
                told = True
        if run is not None:
            return run
        await asyncio.sleep(_DATABASE_RETRY_S)
    return None


class Verifier:
    """Claims, judges, writes."""

    def __init__(self, db: Database, judge: Judge, run_file: RunFile) -> None:
        self.name = f"verifier-{secrets.token_hex(4)}"
        self._db = db
        self._judge = judge
        self._settings = run_file.verification
        self._max_staleness = run_file.scheduling.max_staleness
        self._probation = run_file.scheduling.probation_rollouts
        self._tracing = start_tracing(run_file.tracing, "rollswarm-verifier")
        self._prune_at = 0.0  # by the monotonic clock
        self._rules = verdicts.Rules(self._settings.max_strikes, self._probation, judge.pooled)

    async def run(self, stop: asyncio.Event, client: ShardcastClient) -> None:
        """Work until `stop` is set; a database that is away is waited for."""
        warm = False
        while not stop.is_set():
            try:
                warm = warm or await self._warm_up()
                pending = await self._claim()
                if pending:
                    await self._judge_and_write(pending)
                    await self._prune(client)
                    if len(pending) < self._settings.claim_rollouts:
                        await asyncio.sleep(_REST_S)
                    continue
            except RollswarmError:
                raise
            except Exception:
                log.exception("a round failed; its rollouts are claimed again later", extra={"action": "round_error"})
                await asyncio.sleep(_DATABASE_RETRY_S)
            await asyncio.sleep(_IDLE_S)

    async def close(self) -> None:
        """Send the traces that wait, if there are any."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _warm_up(self) -> bool:
        """Load the head as soon as there is one, so that the first rollouts do not wait for it; whether it was done."""
        async with self._db.read() as connection:
            head = await versions.head(connection)
        if head is None:
            return False
        try:
            await self._judge.warm_up(head.version, head.manifest_digest)
        except (SourceFault, OurFault) as error:
            log.warning("no weights yet: %s", error, extra={"action": "fetch_retry"})
            return False
        return True

    async def _claim(self) -> list[PendingRollout]:
        """What to judge next. Writers wait for one another as little as can be: payloads are read when all is claimed."""
        settings = self._settings
        async with self._db.read() as connection:
            lost = await verdicts.lost(connection, await database.now(connection))
            turned = await knobs.read(connection)
        self._judge.audit_floor = turned.get("audit_fraction", settings.audit_fraction)
        if lost:
            async with self._db.write() as connection:
                await verdicts.give_up(connection, await database.now(connection))
        async with self._db.write(Lane.ROWS) as connection:
            at, term = await database.now(connection), settings.claim_term_s
            ids = await rollouts.claim(connection, verifier=self.name, limit=settings.claim_rollouts, at=at, term=term)
        if not ids:
            return []
        async with self._db.read() as connection:
            return await rollouts.pending(connection, ids, self._probation)

    async def _judge_and_write(self, pending: list[PendingRollout]) -> None:
        begun, at = time.perf_counter(), time.time()
        holding = asyncio.create_task(self._hold([item.rollout_id for item in pending]), name="hold")
        try:
            found = await self._judge.judge(pending)
            await self._write(found)
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
        if self._tracing is not None:
            for item in pending:
                lease_id = item.rollout.lease_id
                self._tracing.verified(lease_id, item.rollout_id, item.worker_id, at, found[item.rollout_id])
        tokens = sum(len(item.rollout.token_ids) for item in pending)
        rejected = sum(verdict.outcome is Outcome.REJECTED for verdict in found.values())
        log.info(
            "%d rollouts, %d tokens, %d rejected, %.2f s",
            len(pending),
            tokens,
            rejected,
            time.perf_counter() - begun,
            extra={"action": "verify"},
        )

    async def _hold(self, rollout_ids: list[str]) -> None:
        """While these are judged, nobody else claims them: what takes longer than a claim's term would be done by every
        verifier in turn, written by none, and dropped in the end. Not for ever: what hangs is for others to try."""
        term = self._settings.claim_term_s
        for _ in range(_HOLDS):
            await asyncio.sleep(term / 3)
            try:
                async with self._db.write(Lane.ROWS) as connection:
                    until = await database.now(connection) + term
                    await rollouts.hold(connection, rollout_ids, verifier=self.name, until=until)
            except Exception:
                log.exception("claims could not be held; it goes on", extra={"action": "round_error"})

    async def _write(self, found: dict[str, Verdict]) -> None:
        """Store what was found, and say what was not accepted."""
        await record(self._db, found, verifier=self.name, rules=self._rules)
        for rollout_id, verdict in found.items():
            if verdict.outcome is not Outcome.ACCEPTED:
                log.info(
                    "%s %s: %s",
                    verdict.outcome,
                    verdict.reason or "",
                    verdict.detail,
                    extra={"action": "verdict", "rollout_id": rollout_id},
                )

    async def _prune(self, client: ShardcastClient) -> None:
        """Forget versions on disk that no rollout to come can name; now and then, for there is no hurry."""
        if time.monotonic() < self._prune_at:
            return
        self._prune_at = time.monotonic() + _PRUNE_EVERY_S
        async with self._db.read() as connection:
            needed = await versions.required(connection)
        if needed:
            oldest = max(0, min(needed[0], needed[-1] - self._max_staleness) - _KEEP_VERSIONS)
            keep = set(range(oldest, needed[-1] + 1)) | {0}
            await asyncio.to_thread(client.prune, keep)

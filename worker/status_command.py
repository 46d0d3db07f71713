"""`worker status`: the coordinator's view of this worker, in words."""

from __future__ import annotations

from pathlib import Path

from coordinator.client import Trust, WorkerClient, fetch_terms
from protocol import keyfile
from protocol.errors import UserError
from worker.config import WorkerConfig
from worker.hardware import describe
from worker.join import installed_version
from worker.verdict import verdict_line

_PATIENCE_S = 5.0


async def show_status(url: str, config: WorkerConfig, ca: Path | None = None) -> None:
    """Print standing and verdicts. Raises UserError if there is no identity or no coordinator."""
    try:
        identity = keyfile.load(config.identity_path)
    except FileNotFoundError:
        raise UserError(f"there is no identity in {config.identity_path}: `worker join` makes one") from None
    trust = Trust(url, ca)
    terms = await fetch_terms(trust, patience_s=_PATIENCE_S)
    client = WorkerClient(
        terms,
        identity,
        name=config.name,
        hardware=describe(),
        software=f"rollswarm {installed_version()}",
        trust=trust,
    )
    try:
        standing = await client.standing(patience_s=_PATIENCE_S)
    finally:
        await client.close()
    print(f"run        {terms.name} ({terms.run_id})")
    print(f"worker     {identity.key_id}")
    print(f"standing   {'banned: ' + standing.ban_reason if standing.banned else 'good'}, {standing.strikes} strikes")
    print(f"credits    {standing.credits} verified tokens")
    print(f"rollouts   {standing.accepted} accepted, {standing.rejected} rejected, {standing.pending} pending")
    for verdict in standing.verdicts:
        print(f"  {verdict_line(verdict)}")

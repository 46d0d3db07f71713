"""What the run does now and by which settings: read once, shown by page and API alike."""

from __future__ import annotations

from coordinator import knobs
from coordinator.dashboard.api.answers import RunNow, Setting
from coordinator.scheduling import Scheduling
from coordinator.store import knobs as knob_store
from coordinator.store import run as run_store
from coordinator.store.database import Database


async def read(db: Database, scheduling: Scheduling, audit_fraction: float) -> RunNow:
    """`scheduling`, `audit_fraction`: the run file's, where no knob was turned."""
    async with db.read() as connection:
        turned = await knob_store.read(connection)
    run = await run_store.load(db)
    assert run is not None
    values = knobs.values(scheduling, audit_fraction, turned)
    return RunNow(
        run_id=run.run_id,
        name=run.name,
        state="paused" if run.paused else "draining" if turned.get(knobs.DRAINING) else "granting leases",
        settings=[
            Setting(name, values[name], knob.low, knob.high, knob.whole, knob.text, name in turned)
            for name, knob in knobs.KNOBS.items()
        ],
    )

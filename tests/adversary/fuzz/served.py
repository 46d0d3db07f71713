"""A coordinator's doors in a process of their own, on a run without a model: real listeners, limits, database and log.

`python -m tests.adversary.fuzz.served URL` prints a ready line with ports and tokens, and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time

from aiohttp import web

from coordinator.dashboard.access import Access
from coordinator.dashboard.views import Views
from coordinator.grpc_server import serve_trainer, serve_workers
from coordinator.limits import Door, DoorLimits, Rate
from coordinator.metrics import Metrics
from coordinator.migrate import upgrade
from coordinator.operate import make_token
from coordinator.operators import Role
from coordinator.scheduling import SERVING
from coordinator.service import TrainerService, WorkerService
from protocol.cli import set_up_logging
from protocol.terms import RunTerms
from tests.dashboard import settings_of
from tests.factories import RUN_ID, SECRET, TEMPERATURE, make_terms
from tests.stored_run import StoredRun

TRAINER_TOKEN = "trainer-token"
_UNLIMITED = Rate(1e6, 1e6)  # what is fuzzed is what lies behind the limit of a key
_PAYLOAD_BYTES = 1 << 20
_SCHEDULING = {"groups_per_batch": 4096, "lease_term_s": 600.0}


async def read_terms() -> RunTerms:
    return make_terms()


async def serve(url: str) -> None:
    """Until told to stop."""
    await upgrade(url)
    run = await StoredRun.begin(url, freshness=SERVING, **_SCHEDULING)
    door, metrics = Door(DoorLimits(key=_UNLIMITED), time.monotonic), Metrics()
    service = run.service(WorkerService, metrics)
    feeding = TrainerService(run.feeding, run_id=RUN_ID, temperature=TEMPERATURE, scheduling=run.scheduling)
    views = Views(
        run.db,
        metrics,
        read_terms,
        access=Access(run.db, SECRET, encrypted=False),
        settings=settings_of(run),
        door=door,
    )
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(run.db.close)
        where = {"host": "127.0.0.1", "port": 0}
        public = await serve_workers(service, secret=SECRET, max_payload_bytes=_PAYLOAD_BYTES, door=door, **where)  # type: ignore[arg-type]
        opened.push_async_callback(public.stop, 0.0)
        private = await serve_trainer(feeding, token=TRAINER_TOKEN, **where)  # type: ignore[arg-type]
        opened.push_async_callback(private.stop, 0.0)
        runner = web.AppRunner(views.application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        opened.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        tokens = [f"{role.name}={await make_token(url, role.name, role, None)}" for role in Role]
        print(
            "ready",
            f"http={runner.addresses[0][1]}",
            f"grpc={public.port}",
            f"trainer={private.port}",
            *tokens,
            flush=True,
        )
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()


if __name__ == "__main__":
    set_up_logging()
    asyncio.run(serve(sys.argv[1]))

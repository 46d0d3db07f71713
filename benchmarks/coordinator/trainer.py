"""A simulated trainer: it pulls groups as they become ready, and steps at once. It never waits for a model.

Every batch is reported, acknowledged as if a checkpoint held it, and followed by a version.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from benchmarks.coordinator.manifests import manifest
from coordinator import trainer_token
from coordinator.client import TrainerClient

_WAIT_S = 5.0


async def train(endpoint: str, token: str) -> None:
    client = TrainerClient(endpoint, token)
    state = await client.state()
    version = -1 if state.head_version is None else state.head_version
    if version < 0:
        version = await client.announce(manifest(state.run_id, 0))
    print(f"ready version={version}", flush=True)
    batch = state.next_batch
    while True:
        trained: list[str] = []
        held: list[str] = []
        while len(held) < state.groups_per_batch:
            groups = await client.pull(
                batch=batch, trainer_version=version, held=held, max_groups=state.groups_per_batch, wait_s=_WAIT_S
            )
            held += [group.group_id for group in groups]
            trained += [rollout.rollout_id for group in groups for rollout in group.rollouts]
        await client.report(
            batch=batch,
            trainer_version=version,
            optimizer_steps=batch + 1,
            metrics={"loss": 0.0, "approx_kl": 0.001},
            dropped={},
            trained=trained,
        )
        version = await client.announce(manifest(state.run_id, version + 1))
        await client.acknowledge(batch)
        batch += 1


async def main(endpoint: str, token: str) -> None:
    task = asyncio.ensure_future(train(endpoint, token))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator.trainer")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(main(options.endpoint, trainer_token.load(options.token_file)))

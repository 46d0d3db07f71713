"""`python -m tests.receipt_keeper FILE join …`: `worker …`, which also writes down every rollout that it holds a receipt of.

The line is on the disk before the worker forgets the rollout: what is in the file was promised by the coordinator.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from coordinator.client import WorkerClient
from protocol.signing import SignedEnvelope
from protos.rollswarm.v1 import worker_pb2
from worker.main import main


class ReceiptKeeper:
    """Stands around `WorkerClient.submit`."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")
        self._submit = WorkerClient.submit

    async def submit(
        self, client: WorkerClient, envelope: SignedEnvelope, patience_s: float | None
    ) -> worker_pb2.Receipt:
        receipt = await self._submit(client, envelope, patience_s)
        self._file.write(receipt.rollout_id + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return receipt


def kept(file: Path) -> set[str]:
    """The ids in such a file; a line that a kill has cut short is none."""
    if not file.exists():
        return set()
    return {line for line in file.read_text().splitlines() if len(line) == len("sha256:") + 64}


if __name__ == "__main__":
    keeper = ReceiptKeeper(Path(sys.argv.pop(1)))

    async def submit(
        self: WorkerClient, envelope: SignedEnvelope, patience_s: float | None = None
    ) -> worker_pb2.Receipt:
        return await keeper.submit(self, envelope, patience_s)

    WorkerClient.submit = submit  # type: ignore[method-assign]
    main()

"""The whole network with real vLLM: a run trains, every invariant holds, and the worker leaves cleanly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.network import Network

pytestmark = pytest.mark.vllm
_ENGINE = ("--enforce-eager", "--kv-cache-gib", "0.25", "--max-model-len", "128")


def test_a_run_with_real_vllm_trains_and_no_honest_rollout_is_rejected(tmp_path: Path) -> None:
    with Network(tmp_path, versions=5) as network:
        network.start_servers()
        worker = network.start("worker", *_ENGINE)
        trained = network.running["trainer"]
        network.wait("the trainer publishes its budget", lambda: not trained.running, 300, allow_end=("trainer",))
        assert network.stop("trainer") == 0

        status = network.status()
        assert status is not None
        assert status["head_version"] == 5
        assert len(status["steps"]) == 5
        network.check_invariants()
        (line,) = status["workers"]
        assert line["rejected"] == 0
        assert line["accepted"] > 0
        assert line["credits"] == network.count("SELECT sum(amount) FROM ledger WHERE kind = 'credit'")
        assert network.count("SELECT count(*) FROM consumptions WHERE trained") > 0

        assert network.stop("worker") == 0
        assert network.count("SELECT count(*) FROM leases WHERE state = 'live'") == 0, worker.last_words(20)
        assert not list((tmp_path / "worker").rglob("*.rollout"))
        last = _last_status(worker.log)
        assert last["receipts"] == network.count("SELECT count(*) FROM rollouts")
        assert last["swaps"] >= 1
        for role in ("verifier", "coordinator", "relay", "origin"):
            assert network.stop(role) == 0


def _last_status(log: Path) -> dict[str, int]:
    """The last JSON line of a worker that has left: how it ended."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return dict(lines[-1])

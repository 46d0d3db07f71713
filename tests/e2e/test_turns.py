"""A run whose tasks call a tool, by real processes: a worker of either engine, a verifier, and a trainer that learns."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from coordinator.operators import Role
from demo.processes import Process
from tests.network import PARITY, Network

CALLING = """
[[environments]]
name = "calling"
kind = "tests.turns:CallingParity"
max_tokens = 48
"""
_VLLM = ("--enforce-eager", "--kv-cache-gib", "0.25", "--max-model-len", "128")


def spread(network: Network) -> tuple[int, int]:
    """Rollouts with tool answers among those accepted, and those without: by the tokens that the model did not write."""
    import asyncio

    from coordinator.export import export

    out = network.folder / "rollouts.parquet"
    asyncio.run(export(network.database, out))
    rows = pq.read_table(out).to_pylist()
    calling = [row for row in rows if "environment" in row["segment_authors"]]
    for row in rows:
        assert sum(row["segment_lengths"]) == len(row["token_ids"]) == len(row["loss_mask"]) <= 48
        assert row["segment_authors"] == ["model", "environment"] * (len(row["segment_authors"]) // 2) + ["model"]
        answers = [n for n, own in enumerate(row["loss_mask"]) if not own]
        assert all(row["behaviour_logprobs"][n] == 0.0 for n in answers)
    return len(calling), len(rows) - len(calling)


def get(network: Network, path: str) -> str:
    headers = {"Authorization": f"Bearer {network.token(Role.VIEWER)}"}
    with urllib.request.urlopen(urllib.request.Request(network.url + path, headers=headers), timeout=20) as response:
        return str(response.read().decode())


def check_run(network: Network, worker: Process) -> None:
    network.check_invariants()
    status = network.status()
    assert status is not None
    assert [line["rejected"] for line in status["workers"]] == [0] * len(status["workers"]), worker.last_words(20)
    calling, plain = spread(network)
    assert calling > 4 and plain > 4, (calling, plain)
    # What is paid for is what the model wrote.
    credited = network.count("SELECT sum(amount) FROM ledger WHERE kind = 'credit'")
    rows = pq.read_table(network.folder / "rollouts.parquet").to_pylist()
    assert credited == sum(sum(row["loss_mask"]) for row in rows)
    shown = next(row for row in rows if "environment" in row["segment_authors"])
    detail = json.loads(get(network, f"/api/v1/rollouts/{shown['rollout_id']}"))
    assert [token["by_model"] for token in detail["tokens"]] == shown["loss_mask"]
    assert all(token["gap"] is None for token in detail["tokens"] if not token["by_model"])
    page = get(network, f"/rollouts/{shown['rollout_id']}")
    assert 'class="tool"' in page and "a tool answered" in page


def test_a_run_that_calls_a_tool_trains_and_no_honest_rollout_is_rejected(tmp_path: Path) -> None:
    with Network(tmp_path, versions=4, environments=CALLING + PARITY) as network:
        network.start_servers()
        terms = json.loads(urllib.request.urlopen(f"{network.url}/.well-known/rollswarm.json", timeout=20).read())
        assert (terms["protocol_min"], terms["protocol_max"], len(terms["turns"])) == (2, 2, 1)
        worker = network.start("worker", "--engine", "reference")
        trained = network.running["trainer"]
        network.wait("the trainer publishes its budget", lambda: not trained.running, 300, allow_end=("trainer",))
        assert network.stop("trainer") == 0
        check_run(network, worker)
        assert network.stop("worker", grace_s=60.0) == 0


@pytest.mark.vllm
def test_a_run_that_calls_a_tool_trains_on_real_vllm(tmp_path: Path) -> None:
    with Network(tmp_path, versions=4, environments=CALLING + PARITY) as network:
        network.start_servers()
        worker = network.start("worker", *_VLLM)
        trained = network.running["trainer"]
        network.wait("the trainer publishes its budget", lambda: not trained.running, 300, allow_end=("trainer",))
        assert network.stop("trainer") == 0
        check_run(network, worker)
        assert network.stop("worker", grace_s=60.0) == 0


def test_a_run_of_single_turns_says_nothing_of_turns(tmp_path: Path) -> None:
    with Network(tmp_path) as network:
        for role in ("origin", "relay", "coordinator"):
            network.start(role)
        terms = json.loads(urllib.request.urlopen(f"{network.url}/.well-known/rollswarm.json", timeout=20).read())
        assert "turns" not in terms
        assert (terms["protocol_min"], terms["protocol_max"]) == (1, 1)

"""kill -9 of each process in turn, then its restart: no receipted rollout is lost, none is trained twice, the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.network import Network

_ROLES = ("coordinator", "verifier", "trainer", "worker", "relay", "origin")


@pytest.mark.timeout(600)
def test_kill_minus_nine_of_any_process_loses_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    with Network(tmp_path, versions=1000) as network:
        network.start_servers()
        network.start("worker", "--engine", "reference")
        network.wait("the run is under way", lambda: _versions(network) >= 3, 180)
        receipts = 0
        for role in _ROLES:
            stored = _stored(network)
            if role == "worker":
                receipts += _receipts(network)
            network.kill(role)
            assert stored <= _stored(network)
            network.start(role, *(("--engine", "reference") if role == "worker" else ()))
            goal = _versions(network) + 2
            network.wait(
                f"two versions more after {role} was killed", lambda goal=goal: _versions(network) >= goal, 180
            )
            assert stored <= _stored(network)
            network.check_invariants()
        receipts += _receipts(network)
        assert 0 < receipts <= network.count("SELECT count(*) FROM rollouts")
        assert (
            network.count(
                "SELECT count(*) FROM verdicts v JOIN rollouts r USING (rollout_id) WHERE r.state = 'pending'"
            )
            == 0
        )
        assert network.stop("trainer") == 0
        network.check_invariants()
        _check_versions_are_whole(network)


def _versions(network: Network) -> int:
    return network.count("SELECT coalesce(max(version), -1) FROM policy_versions")


def _stored(network: Network) -> set[str]:
    """Ids of everything with a receipt."""
    return {row[0] for row in network.query("SELECT rollout_id FROM rollouts")}


def _receipts(network: Network) -> int:
    """Receipts that the running worker has said it holds."""
    lines = network.running["worker"].log.read_text().splitlines()
    told = [json.loads(line)["receipts"] for line in lines if line.startswith("{") and line.endswith("}")]
    return int(told[-1]) if told else 0


def _check_versions_are_whole(network: Network) -> None:
    """Versions are numbered without a gap, each with a digest of its own."""
    rows = network.query("SELECT version, manifest_digest FROM policy_versions ORDER BY version")
    assert [row[0] for row in rows] == list(range(len(rows)))
    assert len({row[1] for row in rows}) == len(rows)

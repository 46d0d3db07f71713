"""`trainer run` under torchrun in a real network: two processes train as one, and publish versions that workers take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.network import Network

_VERSIONS = 2


@pytest.mark.timeout(900)
def test_two_processes_train_and_publish_in_a_real_network(tmp_path: Path) -> None:
    # Also what only came to work on several processes late: averaged weights, Muon, a critic.
    settings = """
optimizer = "muon"
advantage = "critic"
old_logprobs = "ewma"
ewma_decay = 0.9
threads = 1
"""
    with Network(tmp_path, versions=_VERSIONS, trainer=settings) as network:
        for role in ("origin", "relay", "coordinator", "verifier"):
            network.start(role)
        trainer = network.start_team(2)
        network.start("worker", "--engine", "reference")
        network.wait("the team publishes its budget", lambda: not trainer.running, 600, allow_end=("trainer",))
        assert trainer.popen.returncode == 0, trainer.last_words(12)
        assert network.count("SELECT count(*) FROM policy_versions") == _VERSIONS + 1
        assert network.count("SELECT count(*) FROM steps") == _VERSIONS, "each step is reported once, by one of them"
        assert network.count("SELECT count(*) FROM consumptions WHERE trained") > 0
        network.check_invariants()

"""A cheating worker of each kind as a real process beside an honest one: banned, and nothing of theirs accepted."""

from __future__ import annotations

from pathlib import Path

from tests.adversary.attacks import Attack
from tests.network import Network

_CHEATS = (Attack.RANDOM_TOKENS, Attack.OTHER_WEIGHTS, Attack.WRONG_SEED, Attack.EDITED_TOKEN)


def test_every_cheat_is_banned_without_one_accepted_rollout_while_an_honest_worker_is_not_touched(
    tmp_path: Path,
) -> None:
    with Network(tmp_path, versions=100) as network:
        network.start_servers()
        network.start("worker", "--engine", "reference")
        cheats = [f"cheater:{attack}" for attack in _CHEATS]
        for cheat in cheats:
            network.start(cheat)

        def banned() -> int:
            return network.count("SELECT count(*) FROM workers WHERE banned")

        network.wait("every cheat is banned", lambda: banned() == len(cheats), 240, allow_end=tuple(cheats))
        for cheat in cheats:
            (row,) = network.query(
                "SELECT accepted, rejected, credits, ban_reason FROM workers WHERE worker_id = ?", network.key_id(cheat)
            )
            assert (row[0], row[2]) == (0, 0), (cheat, row)
            assert row[1] > 0, (cheat, row)
            assert row[3]
        network.wait(
            "every cheat has left",
            lambda: not any(network.running[cheat].running for cheat in cheats),
            60,
            tuple(cheats),
        )
        for cheat in cheats:
            process = network.running[cheat]
            assert process.popen.returncode != 0
            assert "banned" in process.last_words()
        (honest,) = network.query(
            "SELECT rejected, accepted FROM workers WHERE worker_id = ?", network.key_id("worker")
        )
        assert honest[0] == 0
        network.wait(
            "the honest worker goes on",
            lambda: (
                network.count("SELECT accepted FROM workers WHERE worker_id = ?", network.key_id("worker")) > honest[1]
            ),
            allow_end=tuple(cheats),
        )
        live = "SELECT count(*) FROM leases l JOIN workers w USING (worker_id) WHERE w.banned AND l.state = 'live'"
        assert network.count(live) == 0
        trained = (
            "SELECT count(*) FROM consumptions c JOIN rollouts r USING (rollout_id) "
            "JOIN workers w USING (worker_id) WHERE w.banned"
        )
        assert network.count(trained) == 0
        network.check_invariants()

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.store.rollouts import PendingRollout
from coordinator.verification.judge import Judge
from protocol.errors import SourceFault, UserError
from protocol.rollout import Outcome
from tests.factories import make_rollout


def make_pending(number: int, versions: tuple[int, ...]) -> PendingRollout:
    rollout = make_rollout("lease", f"g0-{number}", versions=versions)
    return PendingRollout(f"r{number}", "worker", rollout, "g0", "sums", 0, "p", (1,), "1", 40, 5, 1, True)


@pytest.mark.parametrize("error", [SourceFault("nobody has it"), UserError("the disk is full")])
async def test_weights_that_cannot_be_had_are_waited_for_once_and_are_our_fault(
    tmp_path: Path, error: Exception
) -> None:
    asked: list[int] = []

    async def fetch(version: int, _digest: str) -> Path:
        asked.append(version)
        if version == 1:
            raise error
        return tmp_path

    judge = Judge.__new__(Judge)  # only what fetching needs
    judge._fetch, judge._folders = fetch, {}
    items = [make_pending(0, (0,)), make_pending(1, (0, 1)), make_pending(2, (1,))]
    ready, found = await judge._with_weights(items)
    assert [item.rollout_id for item in ready] == ["r0"]
    assert {key: verdict.outcome for key, verdict in found.items()} == dict.fromkeys(("r1", "r2"), Outcome.INCONCLUSIVE)
    assert sorted(asked) == [0, 1]


def test_audits_follow_standing_down_to_the_floor() -> None:
    judge = Judge.__new__(Judge)  # only what the draw needs
    judge._secret, judge.audit_floor = bytes(32), 0.25

    def audited(**standing: Any) -> int:
        items = [replace(make_pending(number, (0,)), **standing) for number in range(200)]
        return sum(judge.is_audited(item) for item in items)

    assert audited() == audited(newcomer=False) == audited(newcomer=False, clean_tokens=10**9, watched=True) == 200
    assert 20 < audited(newcomer=False, clean_tokens=10**9) < 80

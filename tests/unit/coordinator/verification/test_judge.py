from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.store.rollouts import PendingRollout
from coordinator.verification.examination import ExaminerSettings
from coordinator.verification.judge import Judge
from protocol.errors import OurFault, SourceFault, UserError
from protocol.rollout import Outcome
from protocol.turns import Turns
from tests.factories import make_rollout
from tests.turns import make_sums


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


@pytest.mark.parametrize("now", [{}, {"sums": make_sums(max_calls=1)}])
def test_turns_by_rules_that_the_run_file_no_longer_has_are_nobodys_fault(now: dict[str, Turns]) -> None:
    """They were admitted, so it is ours to put the rules back."""
    settings = ExaminerSettings(1.0, (256,), 260, 16, {}, turns={"sums": make_sums()})
    item = make_pending(0, (0,))
    item = replace(item, rollout=replace(item.rollout, turns=make_sums().rules.digest))
    assert settings.claim(item).turns is settings.turns["sums"]
    with pytest.raises(OurFault, match=r"other rules for the turns of sums .* put them back"):
        replace(settings, turns=now).claim(item)
    with pytest.raises(OurFault, match="put them back"):
        settings.claim(make_pending(0, (0,)))

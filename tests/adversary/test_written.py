"""What no engine process would write: other rules of choice, and other models' tokens with the right one's proofs."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.verification.resident import ResidentModels
from protocol.rollout import Outcome, RejectionReason
from tests.adversary.attacks import Attack, Cheat, make_cheat
from tests.adversary.attacks.prefilled import Prefilled
from tests.adversary.batch import write_all
from tests.adversary.judging import judge, judge_cheat, make_requests, reasons
from worker.engine import Weights

REQUESTS = make_requests(16, first=300)


def test_other_rules_of_choice_lose_the_draw(published: Weights, models: ResidentModels, tmp_path: Path) -> None:
    top_p = judge_cheat(make_cheat(Attack.TOP_P), REQUESTS, published, models, tmp_path)
    assert reasons(top_p) == {RejectionReason.SEED}


@pytest.mark.parametrize(
    "attack",
    [Attack.OTHER_MODEL, Attack.OTHER_WEIGHTS, Attack.HIDDEN_PROMPT, Attack.OTHER_PROMPT, Attack.OTHER_TEMPERATURE],
)
def test_flawless_proofs_of_what_another_wrote_do_not_help(
    attack: Attack, published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    verdicts = judge_cheat(Prefilled(make_cheat(attack)), REQUESTS, published, models, tmp_path)
    assert reasons(verdicts) == {RejectionReason.SEED}


def test_of_the_best_of_n_seeds_only_the_issued_one_passes(
    published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    issued = write_all(Cheat(), REQUESTS, published, tmp_path)
    best = write_all(make_cheat(Attack.BEST_OF_N), REQUESTS, published, tmp_path)
    verdicts = judge(best, REQUESTS, models)
    for drawn, chosen, verdict in zip(issued, best, verdicts, strict=True):
        same = drawn.token_ids == chosen.token_ids
        assert verdict.outcome is (Outcome.ACCEPTED if same else Outcome.REJECTED)
        assert same or verdict.reason is RejectionReason.SEED
    assert sum(verdict.outcome is Outcome.REJECTED for verdict in verdicts) > len(REQUESTS) / 2

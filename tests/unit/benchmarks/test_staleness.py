"""The staleness laboratory: its protocol, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import benchmarks.staleness.lab as lab
from benchmarks.staleness.lab import Setting, train
from benchmarks.staleness.report import draw, kept, summary, table
from benchmarks.staleness.runs import load, missing, parsed
from benchmarks.staleness.task import TOKENS, rewards, tasks
from trainer.losses import make_objective

SMALL = Setting(steps=9, groups=4, samples=4, learning_rate=1e-2)


@pytest.mark.parametrize("lag", [0, 3])
def test_the_lag_ramps_up_and_stays(monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    ages: list[int] = []
    update = lab.update

    def watched(policy, optimizer, objective, batch, version):
        ages.append(version - batch.version)
        return update(policy, optimizer, objective, batch, version)

    monkeypatch.setattr(lab, "update", watched)
    outcome = train(make_objective("ipo"), lag, 0, SMALL)
    assert ages == [min(step, lag) for step in range(9)], "k batches by the initial policy, then first in, first out"
    assert outcome.metrics["staleness_mean"] == lag, "the ramp is excluded"


def test_a_run_depends_on_its_arguments_alone() -> None:
    one, other = (train(make_objective("dppo"), 2, 1, SMALL) for _ in range(2))
    assert one == other
    assert train(make_objective("dppo"), 2, 2, SMALL) != one


def test_held_out_tasks_are_never_trained_on_and_rewards_are_shares() -> None:
    training, held_out = (set(map(tuple, task.pairs_P2.tolist())) for task in tasks())
    assert not training & held_out
    assert len(training) + len(held_out) == 64
    answers = tasks()[0].answers_PT[:2]
    wrong = answers.clone()
    wrong[1, : TOKENS // 2] += 1
    assert rewards(wrong, answers).tolist() == [1.0, 0.5]


def run(objective: str, lag: int, seed: int, gain: float) -> dict:
    return {
        "objective": objective, "lag": lag, "seed": seed, "gain": gain, "reward": gain,
        "metrics": {"cut_fraction": 0.1, "effective_sample_size": 0.5},
    }  # fmt: skip


RUNS = [run("ipo", 0, 0, 0.4), run("ipo", 0, 1, 0.6), run("ipo", 16, 0, 0.5), run("ipo", 16, 1, 0.4)]


def test_what_is_kept_is_against_the_mean_at_lag_0() -> None:
    """0.5 / 0.5 and 0.4 / 0.5; t = 6.314 at one degree of freedom."""
    mean, half = kept({0: RUNS[:2], 16: RUNS[2:]}, 16) or (0.0, 0.0)
    assert mean == pytest.approx(0.9)
    assert half == pytest.approx(6.314 * 0.1414214 / 2**0.5, rel=1e-4)
    cell = summary(RUNS)["ipo"]["16"]
    assert (cell["seeds"], cell["gain"][0], cell["cut"]) == (2, pytest.approx(0.45), pytest.approx(0.1))
    assert "ipo" in table(RUNS) and "90%" in table(RUNS)
    assert summary([run("ipo", 16, 0, 0.5)])["ipo"]["16"]["kept"] is None


def test_the_figure_is_the_same_for_the_same_runs(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw(RUNS, SMALL, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_parts_add_up_and_another_setting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    assert load(path, SMALL)["runs"] == []
    assert list(missing(RUNS, ["ipo"], [0, 16], 3)) == [("ipo", 0, 2), ("ipo", 16, 2)]
    path.write_text(json.dumps({**load(path, SMALL), "runs": RUNS}))
    assert load(path, SMALL)["runs"] == RUNS
    with pytest.raises(SystemExit, match="another --out"):
        load(path, Setting())


def test_an_objective_may_be_given_parameters() -> None:
    assert parsed("ipo") == ("ipo", {})
    assert parsed("ipo:epsilon=0.1,tau=0") == ("ipo", {"epsilon": 0.1, "tau": 0.0})


def test_on_policy_all_policy_gradients_are_one_run() -> None:
    """At lag 0 with one update per batch, new = old: the objectives can't differ but by their anchors."""
    gains = [train(make_objective(name), 0, 0, SMALL).gain for name in ("pg_is", "async_ppo", "cispo", "dppo", "m2po")]
    assert torch.tensor(gains).std() < 0.02

"""Every objective against numbers worked out by hand.

Three tokens: ρ = 0.5/0.4 = 1.25, 0.9/0.5 = 1.8, 0.1/0.2 = 0.5; Δp = 0.1, 0.4, −0.1; A = 1, 2, −1.
"""

from __future__ import annotations

import math

import pytest

from tests.unit.trainer.losses.given import given
from trainer.losses import LOSSES, make_loss

NEW, BEHAVIOUR, ADVANTAGE = [0.5, 0.9, 0.1], [0.4, 0.5, 0.2], [1.0, 2.0, -1.0]
LOG_NEW = [math.log(p) for p in NEW]
MOVED = [math.log(1.25), math.log(1.8), math.log(0.5)]
IPO_ANCHOR = 1e-3 * sum(moved**2 for moved in MOVED)
# Trusted values that differ from the engine's: w = 2, 1.8, 0.5 and r = 0.625, 1, 1.
OLD = {"old": [0.8, 0.9, 0.1]}
# The step began here: prox / behaviour = 1.25, 1.2, 0.5 and u = 1, 1.5, 1.
PROX = {"prox": [0.5, 0.6, 0.1]}
TEACHER = {"teacher": [0.25, 0.9, 0.4]}
GAP = [math.log(0.5), 0.0, math.log(4.0)]  # teacher against new
OTHERS = ([[0.5, 0.25]] * 3, [[0.5, 0.5]] * 3, [[0.25, 0.5]] * 3)  # by new, sampler, teacher
OTHER_LOGS = math.log(0.5), math.log(0.25)

TABLE = [
    ("pg_is", {}, {}, -1.25 - 3.6 + 0.5, [1, 1, 1]),
    ("pg_is", {"against": "old"}, OLD, -0.625 - 2.0 + 1.0, [1, 1, 1]),
    ("pg_is", {"against": "prox"}, PROX, -1.0 - 3.0 + 1.0, [1, 1, 1]),
    # Moved by 0.4 > 0.3: masked.
    ("ipo", {}, {}, -1.25 + 0.5 + IPO_ANCHOR, [1, 0, 1]),
    ("ipo", {"epsilon": 0.05, "tau": 0.0}, {}, 0.0, [0, 0, 0]),
    # min(1.25, 1.25), min(3.6, 2.56), min(−0.5, −0.8): clipped where it moved the way A wants.
    ("ppo", {}, {}, -1.25 - 2.56 + 0.8, [1, 0, 0]),
    ("ppo", {"clip_high": 0.1, "clip_low": 0.6}, {}, -1.1 - 2.2 + 0.5, [0, 0, 1]),
    ("async_ppo", {}, {}, -1.25 - 2.56 + 0.8, [1, 0, 0]),
    ("async_ppo", {"max_staleness": 3}, {"staleness": [0, 4, 3]}, (-1.25 + 0.8) * 3 / 2, [1, 0, 0]),
    ("two_sided", {}, {}, -1.2 - 2.4 + 0.8, [0, 0, 0]),
    ("two_sided", {"delta": 1.5}, {}, -1.2 - 2.4 + 0.8, [0, 0, 0]),
    # w · PPO(r): 2 · 0.625, 1.8 · 2, 0.5 · 1; then the first capped at 1.5, and 1.8 as well.
    ("tis", {}, OLD, -1.25 - 3.6 + 0.5, [1, 1, 1]),
    ("tis", {"cap": 1.5}, OLD, -1.5 * 0.625 - 1.5 * 2.0 + 0.5, [1, 1, 1]),
    ("icepop", {}, OLD, -1.25 - 3.6 + 0.5, [1, 1, 1]),
    ("icepop", {"high": 1.9}, OLD, -3.6 + 0.5, [0, 1, 1]),
    ("icepop", {"variant": "whole", "low": 0.6}, {}, -1.25 - 3.6, [1, 1, 0]),
    ("icepop", {"variant": "whole", "low": 0.6}, OLD, -1.25 - 3.6, [1, 1, 0]),  # ρ is against the behaviour
    ("icepop", {"variant": "whole", "against": "prox"}, PROX, -1.0 - 3.0 + 1.0, [1, 1, 1]),
    ("cispo", {}, {}, -1.25 * LOG_NEW[0] - 3.6 * LOG_NEW[1] + 0.5 * LOG_NEW[2], [1, 1, 1]),
    (
        "cispo",
        {"clip_low": 0.2, "clip_high": 0.5},
        {},
        -1.25 * LOG_NEW[0] - 3.0 * LOG_NEW[1] + 0.8 * LOG_NEW[2],
        [1, 1, 1],
    ),
    ("dppo", {}, {}, -1.25 * LOG_NEW[0] + 0.5 * LOG_NEW[2], [1, 0, 1]),
    ("dppo", {"delta": 0.05}, {}, 0.0, [0, 0, 0]),
    ("dppo", {"cap": 1.1, "delta": 1.0}, {}, -1.1 * LOG_NEW[0] - 2.2 * LOG_NEW[1] + 0.5 * LOG_NEW[2], [1, 1, 1]),
    ("dppo", {"delta": 0.05, "tau": 1e-3}, {}, IPO_ANCHOR, [0, 0, 0]),
    # The binary divergences are 0.0201, 0.5108 and 0.0444.
    ("dppo", {"divergence": "kl", "delta": 0.03}, {}, -1.25 * LOG_NEW[0], [1, 0, 0]),
    ("dppo", {"divergence": "kl", "delta": 0.05}, {}, -1.25 * LOG_NEW[0] + 0.5 * LOG_NEW[2], [1, 0, 1]),
    # The geometric mean of the ratios is 1.125^(1/3) = 1.0400; each token costs what the completion costs.
    ("gspo", {"clip_high": 0.1, "clip_low": 0.1}, {}, -2.0 * 1.125 ** (1 / 3), [1, 1, 1]),
    ("gspo", {}, {}, -1.0004 - 2.0008 + 1.125 ** (1 / 3), [0, 0, 1]),
    ("decoupled_ppo", {}, PROX, -1.25 - 1.2 * 2.56 + 0.5, [1, 0, 1]),
    ("decoupled_ppo", {"cap": 1.22}, PROX, -1.2 * 2.56 + 0.5, [0, 0, 1]),
    ("decoupled_ppo", {"cap": 1.22, "beyond": "truncate"}, PROX, -1.22 - 1.2 * 2.56 + 0.5, [1, 0, 1]),
    ("decoupled_ppo", {}, {"prox": NEW}, -1.25 - 3.6 + 0.5, [1, 1, 1]),  # one update: u = 1
    # α = 1, 1/2, 1/4: weights 1, √1.8, 0.5^¾; u = 1.25, √1.8 (clipped to 1.28), 0.5^¼.
    ("a3po", {}, {"staleness": [0, 2, 4]}, -1.25 - 2.56 * math.sqrt(1.8) + 0.5, [1, 0, 1]),
    ("ppo_ewma", {}, {"ewma": PROX["prox"]}, -1.25 - 1.2 * 2.56 + 0.5, [1, 0, 1]),
    # Δ² = 0.0498, 0.3455, 0.4805: a budget of 0.04 caps at 0.2, tighter than PPO's bounds, which stand.
    ("m2po", {}, {}, -1.25 - 2.56 + 0.8, [1, 0, 0]),
    # 0.2: cap² = (0.6 − 0.0498) / 2, cap = 0.5245; bounds 0.59185 and 1.68962.
    ("m2po", {"moment": 0.2}, {}, -1.25 - 2 * 1.68962 + 0.59185, [1, 0, 0]),
    ("m2po", {"moment": 1.0}, {}, -1.25 - 3.6 + 0.5, [1, 1, 1]),
    # q = |ln 1.8|; |ln 0.5| lies beyond: the kernel is 1 / (1 + 0.17926²) = 0.96887.
    ("sat", {"quantile": 0.5}, {}, -1.25 - 2.56 + 1 - 0.2 * 0.968867, [1, 0, 0]),
    ("sat", {}, {}, -1.25 - 2.56 + 0.8, [1, 0, 0]),
    ("sao", {}, {}, -1.25 * LOG_NEW[0] - 3.6 * LOG_NEW[1], [1, 1, 0]),
    ("sao", {"low": 0.8, "high": 0.5}, {}, -1.25 * LOG_NEW[0] + 0.5 * LOG_NEW[2], [1, 0, 1]),
    ("vtrace", {}, {}, -LOG_NEW[0] - 2 * LOG_NEW[1] + 0.5 * LOG_NEW[2], [1, 1, 1]),
    # new − (p new + (1 − p) log(1 − e^new)) = 0, ½ ln 9, −0.8 ln 9.
    ("klpo", {"beta": 0.0}, {}, -1.8 * math.log(9), [1, 1, 1]),
    (
        "klpo",
        {"beta": 0.5},
        {},
        -(2 - MOVED[1] / 2) * 0.5 * math.log(9) + (-1 - MOVED[2] / 2) * 0.8 * math.log(9),
        [1, 1, 1],
    ),
    (
        "klpo",
        {"beta": 0.0, "draws": 2},
        {"others": OTHERS},
        -sum(a * (n - sum(OTHER_LOGS) / 2) for a, n in zip(ADVANTAGE, LOG_NEW, strict=True)),
        [1, 1, 1],
    ),
    (
        "klpo",
        {"beta": 1.0, "anchor": "reference"},
        {"reference": NEW},
        -1.8 * math.log(9),
        [1, 1, 1],
    ),
    ("opd", {}, TEACHER, -1.25 * GAP[0] * LOG_NEW[0] - 0.5 * GAP[2] * LOG_NEW[2], [1, 1, 1]),
    # A from the sampler: teacher / behaviour = 0.625, 1.8, 2.
    (
        "opd",
        {"stale": True},
        TEACHER,
        -1.25 * math.log(0.625) * LOG_NEW[0] - 1.8 * math.log(1.8) * LOG_NEW[1] - 0.5 * math.log(2) * LOG_NEW[2],
        [1, 1, 1],
    ),
    # PPO's clip: A = ln ½ with ρ = 1.25 unclipped; A = 0; A = ln 4 with ρ = 0.5 unclipped.
    ("opd", {"clip": True}, TEACHER, -1.25 * GAP[0] - 0.5 * GAP[2], [1, 1, 1]),
    # Two draws: ρ = 1 and ½, A = ln ½ and ln 2; the mean, thrice.
    (
        "opd",
        {"actions": "drawn", "count": 2},
        {**TEACHER, "others": OTHERS},
        -3 * (math.log(0.5) * OTHER_LOGS[0] + 0.5 * math.log(2) * OTHER_LOGS[1]) / 2,
        [1, 1, 1],
    ),
    (
        "opd",
        {"actions": "top_k", "count": 2},
        {**TEACHER, "others": OTHERS},
        3 * (0.5 * math.log(2) - 0.25 * math.log(2)),
        [1, 1, 1],
    ),
    ("opd", {"actions": "teacher", "count": 2}, {**TEACHER, "others": OTHERS}, -3 * sum(OTHER_LOGS) / 2, [1, 1, 1]),
]


@pytest.mark.parametrize(("name", "params", "extra", "total", "kept"), TABLE)
def test_by_hand(name, params, extra, total, kept):
    output = make_loss(name, **params)(given(NEW, BEHAVIOUR, ADVANTAGE, **extra))
    assert float(output.loss.detach()) == pytest.approx(total / 3, abs=2e-6)
    assert output.kept_BT[0].int().tolist() == kept
    assert float(output.loss_BT.sum()) == pytest.approx(total / 3, abs=2e-6)


def test_the_table_leaves_none_out():
    assert {row[0] for row in TABLE} == set(LOSSES)


def test_the_ceiling_bounds_what_ppo_leaves_unbounded():
    """ρ = 9 with A = −1: PPO's loss is 9, and its gradient too; truncated at 4 it is 4 without a gradient."""
    assert float(make_loss("ppo")(given([0.9], [0.1], [-1.0])).loss.detach()) == pytest.approx(9.0, rel=1e-5)
    for name in ("async_ppo", "two_sided"):
        inputs = given([0.9], [0.1], [-1.0])
        output = make_loss(name)(inputs)
        assert float(output.loss.detach()) == pytest.approx(4.0)
        assert output.metrics["ratio_truncated"] == 1.0
        output.loss.backward()
        assert inputs.new_BT.grad.tolist() == [[0.0]]


@pytest.mark.parametrize(("name", "params"), [("cispo", {}), ("dppo", {}), ("sao", {}), ("vtrace", {"cap": 5.0})])
def test_weights_have_no_gradient_of_their_own(name, params):
    """d(−sg(ρ) A new) / d new = −ρ A = −1.25, where −ρ A differentiated twice over would give more."""
    inputs = given([0.5], [0.4], [1.0])
    make_loss(name, **params)(inputs).loss.backward()
    assert inputs.new_BT.grad.tolist()[0] == pytest.approx([-1.25])


def test_the_completions_ratio_moves_all_its_tokens():
    inputs = given([0.5, 0.5], [0.5, 0.5], [1.0, 1.0])
    make_loss("gspo")(inputs).loss.backward()
    assert inputs.new_BT.grad.tolist()[0] == pytest.approx([-0.5, -0.5])


def test_an_exact_gradient_of_the_reverse_kl_over_a_set():
    """d/d new Σ p (log p − log q) = p (log p − log q + 1)."""
    inputs = given([0.5], [0.5], [0.0], teacher=[0.5], others=([[0.5, 0.25]], [[0.5, 0.25]], [[0.25, 0.5]]))
    make_loss("opd", actions="top_k", count=2)(inputs).loss.backward()
    assert inputs.others.new_BTM.grad[0, 0].tolist() == pytest.approx(
        [0.5 * (math.log(2) + 1), 0.25 * (1 - math.log(2))]
    )

"""Metrics by hand, and the silent bug that they must reveal."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.losses import LossInputs, make_loss
from trainer.metrics import StepTokens, k3, loss_shares, step_metrics


def columns(new, old, **changes):
    new, old = torch.tensor(new), torch.tensor(old)
    given = {
        "new": new,
        "old": old,
        "behaviour": old,
        "advantage": torch.ones_like(new),
        "staleness": torch.zeros(new.shape, dtype=torch.long),
        "kept": torch.ones(new.shape, dtype=torch.bool),
        "entropy": torch.zeros_like(new),
    }
    given |= {name: torch.tensor(value) for name, value in changes.items()}
    return {"fresh": given["staleness"] == 0, **given}


def test_values_by_hand():
    """ρ = 2 and 1/2: k3 = 1 − ln 2 and −1/2 + ln 2."""
    metrics = step_metrics(
        **columns(
            [math.log(0.4), math.log(0.1)],
            [math.log(0.2), math.log(0.2)],
            staleness=[0, 3],
            kept=[True, False],
            advantage=[1.0, -1.0],
            behaviour=[math.log(0.2), math.log(0.1)],
        )
    )
    expected = {
        "approx_kl_fresh": 1 - math.log(2),
        "approx_kl_stale": -0.5 + math.log(2),
        "approx_kl": 0.25,
        "cut_fraction": 0.5,
        "cut_fraction_positive": 0.0,
        "cut_fraction_negative": 1.0,
        "staleness_mean": 1.5,
        "staleness_max": 3.0,
        "importance_mean": 1.25,
        "importance_std": 0.75,
        "importance_max": 2.0,
        "effective_sample_size": 2.5**2 / (2 * 4.25),
        "chi_squared": (1.0 + 0.25) / 2,
        "engine_kl": (1 - math.log(2)) / 2,
        "engine_gap_max": math.log(2),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_k3_is_not_capped_where_the_ratio_of_a_loss_would_be():
    assert float(k3(torch.tensor(-1.0), torch.tensor(-6.0))) == pytest.approx(math.exp(5) - 1 - 5)


def test_log_probs_of_other_numerics_show_as_kl_on_fresh_tokens():
    """`old` taken from an engine with noise of 0.25 nats: KL ≈ 0.03 with no staleness at all; trusted `old` shows 0."""
    generator = torch.Generator().manual_seed(0)
    trusted = -torch.rand(4000, generator=generator) - 0.5
    engine = trusted + 0.25 * torch.randn(4000, generator=generator)
    wrong = step_metrics(**columns(trusted.tolist(), engine.tolist()))
    right = step_metrics(**columns(trusted.tolist(), trusted.tolist(), behaviour=engine.tolist()))
    assert 0.02 < wrong["approx_kl_fresh"] < 0.045
    assert wrong["approx_kl_stale"] == 0.0
    assert right["approx_kl_fresh"] == 0.0
    assert 0.02 < right["engine_kl"] < 0.045


def test_what_the_loss_is_fed_shows_apart_from_how_far_the_policy_moved():
    """The silent bug itself: trusted values show no movement, the loss all the same takes ratios of e^±0.25."""
    generator = torch.Generator().manual_seed(0)
    trusted = -torch.rand(4000, generator=generator) - 0.5
    engine = trusted + 0.25 * torch.randn(4000, generator=generator)
    metrics = step_metrics(**columns(trusted.tolist(), trusted.tolist()), against=engine)
    assert metrics["approx_kl_fresh"] == 0.0
    assert 0.02 < metrics["loss_kl_fresh"] < 0.045


def test_loss_shares_by_staleness():
    shares = loss_shares(torch.tensor([1.0, 1.0, 2.0, 4.0]), torch.tensor([0, 3, 4, 100]))
    assert shares == pytest.approx({"loss_share/0": 1 / 8, "loss_share/3-4": 3 / 8, "loss_share/9+": 0.5})
    assert loss_shares(torch.zeros(1), torch.zeros(1)) == {"loss_share/0": 0.0}


def test_only_masked_tokens_count_and_microbatches_are_joined():
    mask = torch.tensor([[True, False]])
    value = torch.tensor([[-1.0, math.nan]])
    inputs = LossInputs(value, value, value, torch.ones(1, 2), mask, torch.tensor([[2, 99]]))
    tokens = StepTokens()
    assert tokens.metrics() == {}
    for _ in range(3):
        tokens.add(inputs, make_loss("ipo")(inputs), torch.tensor([[0.5, math.nan]]))
    metrics = tokens.metrics()
    assert metrics["tokens"] == 3.0
    assert metrics["staleness_max"] == 2.0
    assert metrics["entropy"] == 0.5
    assert metrics["effective_sample_size"] == 1.0


def test_no_tokens_give_no_numbers():
    empty = columns([], [], kept=[], staleness=[])
    assert step_metrics(**empty) == {"tokens": 0.0}

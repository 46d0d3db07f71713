"""Advantages per token by hand."""

from __future__ import annotations

import pytest

from trainer.returns import gae, length_lambda


def test_gae_by_hand():
    """V = ½, ¼: δ = −¼ and ¾; λ = ½ carries half of the last back."""
    assert gae(1.0, [0.5, 0.25], 0.5) == pytest.approx([-0.25 + 0.375, 0.75])
    assert gae(1.0, [0.5, 0.25], 0.0) == pytest.approx([-0.25, 0.75])
    assert gae(1.0, [0.5, 0.25], 1.0) == pytest.approx([0.5, 0.75]), "λ = 1 is R − V"
    assert gae(1.0, [], 1.0) == []


def test_what_was_cut_off_is_bootstrapped_from_its_last_value():
    assert gae(0.0, [0.5, 0.25], 1.0, ended=False) == pytest.approx([-0.25, 0.0])


def test_lambda_looks_further_in_longer_completions():
    assert [length_lambda(length) for length in (1, 2, 100)] == pytest.approx([1 / 3, 2 / 3, 1 - 1 / 150])
    assert length_lambda(0) == pytest.approx(1 / 3)

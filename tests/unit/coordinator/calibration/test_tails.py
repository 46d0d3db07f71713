"""Tails against distributions whose quantiles are known, and the bound on false bans against its own definition."""

import numpy as np
import pytest

from coordinator.calibration.tails import fit_tail, poisson_at_least, strike_probability


@pytest.mark.parametrize("max_strikes", [1, 3, 10])
def test_the_bound_on_false_bans_is_met_and_not_wasted(max_strikes: int) -> None:
    probability = strike_probability(false_bans=1e-3, rollouts=1e5, max_strikes=max_strikes)
    assert poisson_at_least(max_strikes, probability * 1e5) <= 1e-3
    assert poisson_at_least(max_strikes, probability * 1e5 * 1.01) > 1e-3


def test_poisson_against_its_known_values() -> None:
    assert poisson_at_least(0, 2.0) == 1.0
    assert poisson_at_least(1, 2.0) == pytest.approx(1 - np.exp(-2))
    assert poisson_at_least(3, 2.0) == pytest.approx(1 - 5 * np.exp(-2))
    assert poisson_at_least(1, 0.0) == 0.0


@pytest.mark.parametrize("bad", [{"false_bans": 0.0}, {"rollouts": 0.0}, {"max_strikes": 0}])
def test_a_bound_that_means_nothing_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="false_bans must be"):
        strike_probability(**{"false_bans": 1e-3, "rollouts": 1e5, "max_strikes": 3, **bad})  # type: ignore[arg-type]


def test_an_exponential_tail_is_extrapolated_near_the_truth() -> None:
    drawn = np.random.default_rng(0).exponential(size=(200, 1000))
    found = np.array([fit_tail(sample).exceeded_with(1e-7) for sample in drawn])
    truth = -np.log(1e-7)
    assert np.median(found) > truth * 0.95, "a shape below 0 counts as 0: errs to the wide side"
    assert np.median(found) < truth * 2.5


def test_a_light_tail_is_never_cut_below_what_an_exponential_one_says() -> None:
    tail = fit_tail(np.random.default_rng(1).uniform(size=2000))
    assert tail.shape == 0.0
    assert tail.exceeded_with(1e-6) > 1.0


def test_a_threshold_is_never_below_the_largest_seen() -> None:
    values = [0.0] * 500 + [9.0]
    tail = fit_tail(values)
    assert tail.exceeded_with(0.5) == 9.0
    assert tail.exceeded_with(1e-6) >= 9.0


def test_equal_values_have_no_tail() -> None:
    assert fit_tail([2.0] * 100).exceeded_with(1e-9) == 2.0


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        fit_tail([])

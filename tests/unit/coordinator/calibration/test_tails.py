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


def test_an_exponential_tail_is_extrapolated_to_the_truth() -> None:
    drawn = np.random.default_rng(0).exponential(size=(200, 1000))
    found = np.array([fit_tail(sample).exceeded_with(1e-7) for sample in drawn])
    assert np.median(found) == pytest.approx(-np.log(1e-7), rel=0.05)


def test_a_lighter_tail_is_extrapolated_to_the_safe_side() -> None:
    drawn = np.abs(np.random.default_rng(1).normal(size=(100, 1000)))
    found = np.array([fit_tail(sample).exceeded_with(1e-7) for sample in drawn])
    assert (found > 5.33).all(), "that is where a normal number's magnitude has one in ten million"


def test_a_heavier_tail_shows_in_the_shape() -> None:
    draw = np.random.default_rng(2)
    assert np.median([fit_tail(draw.pareto(2, 1000)).shape for _ in range(50)]) > 0.3
    assert np.median([fit_tail(draw.uniform(size=1000)).shape for _ in range(50)]) < -0.5


def test_counts_have_a_tail_beyond_their_ties() -> None:
    counts = np.random.default_rng(3).poisson(1.0, 2000)
    assert fit_tail([1.0] * 1990 + [0.0] * 10, unit=1.0).exceeded_with(1e-7) > 2.0
    assert fit_tail(counts, unit=1.0).exceeded_with(1e-7) > 10.0, "a Poisson count of mean 1 reaches 10 that often"


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

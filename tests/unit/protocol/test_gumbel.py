"""The noise is the GPU kernel's; the sieves of `candidates` never change a winner or a margin."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import gumbel

ROWS = json.loads((Path(__file__).parents[2] / "data" / "gumbel_vectors.json").read_text())["rows"]
SEED = 2**62 + 12345


def all_scores(logits: np.ndarray, seed: int, position: int, temperature: float) -> np.ndarray:
    """Every token's score, without any sieve."""
    scaled = logits.astype(np.float32) / np.float32(temperature)
    return scaled + gumbel.noise(seed, position, np.arange(logits.size))


@pytest.mark.parametrize("row", ROWS)
def test_noise_equals_the_gpu_kernels(row: dict) -> None:
    assert int(gumbel.uniform_hash(row["seed"], row["pos"], row["token"])) == row["hash"]
    assert float(gumbel.noise(row["seed"], row["pos"], row["token"])) == pytest.approx(row["gumbel"], abs=1e-5)


def test_seeds_positions_and_ids_broadcast() -> None:
    seeds = [row["seed"] for row in ROWS]
    positions = np.array([row["pos"] for row in ROWS])
    tokens = np.array([row["token"] for row in ROWS])
    assert gumbel.uniform_hash(seeds, positions, tokens).tolist() == [row["hash"] for row in ROWS]
    table = gumbel.noise(SEED, np.arange(3)[:, None], np.arange(5))
    assert table.shape == (3, 5)
    assert table[2, 4] == gumbel.noise(SEED, 2, 4)


def test_noise_is_bounded_and_distributed_as_gumbel() -> None:
    sample = gumbel.noise(SEED, 3, np.arange(200_000))
    assert sample.max() < gumbel.GUMBEL_MAX
    assert sample.mean() == pytest.approx(0.5772, abs=0.01)
    assert sample.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    assert -np.log(-np.log1p(-(0.5) * 2.0**-32)) < gumbel.GUMBEL_MAX


@given(
    vocabulary=st.sampled_from([1, 2, 63, 64, 65, 1000]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=80, deadline=None)
def test_select_equals_the_argmax_over_all(vocabulary: int, spread: float, temperature: float, seed: int) -> None:
    logits = (np.random.default_rng(seed).normal(size=vocabulary) * spread).astype(np.float32)
    expected = all_scores(logits, seed, 17, temperature).argmax()
    assert gumbel.select(logits, seed, 17, temperature) == expected


def test_margins_equal_those_over_all_tokens() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(40, 5000)) * 4).astype(np.float32)
    tokens = rng.integers(0, 5000, 40)
    tokens[:20] = [gumbel.select(row, SEED, 100 + t, 0.7) for t, row in enumerate(logits[:20])]
    margins = gumbel.margins(logits, seed=SEED, first_position=100, token_ids_T=tokens, temperature=0.7)
    scores = [all_scores(row, SEED, 100 + t, 0.7) for t, row in enumerate(logits)]
    assert margins == pytest.approx([row.max() - row[token] for row, token in zip(scores, tokens, strict=True)])
    assert (margins[:20] == 0).all()
    assert (margins[20:] > 0).sum() > 15


def test_batched_winners_use_each_rows_own_seed_position_and_temperature() -> None:
    rng = np.random.default_rng(4)
    logits = (rng.normal(size=(6, 700)) * 3).astype(np.float32)
    seeds = [0, 1, 2**31, 2**63 - 1, SEED, SEED]
    positions, temperatures = [0, 5, 9, 8191, 40000, 40001], [0.5, 1.0, 1.5, 2.0, 0.7, 0.7]
    winners = gumbel.select_batch(logits, seeds, positions, temperatures)
    single = [
        gumbel.select(row, seed, position, temperature)
        for row, seed, position, temperature in zip(logits, seeds, positions, temperatures, strict=True)
    ]
    assert winners.tolist() == single


def test_blocks_of_rows_do_not_change_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(5).normal(size=(9, 100)).astype(np.float32)
    arguments = {"seed": 7, "first_position": 3, "token_ids_T": [4] * 9, "temperature": 1.0}
    whole = gumbel.margins(logits, **arguments)
    monkeypatch.setattr(gumbel, "_BLOCK_NUMBERS", 200)
    assert gumbel.margins(logits, **arguments).tolist() == whole.tolist()


def test_a_wrong_seed_shows() -> None:
    logits = (np.random.default_rng(6).normal(size=(200, 300)) * 2).astype(np.float32)
    tokens = gumbel.select_batch(logits, [SEED] * 200, np.arange(200), np.ones(200))
    other = gumbel.margins(logits, seed=SEED + 1, first_position=0, token_ids_T=tokens, temperature=1.0)
    assert other.mean() > 1.0


def test_masked_tokens_never_win_and_lose_infinitely() -> None:
    logits = np.full((1, 100), -np.inf, np.float32)
    logits[0, 41] = 1.0
    assert gumbel.select(logits[0], 1, 2, 1.0) == 41
    assert gumbel.margins(logits, seed=1, first_position=2, token_ids_T=[3], temperature=1.0)[0] == np.inf


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_logits_without_a_winner_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        gumbel.select(np.full(80, value, np.float32), 1, 2, 1.0)


@pytest.mark.parametrize("tokens", [[0, 1], [0, 1, 10], [0, -1, 2]])
def test_margins_refuse_what_does_not_fit(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        gumbel.margins(np.zeros((3, 10), np.float32), seed=1, first_position=0, token_ids_T=tokens, temperature=1.0)


def test_no_tokens_no_margins() -> None:
    empty = gumbel.margins(np.zeros((0, 10), np.float32), seed=1, first_position=0, token_ids_T=[], temperature=1.0)
    assert empty.shape == (0,)

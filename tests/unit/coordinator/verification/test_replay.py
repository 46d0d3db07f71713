"""The tensor replay against protocol.gumbel and the GPU kernel's vectors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.verification.pooled import NEAR_TIE_NATS
from coordinator.verification.replay import gumbel, replay
from protocol.gumbel import margins, noise

VECTORS = Path(__file__).parents[3] / "data" / "gumbel_vectors.json"


def test_noise_equals_the_gpu_kernels_vectors() -> None:
    rows = json.loads(VECTORS.read_text())["rows"]
    ours = gumbel(*(torch.tensor([row[name] for row in rows]) for name in ("seed", "pos", "token")))
    np.testing.assert_allclose(ours.numpy(), [row["gumbel"] for row in rows], atol=1e-5)


def test_noise_equals_the_protocols_bit_for_bit() -> None:
    draw = np.random.default_rng(0)
    seeds, positions, tokens = (
        draw.integers(0, 2**63 - 1, 500),
        draw.integers(0, 2**31, 500),
        draw.integers(0, 2**18, 500),
    )
    ours = gumbel(torch.from_numpy(seeds), torch.from_numpy(positions), torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(ours, noise(seeds, positions, tokens), rtol=1e-12)


@pytest.mark.parametrize("vocabulary", [3, 260, 50_000])
@pytest.mark.parametrize("spread", [0.1, 2.0, 12.0])
def test_margins_and_winners_equal_the_exhaustive_ones(vocabulary: int, spread: float) -> None:
    count, seed, first = 12, 2**62 + 5, 7
    torch.manual_seed(vocabulary)
    logits_NV = spread * torch.randn(count, vocabulary)
    scores_NV = logits_NV.log_softmax(-1)
    positions_N = torch.arange(first, first + count)
    noisy_NV = scores_NV.double().numpy() + np.stack([noise(seed, int(p), np.arange(vocabulary)) for p in positions_N])
    winners = noisy_NV.argmax(1)
    for tokens_N in (torch.from_numpy(winners), torch.randint(0, vocabulary, (count,))):
        found = replay(
            scores_NV, scores_NV.exp(), seeds_N=torch.full((count,), seed), positions_N=positions_N, tokens_N=tokens_N
        )
        expected = margins(
            logits_NV.numpy(), seed=seed, first_position=first, token_ids_T=tokens_N.numpy(), temperature=1.0
        )
        np.testing.assert_array_equal(found.winners_N.numpy(), winners)
        np.testing.assert_allclose(found.margins_N.numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("spread", [0.05, 2.0, 12.0])
def test_near_ties_equal_the_exhaustive_ones(spread: float) -> None:
    count, vocabulary, seed = 400, 500, 77
    torch.manual_seed(1)
    scores_NV = (spread * torch.randn(count, vocabulary)).log_softmax(-1)
    noisy_NV = scores_NV.double().numpy() + np.stack([noise(seed, p, np.arange(vocabulary)) for p in range(count)])
    best_two_N2 = np.sort(noisy_NV, axis=1)[:, -2:]
    near = best_two_N2[:, 1] - best_two_N2[:, 0] <= NEAR_TIE_NATS
    for tokens_N in (torch.from_numpy(noisy_NV.argmax(1)), torch.randint(0, vocabulary, (count,))):
        found = replay(
            scores_NV,
            scores_NV.exp(),
            seeds_N=torch.full((count,), seed),
            positions_N=torch.arange(count),
            tokens_N=tokens_N,
        )
        np.testing.assert_array_equal(found.near_N.numpy(), near)
    assert near.any() and not near.all()


def test_the_selected_token_has_margin_zero() -> None:
    scores_NV = torch.randn(40, 300).log_softmax(-1)
    fixed = {"seeds_N": torch.arange(40) << 33, "positions_N": torch.arange(40)}
    winners_N = replay(scores_NV, scores_NV.exp(), tokens_N=torch.zeros(40, dtype=torch.int64), **fixed).winners_N
    again = replay(scores_NV, scores_NV.exp(), tokens_N=winners_N, **fixed)
    assert float(again.margins_N.abs().max()) == 0.0

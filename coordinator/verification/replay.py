"""Seed replay on tensors: which token the issued seed selects, and by how much the claimed token loses to it.

The rule is `protocol.gumbel`'s: token = argmax_i(logits_i / T + g(seed, position, i)), g = -ln(-ln(1 - u)), u from a
32-bit hash. This module computes the same for many positions at once, on any device, and needs logarithms only for the
few tokens that can win: since g <= -ln(u), token i can reach a noisy score b only if u <= exp(score_i - b). The better
of the claimed and the likeliest token's noisy scores is such a b, so one integer hash and one comparison per token
leave about one candidate per position; those are computed in float64. The cut is exact: it never drops the winner, nor
who comes so near to it that it is a near tie.

Shapes: N positions, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coordinator.verification.pooled import NEAR_TIE_NATS

_CUT_SLACK = 1.001  # far above the rounding of the float32 comparison and of the 24 bits it looks at
_BLOCK_ELEMENTS = 1 << 18  # hashed at once: integer temporaries that stay in a CPU's cache


@dataclass(frozen=True, slots=True)
class Replay:
    """`margins_N` float32 nats, >= 0; 0 where the claimed token is the selected one. `winners_N`: the selected ids.
    `near_N`: whether the second best is within NEAR_TIE_NATS of the best."""

    margins_N: torch.Tensor
    winners_N: torch.Tensor
    near_N: torch.Tensor


def replay(
    scores_NV: torch.Tensor,
    probs_NV: torch.Tensor,
    *,
    seeds_N: torch.Tensor,
    positions_N: torch.Tensor,
    tokens_N: torch.Tensor,
) -> Replay:
    """Replay the draw at N positions.

    `scores_NV`: float32 log-probabilities of the sampled distribution, `probs_NV` their exponentials.
    `seeds_N`, `positions_N`, `tokens_N`: int64; the position is that of the input token whose logits these are, in
    the whole sequence.
    """
    claimed_N = _noisy(scores_NV, seeds_N, positions_N, tokens_N)
    likeliest_N = scores_NV.argmax(dim=-1)
    rival_N = _noisy(scores_NV, seeds_N, positions_N, likeliest_N)
    best_N = torch.maximum(claimed_N, rival_N)
    winners_N = torch.where(rival_N > claimed_N, likeliest_N, tokens_N)
    rows_C, ids_C = _candidates(probs_NV, best_N - NEAR_TIE_NATS, _prefix_hash(seeds_N, positions_N))
    noisy_C = scores_NV[rows_C, ids_C].double() + gumbel(seeds_N[rows_C], positions_N[rows_C], ids_C)
    best_N.scatter_reduce_(0, rows_C, noisy_C, reduce="amax")
    wins_C = noisy_C >= best_N[rows_C]
    winners_N[rows_C[wins_C]] = ids_C[wins_C]
    behind_C = noisy_C - best_N[rows_C]
    near_N = torch.zeros_like(tokens_N, dtype=torch.bool)
    near_N[rows_C[(behind_C >= -NEAR_TIE_NATS) & ~wins_C]] = True
    return Replay((best_N - claimed_N).float(), winners_N, near_N)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Float64 noise of `protocol.gumbel`, elementwise over int64 tensors of one shape."""
    hashed = _finish(_prefix_hash(seeds, positions), _mixed_word(token_ids.int()))
    uniform = ((hashed.long() & 0xFFFFFFFF).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def _noisy(
    scores_NV: torch.Tensor, seeds_N: torch.Tensor, positions_N: torch.Tensor, tokens_N: torch.Tensor
) -> torch.Tensor:
    picked_N = scores_NV.gather(1, tokens_N[:, None])[:, 0]
    return picked_N.double() + gumbel(seeds_N, positions_N, tokens_N)


def _candidates(
    probs_NV: torch.Tensor, score_N: torch.Tensor, prefix_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and token of every candidate whose noise can lift it to that score of its row."""
    words_V = _mixed_word(torch.arange(probs_NV.shape[1], dtype=torch.int32, device=probs_NV.device))
    limit_N = (torch.exp(-score_N) * (_CUT_SLACK * 2.0**24)).float()
    rows_per_block = max(1, _BLOCK_ELEMENTS // probs_NV.shape[1])
    found = []
    for at in range(0, len(probs_NV), rows_per_block):
        block = slice(at, at + rows_per_block)
        top_bits_NV = _finish(prefix_N[block, None], words_V).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)
        reachable_NV = top_bits_NV <= probs_NV[block] * limit_N[block, None]
        rows_C, ids_C = reachable_NV.nonzero(as_tuple=True)
        found.append((rows_C + at, ids_C))
    return torch.cat([rows for rows, _ in found]), torch.cat([ids for _, ids in found])


# MurmurHash3_x86_32 over four little-endian words. In int32, whose products and left shifts wrap as uint32's do;
# right shifts are arithmetic there, so the sign bits that they draw in are masked out. The token id is the last word:
# what comes before it is hashed once per position, what depends on it alone once per token.


def _prefix_hash(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    state = torch.zeros_like(seeds, dtype=torch.int32)
    for word in (seeds, seeds >> 32, positions):
        state = _absorb(state, _mixed_word(_low_word(word)))
    return state


def _finish(prefix: torch.Tensor, mixed_word: torch.Tensor) -> torch.Tensor:
    state = _absorb(prefix, mixed_word).bitwise_xor_(16)
    state = _xor_shift(state, 16).mul_(_signed(0x85EBCA6B))
    state = _xor_shift(state, 13).mul_(_signed(0xC2B2AE35))
    return _xor_shift(state, 16)


def _absorb(state: torch.Tensor, mixed_word: torch.Tensor) -> torch.Tensor:
    return _rotate_left(state ^ mixed_word, 13).mul_(5).add_(_signed(0xE6546B64))


def _mixed_word(word: torch.Tensor) -> torch.Tensor:
    return _rotate_left(word * _signed(0xCC9E2D51), 15).mul_(_signed(0x1B873593))


def _rotate_left(value: torch.Tensor, bits: int) -> torch.Tensor:
    low = (value >> (32 - bits)).bitwise_and_((1 << bits) - 1)
    return (value << bits).bitwise_or_(low)


def _xor_shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    return value.bitwise_xor_((value >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _low_word(value: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 values, as int32 with the same bits."""
    low = value & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).int()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word

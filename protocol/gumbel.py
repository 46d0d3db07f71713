"""Seeded sampling that anybody can replay: which token does the issued seed select, and by how much did another lose?

token = argmax_i( logits_i / T + g(seed, pos, i) ),  g = -ln(-ln(1 - u)),  u = (h + ½) · 2⁻³²,
h = MurmurHash3_x86_32(seed_lo32 ‖ seed_hi32 ‖ pos_lo32 ‖ i) over 16 little-endian bytes with hash seed 0. `pos` is the
position, in the sequence, of the input token whose logits these are; i is the token id. This is what vLLM's GPU sampler
computes for requests with a `seed` (vllm/v1/worker/gpu/sample/gumbel.py), there in float32.

No noise exceeds GUMBEL_MAX, so once some score of a row is known, only tokens within GUMBEL_MAX of it can win: noise is
computed for those alone, and the result is still exact.

Shapes: B rows of a batch, T tokens, V vocabulary, M candidates of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

GUMBEL_MAX = 22.88  # u ≥ 2⁻³³, and -ln(-ln(1 - 2⁻³³)) = 22.874
PILOTS = 64  # tokens of a row whose scores bound its best one from below
_BLOCK_NUMBERS = 1 << 19  # logits looked at together: the scratch arrays then stay in the cache

Floats = NDArray[np.floating]


class Candidates(NamedTuple):
    """All tokens that could win their row, ordered by row, then id. `starts`: where each row begins."""

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    scores: NDArray[np.float64]
    starts: NDArray[np.int64]


def noise(seed: ArrayLike, position: ArrayLike, token_ids: ArrayLike) -> NDArray[np.float64]:
    """g(seed, position, token id); the three broadcast. Seeds are taken modulo 2⁶⁴, positions and ids modulo 2³²."""
    return _gumbel(uniform_hash(seed, position, token_ids))


def uniform_hash(seed: ArrayLike, position: ArrayLike, token_ids: ArrayLike) -> NDArray[np.uint32]:
    """h of the formula above: the 32 random bits behind one noise."""
    return _finish(_prefix(_uint64(seed), _uint64(position)), _low32(_uint64(token_ids)))


def select(logits_V: Floats, seed: int, position: int, temperature: float) -> int:
    """The token id that wins; the lowest of equal ones."""
    return int(select_batch(np.asarray(logits_V)[None], [seed], [position], [temperature])[0])


def select_batch(
    logits_BV: Floats, seeds_B: Sequence[int], positions_B: ArrayLike, temperatures_B: ArrayLike
) -> NDArray[np.int64]:
    """The winners of B rows, each with its own seed, position and temperature."""
    found = candidates(logits_BV, seeds_B, positions_B, temperatures_B)
    best_B = np.maximum.reduceat(found.scores, found.starts)
    winners = np.flatnonzero(found.scores == best_B[found.rows])
    _, first = np.unique(found.rows[winners], return_index=True)
    return found.ids[winners[first]]


def candidates(
    logits_BV: Floats, seeds_B: Sequence[int], positions_B: ArrayLike, temperatures_B: ArrayLike
) -> Candidates:
    """Every token that could win its row, with its exact score logits / T + g."""
    temperatures = np.asarray(temperatures_B, dtype=np.float32).reshape(-1, 1)
    scaled = np.asarray(logits_BV, dtype=np.float32) / temperatures
    prefix_B = _prefix(_uint64(seeds_B), _uint64(positions_B))
    return _candidates(scaled, np.broadcast_to(prefix_B, (len(scaled),)))


def margins(
    logits_TV: NDArray[np.float32],
    *,
    seed: int,
    first_position: int,
    token_ids_T: ArrayLike,
    temperature: float,
) -> NDArray[np.float64]:
    """T numbers ≥ 0: by how much each claimed token loses to the one that the seed selects (0: it is that one).

    Row t are the logits that chose token t, of the input token at `first_position` + t. Raises ValueError for ids
    outside the vocabulary or a wrong number of them.
    """
    logits = np.asarray(logits_TV)
    tokens = np.asarray(token_ids_T, dtype=np.int64)
    if logits.ndim != 2 or tokens.shape != (len(logits),):
        raise ValueError(f"{tokens.size} tokens do not go with logits of shape {logits.shape}")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < logits.shape[1]:
        raise ValueError(f"a token id is outside the vocabulary of {logits.shape[1]}")
    result = np.zeros(len(logits))
    for rows in _row_blocks(*logits.shape):
        positions = np.arange(rows.start, rows.stop, dtype=np.uint64) + np.uint64(first_position)
        prefix = _prefix(_uint64(seed), positions)
        result[rows] = _block_margins(logits[rows], prefix, tokens[rows], temperature)
    return result


def _block_margins(
    logits_BV: Floats, prefix_B: NDArray[np.uint32], tokens_B: NDArray[np.int64], temperature: float
) -> NDArray[np.float64]:
    scaled = np.asarray(logits_BV, dtype=np.float32) / np.float32(temperature)
    found = _candidates(scaled, prefix_B)
    best = np.maximum.reduceat(found.scores, found.starts)
    claimed = scaled[np.arange(len(scaled)), tokens_B] + _gumbel(_finish(prefix_B, tokens_B.astype(np.uint32)))
    margins_B: NDArray[np.float64] = np.maximum(best - claimed, 0.0)
    return margins_B


def _candidates(scaled_BV: NDArray[np.float32], prefix_B: NDArray[np.uint32]) -> Candidates:
    """Two exact sieves: a score can reach the bound b only if s ≥ b - GUMBEL_MAX, and then only if u < exp(s - b).

    (g > b - s means u < 1 - exp(-exp(s - b)), which is less.) The second spares nearly all tokens their logarithms.
    """
    bound_B = _best_pilot(scaled_BV, prefix_B)
    if not np.isfinite(bound_B).all():
        raise ValueError("logits are not finite: the seed selects no token")
    within_BV = scaled_BV >= (bound_B - GUMBEL_MAX).astype(np.float32)[:, None]
    possible = np.flatnonzero(within_BV)
    rows = np.repeat(np.arange(len(scaled_BV)), np.count_nonzero(within_BV, axis=1))
    ids = possible - rows * scaled_BV.shape[1]
    hashes = _finish(prefix_B[rows], ids.astype(np.uint32))
    reach = np.exp(scaled_BV.reshape(-1)[possible] - bound_B.astype(np.float32)[rows])
    # 2⁻³² · h ≤ u; the slack covers float32 rounding here, so that the pilot itself always passes
    kept = np.flatnonzero(hashes.astype(np.float32) * np.float32(2.0**-32) < reach * np.float32(1.001))
    rows, ids = rows[kept], ids[kept]
    scores = scaled_BV[rows, ids] + _gumbel(hashes[kept])
    return Candidates(rows, ids, scores, np.searchsorted(rows, np.arange(len(scaled_BV))))


def _best_pilot(scaled_BV: NDArray[np.float32], prefix_B: NDArray[np.uint32]) -> NDArray[np.float64]:
    """A lower bound of each row's best score: the best among the leaders of PILOTS equal stretches of the vocabulary.

    The overall largest logit is among them (unless it is in the few ids left over), and finding them costs one pass,
    where the exact top 64 would cost a partition. Any tokens would do for exactness.
    """
    batch, vocabulary = scaled_BV.shape
    pilots = min(PILOTS, vocabulary)
    width = vocabulary // pilots
    offsets = scaled_BV[:, : pilots * width].reshape(batch, pilots, width).argmax(axis=2)
    ids = offsets + np.arange(pilots) * width
    scores = np.take_along_axis(scaled_BV, ids, axis=1) + _gumbel(_finish(prefix_B[:, None], ids.astype(np.uint32)))
    best_B: NDArray[np.float64] = scores.max(axis=1)
    return best_B


def _row_blocks(rows: int, vocabulary: int) -> Iterator[slice]:
    step = max(1, _BLOCK_NUMBERS // max(1, vocabulary))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _uint64(values: ArrayLike) -> NDArray[np.uint64]:
    """Python ints of any size and integer arrays alike, modulo 2⁶⁴ (a list that mixes small and large ints would go
    through float64 and lose bits)."""
    if isinstance(values, np.ndarray):
        return values.astype(np.uint64)
    array = np.asarray(values, dtype=object)
    return (array % (1 << 64)).astype(np.uint64) if array.ndim else np.asarray(int(array[()]) % (1 << 64), np.uint64)


def _prefix(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The state of the hash before the token id goes in: one per row."""
    state = np.zeros(np.broadcast(seeds, positions).shape, dtype=np.uint32)
    for word in (seeds, seeds >> np.uint64(32), positions):
        state = _mix(state, _low32(word))
    return state


def _low32(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    return (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _mix(state: NDArray[np.uint32], word: NDArray[np.uint32]) -> NDArray[np.uint32]:
    with np.errstate(over="ignore"):
        key = word * np.uint32(0xCC9E2D51)
        key = _rotate(key, 15) * np.uint32(0x1B873593)
        return _rotate(state ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotate(value: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return value << np.uint32(bits) | value >> np.uint32(32 - bits)


def _finish(prefix: NDArray[np.uint32], token_ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    with np.errstate(over="ignore"):
        state = _mix(prefix, token_ids) ^ np.uint32(16)  # 16: the number of bytes hashed
        state = (state ^ state >> np.uint32(16)) * np.uint32(0x85EBCA6B)
        state = (state ^ state >> np.uint32(13)) * np.uint32(0xC2B2AE35)
        return state ^ state >> np.uint32(16)


def _gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    noise_M: NDArray[np.float64] = -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-32))
    return noise_M

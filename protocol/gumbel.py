"""Seeded sampling that anybody can replay: which token does the issued seed select, and by how much did another lose?

token = argmax_i( logits_i / T + g(seed, pos, i) ),  g = -ln(-ln(1 - u)),  u = (h + ½) · 2⁻³²,
h = MurmurHash3_x86_32(seed_lo32 ‖ seed_hi32 ‖ pos_lo32 ‖ i) over 16 little-endian bytes with hash seed 0. `pos` is the
position, in the sequence, of the input token whose logits these are; i is the token id. This is what vLLM's GPU sampler
computes for requests with a `seed` (vllm/v1/worker/gpu/sample/gumbel.py), there in float32.

No noise exceeds GUMBEL_MAX, and a large one is rare: once some score of a row is known, the hash alone tells which few
tokens could beat it, so the logarithms are computed for those only, and the result is still exact.

Shapes: B rows of a batch, T tokens, V vocabulary, M candidates of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

GUMBEL_MAX = 22.88  # u ≥ 2⁻³³, and -ln(-ln(1 - 2⁻³³)) = 22.874
PILOTS = 64  # tokens of a row whose scores bound its best one from below
_BLOCK_NUMBERS = 1 << 17  # logits looked at together: the scratch arrays then stay in the cache

Floats = NDArray[np.floating]


class _Candidates(NamedTuple):
    """All tokens that could win their row (and few others), ordered by row, then id. `starts`: where each row begins."""

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    scores: NDArray[np.float64]
    starts: NDArray[np.int64]


def noise(seed: ArrayLike, position: ArrayLike, token_ids: ArrayLike) -> NDArray[np.float64]:
    """g(seed, position, token id); the three broadcast. Seeds are taken modulo 2⁶⁴, positions and ids modulo 2³²."""
    return _gumbel(uniform_hash(seed, position, token_ids))


def uniform_hash(seed: ArrayLike, position: ArrayLike, token_ids: ArrayLike) -> NDArray[np.uint32]:
    """h of the formula above: the 32 random bits behind one noise."""
    return _finish(_prefix(_uint64(seed), _uint64(position)), _key(_low32(_uint64(token_ids))))


def select(logits_V: Floats, seed: int, position: int, temperature: float) -> int:
    """The token id that wins; the lowest of equal ones."""
    return int(select_batch(np.asarray(logits_V)[None], [seed], [position], [temperature])[0])


def select_batch(
    logits_BV: Floats, seeds_B: Sequence[int] | NDArray[np.uint64], positions_B: ArrayLike, temperatures_B: ArrayLike
) -> NDArray[np.int64]:
    """The winners of B rows, each with its own seed, position and temperature; the lowest id of equal ones."""
    logits = np.asarray(logits_BV)
    temperatures = np.broadcast_to(np.asarray(temperatures_B, dtype=np.float32), (len(logits),))
    prefix_B = np.broadcast_to(_prefix(_uint64(seeds_B), _uint64(positions_B)), (len(logits),))
    winners = np.zeros(len(logits), dtype=np.int64)
    for rows in _row_blocks(*logits.shape):
        scaled = logits[rows].astype(np.float32) / temperatures[rows, None]
        winners[rows] = _winners(_candidates(scaled, prefix_B[rows]))
    return winners


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


def _winners(found: _Candidates) -> NDArray[np.int64]:
    best_B = np.maximum.reduceat(found.scores, found.starts)
    winning = np.flatnonzero(found.scores == best_B[found.rows])
    _, first = np.unique(found.rows[winning], return_index=True)
    return found.ids[winning[first]]


def _block_margins(
    logits_BV: Floats, prefix_B: NDArray[np.uint32], tokens_B: NDArray[np.int64], temperature: float
) -> NDArray[np.float64]:
    scaled = np.asarray(logits_BV, dtype=np.float32) / np.float32(temperature)
    found = _candidates(scaled, prefix_B)
    best = np.maximum.reduceat(found.scores, found.starts)
    claimed = scaled[np.arange(len(scaled)), tokens_B] + _gumbel(_finish(prefix_B, _key(tokens_B.astype(np.uint32))))
    margins_B: NDArray[np.float64] = np.maximum(best - claimed, 0.0)
    return margins_B


def _candidates(scaled_BV: NDArray[np.float32], prefix_B: NDArray[np.uint32]) -> _Candidates:
    """An exact sieve: with the bound b known, a score can reach it only if u < exp(s - b).

    (g > b - s means u < 1 - exp(-exp(s - b)), which is less.) It spares nearly all tokens their logarithms.
    """
    bound_B = _best_pilot(scaled_BV, prefix_B)
    if not np.isfinite(bound_B).all():
        raise ValueError("logits are not finite: the seed selects no token")
    hashes_BV = _finish(prefix_B[:, None], _token_keys(scaled_BV.shape[1]))
    # 2⁻³² · h ≤ u; the slack covers float32 rounding here, so that the pilot itself always passes.
    # Beyond e^88 float32 ends; every hash is below that.
    reach_BV = np.exp(np.minimum(scaled_BV - (bound_B - np.log(1.001 * 2.0**32)).astype(np.float32)[:, None], 88.0))
    kept = np.flatnonzero(hashes_BV < reach_BV)
    rows, ids = np.divmod(kept, scaled_BV.shape[1])
    scores = scaled_BV[rows, ids] + _gumbel(hashes_BV[rows, ids])
    return _Candidates(rows, ids, scores, np.searchsorted(rows, np.arange(len(scaled_BV))))


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
    scores = np.take_along_axis(scaled_BV, ids, axis=1) + _gumbel(
        _finish(prefix_B[:, None], _key(ids.astype(np.uint32)))
    )
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


def _low32(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    return (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _prefix(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The state of the hash before the token id goes in: one per row."""
    state = np.zeros(np.broadcast(seeds, positions).shape, dtype=np.uint32)
    for word in (seeds, seeds >> np.uint64(32), positions):
        state = _mix(state, _key(_low32(word)))
    return state


@lru_cache(maxsize=4)
def _token_keys(vocabulary: int) -> NDArray[np.uint32]:
    keys_V = _key(np.arange(vocabulary, dtype=np.uint32))
    keys_V.setflags(write=False)
    return keys_V


def _key(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A word of input as MurmurHash3 scrambles it before mixing it in."""
    key = np.array(words)
    key *= np.uint32(0xCC9E2D51)
    _rotate(key, 15)
    key *= np.uint32(0x1B873593)
    return key


def _mix(state: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    mixed = np.array(state ^ key)
    _rotate(mixed, 13)
    mixed *= np.uint32(5)
    mixed += np.uint32(0xE6546B64)
    return mixed


def _finish(prefix: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Mix in the last word and avalanche. In place from here on: this runs over whole vocabularies."""
    state = _mix(prefix, key)
    state ^= np.uint32(16)  # the number of bytes hashed
    state ^= state >> np.uint32(16)
    state *= np.uint32(0x85EBCA6B)
    state ^= state >> np.uint32(13)
    state *= np.uint32(0xC2B2AE35)
    state ^= state >> np.uint32(16)
    return state


def _rotate(value: NDArray[np.uint32], bits: int) -> None:
    """Rotate left, in place."""
    high = value >> np.uint32(32 - bits)
    value <<= np.uint32(bits)
    value |= high


def _gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    noise_M: NDArray[np.float64] = -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-32))
    return noise_M

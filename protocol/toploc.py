"""TOPLOC: a 258-byte commitment to the hidden states of up to 32 generated tokens.

Of a chunk of hidden states (rows of the LM head's input, bf16, flattened) the prover takes the k = 128 largest
magnitudes and interpolates the polynomial over GF(65497) through (index mod m, bf16 bits). The verifier takes the top k
of its own hidden states, evaluates the polynomial there and compares sign, exponent and mantissa. Interchangeable with
the published TOPLOC library: a proof is m and then the k coefficients, lowest degree first, 2 bytes big-endian each.

Two things the library leaves open are fixed here. Equal magnitudes: the lower index comes first. A chunk with fewer
than 128 numbers: k is its size.

Shapes: T tokens, C chunks (or the tokens of one chunk in `hidden_bits_CD`), D hidden size, N numbers of a chunk, K = k.
bf16 numbers travel as their bit patterns, np.uint16. Everything is pure; hostile proofs raise ValueError, nothing else.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.rollout import PROOF_CHUNK_TOKENS

TOP_K = 128
CHUNK_TOKENS = PROOF_CHUNK_TOKENS
PRIME = 65497
MODULUS_FLOOR = 32768  # m must be above this
NO_MANTISSA_MATCH = 128.0  # above every possible mantissa error (7 bits): stands for "nothing to compare"

_BATCH = 32  # chunks interpolated at once: their powers, 24 KB each, stay within a cache
_BABY_STEPS = 16
_SHORT = 9  # coefficients of a factor that are multiplied one by one rather than by Fourier transforms
_INVERSE_OF_PRIME = 1.0 / PRIME
_TIES_CONSIDERED = 1024  # of a degenerate chunk, such as all zeros, not every tie is worth looking at

Bits = NDArray[np.uint16]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]  # whole numbers mod PRIME: products and sums of them are exact, and SIMD is fast


@dataclass(frozen=True, slots=True, eq=False)
class Polynomial:
    """A decoded proof. `coefficients`: lowest degree first, each in [0, PRIME)."""

    modulus: int
    coefficients: Ints

    def __call__(self, indices: NDArray[np.integer]) -> Bits:
        """The bf16 bits that the prover claims at these flattened indices."""
        return _evaluate([self], np.asarray(indices, dtype=np.int64)[None])[0].astype(np.uint16)


@dataclass(frozen=True, slots=True)
class ChunkAgreement:
    """How the verifier's top k agree with a proof.

    `compared`: k. `sign_mismatches` is counted over all k. Mantissa errors (units of the last of 7 bits) are over
    positions whose exponents match; NO_MANTISSA_MATCH in both says that no exponent matched.
    """

    compared: int
    exponent_mismatches: int
    sign_mismatches: int
    mantissa_mean: float
    mantissa_median: float


def chunk_k(tokens: int, hidden_size: int) -> int:
    """How many magnitudes a chunk of that many tokens commits to."""
    return min(TOP_K, tokens * hidden_size)


def proof_bytes(k: int) -> int:
    """The exact length of a proof over k magnitudes."""
    return 2 + 2 * k


def top_k_indices(bits_N: Bits, k: int = TOP_K) -> Ints:
    """Ascending indices of the k largest magnitudes of the flattened chunk; of equal ones the lowest indices."""
    above, ties = _top_k_and_ties(_flat(bits_N), k)
    return np.sort(np.concatenate([above, ties[: k - above.size]]))


def encode(indices_K: NDArray[np.integer], bits_K: Bits) -> bytes:
    """The proof that commits to these bits at these distinct flattened indices."""
    return encode_many(np.asarray(indices_K)[None], np.asarray(bits_K)[None])[0]


def encode_many(indices_CK: NDArray[np.integer], bits_CK: Bits) -> tuple[bytes, ...]:
    """`encode` for C chunks of the same k at once, which costs a fraction of C single calls."""
    indices = np.asarray(indices_CK, dtype=np.int64)
    bits = np.asarray(bits_CK, dtype=np.int64)
    if indices.shape != bits.shape or indices.ndim != 2 or indices.shape[1] == 0:
        raise ValueError(f"indices and bits must both be C x K with K > 0, got {indices.shape} and {bits.shape}")
    proofs: list[bytes] = []
    for start in range(0, len(indices), _BATCH):
        proofs.extend(_encode_batch(indices[start : start + _BATCH], bits[start : start + _BATCH]))
    return tuple(proofs)


def decode(proof: bytes, k: int) -> Polynomial:
    """Read a proof over k magnitudes; all checks come before any arithmetic.

    Raises ValueError for a wrong length, a modulus or coefficient out of range, and a degenerate polynomial: one whose
    degree is below k / 2 (zero and constants included). An honest one is that with probability PRIME^(-k/2).
    """
    if k < 1:
        raise ValueError(f"a proof covers at least 1 magnitude, not {k}")
    if len(proof) != proof_bytes(k):
        raise ValueError(f"proof has {len(proof)} bytes; one over {k} magnitudes has {proof_bytes(k)}")
    words = np.frombuffer(proof, dtype=">u2").astype(np.int64)
    modulus, coefficients = int(words[0]), words[1:]
    if not MODULUS_FLOOR < modulus <= PRIME:
        raise ValueError(f"proof modulus {modulus} is outside ({MODULUS_FLOOR}, {PRIME}]")
    if int(coefficients.max()) >= PRIME:
        raise ValueError(f"proof coefficient {int(coefficients.max())} is not below {PRIME}")
    present = np.flatnonzero(coefficients)
    degree = int(present[-1]) if present.size else -1
    if degree < k // 2:
        raise ValueError(f"proof polynomial is degenerate: degree {degree} for {k} magnitudes")
    return Polynomial(modulus, coefficients)


def well_formed(proofs: Sequence[bytes], k: int) -> bool:
    """Whether `decode` takes every one of these proofs over k magnitudes, all checked at once."""
    if k < 1 or any(len(proof) != proof_bytes(k) for proof in proofs):
        return False
    words = np.frombuffer(b"".join(proofs), dtype=">u2").reshape(len(proofs), k + 1)
    moduli, coefficients = words[:, 0], words[:, 1:]
    in_range = (
        bool((moduli > MODULUS_FLOOR).all()) and bool((moduli <= PRIME).all()) and bool((coefficients < PRIME).all())
    )
    return in_range and bool((coefficients[:, k // 2 :] != 0).any(axis=1).all())


def build_proofs(hidden_bits_TD: Bits) -> tuple[bytes, ...]:
    """The ⌈T / 32⌉ proofs of one span: chunks of 32 rows, the last one shorter. T = 0 gives none."""
    if hidden_bits_TD.ndim != 2 or hidden_bits_TD.shape[1] == 0:
        raise ValueError(f"hidden states must be T x D, got {hidden_bits_TD.shape}")
    proofs: list[bytes] = []
    for chunks in _runs_of_equal_k(hidden_bits_TD):
        indices = np.stack([top_k_indices(flat, min(TOP_K, flat.size)) for flat in chunks])
        bits = np.stack([flat[chosen] for flat, chosen in zip(chunks, indices, strict=True)])
        proofs.extend(encode_many(indices, bits))
    return tuple(proofs)


def compare(proof: bytes, hidden_bits_CD: Bits) -> ChunkAgreement:
    """Score a proof against the verifier's own hidden states of that chunk. Raises ValueError as `decode` does.

    Where several magnitudes tie for the last places of the top k, every choice among them is right (the published
    library leaves it to the device), so the one is scored that agrees best.
    """
    return compare_many([proof], [hidden_bits_CD])[0]


def compare_many(proofs: Sequence[bytes], chunks: Sequence[Bits]) -> list[ChunkAgreement]:
    """`compare` for each proof and the hidden states of its chunk, which costs a fraction of single calls."""
    flats = [_flat(chunk) for chunk in chunks]
    if not all(flat.size for flat in flats):
        raise ValueError("cannot compare a proof with an empty chunk")
    agreements: list[ChunkAgreement] = []
    for k, run in itertools.groupby(zip(proofs, flats, strict=True), key=lambda pair: min(TOP_K, pair[1].size)):
        pairs = list(run)
        for start in range(0, len(pairs), _BATCH):
            agreements += _compare_batch(pairs[start : start + _BATCH], k)
    return agreements


def find_modulus(indices_K: NDArray[np.integer]) -> int:
    """The largest m ≤ PRIME, above MODULUS_FLOOR, that keeps the indices distinct. ValueError if there is none."""
    indices = np.asarray(indices_K, dtype=np.int64)
    if int(indices.min()) >= 0 and int(indices.max()) < PRIME and np.unique(indices).size == indices.size:
        return PRIME
    for modulus in range(PRIME, MODULUS_FLOOR, -1):
        if np.unique(indices % modulus).size == indices.size:
            return modulus
    raise ValueError(f"no modulus keeps these {indices.size} indices distinct: are they distinct themselves?")


def _flat(bits: Bits) -> Bits:
    return np.ascontiguousarray(bits, dtype=np.uint16).reshape(-1)


def _top_k_and_ties(flat_N: Bits, k: int) -> tuple[Ints, Ints]:
    """Indices of all magnitudes above the k-th largest (fewer than k), and of all that equal it."""
    if not 0 < k <= flat_N.size:
        raise ValueError(f"cannot take the top {k} of a chunk with {flat_N.size} numbers")
    magnitudes = flat_N & np.uint16(0x7FFF)  # bf16 magnitudes order as their bits do
    likely = np.flatnonzero(magnitudes >= _magnitude_floor(magnitudes, k))
    threshold = np.partition(magnitudes[likely], likely.size - k)[likely.size - k]
    return likely[magnitudes[likely] > threshold], likely[magnitudes[likely] == threshold]


def _magnitude_floor(magnitudes_N: Bits, k: int) -> int:
    """A lower bound of the k-th largest magnitude: the k-th largest among the maxima of 4k disjoint parts. One fast pass."""
    width = magnitudes_N.size // (4 * k)
    if width < 2:
        return 0
    maxima = magnitudes_N[: 4 * k * width].reshape(width, 4 * k).max(axis=0)
    return int(np.partition(maxima, 3 * k)[3 * k])


def _compare_batch(pairs: Sequence[tuple[bytes, Bits]], k: int) -> list[ChunkAgreement]:
    """Of chunks of the same k."""
    decoded = [decode(proof, k) for proof, _ in pairs]
    found = [_top_k_and_ties(flat, k) for _, flat in pairs]
    candidates = [np.concatenate([above, ties[:_TIES_CONSIDERED]]) for above, ties in found]
    sizes_C1 = np.array([[each.size] for each in candidates])
    width = int(sizes_C1.max())
    indices_CW, ours_CW = np.zeros((2, len(pairs), width), dtype=np.int64)
    for row, ((_, flat), chosen) in enumerate(zip(pairs, candidates, strict=True)):
        indices_CW[row, : chosen.size], ours_CW[row, : chosen.size] = chosen, flat[chosen]
    claimed_CW = _evaluate(decoded, indices_CW)
    if width > k:
        above_C1 = np.array([[above.size] for above, _ in found])
        places_W = np.arange(width)
        rank_CW = np.abs(claimed_CW - ours_CW)
        rank_CW[places_W < above_C1] = -1
        rank_CW[places_W >= sizes_C1] = np.iinfo(np.int64).max  # a row holds nothing there: a neighbour has more ties
        best_CK = np.argsort(rank_CW, axis=1, kind="stable")[:, :k]
        ours_CW, claimed_CW = (np.take_along_axis(each, best_CK, axis=1) for each in (ours_CW, claimed_CW))
    return _agreements(ours_CW, claimed_CW)


def _evaluate(polynomials: Sequence[Polynomial], indices_CN: Ints) -> Ints:
    """The bits that each polynomial claims at its row of flattened indices."""
    moduli_C = np.array([each.modulus for each in polynomials])
    coefficients_CK = np.stack([each.coefficients for each in polynomials]).astype(np.float64)
    points_CN = (indices_CN % moduli_C[:, None] % PRIME).astype(np.float64)
    values_CN = _Steps.of(points_CN, coefficients_CK.shape[1]).evaluate(coefficients_CK)
    return values_CN.astype(np.int64) % PRIME


def _agreements(ours_CK: Ints, claimed_CK: Ints) -> list[ChunkAgreement]:
    matches_CK = _exponent(ours_CK) == _exponent(claimed_CK)
    errors_CK = np.abs((ours_CK & 0x7F) - (claimed_CK & 0x7F))
    ordered_CK = np.sort(np.where(matches_CK, errors_CK, PRIME), axis=1)  # those that count come first
    sums_C = np.where(matches_CK, errors_CK, 0).sum(axis=1)
    signs_C = np.count_nonzero((ours_CK ^ claimed_CK) & 0x8000, axis=1)
    compared = ours_CK.shape[1]
    return [
        ChunkAgreement(
            compared=compared,
            exponent_mismatches=compared - count,
            sign_mismatches=int(signs),
            mantissa_mean=float(total / count) if count else NO_MANTISSA_MATCH,
            mantissa_median=float(ordered[count // 2] + ordered[count - count // 2 - 1]) / 2
            if count
            else NO_MANTISSA_MATCH,
        )
        for count, total, signs, ordered in zip(
            matches_CK.sum(axis=1).tolist(), sums_C.tolist(), signs_C, ordered_CK, strict=True
        )
    ]


def _runs_of_equal_k(hidden_bits_TD: Bits) -> Iterator[list[Bits]]:
    """Flattened chunks, in order, in at most two runs: the full ones and the shorter last one."""
    full = len(hidden_bits_TD) // CHUNK_TOKENS * CHUNK_TOKENS
    if full:
        yield list(np.ascontiguousarray(hidden_bits_TD[:full]).reshape(full // CHUNK_TOKENS, -1))
    if full < len(hidden_bits_TD):
        yield [np.ascontiguousarray(hidden_bits_TD[full:]).reshape(-1)]


def _encode_batch(indices_CK: Ints, bits_CK: Ints) -> Iterator[bytes]:
    moduli = _moduli(indices_CK)
    # m = PRIME leaves residues below PRIME already; bits ≥ PRIME are NaNs, which no check would accept anyway.
    coefficients = interpolate(indices_CK % moduli[:, None], bits_CK % PRIME)
    for row in np.concatenate([moduli[:, None], coefficients], axis=1).astype(">u2"):
        yield row.tobytes()


def _moduli(indices_CK: Ints) -> Ints:
    """`find_modulus` of each chunk; nearly always it is PRIME, which one look at all chunks shows."""
    ordered = np.sort(indices_CK, axis=1)
    plain = (ordered[:, 0] >= 0) & (ordered[:, -1] < PRIME) & (np.diff(ordered, axis=1) > 0).all(axis=1)
    return np.array(
        [PRIME if easy else find_modulus(indices) for easy, indices in zip(plain, indices_CK, strict=True)],
        dtype=np.int64,
    )


def interpolate(points_CK: Ints, values_CK: Ints) -> Ints:
    """Coefficients (lowest first) of the C polynomials of degree < K through K distinct points each, over GF(PRIME).

    With M(x) = Π (x - x_i) = Σ c_t x^t and v_i = y_i / M'(x_i), Lagrange's sum Σ v_i M(x) / (x - x_i) has the
    coefficients a_j = Σ_{t>j} c_t S_{t-j-1} with the weighted power sums S_n = Σ v_i x_i^n.
    """
    k = points_CK.shape[1]
    points = points_CK.astype(np.float64)
    steps = _Steps.of(points, k)
    master = _from_roots(points)
    slopes_at_roots = steps.evaluate(_reduced(master[:, 1:] * np.arange(1, k + 1)))
    weights = _reduced(values_CK * _inverses()[slopes_at_roots.astype(np.int64)])
    power_sums = steps.weighted_sums(weights, k)
    # Reversed, the correlation is a plain product: a_j is the coefficient of x^(k-1-j) of it.
    return _multiply(master[:, :0:-1], power_sums)[:, k - 1 :: -1].astype(np.int64) % PRIME


def _reduced(values: Floats) -> Floats:
    """values mod PRIME, within [0, PRIME]: PRIME itself may stand for 0. Exact for whole numbers below 2^50.

    The quotient is a multiple of 1/PRIME and its rounding error below 2^-15 of that, so that floor can only miss an exact
    multiple, by one.
    """
    quotients = values * _INVERSE_OF_PRIME
    np.floor(quotients, out=quotients)
    quotients *= PRIME
    return np.subtract(values, quotients, out=quotients)


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Baby steps x^b (b < 16) and giant steps x^(16 g) of points [..., K]: any power is a product of one of each.

    Sums over both need far fewer products than all powers of x would; each has at most 2^39 in float64: exact.
    """

    baby: Floats  # [..., K, 16]
    giant: Floats  # [..., K, G]

    @classmethod
    def of(cls, points: Floats, count: int) -> _Steps:
        """Enough for the powers below `count`."""
        baby = _powers(points, _BABY_STEPS)
        return cls(baby, _powers(_reduced(baby[..., -1] * points), -(-count // _BABY_STEPS)))

    def evaluate(self, coefficients: Floats) -> Floats:
        """[..., K] values at the points of the polynomials [..., count], lowest coefficient first."""
        inner = _reduced(self.baby @ self._by_steps(coefficients).swapaxes(-1, -2))
        return _reduced(_reduced(self.giant * inner).sum(axis=-1))

    def weighted_sums(self, weights: Floats, count: int) -> Floats:
        """[..., count] sums over the points of weight times x^n, n ascending."""
        sums = _reduced(_reduced(weights[..., None] * self.giant).swapaxes(-1, -2) @ self.baby)
        return sums.reshape(*sums.shape[:-2], -1)[..., :count]

    def _by_steps(self, coefficients: Floats) -> Floats:
        """[..., G, 16], padded with zeros."""
        steps = self.giant.shape[-1]
        padded = np.zeros((*coefficients.shape[:-1], steps * _BABY_STEPS))
        padded[..., : coefficients.shape[-1]] = coefficients
        return padded.reshape(*padded.shape[:-1], steps, _BABY_STEPS)


def _powers(points: Floats, count: int) -> Floats:
    """[..., K] -> [..., K, count]: x^0 … x^(count - 1), by doubling."""
    powers = np.ones((*points.shape, count))
    step, done = points, 1
    while done < count:
        width = min(done, count - done)
        powers[..., done : done + width] = _reduced(powers[..., :width] * step[..., None])
        step, done = _reduced(step * step), done * 2
    return powers


@functools.cache
def _inverses() -> Floats:
    """1 / x for x in [0, PRIME], by x^(PRIME - 2); 0 where there is none."""
    result, square, exponent = np.ones(PRIME + 1), np.arange(PRIME + 1.0), PRIME - 2
    while exponent:
        if exponent & 1:
            result = _reduced(result * square)
        square, exponent = _reduced(square * square), exponent >> 1
    return result % PRIME


def _from_roots(points_CK: Floats) -> Floats:
    """[C, K + 1] coefficients (lowest first) of the monic polynomials with these roots, by a product tree."""
    count, k = points_CK.shape
    leaves = 1 << (k - 1).bit_length()
    factors = np.zeros((count, leaves, 2))  # leaves beyond k are the constant 1
    factors[:, :k, 0], factors[:, :k, 1], factors[:, k:, 0] = PRIME - points_CK, 1, 1
    while factors.shape[1] > 1:
        factors = _multiply(factors[:, ::2], factors[:, 1::2])
    return factors[:, 0, : k + 1]


def _multiply(left: Floats, right: Floats) -> Floats:
    """Products of polynomials along the last axis, mod PRIME.

    Coefficients are at most 2^16, so for K = 128 Fourier transforms err by less than 0.01: rounding is exact. Short
    products are summed up term by term: at most 2^37.
    """
    size = left.shape[-1] + right.shape[-1] - 1
    if left.shape[-1] <= _SHORT:
        short = np.zeros((*left.shape[:-1], size))
        for at in range(left.shape[-1]):
            short[..., at : at + right.shape[-1]] += left[..., at : at + 1] * right
        return _reduced(short)
    fast = 1 << (size - 1).bit_length()
    spectrum = np.fft.rfft(left, fast)
    spectrum *= np.fft.rfft(right, fast)
    product = np.fft.irfft(spectrum, fast)[..., :size]
    return _reduced(np.rint(product, out=product))


def _exponent(bits: Ints) -> Ints:
    return bits >> 7 & 0xFF

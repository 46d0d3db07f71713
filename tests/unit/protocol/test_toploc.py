"""Proofs are interchangeable with the published library's, and hostile bytes raise ValueError and nothing else."""

import base64
import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import toploc

DATA = Path(__file__).parents[2] / "data"
CASES = {case["name"]: case for case in json.loads((DATA / "toploc_vectors.json").read_text())["cases"]}
ARRAYS = np.load(DATA / "toploc_vectors.npz")
COLLISION = "d4096_t32_index_collision"


def reference_chunks(name: str, variant: str) -> list[np.ndarray]:
    """The chunks as the library cuts them: an optional prefill is one chunk of its own."""
    rows = ARRAYS[f"{name}__{variant}"]
    chunks = [rows[start : start + toploc.CHUNK_TOKENS] for start in range(0, len(rows), toploc.CHUNK_TOKENS)]
    return [ARRAYS[f"{name}__prefill"], *chunks] if CASES[name]["prefill"] else chunks


def reference_proofs(name: str) -> list[bytes]:
    return [base64.b64decode(proof) for proof in CASES[name]["proofs"]]


def ties_at_threshold(chunk: np.ndarray) -> bool:
    """Whether more than one choice of the top k exists, so that the library's is a matter of its device."""
    ordered = np.sort(chunk.reshape(-1) & 0x7FFF)
    return ordered.size > toploc.TOP_K and ordered[-toploc.TOP_K] == ordered[-toploc.TOP_K - 1]


def random_hidden(tokens: int, size: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(tokens, size)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def naive_interpolation(points: list[int], values: list[int]) -> list[int]:
    """Lagrange by the book, in Python integers."""
    total = [0] * len(points)
    for i, (x_i, y_i) in enumerate(zip(points, values, strict=True)):
        basis, scale = [1], y_i
        for j, x_j in enumerate(points):
            if j == i:
                continue
            shifted, lowered = [0, *basis], [-x_j * coefficient for coefficient in basis] + [0]
            basis = [(a + b) % toploc.PRIME for a, b in zip(shifted, lowered, strict=True)]
            scale = scale * pow(x_i - x_j, -1, toploc.PRIME) % toploc.PRIME
        total = [(a + scale * b) % toploc.PRIME for a, b in zip(total, basis, strict=True)]
    return total


@pytest.mark.parametrize("name", CASES)
def test_our_proofs_equal_the_librarys_wherever_the_top_k_is_unique(name: str) -> None:
    chunks, proofs = reference_chunks(name, "activations"), reference_proofs(name)
    assert len(chunks) == len(proofs)
    for chunk, proof in zip(chunks, proofs, strict=True):
        flat = chunk.reshape(-1)
        chosen = toploc.top_k_indices(flat)
        ours = toploc.encode(chosen, flat[chosen])
        if not ties_at_threshold(chunk):
            assert ours == proof
        assert toploc.decode(ours, toploc.TOP_K).modulus == toploc.decode(proof, toploc.TOP_K).modulus


@pytest.mark.parametrize("name", CASES)
def test_the_librarys_proofs_agree_fully_with_the_same_activations(name: str) -> None:
    for chunk, proof in zip(reference_chunks(name, "same"), reference_proofs(name), strict=True):
        expected = toploc.ChunkAgreement(toploc.TOP_K, 0, 0, 0.0, 0.0)
        assert toploc.compare(proof, chunk) == expected


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name, case in CASES.items() if name != COLLISION for check in case["checks"]],
    ids=lambda value: value if isinstance(value, str) else value["against"],
)
def test_agreement_equals_the_librarys(name: str, check: dict) -> None:
    """Exactly where the verifier's top k is unique; with ties ours picks the best choice, so it is never worse."""
    chunks = reference_chunks(name, check["against"])
    for chunk, proof, (exponents, mean, median) in zip(chunks, reference_proofs(name), check["results"], strict=True):
        ours = toploc.compare(proof, chunk)
        assert exponents - 2 <= ours.exponent_mismatches <= exponents
        if mean is None:
            assert (ours.mantissa_mean, ours.mantissa_median) == (toploc.NO_MANTISSA_MATCH,) * 2
        elif not ties_at_threshold(chunk):
            assert ours.exponent_mismatches == exponents
            assert ours.mantissa_mean == pytest.approx(mean)
            assert ours.mantissa_median == median


def test_index_collision_is_resolved_by_a_smaller_modulus() -> None:
    (chunk,), (proof,) = reference_chunks(COLLISION, "noise_0p4pct"), reference_proofs(COLLISION)
    assert toploc.decode(proof, toploc.TOP_K).modulus == CASES[COLLISION]["moduli"][0] == 65496
    assert toploc.compare(proof, chunk).exponent_mismatches <= 5


def test_batched_interpolation_equals_lagrange_by_the_book() -> None:
    rng = np.random.default_rng(1)
    for k in (1, 2, 3, 17, 128):
        points = np.stack([rng.choice(toploc.PRIME, k, replace=False) for _ in range(3)]).astype(np.int64)
        values = rng.integers(0, toploc.PRIME, (3, k))
        coefficients = toploc.interpolate(points, values)
        if k <= 17:
            assert coefficients[1].tolist() == naive_interpolation(points[1].tolist(), values[1].tolist())
        for row in range(3):
            polynomial = toploc.Polynomial(toploc.PRIME, coefficients[row])
            assert polynomial(points[row]).tolist() == values[row].tolist()


@given(tokens=st.integers(1, 70), size=st.sampled_from([1, 3, 64, 200]), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_proofs_of_a_span_agree_with_it(tokens: int, size: int, seed: int) -> None:
    hidden = random_hidden(tokens, size, seed)
    proofs = toploc.build_proofs(hidden)
    assert len(proofs) == -(-tokens // toploc.CHUNK_TOKENS)
    for number, proof in enumerate(proofs):
        chunk = hidden[number * toploc.CHUNK_TOKENS :][: toploc.CHUNK_TOKENS]
        k = toploc.chunk_k(*chunk.shape)
        assert len(proof) == toploc.proof_bytes(k)
        assert toploc.compare(proof, chunk) == toploc.ChunkAgreement(k, 0, 0, 0.0, 0.0)


def test_an_empty_span_has_no_proofs() -> None:
    assert toploc.build_proofs(np.zeros((0, 64), np.uint16)) == ()


def test_more_chunks_than_one_batch_keep_their_order() -> None:
    hidden = random_hidden(toploc.CHUNK_TOKENS * 70, 8)
    proofs = toploc.build_proofs(hidden)
    assert proofs[65] == toploc.build_proofs(hidden[65 * toploc.CHUNK_TOKENS : 66 * toploc.CHUNK_TOKENS])[0]


def test_top_k_takes_magnitudes_and_the_lowest_of_equal_indices() -> None:
    bits = np.array([0x3F80, 0x3F80, 0xC000, 0x3F80, 0x0000], np.uint16)  # 1, 1, -2, 1, 0
    assert toploc.top_k_indices(bits, 3).tolist() == [0, 1, 2]
    large = random_hidden(32, 4096)
    kept = toploc.top_k_indices(large.reshape(-1))
    magnitudes = large.reshape(-1) & 0x7FFF
    assert np.sort(magnitudes[kept]).tolist() == np.sort(magnitudes)[-toploc.TOP_K :].tolist()


def test_other_activations_disagree() -> None:
    proof = toploc.build_proofs(random_hidden(32, 64, seed=1))[0]
    agreement = toploc.compare(proof, random_hidden(32, 64, seed=2))
    assert agreement.exponent_mismatches > 100
    assert agreement.sign_mismatches > 30


def test_many_at_once_are_scored_as_each_alone() -> None:
    """Over batches, chunks of other sizes between, ties, a chunk of one value throughout, and proofs of something else."""
    chunks = [random_hidden(rows, 48, seed=rows) & np.uint16(0xFFF0) for rows in (32, 32, 7, 32, 2, 2, *[32] * 40)]
    chunks[3] = np.full((32, 48), 0x3F80, np.uint16)
    chunks[9] = random_hidden(32, 48, seed=99)
    proofs = [toploc.build_proofs(chunk)[0] for chunk in chunks]
    proofs[3], proofs[12] = proofs[9], proofs[11]
    proofs[13] = toploc.build_proofs(random_hidden(32, 48, seed=1))[0]
    together = toploc.compare_many(proofs, chunks)
    assert together == [toploc.compare(proof, chunk) for proof, chunk in zip(proofs, chunks, strict=True)]
    assert len({each.exponent_mismatches for each in together}) > 2
    assert toploc.compare_many([], []) == []
    with pytest.raises(ValueError, match="bytes"):
        toploc.compare_many(proofs[2:4], chunks[3:5])


def test_what_a_wider_neighbour_leaves_empty_is_never_chosen() -> None:
    """Not even before a tie that is as far from the claim as bits can be: a NaN that is claimed to be next to nothing."""
    wide, narrow = np.full((32, 48), 0x3F80, np.uint16), np.zeros((32, 48), np.uint16)
    places = np.arange(5, 5 + 3 * toploc.TOP_K, 3)
    narrow.reshape(-1)[places] = 0xFFFF
    claims = np.random.default_rng(0).integers(0, 30, toploc.TOP_K).astype(np.uint16)
    proofs = [toploc.build_proofs(random_hidden(32, 48))[0], toploc.encode(places, claims)]
    assert toploc.compare_many(proofs, [wide, narrow])[1] == toploc.compare(proofs[1], narrow)


def test_sign_flips_are_seen_apart() -> None:
    hidden = random_hidden(32, 64)
    agreement = toploc.compare(toploc.build_proofs(hidden)[0], hidden ^ np.uint16(0x8000))
    assert (agreement.exponent_mismatches, agreement.sign_mismatches) == (0, toploc.TOP_K)


def words(*values: int) -> bytes:
    return b"".join(value.to_bytes(2, "big") for value in values)


@pytest.mark.parametrize(
    ("proof", "says"),
    [
        (b"", "bytes"),
        (words(65497, 1, 2, 3), "bytes"),
        (words(65497, 1, 2, 3, 4, 5), "bytes"),
        (words(0, 1, 2, 3, 4), "modulus 0"),
        (words(32768, 1, 2, 3, 4), "modulus 32768"),
        (words(65498, 1, 2, 3, 4), "modulus 65498"),
        (words(65497, 1, 2, 3, 65497), "coefficient"),
        (words(65497, 0, 0, 0, 0), "degenerate"),
        (words(65497, 9, 0, 0, 0), "degenerate"),
        (words(65497, 9, 9, 0, 0), "degenerate"),
    ],
)
def test_hostile_proofs_are_named(proof: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        toploc.decode(proof, 4)


@given(proof=st.one_of(st.binary(max_size=300), st.binary(min_size=258, max_size=258)), rows=st.integers(0, 33))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_result_or_a_value_error(proof: bytes, rows: int) -> None:
    with contextlib.suppress(ValueError):
        agreement = toploc.compare(proof, random_hidden(rows, 64))
        assert 0 <= agreement.exponent_mismatches <= agreement.compared


@given(modulus=st.integers(0, 65535), coefficient=st.integers(0, 65535), at=st.integers(0, 127))
@settings(max_examples=100, deadline=None)
def test_monomials_give_a_result_or_a_value_error(modulus: int, coefficient: int, at: int) -> None:
    values = [0] * toploc.TOP_K
    values[at] = coefficient
    accepted = False
    with contextlib.suppress(ValueError):
        toploc.decode(words(modulus, *values), toploc.TOP_K)
        accepted = True
    in_range = toploc.MODULUS_FLOOR < modulus <= toploc.PRIME and 0 < coefficient < toploc.PRIME
    assert accepted == (in_range and at >= toploc.TOP_K // 2)


def test_degenerate_activations_still_give_a_proof_that_is_refused() -> None:
    """All-zero hidden states are no model's: building must not crash, and no verifier accepts the constant."""
    zeros = np.zeros((32, 4096), np.uint16)
    with pytest.raises(ValueError, match="degenerate"):
        toploc.compare(toploc.build_proofs(zeros)[0], zeros)


def test_nan_activations_raise_nothing_else() -> None:
    hidden = np.full((32, 64), 0xFFFF, np.uint16)
    hidden[0] = random_hidden(1, 64)[0]
    proof = toploc.build_proofs(hidden)[0]
    with contextlib.suppress(ValueError):
        assert toploc.compare(proof, hidden).compared == toploc.TOP_K


def test_no_modulus_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="distinct"):
        toploc.encode(np.array([5, 5]), np.array([1, 2], np.uint16))


@pytest.mark.parametrize("k", [1, 7, 128])
def test_many_proofs_are_well_formed_if_and_only_if_each_can_be_read(k: int) -> None:
    random = np.random.default_rng(k)
    good = np.concatenate([[toploc.PRIME], random.integers(1, toploc.PRIME, k)])
    edges = [good, good.copy(), good.copy(), good.copy(), good.copy(), good.copy()]
    edges[1][0], edges[2][0] = toploc.MODULUS_FLOOR, toploc.MODULUS_FLOOR + 1
    edges[3][-1] = toploc.PRIME
    edges[4][1 + k // 2 :] = 0
    edges[5][2 + k // 2 :] = 0
    proofs = [each.astype(">u2").tobytes() for each in edges]
    proofs += [proofs[0][:-2], proofs[0] + b"\0\0", b""]
    for proof in proofs:
        try:
            toploc.decode(proof, k)
            readable = True
        except ValueError:
            readable = False
        assert toploc.well_formed([proofs[0], proof], k) is readable

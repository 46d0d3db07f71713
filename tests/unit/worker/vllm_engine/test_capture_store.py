"""The store keeps rows by position, chooses the top k as the protocol does, and stays within its memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import toploc
from worker.vllm_engine.capture_store import PAGE_ROWS, CaptureStore, RequestTerms, top_k_by_keys, top_k_of_chunks
from worker.within_memory import is_out_of_memory

SIZE = 16
CPU = torch.device("cpu")


def store(row_limit: int = 100 * PAGE_ROWS) -> CaptureStore:
    return CaptureStore(hidden_size=SIZE, device=CPU, row_limit=row_limit, max_positions=1000)


def terms(key: str, first: int = 10) -> RequestTerms:
    return RequestTerms(key, seed=2**62 + 1, temperature=0.5, first_position=first)


def write(kept: CaptureStore, request_ids: list[str], positions: list[int], value: float) -> None:
    """Rows whose numbers and log-probs are `value` + their place in the batch."""
    rows = kept.rows(kept.slots(request_ids), np.array(positions))
    stored = np.flatnonzero(rows >= 0)
    values = torch.arange(len(positions), dtype=torch.float32) + value
    kept.write(rows[stored], values[stored][:, None].repeat(1, SIZE), values[stored])


def logprobs(kept: CaptureStore, key: str, lengths: list[int]) -> list[float]:
    return np.frombuffer(kept.collect(key, lengths, 32, 128).logprobs, dtype=np.float32).tolist()


def test_rows_are_kept_by_position_whatever_the_order_and_the_batch() -> None:
    kept = store()
    kept.open("a-1", terms("a", first=10))
    kept.open("b-1", terms("b", first=3))
    write(kept, ["a-1", "b-1"], [11, 3], 100.0)
    write(kept, ["b-1", "a-1"], [4, 10], 200.0)
    write(kept, ["a-1"], [12], 300.0)
    write(kept, ["a-1"], [12], 400.0)  # sampled again: the later row counts
    assert logprobs(kept, "a", [3]) == [201.0, 100.0, 400.0]
    assert logprobs(kept, "b", [2]) == [101.0, 200.0]


def test_chunks_start_anew_at_each_span() -> None:
    kept = store()
    kept.open("a-1", terms("a", first=0))
    for position in range(70):
        write(kept, ["a-1"], [position], float(position + 1))
    found = kept.collect("a", [40, 30], 32, 128)
    assert [[chunk.k for chunk in span] for span in found.chunks] == [[128, 128], [128]]
    first_of_second = np.frombuffer(found.chunks[1][0].bits, dtype=np.uint16)
    assert first_of_second.max() == toploc_bits(70.0)


def toploc_bits(value: float) -> int:
    return int(torch.tensor([value], dtype=torch.bfloat16).view(torch.int16).item()) & 0xFFFF


def test_closing_frees_everything_and_late_rows_are_dropped() -> None:
    kept = store()
    kept.open("a-1", terms("a"))
    write(kept, ["a-1"], [10], 1.0)
    assert (kept.open_requests, kept.used_pages) == (1, 1)
    kept.close("a")
    kept.close("a")
    write(kept, ["a-1"], [11], 2.0)
    assert (kept.open_requests, kept.used_pages) == (0, 0)
    with pytest.raises(LookupError, match="no hidden states"):
        kept.collect("a", [1], 32, 128)


def test_reopening_after_a_preemption_keeps_the_rows() -> None:
    kept = store()
    kept.open("a-1", terms("a"))
    write(kept, ["a-1"], [10], 7.0)
    kept.open("a-1", terms("a"))
    assert logprobs(kept, "a", [1]) == [7.0]


def test_requests_of_others_are_not_captured() -> None:
    kept = store()
    kept.open("a-1", terms("a"))
    write(kept, ["warm-up", "a-1"], [5, 10], 1.0)
    assert (kept.open_requests, kept.used_pages) == (1, 1)
    assert logprobs(kept, "a", [1]) == [2.0]


def test_a_missing_row_is_named_rather_than_guessed() -> None:
    kept = store()
    kept.open("a-1", terms("a"))
    write(kept, ["a-1"], [10], 1.0)
    write(kept, ["a-1"], [12], 1.0)
    with pytest.raises(LookupError, match="not captured"):
        kept.collect("a", [3], 32, 128)
    with pytest.raises(LookupError, match="of 200"):
        kept.collect("a", [200], 32, 128)


def test_memory_is_bounded_and_a_request_that_needs_more_is_named() -> None:
    kept = store(row_limit=2 * PAGE_ROWS)
    for name in "abc":
        kept.open(f"{name}-1", terms(name))
        write(kept, [f"{name}-1"], [10], 1.0)
    assert kept.used_pages == 2
    assert logprobs(kept, "a", [1]) == [1.0]
    with pytest.raises(LookupError, match="capture memory is full") as full:
        kept.collect("c", [1], 32, 128)
    assert is_out_of_memory(full.value), "the worker starts again with fewer"
    kept.close("a")
    kept.close("c")
    kept.open("d-1", terms("d"))
    write(kept, ["d-1"], [10], 4.0)
    assert logprobs(kept, "d", [1]) == [4.0]


def test_more_requests_than_the_first_slots() -> None:
    kept = store()
    names = [f"r{number}" for number in range(50)]
    for number, name in enumerate(names):
        kept.open(name + "-x", terms(name, first=number))
    write(kept, [name + "-x" for name in names], list(range(50)), 0.0)
    assert [logprobs(kept, name, [1]) for name in names] == [[float(number)] for number in range(50)]
    assert kept.seeds[kept.slots(["r3-x"])[0]] == np.uint64(2**62 + 1)


@given(tokens=st.integers(1, 33), size=st.sampled_from([1, 3, 64, 300]), levels=st.sampled_from([2, 50, 60000]))
@settings(max_examples=40, deadline=None)
def test_top_k_is_the_protocols_also_with_ties(tokens: int, size: int, levels: int) -> None:
    rng = np.random.default_rng(tokens * size)
    bits = (rng.integers(0, levels, tokens * size) + 0x3000).astype(np.uint16)
    bits |= rng.integers(0, 2, bits.size).astype(np.uint16) << 15
    hidden = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)[None]
    k = min(toploc.TOP_K, bits.size)
    expected = toploc.top_k_indices(bits, k)
    for (chunk,) in (top_k_of_chunks(hidden, toploc.TOP_K), top_k_by_keys(hidden.view(torch.int16), k)):
        assert np.frombuffer(chunk.indices, dtype=np.int32).tolist() == expected.tolist()
        assert np.frombuffer(chunk.bits, dtype=np.uint16).tolist() == bits[expected].tolist()

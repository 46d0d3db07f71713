"""Where vLLM's process keeps, per request, what proofs are made of: one hidden state and one log-prob per sampled token.

Rows live on the model's device in pages of PAGE_ROWS rows, keyed by the absolute position of the input token, so that the
order of arrival does not matter. A step costs a few array operations whatever the batch; only opening and closing a
request, and every PAGE_ROWS-th row of it, run Python per request.

Invariants: a page belongs to one open request or is free; a closed request's late rows (async scheduling computes one
too many) are dropped; memory never exceeds `row_limit` rows, and a request that would need more is marked, not the
engine failed.

Shapes: B rows of a step, T tokens of a request, D hidden size, C chunks, N numbers of a chunk, K magnitudes of a proof.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from protocol import toploc

PAGE_ROWS = 64
_FIRST_PAGES = 64
_FIRST_SLOTS = 16
_CHUNKS_AT_ONCE = 32  # bounds the scratch memory of the top k


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """How a request samples. `key`: the caller's request id; `first_position`: that of the last prompt token."""

    key: str
    seed: int
    temperature: float
    first_position: int


@dataclass(frozen=True, slots=True)
class CapturedChunk:
    """The top k of one chunk: flattened indices (int32) and bf16 bits (uint16), as bytes for the RPC."""

    k: int
    indices: bytes
    bits: bytes


class CaptureStore:
    """See the module's docstring. Not thread-safe: vLLM's worker runs steps and RPCs one after another."""

    def __init__(self, *, hidden_size: int, device: torch.device, row_limit: int, max_positions: int) -> None:
        self._device = device
        self._page_limit = max(1, row_limit // PAGE_ROWS)
        self._hidden = torch.empty((0, hidden_size), dtype=torch.bfloat16, device=device)
        self._logprobs = torch.empty(0, dtype=torch.float32, device=device)
        self._free_pages: list[int] = []
        self._pages = np.full((0, -(-max_positions // PAGE_ROWS)), -1, dtype=np.int64)
        self._first = np.zeros(0, dtype=np.int64)
        self.temperatures = np.ones(0, dtype=np.float32)
        self.seeds = np.zeros(0, dtype=np.uint64)
        self._free_slots: list[int] = []
        self._slot_of: dict[str, int] = {}
        self._request_of: dict[str, str] = {}
        self._overflowed: set[int] = set()
        self._last_batch: tuple[list[str], NDArray[np.int64]] = ([], np.zeros(0, dtype=np.int64))

    @property
    def open_requests(self) -> int:
        return len(self._slot_of)

    @property
    def used_pages(self) -> int:
        return int(np.count_nonzero(self._pages >= 0))

    def open(self, request_id: str, terms: RequestTerms) -> None:
        """Start keeping rows for vLLM's `request_id`. Opening it again (after a preemption) changes nothing."""
        if request_id in self._slot_of:
            return
        if not self._free_slots:
            self._add_slots()
        slot = self._free_slots.pop()
        self._slot_of[request_id], self._request_of[terms.key] = slot, request_id
        self._first[slot], self.temperatures[slot] = terms.first_position, terms.temperature
        self.seeds[slot] = np.uint64(terms.seed)
        self._last_batch = ([], self._last_batch[1])

    def close(self, key: str) -> None:
        """Forget the caller's request `key` and free its pages. Unknown keys are fine."""
        request_id = self._request_of.pop(key, None)
        if request_id is None:
            return
        slot = self._slot_of.pop(request_id)
        pages = self._pages[slot]
        self._free_pages.extend(pages[pages >= 0].tolist())
        pages[:] = -1
        self._overflowed.discard(slot)
        self._free_slots.append(slot)
        self._last_batch = ([], self._last_batch[1])

    def slots(self, request_ids: list[str]) -> NDArray[np.int64]:
        """The slot of each row's request, -1 for requests that are not captured."""
        known, slots = self._last_batch
        if known == request_ids and request_ids:
            return slots
        slots = np.array([self._slot_of.get(request_id, -1) for request_id in request_ids], dtype=np.int64)
        self._last_batch = (list(request_ids), slots)
        return slots

    def rows(self, slots_B: NDArray[np.int64], positions_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each (slot, position); -1 where the slot is -1 or there is no memory for it."""
        offsets = positions_B - self._first[slots_B] if len(self._first) else np.full_like(positions_B, -1)
        held = (slots_B >= 0) & (offsets >= 0) & (offsets < self._pages.shape[1] * PAGE_ROWS)
        page_numbers = np.where(held, offsets, 0) // PAGE_ROWS
        pages = np.where(held, self._pages[slots_B, page_numbers] if held.any() else -1, -1)
        for row in np.flatnonzero(held & (pages < 0)):
            pages[row] = self._new_page(int(slots_B[row]), int(page_numbers[row]))
        return np.where(pages >= 0, pages * PAGE_ROWS + offsets % PAGE_ROWS, -1)

    def write(self, rows: NDArray[np.int64], hidden_BD: torch.Tensor, logprobs_B: torch.Tensor) -> None:
        """Store hidden states and log-probs at these rows (all ≥ 0)."""
        index = torch.from_numpy(rows).to(self._device, non_blocking=True)
        self._hidden.index_copy_(0, index, hidden_BD.to(torch.bfloat16))
        self._logprobs.index_copy_(0, index, logprobs_B)

    def collect(self, key: str, span_lengths: list[int], chunk_tokens: int, top_k: int) -> Collected:
        """Top k of every chunk (chunks start anew at each span) and the T log-probs. Raises LookupError if rows lack."""
        slot = self._slot_of[self._request_of[key]] if key in self._request_of else -1
        if slot < 0:
            raise LookupError(f"no hidden states were captured for request {key!r}")
        if slot in self._overflowed:
            raise LookupError("capture memory is full: what proofs are made of is kept for fewer samples at once")
        index = self._written_rows(slot, sum(span_lengths))
        chunks: list[tuple[CapturedChunk, ...]] = []
        start = 0
        for length in span_lengths:
            chunks.append(self._span_chunks(index[start : start + length], chunk_tokens, top_k))
            start += length
        logprobs = self._logprobs[index].cpu()
        if bool(logprobs.isnan().any()):
            raise LookupError(f"request {key!r} has tokens whose hidden states were not captured")
        return Collected(tuple(chunks), logprobs.numpy().tobytes())

    def _written_rows(self, slot: int, tokens: int) -> torch.Tensor:
        offsets = np.arange(tokens)
        pages = self._pages[slot, offsets // PAGE_ROWS]
        if (pages < 0).any():
            raise LookupError(f"only {int((pages >= 0).sum())} of {tokens} hidden states were captured")
        return torch.from_numpy(pages * PAGE_ROWS + offsets % PAGE_ROWS).to(self._device)

    def _span_chunks(self, index: torch.Tensor, chunk_tokens: int, top_k: int) -> tuple[CapturedChunk, ...]:
        full = len(index) // chunk_tokens * chunk_tokens
        chunks: list[CapturedChunk] = []
        for start in range(0, full, chunk_tokens * _CHUNKS_AT_ONCE):
            rows = index[start : min(full, start + chunk_tokens * _CHUNKS_AT_ONCE)]
            chunks.extend(top_k_of_chunks(self._hidden[rows].reshape(len(rows) // chunk_tokens, -1), top_k))
        if full < len(index):
            chunks.extend(top_k_of_chunks(self._hidden[index[full:]].reshape(1, -1), top_k))
        return tuple(chunks)

    def _new_page(self, slot: int, page_number: int) -> int:
        if not self._free_pages and not self._add_pages():
            self._overflowed.add(slot)
            return -1
        page = self._free_pages.pop()
        self._pages[slot, page_number] = page
        self._logprobs[page * PAGE_ROWS : (page + 1) * PAGE_ROWS] = float("nan")  # NaN marks a row never written
        return page

    def _add_pages(self) -> bool:
        """Double the pages, up to the limit. False if there is no room left."""
        have = len(self._hidden) // PAGE_ROWS
        count = min(max(have, _FIRST_PAGES), self._page_limit - have)
        if count <= 0:
            return False
        rows = count * PAGE_ROWS
        self._hidden = torch.cat([self._hidden, self._hidden.new_zeros((rows, self._hidden.shape[1]))])
        self._logprobs = torch.cat([self._logprobs, self._logprobs.new_full((rows,), float("nan"))])
        self._free_pages.extend(range(have, have + count))
        return True

    def _add_slots(self) -> None:
        have = len(self._first)
        count = max(have, _FIRST_SLOTS)
        self._pages = np.concatenate([self._pages, np.full((count, self._pages.shape[1]), -1, dtype=np.int64)])
        self._first = np.concatenate([self._first, np.zeros(count, dtype=np.int64)])
        self.temperatures = np.concatenate([self.temperatures, np.ones(count, dtype=np.float32)])
        self.seeds = np.concatenate([self.seeds, np.zeros(count, dtype=np.uint64)])
        self._free_slots.extend(range(have, have + count))


@dataclass(frozen=True, slots=True)
class Collected:
    """What a finished request's proofs are made of. `chunks[s]`: of span s. `logprobs`: T float32, as bytes."""

    chunks: tuple[tuple[CapturedChunk, ...], ...]
    logprobs: bytes


def top_k_of_chunks(hidden_CN: torch.Tensor, top_k: int) -> list[CapturedChunk]:
    """The top k of each flattened bf16 chunk, chosen as `protocol.toploc.top_k_indices` does, on the tensor's device."""
    bits_CN = hidden_CN.view(torch.int16)
    k = min(top_k, bits_CN.shape[1])
    if bits_CN.device.type == "cpu":
        return [_top_k_of_chunk(bits_N, k) for bits_N in bits_CN.numpy().view(np.uint16)]
    return top_k_by_keys(bits_CN, k)


def top_k_by_keys(bits_CN: torch.Tensor, k: int) -> list[CapturedChunk]:
    """The way of accelerators: all chunks at once, by an integer that orders by magnitude, then by lower index, so that
    equal magnitudes are chosen alike everywhere."""
    size = bits_CN.shape[1]
    keys_CN = (bits_CN & 0x7FFF).to(torch.int64) * size + torch.arange(size - 1, -1, -1, device=bits_CN.device)
    indices_CK = keys_CN.topk(k, dim=1).indices.sort(dim=1).values
    chosen = bits_CN.gather(1, indices_CK).cpu().numpy()
    indices = indices_CK.to(torch.int32).cpu().numpy()
    return [CapturedChunk(k, row.tobytes(), bits.tobytes()) for row, bits in zip(indices, chosen, strict=True)]


def _top_k_of_chunk(bits_N: NDArray[np.uint16], k: int) -> CapturedChunk:
    """On a CPU a partition of the few large magnitudes is many times faster than sorting keys."""
    indices_K = toploc.top_k_indices(bits_N, k)
    return CapturedChunk(k, indices_K.astype(np.int32).tobytes(), bits_N[indices_K].tobytes())

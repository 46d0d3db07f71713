"""What of the vLLM prefill needs no engine; tests/integration has the rest."""

from __future__ import annotations

from coordinator.verification.prefill_layout import PrefillItem
from coordinator.verification.vllm_prefill import batches


def item(tokens: int, first: int = 0) -> PrefillItem:
    return PrefillItem("r", (1,), (2,) * tokens, 5, 1.0, first)


def test_batches_keep_the_order_and_the_bound() -> None:
    items = [item(4), item(4), item(9), item(3, first=2), item(30)]
    assert [[len(each.completion_token_ids) for each in batch] for batch in batches(items, 10)] == [
        [4, 4],
        [9, 3],
        [30],
    ]
    assert list(batches([], 10)) == []

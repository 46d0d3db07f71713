"""Packed rows and padded batches: every token measured once, under exactly what it may see."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.verification.prefill_layout import (
    PACKED_TOKENS_MAX,
    ROW_TOKENS,
    Packed,
    PrefillItem,
    pad,
    plan_packed,
    plan_padded,
)

BUDGET = 1024


@st.composite
def short_items(draw: st.DrawFn) -> list[PrefillItem]:
    """Rollouts of few prompts; every token is of its own, so that a place tells what it holds."""
    prompts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    fresh = iter(range(1_000_000))
    texts = [tuple(next(fresh) for _ in range(length)) for length in prompts]
    items = []
    for key in range(draw(st.integers(1, 40))):
        prompt = draw(st.sampled_from(texts))
        length = draw(st.integers(1, PACKED_TOKENS_MAX + 1 - len(prompt)))
        completion = tuple(next(fresh) for _ in range(length))
        items.append(PrefillItem(key, prompt, completion, 0, 1.0, first=draw(st.integers(0, length - 1))))
    return items


def seen_by(packed: Packed, allowed: np.ndarray, row: int, place: int) -> list[int]:
    """The tokens that a place sees, by their positions."""
    seen = allowed[row, 0, place].nonzero()[0]
    order = packed.position_RL[row].numpy()[seen].argsort()
    return packed.ids_RL[row].numpy()[seen[order]].tolist()


@settings(deadline=None, max_examples=40)
@given(short_items())
def test_a_packed_place_sees_what_the_rollout_alone_would(items: list[PrefillItem]) -> None:
    measured: list[int] = []
    for packed in plan_packed(items, range(len(items)), BUDGET):
        rows, width = packed.ids_RL.shape
        assert rows * width <= BUDGET or rows == 1
        assert width <= ROW_TOKENS
        allowed = packed.allowed().numpy()
        sources = iter(packed.source_N.tolist())
        for index in packed.items:
            item = items[index]
            measured.append(index)
            for step in range(item.first, len(item.completion_token_ids)):
                row, place = divmod(next(sources), width)
                alone = [*item.prompt_token_ids, *item.completion_token_ids[:step]]
                assert seen_by(packed, allowed, row, place) == alone
                assert int(packed.position_RL[row, place]) == len(alone) - 1
        assert next(sources, None) is None
    assert sorted(measured) == list(range(len(items)))


def test_a_groups_prompt_is_fed_once() -> None:
    prompt = tuple(range(100, 120))
    items = [PrefillItem(i, prompt, (i, i, i, i, 2), 0, 1.0) for i in range(16)]
    (packed,) = plan_packed(items, range(16), BUDGET)
    assert packed.ids_RL.shape == (1, 20 + 16 * 4), "no padding, and the prompt once"


def test_padding_sees_something_so_that_no_softmax_is_empty() -> None:
    items = [PrefillItem(0, (1,) * 100, (2,) * 20, 0, 1.0), PrefillItem(1, (3,) * 100, (4,) * 90, 0, 1.0)]
    items += [PrefillItem(2, (5,) * 100, (6,) * 20, 0, 1.0)]
    (packed,) = plan_packed(items, range(3), BUDGET)
    assert packed.ids_RL.shape[0] == 2
    assert packed.allowed().any(-1).all()


def test_padded_batches_keep_the_budget_and_groups_together() -> None:
    lengths = [5, 200, 5, 5, 6, 190, 5, 300, 5]
    items = [PrefillItem(i, (i % 4,) * 10, (1,) * length, 0, 1.0) for i, length in enumerate(lengths)]
    batches = list(plan_padded(items, range(len(items)), 440))
    assert sorted(index for batch in batches for index in batch) == list(range(len(items)))
    for batch in batches:
        width = 10 + max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * width <= 440
    assert {0, 2, 3, 6, 8} <= set(batches[0]), "the short ones share a forward"


def test_pad_fills_on_the_right() -> None:
    ids, lengths = pad([(1, 2, 3), (4,)])
    np.testing.assert_array_equal(ids, [[1, 2, 3], [4, 0, 0]])
    np.testing.assert_array_equal(lengths, [3, 1])

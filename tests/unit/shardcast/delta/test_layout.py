"""shardcast.delta.layout: headers that lie are no tensors, and runs tile the file."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcast.delta.layout import Run, Tensor, pieces_of, runs_of, tensors_of
from tests.unit.shardcast.delta.versions import safetensors


def tensors(data: bytes) -> list[Tensor] | None:
    return tensors_of(lambda offset, count: data[offset : offset + count], len(data))


def with_header(header: object, body: bytes = bytes(100)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_tensors_are_found_in_the_order_of_their_bytes() -> None:
    data = safetensors({"b": ("BF16", bytes(6)), "a": ("F32", bytes(8)), "none": ("BF16", b"")})
    found = tensors(data)
    assert found is not None
    assert [(each.name, each.dtype, each.size) for each in found if each.size] == [("b", "BF16", 6), ("a", "F32", 8)]
    assert found[-1].end == len(data)
    assert [each.is_words for each in found if each.size] == [True, False]


def entry(begin: object, end: object, dtype: object = "BF16") -> dict[str, object]:
    return {"dtype": dtype, "shape": [1], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(7),
        struct.pack("<Q", 2**63) + bytes(100),
        struct.pack("<Q", 101) + bytes(100),
        with_header(b"not json"),
        with_header(b"[" * 50_000),
        with_header([]),
        with_header({"a": 1}),
        with_header({"a": {"dtype": "BF16"}}),
        with_header({"a": entry(0, 101)}),
        with_header({"a": entry(10, 4)}),
        with_header({"a": entry(-2, 4)}),
        with_header({"a": entry(0, 8), "b": entry(6, 12)}),
        with_header({"a": entry(True, 8)}),
        with_header({"a": entry(0.0, 8)}),
        with_header({"a": entry(0, 8, dtype=16)}),
    ],
)
def test_a_header_that_breaks_a_rule_describes_nothing(data: bytes) -> None:
    assert tensors(data) is None


@given(st.binary(max_size=200))
def test_noise_is_no_safetensors_file_or_a_well_formed_one(noise: bytes) -> None:
    found = tensors(noise)
    assert found is None or all(0 <= each.begin <= each.end <= len(noise) for each in found)


def test_equal_layouts_become_one_run_of_words() -> None:
    data = safetensors({name: ("BF16", bytes(10)) for name in "abc"})
    found = tensors(data)
    begin = len(data) - 30
    assert runs_of(found, len(data), found, (4, len(data)), {}) == [
        Run(0, begin, base=(4, 0)),
        Run(begin, 30, words=True, base=(4, begin)),
    ]


def test_only_a_tensor_of_the_same_name_type_and_size_is_a_base() -> None:
    old = tensors(safetensors({"a": ("BF16", bytes(10)), "b": ("BF16", bytes(10)), "c": ("F32", bytes(8))}))
    data = safetensors(
        {"c": ("F32", bytes(8)), "a": ("F16", bytes(10)), "b": ("BF16", bytes(12)), "d": ("BF16", b"xx")}
    )
    runs = runs_of(tensors(data), len(data), old, (0, 200), {})
    assert [(run.size, run.words, run.base is not None) for run in runs[1:]] == [
        (8, False, True),
        (24, True, False),
    ]
    assert sum(run.size for run in runs) == len(data)


@pytest.mark.parametrize(("base_file", "base"), [(None, None), ((0, 50), (0, 0)), ((0, 51), None)])
def test_other_files_are_held_against_a_base_of_the_same_size(
    base_file: tuple[int, int] | None, base: tuple[int, int] | None
) -> None:
    assert runs_of(None, 50, None, base_file, {}) == [Run(0, 50, base=base)]


def test_a_tied_tensor_is_a_run_of_its_own() -> None:
    data = safetensors({"head": ("BF16", bytes(10)), "embed": ("BF16", bytes(10)), "norm": ("BF16", bytes(4))})
    found = tensors(data)
    assert found is not None
    head, embed, norm = found
    runs = runs_of(found, len(data), found, (0, len(data)), {embed.begin: (0, head.begin)})
    assert [(run.offset, run.twin) for run in runs[1:]] == [
        (head.begin, None),
        (embed.begin, (0, head.begin)),
        (norm.begin, None),
    ]


@given(
    cut=st.integers(0, 100),
    length=st.integers(1, 100),
    most=st.integers(2, 20),
    start=st.integers(0, 9),
    words=st.booleans(),
)
def test_pieces_tile_any_range_and_never_cut_a_word(cut: int, length: int, most: int, start: int, words: bool) -> None:
    runs = [Run(0, start, base=(0, 0)), Run(start, 120, words=words, base=(3, 1000))]
    end = min(cut + length, start + 120)
    pieces = pieces_of([run for run in runs if run.size], min(cut, end), end, most)
    at = min(cut, end)
    for piece in pieces:
        assert piece.offset == at and 1 <= piece.size <= most
        if piece.offset >= start:
            assert piece.base == (3, 1000 + piece.offset - start)
        if piece.words:
            assert piece.size % 2 == 0 and (piece.offset - start) % 2 == 0
        at += piece.size
    assert at == end
    assert not words or sum(1 for piece in pieces if piece.offset >= start and not piece.words) <= 2

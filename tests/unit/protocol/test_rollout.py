from __future__ import annotations

from hashlib import sha256

import pytest

from protocol.rollout import Author, SamplingParams, Segment, Task, VersionSpan, token_digest
from tests.factories import make_rollout


@pytest.mark.parametrize("temperature", [0.0, -1.0, 10.1, float("nan"), float("inf")])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature, 8, (0,))


def test_at_least_one_token_is_generated() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(1.0, 0, (0,))


@pytest.mark.parametrize(("length", "proofs"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_a_span_has_a_proof_for_every_32_tokens_begun(length: int, proofs: int) -> None:
    span = VersionSpan(0, "sha256:0", 5, 5 + length)
    assert (len(span), span.proof_count) == (length, proofs)


def test_a_rollout_joins_its_segments() -> None:
    rollout = make_rollout(tokens=(5, 6, 7, 256), versions=(3, 4))
    assert rollout.token_ids == (5, 6, 7, 256)
    assert rollout.loss_mask == (True,) * 4
    assert (rollout.oldest_version, rollout.newest_version) == (3, 4)


def test_a_models_segment_is_trained_on() -> None:
    assert Segment.by_model((1, 2)) == Segment(Author.MODEL, (1, 2), (True, True))


def test_a_token_digest_covers_little_endian_words() -> None:
    assert token_digest((1, 2**32 - 1)) == sha256(b"\x01\0\0\0\xff\xff\xff\xff").digest()
    assert token_digest([1, 2]) == token_digest((1, 2)) != token_digest((2, 1))


def test_a_task_is_named_by_environment_and_index() -> None:
    assert Task("sums", 7, "1 + 1 =").task_id == "sums/7"

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import WorkerFault
from protocol.rollout import (
    Author,
    RejectionReason,
    Rollout,
    SamplingParams,
    Segment,
    StopReason,
    VersionSpan,
)
from protocol.wire import (
    check_storable,
    envelope_from_wire,
    envelope_to_wire,
    floats_from_bytes,
    floats_to_bytes,
    group_from_wire,
    rollout_from_payload,
    rollout_from_store,
    rollout_id,
    rollout_to_payload,
    sampling_from_wire,
    sampling_to_wire,
    tokens_on_wire,
    verified_to_wire,
)
from protos.rollswarm.v1 import common_pb2, trainer_pb2, worker_pb2
from tests.factories import make_identity, make_rollout

# What only our own side may say. No message that a worker sends has a field that sounds like it.
FORBIDDEN = ("reward", "score", "prompt", "advantage", "return", "verdict", "credit", "accepted", "old_logprob")
# A field of every wire type, numbered 99: tag, then a value.
SMUGGLED = {
    "double": bytes([0x99, 0x06]) + struct.pack("<d", 1.0),
    "varint": bytes([0x98, 0x06, 0x01]),
    "bytes": bytes([0x9A, 0x06, 0x01, 0x41]),
    "float": bytes([0x9D, 0x06]) + struct.pack("<f", 1.0),
}


def test_a_rollout_survives_the_wire() -> None:
    rollout = make_rollout(tokens=range(40), versions=(3, 4, 7))
    assert rollout_from_payload(rollout_to_payload(rollout)) == rollout


def test_segments_of_both_authors_survive_the_wire() -> None:
    rollout = make_rollout()
    segments = (Segment.by_model((1, 2)), Segment(Author.ENVIRONMENT, (3,), (False,)), Segment.by_model((4, 5, 256)))
    named = replace(rollout, segments=segments, turns="sha256:" + "0" * 64)
    assert rollout_from_payload(rollout_to_payload(named)) == named
    payload = worker_pb2.RolloutPayload.FromString(rollout_to_payload(rollout))
    assert "turns" not in {field.name for field, _ in payload.ListFields()}
    del payload.segments[:]
    for segment in segments:
        payload.segments.add(author=int(segment.author), token_ids=segment.token_ids, loss_mask=segment.loss_mask)
    assert rollout_from_payload(payload.SerializeToString()).segments == segments


@pytest.mark.parametrize("field", SMUGGLED.values(), ids=SMUGGLED)
def test_an_unknown_field_such_as_a_reward_is_refused(field: bytes) -> None:
    with pytest.raises(WorkerFault) as caught:
        rollout_from_payload(rollout_to_payload(make_rollout()) + field)
    assert caught.value.reason == RejectionReason.FORM


@pytest.mark.parametrize("field", SMUGGLED.values(), ids=SMUGGLED)
def test_an_unknown_field_deep_inside_is_refused(field: bytes) -> None:
    payload = worker_pb2.RolloutPayload.FromString(rollout_to_payload(make_rollout()))
    payload.segments[0].MergeFromString(field)
    with pytest.raises(WorkerFault):
        rollout_from_payload(payload.SerializeToString())


@pytest.mark.parametrize(
    "payload",
    [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", rollout_to_payload(make_rollout())[:-3]],
    ids=["garbage", "truncated string", "no utf-8", "truncated"],
)
def test_what_is_no_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(WorkerFault) as caught:
        rollout_from_payload(payload)
    assert caught.value.reason == RejectionReason.FORM


@pytest.mark.parametrize("stop_reason", [0, 3, 99])
def test_an_unknown_stop_reason_is_refused(stop_reason: int) -> None:
    payload = worker_pb2.RolloutPayload.FromString(rollout_to_payload(make_rollout()))
    payload.stop_reason = stop_reason  # type: ignore[assignment]
    with pytest.raises(WorkerFault, match="stop reason"):
        rollout_from_payload(payload.SerializeToString())


@pytest.mark.parametrize("author", [0, 3])
def test_an_unknown_author_is_refused(author: int) -> None:
    payload = worker_pb2.RolloutPayload.FromString(rollout_to_payload(make_rollout()))
    payload.segments[0].author = author  # type: ignore[assignment]
    with pytest.raises(WorkerFault, match="author"):
        rollout_from_payload(payload.SerializeToString())


@given(st.binary(max_size=200))
def test_hostile_bytes_never_do_more_than_be_refused(payload: bytes) -> None:
    try:
        rollout_from_payload(payload)
    except WorkerFault as fault:
        assert fault.reason == RejectionReason.FORM


HONEST = rollout_to_payload(make_rollout(tokens=range(1, 41), versions=(3, 4)))


@given(st.lists(st.tuples(st.integers(0, len(HONEST) - 1), st.integers(0, 255)), max_size=4), st.integers(0, 8))
def test_a_payload_with_changed_bytes_is_read_or_refused(changes: list[tuple[int, int]], cut: int) -> None:
    payload = bytearray(HONEST)
    for at, value in changes:
        payload[at] = value
    try:
        rollout = rollout_from_payload(bytes(payload[: len(payload) - cut]))
    except WorkerFault as fault:
        assert fault.reason == RejectionReason.FORM
    else:
        assert _same(rollout_from_payload(rollout_to_payload(rollout)), rollout)


def _same(one: Rollout, other: Rollout) -> bool:
    """Equal, where NaN equals NaN."""
    return repr(one) == repr(other)


uint32s = st.integers(0, 2**32 - 1)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
segments = st.builds(
    Segment,
    st.sampled_from(Author),
    st.lists(uint32s, max_size=6).map(tuple),
    st.lists(st.booleans(), max_size=6).map(tuple),
)
rollouts = st.builds(
    Rollout,
    names,
    names,
    names,
    st.lists(segments, max_size=3).map(tuple),
    st.lists(st.floats(width=32), max_size=8).map(tuple),
    st.lists(st.builds(VersionSpan, st.integers(0, 2**63 - 1), names, uint32s, uint32s), max_size=3).map(tuple),
    st.lists(st.lists(st.binary(max_size=9), max_size=3).map(tuple), max_size=3).map(tuple),
    st.sampled_from(StopReason),
)


@given(rollouts)
def test_any_rollout_that_can_be_stored_survives_the_wire_however_senseless(rollout: Rollout) -> None:
    payload = rollout_to_payload(rollout)
    assert _same(rollout_from_payload(payload), rollout)
    assert _same(rollout_from_store(payload), rollout)


@given(st.lists(st.floats(width=32), max_size=20))
def test_floats_survive_as_float32(values: list[float]) -> None:
    back = floats_from_bytes(floats_to_bytes(values))
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(back, values, strict=True))


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_torn_float_array_is_refused(length: int) -> None:
    with pytest.raises(WorkerFault):
        floats_from_bytes(bytes(length))


def test_a_rollouts_id_is_the_digest_of_its_very_bytes() -> None:
    payload = rollout_to_payload(make_rollout())
    assert rollout_id(payload) == rollout_id(bytes(payload)) != rollout_id(payload + b"\0")


def test_an_envelope_survives_the_wire() -> None:
    envelope = make_identity(1).sign("rollout", b"\0payload")
    assert envelope_from_wire(envelope_to_wire(envelope)) == envelope


def test_sampling_survives_the_wire() -> None:
    sampling = SamplingParams(0.7, 512, (0, 2))
    assert sampling_from_wire(sampling_to_wire(sampling)) == sampling


def test_a_group_survives_the_wire_without_the_proofs() -> None:
    rollout = make_rollout("", "g0-1", run_id="", versions=(2, 3))
    old = floats_to_bytes((-0.5,) * 6)
    members = [
        verified_to_wire(
            rollout_to_payload(rollout),
            rollout_id=f"sha256:{number}",
            sample_id="g0-1",
            worker_id="ed25519:1",
            reward=reward,
            old_logprobs=logprobs,
            audited=audited,
        )
        for number, reward, logprobs, audited in ((1, 1.0, old, True), (2, 0.0, b"", False))
    ]
    sent = trainer_pb2.RolloutGroup(
        group_id="g0", task_id="sums/4", environment="sums", prompt_token_ids=(7, 8), n_requested=3, rollouts=members
    )
    assert tokens_on_wire(sent) == 2 * len(rollout.token_ids)
    group = group_from_wire(sent)
    assert (group.group_id, group.task_id, group.prompt_token_ids, group.n_requested) == ("g0", "sums/4", (7, 8), 3)
    first, second = group.rollouts
    assert [(each.rollout_id, each.sample_id, each.worker_id) for each in group.rollouts] == [
        ("sha256:1", "g0-1", "ed25519:1"),
        ("sha256:2", "g0-1", "ed25519:1"),
    ]
    assert first.rollout.segments == rollout.segments
    assert first.rollout.token_ids == rollout.token_ids
    assert first.rollout.spans == rollout.spans
    assert first.rollout.logprobs == rollout.logprobs
    assert first.rollout.stop_reason is StopReason.EOS
    assert first.rollout.proofs == ()
    assert (first.reward, first.old_logprobs, first.audited) == (1.0, (-0.5,) * 6, True)
    assert (second.reward, second.old_logprobs, second.audited) == (0.0, (), False)


def sent_by_workers() -> Iterator[FieldDescriptor]:
    """Every field of every message that a worker can send, however deep."""
    service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
    waiting: list[Descriptor] = [method.input_type for method in service.methods]
    waiting.append(worker_pb2.RolloutPayload.DESCRIPTOR)
    seen: set[str] = set()
    while waiting:
        message = waiting.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            yield field
            if field.message_type is not None:
                waiting.append(field.message_type)


def test_no_message_of_a_worker_can_state_a_reward_a_prompt_or_an_advantage() -> None:
    fields = list(sent_by_workers())
    names = {field.full_name for field in fields}
    assert "rollswarm.v1.RolloutPayload.logprobs" in names and "rollswarm.v1.Segment.token_ids" in names
    suspicious = [field.full_name for field in fields if any(word in field.name for word in FORBIDDEN)]
    asked = "rollswarm.v1.GetStandingRequest.max_verdicts"  # how many verdicts it wants to see, none of its own
    assert [name for name in suspicious if name != asked] == []


def test_no_message_of_a_worker_has_room_for_anything_unnamed() -> None:
    for field in sent_by_workers():
        if field.message_type is not None:
            assert not field.message_type.full_name.startswith("google.protobuf.")
            assert not field.message_type.GetOptions().map_entry, f"{field.full_name} is a map"


def test_segments_name_their_author_by_number() -> None:
    assert {int(author) for author in Author} == {common_pb2.AUTHOR_MODEL, common_pb2.AUTHOR_ENVIRONMENT}


@pytest.mark.parametrize("field", ["segments", "spans", "proofs"])
def test_a_million_small_pieces_are_not_unpacked(field: str) -> None:
    message = worker_pb2.RolloutPayload.FromString(rollout_to_payload(make_rollout()))
    pieces = getattr(message, field)
    pieces.extend([pieces[0]] * 1024)
    with pytest.raises(WorkerFault, match="1024"):
        rollout_from_payload(message.SerializeToString())


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.GetChallengeRequest(key_id="ed25519:\0"),
        worker_pb2.RenewLeasesRequest(progress=[worker_pb2.LeaseProgress(policy_version=1 << 63)]),
        worker_pb2.ReturnLeasesRequest(lease_ids=["a", "b\0"]),
        trainer_pb2.ReportStepRequest(batch=(1 << 64) - 1),
        trainer_pb2.ReportStepRequest(metrics={"\0": 1.0}),
        trainer_pb2.ReportStepRequest(dropped={"a": 1 << 63}),
    ],
)
def test_what_no_database_holds_is_no_message(message: Message) -> None:
    with pytest.raises(WorkerFault, match="nobody could store") as caught:
        check_storable(message)
    assert caught.value.reason == RejectionReason.FORM


def test_what_a_database_holds_passes() -> None:
    check_storable(
        trainer_pb2.ReportStepRequest(batch=(1 << 63) - 1, metrics={"a": 1e308}, trained_rollout_ids=["\u0001"])
    )
    check_storable(worker_pb2.SubmitRolloutRequest())

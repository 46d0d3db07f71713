"""Protobuf messages to protocol values and back; the only importer of `protos` in this package.

What comes in is checked for shape here (`WorkerFault(FORM)`), for meaning by `coordinator.admission`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protocol.declaration import BF16, HARDWARE_LENGTH, UNDECLARED, Declaration, printable
from protocol.errors import WorkerFault
from protocol.rollout import (
    Author,
    RejectionReason,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Segment,
    StopReason,
    VerifiedRollout,
    VersionSpan,
)
from protocol.signing import SignedEnvelope
from protos.rollswarm.v1 import common_pb2, trainer_pb2, worker_pb2

_STORABLE = 1 << 63  # databases count in 64 bits, one of which is the sign
# Far above what any run admits: a few bytes on the wire must not become an object each, a million times.
_PIECES_MAX = 1024
_PRECISION_LENGTH = 16
_DIGEST_LENGTH = 71  # sha256: and its digits

_CHECKED = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_MESSAGE)

_LOOKED_AT: dict[str, tuple[tuple[str, bool], ...]] = {}  # by kind of message, of which there are few

_STOP_TO_WIRE = {StopReason.EOS: common_pb2.STOP_REASON_EOS, StopReason.LENGTH: common_pb2.STOP_REASON_LENGTH}
_STOP_FROM_WIRE = {int(wire): stop for stop, wire in _STOP_TO_WIRE.items()}
_AUTHOR_TO_WIRE = {Author.MODEL: common_pb2.AUTHOR_MODEL, Author.ENVIRONMENT: common_pb2.AUTHOR_ENVIRONMENT}


def check_storable(message: Message) -> None:
    """Raises WorkerFault(FORM) for a number of 2^63 or more, or a NUL in a text: no database holds them."""
    for name, may_be_absent in _looked_at(message):
        if may_be_absent and not message.HasField(name):
            continue
        value = getattr(message, name)
        if isinstance(value, Mapping):
            values: Iterable[object] = (*value.keys(), *value.values())
        else:
            values = (value,) if isinstance(value, str | int | Message) else value
        for each in values:
            if isinstance(each, str):
                bad = "\0" in each
            elif isinstance(each, int):
                bad = each >= _STORABLE
            else:
                bad = False
                if isinstance(each, Message):
                    check_storable(each)
            if bad:
                raise WorkerFault(RejectionReason.FORM, f"{name} holds what nobody could store")


def _looked_at(message: Message) -> tuple[tuple[str, bool], ...]:
    """(name, may be absent) of the fields that may hold what nobody could store."""
    name = message.DESCRIPTOR.full_name
    known = _LOOKED_AT.get(name)
    if known is None:
        known = _LOOKED_AT[name] = tuple(
            (field.name, field.has_presence)
            for field in message.DESCRIPTOR.fields
            if field.cpp_type in _CHECKED
            and field.type != FieldDescriptor.TYPE_BYTES
            and not _is_harmless(field.message_type)
        )
    return known


def _is_harmless(kind: Any) -> bool:
    """Whether this is a kind of message (None: none) with small numbers and bytes alone, such as proofs."""
    return kind is not None and not any(
        field.cpp_type in _CHECKED and field.type != FieldDescriptor.TYPE_BYTES for field in kind.fields
    )


def envelope_to_wire(envelope: SignedEnvelope) -> common_pb2.SignedEnvelope:
    return common_pb2.SignedEnvelope(payload=envelope.payload, key_id=envelope.key_id, signature=envelope.signature)


def envelope_from_wire(message: common_pb2.SignedEnvelope) -> SignedEnvelope:
    return SignedEnvelope(message.payload, message.key_id, message.signature)


def floats_to_bytes(values: Sequence[float]) -> bytes:
    """Pack as little-endian float32."""
    return struct.pack(f"<{len(values)}f", *values)


def floats_from_bytes(packed: bytes) -> tuple[float, ...]:
    """Unpack little-endian float32. Raises WorkerFault(FORM) if the length is no multiple of 4."""
    if len(packed) % 4:
        raise WorkerFault(RejectionReason.FORM, f"{len(packed)} bytes are no float32 array")
    return struct.unpack(f"<{len(packed) // 4}f", packed)


def declaration_to_payload(declaration: Declaration, challenge: bytes) -> bytes:
    """What a worker signs as a declaration, in answer to this challenge."""
    return worker_pb2.Declaration(
        challenge=challenge, precision=declaration.precision, hardware=declaration.hardware
    ).SerializeToString()


def declaration_from_payload(payload: bytes, challenge: bytes) -> Declaration:
    """Parse a declaration. Raises WorkerFault(FORM) if it is none, or was made for another challenge."""
    message = worker_pb2.Declaration()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise WorkerFault(RejectionReason.FORM, "the declaration is no Declaration") from error
    if message.challenge != challenge:
        raise WorkerFault(RejectionReason.FORM, "the declaration was made for another challenge")
    hardware = printable(message.hardware, HARDWARE_LENGTH)
    return Declaration(message.precision[:_PRECISION_LENGTH] or BF16, hardware or UNDECLARED)


def rollout_to_payload(rollout: Rollout) -> bytes:
    """Serialize a rollout: the bytes that are signed, and whose digest is the rollout's id."""
    return worker_pb2.RolloutPayload(
        run_id=rollout.run_id,
        lease_id=rollout.lease_id,
        sample_id=rollout.sample_id,
        segments=[_segment_to_wire(segment) for segment in rollout.segments],
        logprobs=floats_to_bytes(rollout.logprobs),
        spans=[_span_to_wire(span) for span in rollout.spans],
        proofs=[worker_pb2.SpanProofs(chunks=list(chunks)) for chunks in rollout.proofs],
        stop_reason=_STOP_TO_WIRE[rollout.stop_reason],
        precision=rollout.precision,
        turns=rollout.turns,
    ).SerializeToString()


def rollout_from_payload(payload: bytes) -> Rollout:
    """Parse a submission. Raises WorkerFault(FORM) for anything that is no RolloutPayload of known values."""
    message = worker_pb2.RolloutPayload()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise WorkerFault(RejectionReason.FORM, "the payload is no RolloutPayload") from error
    check_storable(message)
    if max(len(message.segments), len(message.spans), len(message.proofs)) > _PIECES_MAX:
        raise WorkerFault(RejectionReason.FORM, f"more than {_PIECES_MAX} segments, spans or lists of proofs")
    if has_unknown_fields(message):
        raise WorkerFault(RejectionReason.FORM, "the payload has fields that this protocol does not define")
    return _rollout(message)


def rollout_from_store(payload: bytes) -> Rollout:
    """Parse a submission that `rollout_from_payload` took when it came."""
    message = worker_pb2.RolloutPayload()
    message.ParseFromString(payload)
    return _rollout(message)


def _rollout(message: worker_pb2.RolloutPayload) -> Rollout:
    return Rollout(
        run_id=message.run_id,
        lease_id=message.lease_id,
        sample_id=message.sample_id,
        segments=tuple(_segment_from_wire(segment) for segment in message.segments),
        logprobs=floats_from_bytes(message.logprobs),
        spans=tuple(_span_from_wire(span) for span in message.spans),
        proofs=tuple(tuple(proofs.chunks) for proofs in message.proofs),
        stop_reason=_stop_from_wire(message.stop_reason),
        precision=message.precision[:_PRECISION_LENGTH] or BF16,
        turns=message.turns[:_DIGEST_LENGTH],
    )


def has_unknown_fields(message: worker_pb2.RolloutPayload) -> bool:
    """Does the message carry fields outside the schema, such as a claimed reward?"""
    parts = (message, *message.segments, *message.spans, *message.proofs)  # the schema nests no deeper
    return any(len(UnknownFieldSet(part)) for part in parts)


def rollout_id(payload: bytes) -> str:
    """The id of a submission: `sha256:<hex>` of its exact bytes."""
    return "sha256:" + sha256(payload).hexdigest()


def sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature, max_tokens=sampling.max_tokens, eos_token_ids=sampling.eos_token_ids
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(message.temperature, message.max_tokens, tuple(message.eos_token_ids))


def group_from_wire(message: trainer_pb2.RolloutGroup) -> RolloutGroup:
    return RolloutGroup(
        group_id=message.group_id,
        task_id=message.task_id,
        environment=message.environment,
        prompt_token_ids=tuple(message.prompt_token_ids),
        n_requested=message.n_requested,
        rollouts=tuple(_verified_from_wire(rollout) for rollout in message.rollouts),
    )


def verified_to_wire(
    payload: bytes,
    *,
    rollout_id: str,
    sample_id: str,
    worker_id: str,
    reward: float,
    old_logprobs: bytes,
    audited: bool,
) -> trainer_pb2.VerifiedRollout:
    """A submission that `rollout_from_payload` took when it came, as the trainer gets it: its parts are copied as they
    are. `old_logprobs`: as `floats_to_bytes` packs them."""
    message = worker_pb2.RolloutPayload()
    message.ParseFromString(payload)
    return trainer_pb2.VerifiedRollout(
        rollout_id=rollout_id,
        sample_id=sample_id,
        worker_id=worker_id,
        segments=message.segments,
        spans=message.spans,
        behaviour_logprobs=message.logprobs,
        old_logprobs=old_logprobs,
        reward=reward,
        audited=audited,
        stop_reason=message.stop_reason,
    )


def tokens_on_wire(group: trainer_pb2.RolloutGroup) -> int:
    """How many tokens all rollouts of a group have together."""
    return sum(len(segment.token_ids) for rollout in group.rollouts for segment in rollout.segments)


def _verified_from_wire(message: trainer_pb2.VerifiedRollout) -> VerifiedRollout:
    rollout = Rollout(
        run_id="",
        lease_id="",
        sample_id=message.sample_id,
        segments=tuple(_segment_from_wire(segment) for segment in message.segments),
        logprobs=floats_from_bytes(message.behaviour_logprobs),
        spans=tuple(_span_from_wire(span) for span in message.spans),
        proofs=(),
        stop_reason=_stop_from_wire(message.stop_reason),
    )
    return VerifiedRollout(
        rollout_id=message.rollout_id,
        sample_id=message.sample_id,
        worker_id=message.worker_id,
        rollout=rollout,
        reward=message.reward,
        old_logprobs=floats_from_bytes(message.old_logprobs),
        audited=message.audited,
    )


def _segment_to_wire(segment: Segment) -> common_pb2.Segment:
    return common_pb2.Segment(
        author=_AUTHOR_TO_WIRE[segment.author], token_ids=segment.token_ids, loss_mask=segment.loss_mask
    )


def _segment_from_wire(message: common_pb2.Segment) -> Segment:
    try:
        author = Author(message.author)
    except ValueError:
        raise WorkerFault(RejectionReason.FORM, f"unknown segment author {message.author}") from None
    return Segment(author, tuple(message.token_ids), tuple(message.loss_mask))


def _span_to_wire(span: VersionSpan) -> common_pb2.VersionSpan:
    return common_pb2.VersionSpan(
        version=span.version, manifest_digest=span.manifest_digest, start=span.start, end=span.end
    )


def _span_from_wire(message: common_pb2.VersionSpan) -> VersionSpan:
    return VersionSpan(message.version, message.manifest_digest, message.start, message.end)


def _stop_from_wire(stop_reason: int) -> StopReason:
    try:
        return _STOP_FROM_WIRE[stop_reason]
    except KeyError:
        raise WorkerFault(RejectionReason.FORM, f"unknown stop reason {stop_reason}") from None

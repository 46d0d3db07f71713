"""What is done to a submission: bytes of the request or of the payload, or fields of the payload, one to three at once."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from protocol.signing import ROLLOUT, SignedEnvelope
from protocol.wire import envelope_to_wire
from protos.rollswarm.v1 import worker_pb2
from tests.adversary.fuzz.corpus import Corpus, Sample
from tests.tiny_model import EOS_TOKEN_ID, VOCABULARY

Payload = Any  # worker_pb2.RolloutPayload
Mutate = Callable[[random.Random, Payload, Payload], None]

_HUGE = 1 << 16
_NUMBERS = (0, 1, 2, 31, 32, 33, 255, 1 << 15, 1 << 31, (1 << 32) - 1)
_FLOATS = (0.0, -0.0, 1e-4, -1e-4, -0.05, 0.7, -30.0, 1e30, -1e30, float("nan"), float("inf"), float("-inf"))


def mutated(draw: random.Random, corpus: Corpus, sample: Sample) -> tuple[str, bytes]:
    """The kind of the mutation, and the bytes of a SubmitRolloutRequest: signed by the worker's own key, or torn."""
    kind = draw.choice(("request bytes", "envelope", "payload bytes", "fields", "fields", "fields"))
    payload = sample.payload
    if kind == "payload bytes":
        payload = other_bytes(draw, payload)
    elif kind == "fields":
        message, other = worker_pb2.RolloutPayload(), worker_pb2.RolloutPayload()
        message.ParseFromString(payload)
        other.ParseFromString(draw.choice(corpus.samples).payload)
        for mutate in draw.choices(FIELDS, k=draw.choice((1, 1, 2, 3))):
            mutate(draw, message, other)
        payload = message.SerializeToString()
    envelope = corpus.worker.sign(ROLLOUT, payload)
    if kind == "envelope":
        envelope = _other_envelope(draw, envelope)
    request = worker_pb2.SubmitRolloutRequest(rollout=envelope_to_wire(envelope)).SerializeToString()
    return kind, other_bytes(draw, request) if kind == "request bytes" else request


def _other_envelope(draw: random.Random, envelope: SignedEnvelope) -> SignedEnvelope:
    """Something else than what was signed, under the same signature, or the reverse."""
    payload, key_id, signature = envelope.payload, envelope.key_id, envelope.signature
    part = draw.randrange(3)
    if part == 0:
        payload = other_bytes(draw, payload)
    elif part == 1:
        key_id = draw.choice((key_id[:-1], key_id.upper(), key_id[::-1], "", "ed25519:" + "0" * 64, key_id[:-1] + "g"))
    else:
        signature = other_bytes(draw, signature)
    return SignedEnvelope(payload, key_id, signature)


def other_bytes(draw: random.Random, data: bytes) -> bytes:
    """Flipped, overwritten, inserted, cut out, doubled or cut off."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        if not changed:
            break
        at = draw.randrange(len(changed))
        end = min(len(changed), at + draw.choice((1, 2, 4, 64)))
        how = draw.randrange(6)
        if how == 0:
            changed[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            changed[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif how == 2:
            changed[at:at] = draw.randbytes(draw.choice((1, 2, 9)))
        elif how == 3:
            del changed[at:end]
        elif how == 4:
            changed[at:at] = changed[at:end]
        else:
            del changed[at:]
    return bytes(changed)


def _token(draw: random.Random, message: Payload, other: Payload) -> None:
    tokens = _segment(draw, message).token_ids
    if tokens:
        tokens[draw.randrange(len(tokens))] = draw.choice((draw.randrange(VOCABULARY), EOS_TOKEN_ID, *_NUMBERS))


def _last_token(draw: random.Random, message: Payload, other: Payload) -> None:
    """No activation follows it: only its own log-prob and the draw can give it away."""
    tokens = _segment(draw, message).token_ids
    if tokens:
        tokens[-1] = draw.randrange(VOCABULARY)


def _length(draw: random.Random, message: Payload, other: Payload) -> None:
    """A few tokens more or fewer, with everything else that goes with them, or only the tokens."""
    segment, by = _segment(draw, message), draw.choice((-8, -2, -1, 1, 2, 8))
    if by < 0:
        del segment.token_ids[by:], segment.loss_mask[by:]
    else:
        segment.token_ids.extend(draw.choices(range(VOCABULARY), k=by))
        segment.loss_mask.extend([True] * by)
    if draw.random() < 0.7:
        message.logprobs = message.logprobs[: 4 * by] if by < 0 else message.logprobs + message.logprobs[-4:] * by
        if message.spans:
            message.spans[-1].end = max(0, min(_HUGE, message.spans[-1].end + by))
    if draw.random() < 0.3:
        _ending(draw, message, other)


def _ending(draw: random.Random, message: Payload, other: Payload) -> None:
    message.stop_reason = draw.choice((0, 1, 2, 2, 1, 3, 77))
    segment = _segment(draw, message)
    if segment.token_ids and draw.random() < 0.5:
        segment.token_ids[-1] = EOS_TOKEN_ID


def _logprob(draw: random.Random, message: Payload, other: Payload) -> None:
    count = len(message.logprobs) // 4
    if not count:
        return
    values = list(struct.unpack(f"<{count}f", message.logprobs[: 4 * count]))
    at = draw.randrange(count)
    values[at] = draw.choice((*_FLOATS, values[at] + draw.uniform(-1, 1), values[at] + draw.uniform(-0.01, 0.01)))
    message.logprobs = struct.pack(f"<{count}f", *values) + b"\0" * draw.choice((0, 0, 0, 1, 4))


def _span(draw: random.Random, message: Payload, other: Payload) -> None:
    if not message.spans:
        return
    span = draw.choice(message.spans)
    field = draw.choice(("version", "digest", "both", "start", "end", "border"))
    if field in ("version", "both"):
        span.version = draw.choice((0, 1, 2, 1 << 62, (1 << 64) - 1))
    if field in ("digest", "both"):
        span.manifest_digest = draw.choice((f"sha256:{0:064x}", f"sha256:{1:064x}", "", "sha256:", "\0", "x" * 999))
    if field in ("start", "end"):
        near = abs(getattr(span, field) + draw.choice((-1, 1)))
        setattr(span, field, draw.choice((*_NUMBERS, min(near, _NUMBERS[-1]))))
    if field == "border" and len(message.spans) > 1:
        message.spans[0].end = message.spans[1].start = draw.randrange(1, 40)


def _spans(draw: random.Random, message: Payload, other: Payload) -> None:
    """One more, one less, in another order, or another sample's; proofs go along or not."""
    spans, proofs = list(message.spans), list(message.proofs)
    how = draw.randrange(5)
    if how == 0 and spans:
        split = max(1, spans[-1].end // 2)
        first, second = type(spans[-1])(), type(spans[-1])()
        first.CopyFrom(spans[-1]), second.CopyFrom(spans[-1])
        first.version, first.manifest_digest, first.end = 0, f"sha256:{0:064x}", split
        second.start = split
        spans[-1:] = [first, second]
        proofs += proofs[-1:]
    elif how == 1:
        spans, proofs = spans[:-1], proofs[: draw.choice((-1, len(proofs)))]
    elif how == 2:
        spans = spans[::-1]
    elif how == 3:
        spans = list(other.spans)
    else:
        spans = spans * draw.choice((2, 40))
    _replace(message.spans, spans), _replace(message.proofs, proofs)


def _proof(draw: random.Random, message: Payload, other: Payload) -> None:
    chunks = draw.choice(message.proofs).chunks if message.proofs else []
    if not chunks:
        return
    at, proof = draw.randrange(len(chunks)), chunks[draw.randrange(len(chunks))]
    modulus = draw.choice((0, 1, 255, 32768, 32769, 40000, 65496, 65497, 65498, 65535)).to_bytes(2, "big")
    chunks[at] = draw.choice(
        (
            modulus + proof[2:],
            other_bytes(draw, proof),
            draw.randbytes(len(proof)),
            proof[:2] + bytes(max(0, len(proof) - 2)),
            proof[:2] + proof[4:] + proof[2:4],
            proof[:2],
            b"",
            proof * 2,
            bytes(_HUGE),
        )
    )


def _proofs(draw: random.Random, message: Payload, other: Payload) -> None:
    how = draw.randrange(5)
    if how == 0:
        _replace(message.proofs, list(other.proofs))
    elif how == 1 and message.proofs:
        del message.proofs[0].chunks[-1:]
    elif how == 2 and message.proofs:
        message.proofs[-1].chunks.extend(list(message.proofs[-1].chunks) or [b""])
    elif how == 3:
        message.proofs.add()
    else:
        del message.proofs[:]


def _segments(draw: random.Random, message: Payload, other: Payload) -> None:
    """Turns of other authors, in pieces, empty, or another sample's; masks that hide tokens from the loss."""
    segment = _segment(draw, message)
    how = draw.randrange(6)
    if how == 0:
        segment.author = draw.choice((0, 1, 2, 3))
    elif how == 1 and segment.loss_mask:
        segment.loss_mask[draw.randrange(len(segment.loss_mask))] ^= True
    elif how == 2:
        half = len(segment.token_ids) // 2
        message.segments.add(
            author=draw.choice((1, 2)), token_ids=segment.token_ids[half:], loss_mask=segment.loss_mask[half:]
        )
        del segment.token_ids[half:], segment.loss_mask[half:]
    elif how == 3:
        message.segments.add(author=draw.choice((1, 2)))
    elif how == 4:
        _replace(message.segments, list(other.segments))
    else:
        del message.segments[-1:]


def _identity(draw: random.Random, message: Payload, other: Payload) -> None:
    how = draw.randrange(5)
    if how == 0:
        message.lease_id = other.lease_id
    elif how == 1:
        message.sample_id = other.sample_id
    elif how == 2:
        message.lease_id, message.sample_id = other.lease_id, other.sample_id
    elif how == 3:
        message.run_id = draw.choice(("", "other", "\0", "x" * 500))
    else:
        message.lease_id = draw.choice(("", "\0", "g0", message.lease_id + "0", "x" * 500))


def _answer(draw: random.Random, message: Payload, other: Payload) -> None:
    """Another sample's whole answer under this one's lease."""
    ids = message.run_id, message.lease_id, message.sample_id
    message.CopyFrom(other)
    message.run_id, message.lease_id, message.sample_id = ids


def _unknown(draw: random.Random, message: Payload, other: Payload) -> None:
    """A field of no schema, such as a reward."""
    message.MergeFromString(bytes([0x99, 0x06]) + struct.pack("<d", 1.0))


FIELDS: tuple[Mutate, ...] = (
    _token,
    _last_token,
    _length,
    _ending,
    _logprob,
    _span,
    _spans,
    _proof,
    _proofs,
    _segments,
    _identity,
    _answer,
    _unknown,
)


def _segment(draw: random.Random, message: Payload) -> Any:
    """One of its segments; a new one if there is none."""
    return draw.choice(message.segments) if message.segments else message.segments.add()


def _replace(field: Any, values: list[Any]) -> None:
    copies = [type(value)() for value in values]
    for copy, value in zip(copies, values, strict=True):
        copy.CopyFrom(value)
    del field[:]
    field.extend(copies)

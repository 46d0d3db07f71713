"""Values that tests begin with: identities, signed versions, and rollouts whose form and proofs are valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from protocol import toploc
from protocol.manifest import Digest, Manifest, ManifestFile, Shard, manifest_digest, sign_manifest, tree_digest
from protocol.rollout import Rollout, Segment, StopReason, VersionSpan
from protocol.signing import ROLLOUT, Identity, SignedEnvelope
from protocol.terms import RunTerms
from protocol.wire import rollout_to_payload

RUN_ID = "test-run"
SECRET = bytes(range(32))
VOCAB_SIZE = 260
HIDDEN_SIZE = 16
EOS = 256
TEMPERATURE = 1.0
MAX_TOKENS = 40


def make_identity(number: int) -> Identity:
    """Always the same key for the same number."""
    return Identity.from_seed(number.to_bytes(32, "big"))


COORDINATOR = make_identity(1)
TRAINER = make_identity(2)


def make_version(
    version: int, *, run_id: str = RUN_ID, signer: Identity = TRAINER, content: str = ""
) -> SignedEnvelope:
    """A signed manifest of one small file; other `content` gives another digest."""
    data = f"weights {version} {content}".encode()
    shard = Shard(0, 0, len(data), Digest.of(data))
    tree = tree_digest([shard.digest])
    file = ManifestFile("model.safetensors", len(data), tree)
    return sign_manifest(Manifest(run_id, version, (file,), (shard,), tree), signer)


def version_digest(version: int) -> str:
    """The manifest digest of `make_version(version)`."""
    return str(manifest_digest(make_version(version).payload))


def make_spans(length: int, versions: Sequence[int] = (0,)) -> tuple[VersionSpan, ...]:
    """Contiguous spans over [0, length), one per version, as equal as they can be."""
    borders = [length * i // len(versions) for i in range(len(versions) + 1)]
    return tuple(
        VersionSpan(version, version_digest(version), start, end)
        for version, start, end in zip(versions, borders, borders[1:], strict=False)
    )


def make_proofs(spans: Sequence[VersionSpan], hidden_size: int = HIDDEN_SIZE) -> tuple[tuple[bytes, ...], ...]:
    """Proofs of random bf16 hidden states, of the exact number and length."""
    random = np.random.default_rng(7)
    # Exponents around 1.0: honest hidden states hold no NaN.
    return tuple(
        toploc.build_proofs(random.integers(0x3E00, 0x4100, (len(span), hidden_size)).astype(np.uint16))
        for span in spans
    )


def make_tokens(length: int, *, first: int = 1) -> tuple[int, ...]:
    """`length` ordinary tokens, the last of which is EOS."""
    return (*((first + i) % 250 for i in range(length - 1)), EOS)


def make_rollout(
    lease_id: str = "lease",
    sample_id: str = "g0-0",
    *,
    run_id: str = RUN_ID,
    tokens: Sequence[int] | None = None,
    versions: Sequence[int] = (0,),
) -> Rollout:
    """A rollout of valid form: ends with EOS, or has the greatest length."""
    token_ids = make_tokens(6) if tokens is None else tuple(tokens)
    spans = make_spans(len(token_ids), versions)
    return Rollout(
        run_id=run_id,
        lease_id=lease_id,
        sample_id=sample_id,
        segments=(Segment.by_model(token_ids),),
        logprobs=tuple(-0.5 - i / 64 for i in range(len(token_ids))),  # exact in float32
        spans=spans,
        proofs=make_proofs(spans),
        stop_reason=StopReason.EOS if token_ids[-1] == EOS else StopReason.LENGTH,
    )


def make_turns_rollout(
    lease_id: str,
    sample_id: str,
    segments: Sequence[Segment],
    *,
    turns: str,
    spans: Sequence[tuple[int, int, int]] = (),
) -> Rollout:
    """A rollout of several turns, of valid form if the segments are. `spans`: (version, start, end); one if none are given."""
    tokens = [token for segment in segments for token in segment.token_ids]
    mask = [own for segment in segments for own in segment.loss_mask]
    rollout = Rollout(
        run_id=RUN_ID,
        lease_id=lease_id,
        sample_id=sample_id,
        segments=tuple(segments),
        logprobs=tuple(-0.5 if own else 0.0 for own in mask),
        spans=tuple(
            VersionSpan(version, version_digest(version), a, b) for version, a, b in spans or [(0, 0, len(tokens))]
        ),
        proofs=(),
        stop_reason=StopReason.EOS if tokens[-1] == EOS else StopReason.LENGTH,
        turns=turns,
    )
    random = np.random.default_rng(7)
    proofs = tuple(
        tuple(
            proof
            for start, end in rollout.stretches(span)
            for proof in toploc.build_proofs(
                random.integers(0x3E00, 0x4100, (end - start, HIDDEN_SIZE)).astype(np.uint16)
            )
        )
        for span in rollout.spans
    )
    return replace(rollout, proofs=proofs)


def sign_rollout(rollout: Rollout, worker: Identity) -> SignedEnvelope:
    """The rollout as its worker submits it."""
    return worker.sign(ROLLOUT, rollout_to_payload(rollout))


def make_terms(**changes: object) -> RunTerms:
    """The terms of the test run."""
    values: dict[str, object] = {
        "run_id": RUN_ID,
        "name": "test",
        "protocol_min": 1,
        "protocol_max": 1,
        "grpc_endpoints": ("127.0.0.1:1",),
        "relays": ("http://127.0.0.1:2",),
        "coordinator_key": COORDINATOR.key_id,
        "trainer_key": TRAINER.key_id,
        "model": "tiny",
        "model_digest": None,
        "temperature": TEMPERATURE,
        "eos_token_ids": (EOS,),
        "max_tokens": MAX_TOKENS,
        "max_prompt_tokens": 64,
        "max_staleness": 2,
        "lease_term_s": 60.0,
        "precision_classes": ("bf16",),
    }
    return RunTerms(**{**values, **changes})  # type: ignore[arg-type]

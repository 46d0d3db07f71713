"""Form: everything that can be said about a rollout without a model. Later checks rely on what this one has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from coordinator.verification.checks.base import CheckResult, Claim
from protocol import toploc
from protocol.rollout import PROOF_CHUNK_TOKENS, Author, RejectionReason, Rollout, VersionSpan

_LOGPROB_SLACK = 1e-3  # nats: log-softmax in float32 may round to just above 0


class FormCheck:
    """Lengths, vocabulary, segments, spans, log-probabilities, and the form of every proof, sizes first."""

    reason = RejectionReason.FORM

    def __call__(self, claim: Claim) -> CheckResult:
        for rule in _RULES:
            if detail := rule(claim):
                return CheckResult.failed(detail)
        return CheckResult(True)


def _lengths(claim: Claim) -> str:
    rollout = claim.rollout
    tokens = sum(len(segment.token_ids) for segment in rollout.segments)
    written = sum(len(segment.token_ids) for segment in rollout.segments if segment.author is Author.MODEL)
    if written == 0:
        return "the rollout has no token written by the model; submit at least one"
    if written > claim.sampling.max_tokens:
        return f"the rollout has {written} tokens written by the model; the lease allows {claim.sampling.max_tokens}"
    if len(rollout.logprobs) != tokens:
        return f"{len(rollout.logprobs)} log-probs came for {tokens} tokens; send one per token"
    return ""


def _vocabulary(claim: Claim) -> str:
    tokens = claim.rollout.token_ids
    if min(tokens) >= 0 and max(tokens) < claim.vocab_size:
        return ""
    for index, token in enumerate(tokens):
        if not 0 <= token < claim.vocab_size:
            return f"token {index} is {token}, outside the vocabulary of {claim.vocab_size}"
    return ""


def _segments(claim: Claim) -> str:
    for index, segment in enumerate(claim.rollout.segments):
        if len(segment.loss_mask) != len(segment.token_ids):
            return f"segment {index} has {len(segment.token_ids)} tokens and a loss mask of {len(segment.loss_mask)}"
        by_model = segment.author is Author.MODEL
        if (not by_model) in segment.loss_mask:
            return f"segment {index}: the loss mask must be true on the model's tokens and false on the environment's"
    authors = [segment.author for segment in claim.rollout.segments]
    if not all(segment.token_ids for segment in claim.rollout.segments) or any(a is b for a, b in pairwise(authors)):
        # A turn in two pieces could hide an EOS at their border.
        return "a segment is empty, or two in a row are by the same author: send one per turn"
    written = tuple(segment for segment in claim.rollout.segments if segment.author is Author.ENVIRONMENT)
    if [segment.token_ids for segment in written] != [segment.token_ids for segment in claim.environment_segments]:
        return (
            f"{len(written)} environment segments came, which are not the {len(claim.environment_segments)} that the "
            "environment wrote"
        )
    return ""


def _spans(claim: Claim) -> str:
    rollout = claim.rollout
    expected = 0
    for span in rollout.spans:
        if span.start != expected or span.end <= span.start:
            return f"span [{span.start}, {span.end}) must begin at {expected} and hold at least one token"
        expected = span.end
    if expected != len(rollout.token_ids):
        return f"the spans cover [0, {expected}) of {len(rollout.token_ids)} tokens"
    versions = [span.version for span in rollout.spans]
    if versions != sorted(set(versions)):
        return f"the spans' versions must ascend, one span per version; they are {versions}"
    return ""


def _logprobs(claim: Claim) -> str:
    logprobs = claim.rollout.logprobs
    # Float32 numbers, so that their sum is finite if and only if all are.
    if math.isfinite(sum(logprobs)) and max(logprobs) <= _LOGPROB_SLACK:
        return ""
    for index, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob > _LOGPROB_SLACK:
            return f"the log-prob of token {index} is {logprob}; it must be finite and at most 0"
    return ""


def _proof_counts(claim: Claim) -> str:
    rollout = claim.rollout
    if len(rollout.proofs) != len(rollout.spans):
        return f"{len(rollout.proofs)} lists of proofs came for {len(rollout.spans)} spans"
    for span, proofs in zip(rollout.spans, rollout.proofs, strict=True):
        if len(proofs) != span.proof_count:
            return (
                f"span [{span.start}, {span.end}) came with {len(proofs)} proofs; it takes {span.proof_count}, "
                f"one per {PROOF_CHUNK_TOKENS} tokens"
            )
    return ""


def _proof_forms(claim: Claim) -> str:
    by_k: dict[int, list[bytes]] = {}
    for start, end, proof in proof_chunks(claim.rollout):
        by_k.setdefault(toploc.chunk_k(end - start, claim.hidden_size), []).append(proof)
    if all(toploc.well_formed(proofs, k) for k, proofs in by_k.items()):
        return ""
    for start, end, proof in proof_chunks(claim.rollout):
        try:
            toploc.decode(proof, toploc.chunk_k(end - start, claim.hidden_size))
        except ValueError as error:
            return f"tokens [{start}, {end}): {error}"
    return ""


_RULES: tuple[Callable[[Claim], str], ...] = (
    _lengths,
    _vocabulary,
    _segments,
    _spans,
    _logprobs,
    _proof_counts,
    _proof_forms,
)


def proof_chunks(rollout: Rollout) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, proof) of every proof; chunks start anew at each span. The counts must have been checked."""
    for span, proofs in zip(rollout.spans, rollout.proofs, strict=True):
        yield from _span_chunks(span, proofs)


def _span_chunks(span: VersionSpan, proofs: tuple[bytes, ...]) -> Iterator[tuple[int, int, bytes]]:
    starts = range(span.start, span.end, PROOF_CHUNK_TOKENS)
    for start, proof in zip(starts, proofs, strict=True):
        yield start, min(start + PROOF_CHUNK_TOKENS, span.end), proof

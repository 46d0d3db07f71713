"""Form: everything that can be said about a rollout without a model. Later checks rely on what this one has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from coordinator.verification.checks.base import CheckResult, Claim
from protocol import toploc
from protocol.rollout import (
    ENVIRONMENT_LOGPROB,
    PROOF_CHUNK_TOKENS,
    Author,
    RejectionReason,
    Rollout,
    proof_count,
)

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
    if rollout.model_tokens == 0:
        return "the rollout has no token written by the model; submit at least one"
    if tokens > claim.sampling.max_tokens:
        return f"the rollout has {tokens} tokens; the lease allows {claim.sampling.max_tokens}"
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
    return _authors(claim)


def _authors(claim: Claim) -> str:
    """Who wrote what follows from the tokens; what the worker says of it must be that."""
    if claim.turns is None:
        return "" if len(claim.rollout.segments) == 1 else "the task takes one turn: send one segment, by the model"
    reading = claim.turns.read(claim.rollout.token_ids, claim.sampling)
    if reading.problem:
        return reading.problem
    if reading.segments != claim.rollout.segments:
        lengths = [f"{segment.author.name.lower()} {len(segment.token_ids)}" for segment in reading.segments[:8]]
        return f"its tokens were written in other turns than its segments say: {', '.join(lengths)}"
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
    if len(rollout.segments) > 1 and not all(
        map(rollout.loss_mask.__getitem__, (span.start for span in rollout.spans))
    ):
        return "a span begins with the environment's tokens; they belong to the span of the token before them"
    versions = [span.version for span in rollout.spans]
    if versions != sorted(set(versions)):
        return f"the spans' versions must ascend, one span per version; they are {versions}"
    return ""


def _logprobs(claim: Claim) -> str:
    logprobs = claim.rollout.logprobs
    if len(claim.rollout.segments) > 1:
        mask = claim.rollout.loss_mask
        if any(logprob != ENVIRONMENT_LOGPROB for logprob, own in zip(logprobs, mask, strict=True) if not own):
            return f"the log-probs of the environment's tokens must be {ENVIRONMENT_LOGPROB:g}: nobody sampled them"
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
        needed = sum(proof_count(end - start) for start, end in rollout.stretches(span))
        if len(proofs) != needed:
            return (
                f"span [{span.start}, {span.end}) came with {len(proofs)} proofs; it takes {needed}, "
                f"one per {PROOF_CHUNK_TOKENS} tokens of each of the model's turns"
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
    """(start, end, proof) of every proof; chunks start anew at each span and each turn. The counts must have been checked."""
    for span, proofs in zip(rollout.spans, rollout.proofs, strict=True):
        yield from _span_chunks(rollout.stretches(span), proofs)


def _span_chunks(stretches: Sequence[tuple[int, int]], proofs: tuple[bytes, ...]) -> Iterator[tuple[int, int, bytes]]:
    chunks = [
        (at, min(at + PROOF_CHUNK_TOKENS, end))
        for start, end in stretches
        for at in range(start, end, PROOF_CHUNK_TOKENS)
    ]
    for (start, end), proof in zip(chunks, proofs, strict=True):
        yield start, end, proof

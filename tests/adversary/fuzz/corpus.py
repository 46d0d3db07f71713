"""Honest submissions to mutate: short and long, of one version and of two, with and without commitments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.lease import Commitment, Lease
from protocol.rollout import Rollout, StopReason, token_digest
from protocol.signing import Identity
from protocol.wire import rollout_to_payload
from tests.adversary.attacks.cheat import Cheat
from tests.adversary.batch import write_all
from tests.factories import make_identity
from tests.tiny_model import build_other_tiny_model, build_tiny_model
from tests.unit.coordinator.verification.claims import RUN_ID, make_claim, make_request
from worker.engine import Generation, GenerationRequest, Weights

_BORDER = 12  # tokens of the first version, where there are two
_LENGTHS = (3, 8, 40, 70)


@dataclass(frozen=True, slots=True)
class Sample:
    """One leased sample and the honest rollout for it."""

    request: GenerationRequest
    lease: Lease
    rollout: Rollout

    @property
    def payload(self) -> bytes:
        return rollout_to_payload(self.rollout)


@dataclass(frozen=True, slots=True)
class Corpus:
    """One worker's samples. `folders`: of every published version, by digest."""

    worker: Identity
    samples: tuple[Sample, ...]
    versions: dict[int, str]
    folders: dict[str, Path]


def build_corpus(folder: Path, per_kind: int = 6) -> Corpus:
    """`per_kind` samples of each length, as many again that met a swap; pairs share a prompt. Always the same."""
    old = Weights(0, f"sha256:{0:064x}", build_other_tiny_model(folder / "0"))
    new = Weights(1, f"sha256:{1:064x}", build_tiny_model(folder / "1"))
    worker = make_identity(21)
    samples: list[Sample] = []
    for kind, length in enumerate(_LENGTHS):
        requests = [make_request(100 * kind + n, max_tokens=length, group_size=2) for n in range(per_kind)]
        generations = write_all(Cheat(), requests, new, folder)
        samples += [_sample(*pair, worker) for pair in zip(requests, generations, strict=True)]
    requests = [make_request(1000 + n, max_tokens=40, group_size=2) for n in range(per_kind)]
    generations = _write_across_a_swap(requests, old, new, folder)
    samples += [_sample(*pair, worker) for pair in zip(requests, generations, strict=True)]
    digests = {weights.version: weights.manifest_digest for weights in (old, new)}
    return Corpus(worker, tuple(samples), digests, {w.manifest_digest: w.path for w in (old, new)})


def _write_across_a_swap(
    requests: Sequence[GenerationRequest], old: Weights, new: Weights, scratch: Path
) -> list[Generation]:
    """The first tokens by `old`, the others by `new`, which reads the whole prefix again, as an engine does."""
    begun = write_all(Cheat(), [_limited(request, _BORDER) for request in requests], old, scratch)
    found: list[Generation] = []
    for request, first in zip(requests, begun, strict=True):
        if first.stop_reason is StopReason.EOS:
            found.append(first)
            continue
        rest = replace(request, prompt_token_ids=request.prompt_token_ids + first.token_ids)
        (second,) = write_all(Cheat(), [_limited(rest, request.sampling.max_tokens - _BORDER)], new, scratch)
        spans = (*first.spans, *(replace(s, start=_BORDER, end=_BORDER + s.end) for s in second.spans))
        found.append(
            Generation(
                first.token_ids + second.token_ids,
                first.logprobs + second.logprobs,
                spans,
                first.proofs + second.proofs,
                second.stop_reason,
            )
        )
    return found


def _limited(request: GenerationRequest, max_tokens: int) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))


def _sample(request: GenerationRequest, generation: Generation, worker: Identity) -> Sample:
    lease_id = f"lease-{request.request_id}"
    claimed = make_claim(generation, request).rollout
    rollout = replace(claimed, run_id=RUN_ID, lease_id=lease_id, sample_id=request.request_id)
    committed = rollout.token_ids[: len(rollout.token_ids) // 3]
    commitment = Commitment(len(committed), token_digest(committed), 0) if committed else Commitment()
    lease = Lease(lease_id, request.request_id, worker.key_id, 0, deadline=100.0, commitment=commitment)
    return Sample(request, lease, rollout)

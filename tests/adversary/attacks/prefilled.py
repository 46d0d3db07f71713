"""The strongest form of a cheat: whatever wrote the tokens, the right model prefills them for proofs and log-probs.

A prefill is many times cheaper than generating, so a cheat can afford it. Activations and log-probs are then flawless:
only the draw, which the issued seed decides, can give it away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from protocol import toploc
from protocol.rollout import VersionSpan
from tests.adversary.attacks.cheat import Cheat
from tests.adversary.attacks.tokens import cut
from worker.engine import Generation, GenerationRequest, Weights

if TYPE_CHECKING:
    from coordinator.verification.prefill import PrefillModel, PrefillResult


class Prefilled(Cheat):
    """Another cheat's tokens with the right model's proofs and log-probs. `dtype`: of the prefill."""

    def __init__(self, inner: Cheat, *, dtype: str = "bfloat16") -> None:
        self._inner = inner
        self._dtype = dtype
        self.commits = inner.commits  # type: ignore[misc]
        self.choose = inner.choose
        self.alters_module = inner.alters_module
        self._published: dict[str, Path] = {}
        self._models: dict[str, PrefillModel] = {}

    def weights(self, published: Weights, scratch: Path) -> Weights:
        self._published[published.manifest_digest] = published.path
        return self._inner.weights(published, scratch)

    def draws(self, issued: GenerationRequest) -> list[GenerationRequest]:
        return self._inner.draws(issued)

    def pick(self, drawn: Sequence[Generation]) -> Generation:
        return self._inner.pick(drawn)

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        return self.proven(self._inner.falsify(honest, issued), issued)

    def proven(self, written: Generation, issued: GenerationRequest) -> Generation:
        """The same tokens, with what the claimed versions say about them."""
        found = [self.prefill([written], span, issued)[0] for span in written.spans]
        logprobs = tuple(float(logprob) for part in found for logprob in part.logprobs_T)
        proofs = tuple(toploc.build_proofs(part.hidden_bits_TD) for part in found)
        return replace(written, logprobs=logprobs, proofs=proofs)

    def prefill(
        self, written: Sequence[Generation], span: VersionSpan, issued: GenerationRequest
    ) -> list[PrefillResult]:
        """What the span's version says about its tokens in each of these completions."""
        import torch

        from coordinator.verification.prefill import PrefillModel
        from coordinator.verification.prefill_layout import PrefillItem

        if span.manifest_digest not in self._models:
            folder = self._published[span.manifest_digest]
            self._models[span.manifest_digest] = PrefillModel(folder, dtype=getattr(torch, self._dtype))
        sampling = issued.sampling
        items = [
            PrefillItem(
                n, issued.prompt_token_ids, w.token_ids[: span.end], issued.seed, sampling.temperature, span.start
            )
            for n, w in enumerate(written)
        ]
        return self._models[span.manifest_digest].prefill(items)


class FlatteringCut(Prefilled):
    """Cuts where an EOS loses the draw by least: where stopping looks most natural. `places`: the most that it tries."""

    commits = False

    def __init__(self, *, places: int = 64, dtype: str = "bfloat16") -> None:
        super().__init__(Cheat(), dtype=dtype)
        self._places = places
        self.commits = False  # type: ignore[misc]

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        if len(honest.spans) > 1:
            return honest
        # The last place would be the honest end, if that is an EOS.
        step = -(-len(honest.token_ids) // self._places)
        lengths = range(1, len(honest.token_ids), step)
        cuts = [cut(honest, length, issued.sampling.eos_token_ids) for length in lengths]
        if not cuts:
            return honest
        margins = [float(found.margins_T[-1]) for found in self.prefill(cuts, honest.spans[0], issued)]
        return self.proven(cuts[margins.index(min(margins))], issued)


class LyingSpans(Prefilled):
    """Claims a border where there was none: the first half by the version before, which never wrote it."""

    def __init__(self, *, dtype: str = "bfloat16") -> None:
        super().__init__(Cheat(), dtype=dtype)
        self._before: Weights | None = None
        self._newest: Weights | None = None

    def weights(self, published: Weights, scratch: Path) -> Weights:
        self._before, self._newest = self._newest, published
        return super().weights(published, scratch)

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        length = len(honest.token_ids)
        if self._before is None or length < 2 or len(honest.spans) > 1:
            return honest
        true = self.proven(honest, issued)
        hidden_TD = self.prefill([honest], honest.spans[0], issued)[0].hidden_bits_TD
        older = VersionSpan(self._before.version, self._before.manifest_digest, 0, length // 2)
        spans = (older, replace(honest.spans[0], start=length // 2))
        return replace(true, spans=spans, proofs=tuple(toploc.build_proofs(hidden_TD[s.start : s.end]) for s in spans))

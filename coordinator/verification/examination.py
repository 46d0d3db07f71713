"""What rollouts are measured with and held to, as the verifier and the process that it has examine them both know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.store.rollouts import PendingRollout
from coordinator.verification.checks import Claim
from coordinator.verification.thresholds import Thresholds
from protocol.errors import OurFault
from protocol.rollout import Outcome, SamplingParams, Verdict
from protocol.turns import Turns

TRANSFORMERS, VLLM = "transformers", "vllm"


@dataclass(frozen=True, slots=True)
class ExaminerSettings:
    """What rollouts are measured with and held to. `classes`: thresholds by precision class. `dtype`: of the prefill.

    `engine`: what computes it, "transformers" or "vllm"; the three fields behind it are of the latter. `turns`: by
    environment, of those whose tasks take several.
    """

    temperature: float
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    classes: Mapping[str, Thresholds]
    dtype: str = "bfloat16"
    resident_versions: int = 2
    threads: int = 1
    device: str = "cpu"
    engine: str = TRANSFORMERS
    max_model_len: int = 8192
    kv_cache_gib: float | None = None
    tensor_parallel: int = 1
    turns: Mapping[str, Turns] = field(default_factory=dict)

    def claim(self, item: PendingRollout) -> Claim:
        """The rollout beside what our side knows of it. Raises OurFault if its turns went by rules that are gone since."""
        turns = self.turns.get(item.environment)
        if item.rollout.turns != ("" if turns is None else turns.rules.digest):
            raise OurFault(
                f"the run file has other rules for the turns of {item.environment} than it had: put them back"
            )
        return Claim(
            rollout=item.rollout,
            prompt_token_ids=item.prompt_token_ids,
            sampling=SamplingParams(self.temperature, item.max_tokens, self.eos_token_ids),
            seed=item.seed,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            turns=turns,
        )

    def thresholds(self, item: PendingRollout) -> Thresholds:
        """Those of the rollout's own class; its class was admitted when it came in, so a lack of them is ours."""
        try:
            return self.classes[item.rollout.precision]
        except KeyError:
            raise OurFault(
                f"the run file has no thresholds for {item.rollout.precision} any more: put them back"
            ) from None


def inconclusive(error: Exception) -> Verdict:
    """Ours or an environment's failure."""
    return Verdict(Outcome.INCONCLUSIVE, detail=f"{getattr(error, 'fault', 'us')}: {error}", audited=False)

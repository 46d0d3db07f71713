"""Every cheat that a worker's process can be, by the name that `--attack` takes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from tests.adversary.attacks import claims, weights
from tests.adversary.attacks.cheat import Cheat
from tests.adversary.attacks.choices import NearTies, TopP
from tests.adversary.attacks.claims import HostileProofs, LyingLogprobs
from tests.adversary.attacks.prefilled import FlatteringCut, LyingSpans, Prefilled
from tests.adversary.attacks.requests import BestOfN, HiddenPrompt, OtherPrompt, OtherSeed, OtherTemperature
from tests.adversary.attacks.tokens import EditedToken, OtherTokens, Replay, Truncated
from worker.engine import Generation


class Attack(enum.StrEnum):
    HONEST = "honest"
    # Weights
    OTHER_WEIGHTS = "other_weights"  # the published ones, with 10 % noise
    OTHER_MODEL = "other_model"
    RANDOM_INIT = "random_init"
    NOISE_1 = "noise_1"
    NOISE_3 = "noise_3"
    INT4 = "int4"
    INT6 = "int6"
    INT8 = "int8"
    FP8_CACHE = "fp8_cache"
    STALE_WEIGHTS = "stale_weights"
    SMALL_MODEL = "small_model"  # writes; the right one prefills
    # Requests
    HIDDEN_PROMPT = "hidden_prompt"
    OTHER_PROMPT = "other_prompt"
    OTHER_TEMPERATURE = "other_temperature"
    WRONG_SEED = "wrong_seed"
    BEST_OF_N = "best_of_n"
    # The choice of tokens
    TOP_P = "top_p"
    NEAR_TIES = "near_ties"
    # Tokens
    RANDOM_TOKENS = "random_tokens"
    EDITED_TOKEN = "edited_token"
    EDITED_EARLY = "edited_early"
    EDITED_LAST = "edited_last"
    TRUNCATED = "truncated"
    FLATTERING_CUT = "flattering_cut"
    REPLAY = "replay"
    # Claims
    LYING_LOGPROB = "lying_logprob"
    LYING_LOGPROBS = "lying_logprobs"
    LYING_SPANS = "lying_spans"
    # Proofs
    PROOF_ZERO_MODULUS = "proof_zero_modulus"
    PROOF_TOO_FEW = "proof_too_few"
    PROOF_TOO_MANY = "proof_too_many"
    PROOF_NONE = "proof_none"
    PROOF_EMPTY = "proof_empty"
    PROOF_TWO_BYTES = "proof_two_bytes"
    PROOF_HUGE = "proof_huge"
    PROOF_NAN = "proof_nan"
    PROOF_CONSTANT = "proof_constant"
    PROOF_LOW_DEGREE = "proof_low_degree"
    PROOF_HALF_DEGREE = "proof_half_degree"
    PROOF_ONES = "proof_ones"


def make_cheat(attack: Attack) -> Cheat:
    """A new cheat of that name."""
    return _MAKE[attack]()


def even(token_ids: NDArray[Any]) -> NDArray[Any]:
    """Which tokens pay, where a cheat wants some: the even ones, half of any vocabulary."""
    return token_ids % 2 == 0


def share_of_even(generation: Generation) -> float:
    """What a completion pays, where a cheat wants the best of several."""
    return sum(token % 2 == 0 for token in generation.token_ids) / len(generation.token_ids)


_MAKE: dict[Attack, Callable[[], Cheat]] = {
    Attack.HONEST: Cheat,
    Attack.OTHER_WEIGHTS: lambda: weights.noise(0.1),
    Attack.OTHER_MODEL: weights.other_model,
    Attack.RANDOM_INIT: weights.random_init,
    Attack.NOISE_1: lambda: weights.noise(0.01),
    Attack.NOISE_3: lambda: weights.noise(0.03),
    Attack.INT4: lambda: weights.rounded(4),
    Attack.INT6: lambda: weights.rounded(6),
    Attack.INT8: lambda: weights.rounded(8),
    Attack.FP8_CACHE: weights.Fp8Cache,
    Attack.STALE_WEIGHTS: weights.StaleWeights,
    Attack.SMALL_MODEL: lambda: Prefilled(weights.other_model()),
    Attack.HIDDEN_PROMPT: HiddenPrompt,
    Attack.OTHER_PROMPT: OtherPrompt,
    Attack.OTHER_TEMPERATURE: OtherTemperature,
    Attack.WRONG_SEED: OtherSeed,
    Attack.BEST_OF_N: lambda: BestOfN(4, share_of_even),
    Attack.TOP_P: TopP,
    Attack.NEAR_TIES: lambda: NearTies(0.23, even),
    Attack.RANDOM_TOKENS: OtherTokens,
    Attack.EDITED_TOKEN: lambda: EditedToken("middle"),
    Attack.EDITED_EARLY: lambda: EditedToken("early"),
    Attack.EDITED_LAST: lambda: EditedToken("last"),
    Attack.TRUNCATED: Truncated,
    Attack.FLATTERING_CUT: FlatteringCut,
    Attack.REPLAY: Replay,
    Attack.LYING_LOGPROB: lambda: LyingLogprobs(one=1.5),
    Attack.LYING_LOGPROBS: lambda: LyingLogprobs(every=1.0),
    Attack.LYING_SPANS: LyingSpans,
    Attack.PROOF_ZERO_MODULUS: lambda: HostileProofs(claims.zero_modulus),
    Attack.PROOF_TOO_FEW: lambda: HostileProofs(claims.too_few),
    Attack.PROOF_TOO_MANY: lambda: HostileProofs(claims.too_many),
    Attack.PROOF_NONE: lambda: HostileProofs(claims.none_at_all),
    Attack.PROOF_EMPTY: lambda: HostileProofs(claims.empty),
    Attack.PROOF_TWO_BYTES: lambda: HostileProofs(claims.two_bytes),
    Attack.PROOF_HUGE: lambda: HostileProofs(claims.huge),
    Attack.PROOF_NAN: lambda: HostileProofs(claims.not_numbers),
    Attack.PROOF_CONSTANT: lambda: HostileProofs(claims.constant),
    Attack.PROOF_LOW_DEGREE: lambda: HostileProofs(claims.polynomial(degree=5)),
    Attack.PROOF_HALF_DEGREE: lambda: HostileProofs(claims.polynomial(degree=64)),
    Attack.PROOF_ONES: lambda: HostileProofs(claims.of_another),
}

"""Honest rollouts of a tiny model pass; each kind of cheat is refused, for its own reason, within five tokens."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.verification.checks import Claim, run_checks
from coordinator.verification.pooled import LOGPROB_GAP, NEAR_TIES, NEAR_TIES_LOST, NUMERIC, SEED_MARGIN
from coordinator.verification.prefill import PrefillResult
from coordinator.verification.resident import ResidentModels, prefill_rollouts
from protocol import toploc
from protocol.errors import OurFault
from protocol.rollout import EOS_LOGPROB, Outcome, RejectionReason, StopReason, Verdict, VersionSpan
from tests.thresholds import BY_HAND
from tests.tiny_model import build_tiny_model
from tests.unit.coordinator.verification.claims import (
    alter,
    generate_all,
    make_claim,
    make_request,
    to_prefill,
    with_tokens,
)
from worker.engine import Generation, GenerationRequest, Weights
from worker.reference_engine import ReferenceEngine

TRUE, NOISY, OTHER = "sha256:true", "sha256:noisy", "sha256:other"
SHORT = [make_request(number, group_size=4) for number in range(24)]
LONG = [make_request(100 + number, max_tokens=48) for number in range(4)]


def add_noise(source: Path, target: Path, share: float) -> Path:
    """The same model with each weight off by a normal share of itself."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    torch.manual_seed(5)
    state = load_file(target / "model.safetensors")
    noisy = {name: (t.float() * (1 + share * torch.randn(t.shape))).to(t.dtype) for name, t in state.items()}
    save_file(noisy, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    true = build_tiny_model(folder / "true")
    return {
        TRUE: true,
        OTHER: build_tiny_model(folder / "other", seed=1),
        NOISY: add_noise(true, folder / "noisy", 0.03),
    }


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> ResidentModels:
    return ResidentModels(folders.__getitem__, max_resident=3)


def written_by(folders: dict[str, Path], digest: str, requests: list[GenerationRequest]) -> list[Claim]:
    """What an engine with those weights writes, claimed to come from the true ones."""

    async def run() -> list[Generation]:
        engine = ReferenceEngine()
        await engine.start(Weights(0, TRUE, folders[digest]))
        try:
            return await generate_all(engine, requests)
        finally:
            await engine.close()

    return [make_claim(*pair) for pair in zip(asyncio.run(run()), requests, strict=True)]


@pytest.fixture(scope="module")
def honest(folders: dict[str, Path]) -> list[Claim]:
    return written_by(folders, TRUE, SHORT + LONG)


def judge(claims: list[Claim], models: ResidentModels) -> list[Verdict]:
    found = prefill_rollouts([to_prefill(claim, key) for key, claim in enumerate(claims)], models)
    return [run_checks(claim, found[key], BY_HAND) for key, claim in enumerate(claims)]


def proven(claims: list[Claim], models: ResidentModels) -> list[Claim]:
    """The claims with proofs and log-probs of an honest forward over their tokens: only the draw can give them away."""
    found = prefill_rollouts([to_prefill(claim, key) for key, claim in enumerate(claims)], models)
    return [
        alter(
            claim,
            proofs=tuple(toploc.build_proofs(found[key].hidden_bits_TD[s.start : s.end]) for s in claim.rollout.spans),
            logprobs=tuple(map(float, found[key].logprobs_T)),
        )
        for key, claim in enumerate(claims)
    ]


def other_token(token: int) -> int:
    return (token + 101) % 250


def reasons(verdicts: list[Verdict]) -> set[RejectionReason | None]:
    return {verdict.reason for verdict in verdicts}


def test_honest_rollouts_pass_with_trusted_logprobs(honest: list[Claim], models: ResidentModels) -> None:
    for claim, verdict in zip(honest, judge(honest, models), strict=True):
        assert verdict.outcome is Outcome.ACCEPTED, verdict.detail
        assert verdict.audited and len(verdict.entropies) == len(claim.rollout.token_ids)
        np.testing.assert_allclose(verdict.old_logprobs, claim.rollout.logprobs, atol=0.3)
        assert verdict.metrics["seed_margin_max"] < 0.3 and verdict.metrics["proof_mantissa_mean"] < 4


def test_a_verdict_says_what_was_admitted_and_what_the_pooled_tests_take(
    honest: list[Claim], models: ResidentModels
) -> None:
    for verdict in judge(honest, models):
        assert verdict.admitted.keys() <= verdict.metrics.keys()
        assert {"proof_mantissa_mean", "logprob_gap_max", "seed_margin_mean"} <= verdict.admitted.keys()
        assert all(verdict.metrics[name] <= bound for name, bound in verdict.admitted.items() if name != EOS_LOGPROB)
        long = len(verdict.old_logprobs) >= 8
        assert verdict.observations.keys() == (set(NUMERIC) if long else set()), "so short ones were not measured"
        assert verdict.metrics[NEAR_TIES] >= verdict.metrics[NEAR_TIES_LOST] >= 0
        assert all(value >= 0 for value in verdict.observations.values())
    lying = [alter(c, logprobs=tuple(p - 0.5 for p in c.rollout.logprobs)) for c in honest]
    [shifted] = judge([alter(honest[-1], logprobs=tuple(p - 0.04 for p in honest[-1].rollout.logprobs))], models)
    [plain] = judge(honest[-1:], models)
    assert shifted.observations[LOGPROB_GAP] > plain.observations[LOGPROB_GAP], "what passes still counts"
    rejected = judge(lying[-1:], models)[0]
    assert rejected.metrics["logprob_gap_median"] > rejected.admitted["logprob_gap_median"]
    assert SEED_MARGIN not in rejected.observations, "checks behind the failure did not run"


def test_honest_rollouts_at_other_temperatures_pass(folders: dict[str, Path], models: ResidentModels) -> None:
    requests = [make_request(200 + n, temperature=t, max_tokens=12) for n, t in enumerate((0.5, 0.8, 1.5))]
    assert {verdict.outcome for verdict in judge(written_by(folders, TRUE, requests), models)} == {Outcome.ACCEPTED}


def test_random_tokens(honest: list[Claim], models: ResidentModels) -> None:
    made_up = [with_tokens(claim, [other_token(t) for t in claim.rollout.token_ids]) for claim in honest]
    made_up = [
        alter(c, stop_reason=StopReason.LENGTH) for c in made_up if len(c.rollout.token_ids) == c.sampling.max_tokens
    ]
    assert len(made_up) > 15
    assert reasons(judge(made_up, models)) == {RejectionReason.PROOF}
    assert reasons(judge(proven(made_up, models), models)) == {RejectionReason.SEED}


@pytest.mark.parametrize("digest", [OTHER, NOISY], ids=["another-model", "3-percent-noise"])
def test_other_weights(folders: dict[str, Path], models: ResidentModels, digest: str) -> None:
    verdicts = judge(written_by(folders, digest, SHORT + LONG), models)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.REJECTED}
    assert RejectionReason.PROOF in reasons(verdicts)


def test_another_seed(folders: dict[str, Path], honest: list[Claim], models: ResidentModels) -> None:
    reseeded = [replace(request, seed=request.seed ^ 1) for request in SHORT + LONG]
    claims = [
        replace(claim, seed=request.seed)
        for claim, request in zip(written_by(folders, TRUE, reseeded), SHORT + LONG, strict=True)
    ]
    for claim, same, verdict in zip(claims, honest, judge(claims, models), strict=True):
        drawn_alike = claim.rollout.token_ids == same.rollout.token_ids
        assert drawn_alike or verdict.reason is RejectionReason.SEED


@pytest.mark.parametrize("place", [0, 2, -1], ids=["first", "middle", "last"])
def test_one_edited_token(honest: list[Claim], models: ResidentModels, place: int) -> None:
    edited = []
    for claim in honest:
        tokens = list(claim.rollout.token_ids)
        if len(tokens) == claim.sampling.max_tokens:
            tokens[place] = other_token(tokens[place])
            edited.append(alter(with_tokens(claim, tokens), stop_reason=StopReason.LENGTH))
    assert {verdict.outcome for verdict in judge(edited, models)} == {Outcome.REJECTED}
    assert reasons(judge(proven(edited, models), models)) == {RejectionReason.SEED}


def test_another_prompt(honest: list[Claim], models: ResidentModels) -> None:
    swapped = [replace(claim, prompt_token_ids=(7, *claim.prompt_token_ids[1:])) for claim in honest]
    assert {verdict.outcome for verdict in judge(swapped, models)} == {Outcome.REJECTED}


def test_another_temperature(folders: dict[str, Path], models: ResidentModels) -> None:
    cold = [make_request(300 + n, max_tokens=48, temperature=0.5) for n in range(4)]
    claims = [
        replace(claim, sampling=replace(claim.sampling, temperature=1.0)) for claim in written_by(folders, TRUE, cold)
    ]
    long_ones = [claim for claim in claims if len(claim.rollout.token_ids) > 8]
    assert long_ones and {verdict.outcome for verdict in judge(long_ones, models)} == {Outcome.REJECTED}


def test_lying_logprobs(honest: list[Claim], models: ResidentModels) -> None:
    one = [alter(c, logprobs=(c.rollout.logprobs[0] - 1.5, *c.rollout.logprobs[1:])) for c in honest]
    every = [alter(c, logprobs=tuple(p - 0.5 for p in c.rollout.logprobs)) for c in honest]
    assert reasons(judge(one, models)) == {RejectionReason.LOGPROB}
    assert reasons(judge([c for c in every if len(c.rollout.token_ids) > 4], models)) == {RejectionReason.LOGPROB}


def test_another_version_claimed(honest: list[Claim], models: ResidentModels) -> None:
    lying = [
        alter(claim, spans=tuple(replace(s, manifest_digest=OTHER) for s in claim.rollout.spans)) for claim in honest
    ]
    assert reasons(judge(lying, models)) == {RejectionReason.PROOF}


def test_a_border_that_was_not_there(honest: list[Claim], models: ResidentModels) -> None:
    claim = honest[-1]
    tokens = len(claim.rollout.token_ids)
    spans = (VersionSpan(0, TRUE, 0, 3), VersionSpan(1, OTHER, 3, tokens))
    hidden_TD = prefill_rollouts([to_prefill(claim)], models)[0].hidden_bits_TD
    lying = alter(claim, spans=spans, proofs=tuple(toploc.build_proofs(hidden_TD[s.start : s.end]) for s in spans))
    assert reasons(judge([lying], models)) == {RejectionReason.PROOF}


def test_eos_put_where_the_model_would_go_on(honest: list[Claim], models: ResidentModels) -> None:
    claim = next(c for c in honest if len(c.rollout.token_ids) == 48)
    eos = claim.sampling.eos_token_ids[0]
    cut = with_tokens(claim, (*claim.rollout.token_ids[:4], eos))
    cut = alter(cut, spans=(replace(claim.rollout.spans[0], end=5),), stop_reason=StopReason.EOS)
    [flattering] = proven([cut], models)
    assert reasons(judge([flattering], models)) == {RejectionReason.SEED}
    found = prefill_rollouts([to_prefill(flattering)], models)[0]
    strict = replace(BY_HAND, eos_logprob_min=float(found.logprobs_T[-1]) + 0.1)
    assert run_checks(flattering, found, strict).reason is RejectionReason.TERMINATION


def test_what_breaks_on_our_side_is_never_the_workers_failure(honest: list[Claim], models: ResidentModels) -> None:
    claim = honest[0]
    found = prefill_rollouts([to_prefill(claim)], models)[0]
    nan = replace(found, logprobs_T=np.full_like(found.logprobs_T, np.nan))
    narrow = replace(found, winners_T=found.winners_T[:0], margins_T=found.margins_T[:-1])
    shorter = PrefillResult.concatenate([found, found])
    for broken in (nan, narrow, shorter):
        with pytest.raises(OurFault):
            run_checks(claim, broken, BY_HAND)


def test_details_tell_the_contributor_what_to_do(honest: list[Claim], models: ResidentModels) -> None:
    claim = honest[0]
    wrong_seed = replace(claim, seed=claim.seed ^ 1)
    verdict = judge([wrong_seed], models)[0]
    assert "but the issued seed selects" in verdict.detail and "temperature 1" in verdict.detail
    lying = alter(claim, spans=tuple(replace(s, manifest_digest=OTHER) for s in claim.rollout.spans))
    assert "activations of tokens [0," in judge([lying], models)[0].detail

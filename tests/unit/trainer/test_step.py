"""One optimizer step on groups of rollouts, on a tiny Llama."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.rollout import Rollout, RolloutGroup, Segment, StopReason, VerifiedRollout, VersionSpan
from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model
from trainer.config import TrainerConfig
from trainer.losses import make_loss
from trainer.optim import Optimizer, OptimizerSettings
from trainer.step import Stepper

PROMPT = (65, 66, 67)


@pytest.fixture
def stepper(tmp_path: Path) -> Stepper:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path / "model"), dtype=torch.float32)
    optimizer = Optimizer(model.parameters(), OptimizerSettings(lr=3e-4))
    return Stepper(model, make_loss("ipo"), optimizer, TrainerConfig(), temperature=1.0)


def verified(name: str, tokens: tuple[int, ...], reward: float, logprob: float, version: int = 3) -> VerifiedRollout:
    logprobs = (logprob,) * len(tokens)
    rollout = Rollout(
        run_id="",
        lease_id="",
        sample_id=name,
        segments=(Segment.by_model(tokens),),
        logprobs=logprobs,
        spans=(VersionSpan(version, "sha256:" + "0" * 64, 0, len(tokens)),),
        proofs=(),
        stop_reason=StopReason.EOS,
    )
    return VerifiedRollout(name, name, "worker", rollout, reward, logprobs, audited=True)


def group(
    name: str,
    rewards: tuple[float, ...],
    n_requested: int | None = None,
    environment: str = "sums",
) -> RolloutGroup:
    """Completions that differ in their first token; log-probs about those of a model that knows nothing."""
    rollouts = tuple(
        verified(f"{name}-{i}", (70 + i, 71, EOS_TOKEN_ID), reward, -5.5) for i, reward in enumerate(rewards)
    )
    return RolloutGroup(name, f"{environment}/0", environment, PROMPT, n_requested or len(rewards), rollouts)


def logprob(stepper: Stepper, token: int) -> float:
    """Of `token` after the prompt."""
    with torch.no_grad():
        return float(stepper._model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)[token])


def test_a_step_makes_what_was_rewarded_likelier(stepper: Stepper) -> None:
    with torch.no_grad():
        likeliest = stepper._model(torch.tensor([PROMPT])).logits[0, -1].topk(2).indices.tolist()
    before = [logprob(stepper, token) for token in likeliest]
    rollouts = tuple(
        verified(f"a-{i}", (token,), reward=1.0 - i, logprob=before[i]) for i, token in enumerate(likeliest)
    )
    result = stepper.step([RolloutGroup("a", "sums/0", "sums", PROMPT, 2, rollouts)], trainer_version=3)
    after = [logprob(stepper, token) for token in likeliest]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert result.trained == ("a-0", "a-1")
    assert result.metrics["applied"] == 1.0
    assert result.metrics["approx_kl_fresh"] == pytest.approx(0.0, abs=1e-6)
    assert result.dropped == {}


def test_a_group_without_an_advantage_is_dropped_and_counted_and_still_in_the_reward(stepper: Stepper) -> None:
    result = stepper.step([group("a", (1.0, 0.0)), group("b", (1.0, 1.0), environment="counts")], trainer_version=3)
    assert result.trained == ("a-0", "a-1")
    assert result.dropped == {"zero_advantage": 2}
    assert result.metrics["reward_mean"] == 0.75
    assert result.metrics["reward_mean/counts"] == 1.0


def test_a_batch_without_any_advantage_changes_nothing(stepper: Stepper) -> None:
    before = {name: tensor.clone() for name, tensor in stepper._model.state_dict().items()}
    result = stepper.step([group("a", (0.0, 0.0))], trainer_version=3)
    assert result.report is None
    assert result.trained == ()
    assert all(torch.equal(before[name], tensor) for name, tensor in stepper._model.state_dict().items())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(stepper: Stepper) -> None:
    with torch.no_grad():
        stepper._model.lm_head.weight[0, 0] = float("nan")
    result = stepper.step([group("a", (1.0, 0.0))], trainer_version=3)
    assert result.metrics["applied"] == 0.0
    assert result.trained == ()
    assert result.dropped == {"skipped_step": 2}


def test_the_order_in_which_groups_became_ready_changes_nothing(tmp_path: Path, stepper: Stepper) -> None:
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    again = Stepper(
        other, make_loss("ipo"), Optimizer(other.parameters(), OptimizerSettings(lr=3e-4)), TrainerConfig(), 1.0
    )
    groups = [group("a", (1.0, 0.0)), group("b", (0.0, 1.0, 1.0)), group("c", (1.0, 0.0), n_requested=4)]
    first, second = stepper.step(groups, 3), again.step(groups[::-1], 3)
    assert first.trained == second.trained
    assert first.metrics["incomplete_groups"] == 1.0
    for name, tensor in stepper._model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_staleness_is_seen_from_the_trainers_version(stepper: Stepper) -> None:
    result = stepper.step([group("a", (1.0, 0.0))], trainer_version=5)
    assert result.metrics["staleness_mean"] == 2.0

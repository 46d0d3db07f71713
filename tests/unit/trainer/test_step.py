"""One optimizer step on groups of rollouts, on a tiny Llama."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.rollout import Rollout, RolloutGroup, Segment, StopReason, VerifiedRollout, VersionSpan
from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model
from trainer.companions import make_companions
from trainer.config import TrainerConfig
from trainer.losses import make_loss, make_objective
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


def made(folder: Path, loss: str, params=None, modifiers=(), regularizers=(), **changes) -> Stepper:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(folder), dtype=torch.float32)
    objective = make_objective(loss, params, modifiers, regularizers)
    config = TrainerConfig(loss=loss, **changes)
    load = lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # noqa: E731
    companions = make_companions(objective, model, initial=load, teacher=load, ewma=config.ewma_decay)
    return Stepper(model, objective, Optimizer(model.parameters(), OptimizerSettings(lr=3e-4)), config, 1.0, companions)


GROUPS = [group("a", (1.0, 0.0)), group("b", (0.0, 1.0, 1.0)), group("c", (1.0, 0.0))]


@pytest.mark.parametrize(
    ("loss", "rest"),
    [
        ("klpo", {"params": {"draws": 3}}),
        ("opd", {}),
        ("opd", {"params": {"actions": "drawn", "count": 3}}),
        ("opd", {"params": {"actions": "top_k", "count": 3}}),
        ("opd", {"params": {"actions": "teacher", "count": 3}}),
        ("ppo_ewma", {"ewma_decay": 0.9}),
        ("ipo", {"old_logprobs": "snapshot"}),
        ("ipo", {"old_logprobs": "ewma", "ewma_decay": 0.5}),
        ("ipo", {"regularizers": [{"name": "reference_kl"}, {"name": "entropy"}]}),
        ("ipo", {"modifiers": [{"name": "vcpo", "baseline": True}, {"name": "soft_staleness"}, {"name": "seq_drop"}]}),
        ("sao", {"advantage": "critic"}),
        ("sao", {"advantage": "single"}),
        ("decoupled_ppo", {"updates_per_batch": 2}),
    ],
)
def test_whatever_an_objective_needs_is_supplied(tmp_path: Path, loss: str, rest: dict) -> None:
    stepper = made(tmp_path / "model", loss, **rest)
    for _ in range(2):
        result = stepper.step(GROUPS, trainer_version=4)
        assert result.metrics["applied"] == 1.0
        assert result.metrics["grad_norm"] >= 0.0
    assert len(result.trained) == 7


def test_a_teacher_that_scored_groups_as_they_came_gives_the_same_step(tmp_path: Path) -> None:
    one, other = (made(tmp_path / name, "opd") for name in ("one", "two"))
    with torch.no_grad():  # a student that differs from its teacher
        for stepper in (one, other):
            stepper._model.lm_head.weight += 0.05 * torch.sin(torch.arange(260.0))[:, None]
    for each in GROUPS:
        other.receive([each])
    other.receive(GROUPS[:1])
    assert other._teaching.held == 7
    backbone = other._companions.teacher.base_model
    backbone.forward = None  # not asked again
    first, second = one.step(GROUPS, 3), other.step(GROUPS, 3)
    del backbone.forward
    assert other._teaching.held == 0
    assert first.metrics["grad_norm"] == pytest.approx(second.metrics["grad_norm"], rel=1e-4)
    assert first.metrics["grad_norm"] > 0.0
    assert other.step(GROUPS, 3).metrics["applied"] == 1.0, "what was not scored before is scored in the step"


def test_a_teacher_teaches_on_groups_whatever_their_rewards(tmp_path: Path) -> None:
    result = made(tmp_path / "model", "opd").step([group("a", (0.0, 0.0)), group("b", (1.0,))], trainer_version=3)
    assert result.trained == ("a-0", "a-1", "b-0")
    assert result.dropped == {}


def test_several_updates_count_apart_from_versions(tmp_path: Path) -> None:
    stepper = made(tmp_path / "model", "decoupled_ppo", updates_per_batch=2)
    stepper.step(GROUPS, trainer_version=3)
    assert stepper._optimizer.counters.steps == 2


@pytest.mark.parametrize(
    ("loss", "rest", "passes"),
    [
        ("decoupled_ppo", {}, 4),
        ("decoupled_ppo", {"updates_per_batch": 1}, 1),
        ("a3po", {}, 2),
        ("ipo", {}, 2),
        ("ipo", {"params": {"against": "prox"}}, 4),
        ("ipo", {"old_logprobs": "snapshot"}, 4),
        ("ipo", {"modifiers": [{"name": "vcpo", "baseline": True}]}, 4),
    ],
)
def test_the_step_start_policy_is_asked_only_where_it_counts(
    tmp_path: Path, loss: str, rest: dict, passes: int
) -> None:
    stepper = made(tmp_path / "model", loss, **{"updates_per_batch": 2, **rest})
    made_passes = []
    stepper._model.base_model.register_forward_pre_hook(lambda *_: made_passes.append(1))
    stepper.step(GROUPS, trainer_version=4)
    assert len(made_passes) == passes


def test_rollouts_without_trusted_log_probs_are_compared_with_the_step_start_policy(tmp_path: Path) -> None:
    stepper = made(tmp_path / "model", "ipo", updates_per_batch=2)
    made_passes = []
    stepper._model.base_model.register_forward_pre_hook(lambda *_: made_passes.append(1))
    unaudited = replace(GROUPS[0], rollouts=tuple(replace(item, audited=False) for item in GROUPS[0].rollouts))
    stepper.step([unaudited, *GROUPS[1:]], trainer_version=4)
    assert len(made_passes) == 4


def own_group(stepper: Stepper) -> RolloutGroup:
    """Two completions with the very log-probs that the stepper's weights give."""
    rollouts = tuple(
        verified(f"a-{i}", (token,), reward=1.0 - i, logprob=logprob(stepper, token))
        for i, token in enumerate((70, 71))
    )
    return RolloutGroup("a", "sums/0", "sums", PROMPT, 2, rollouts)


def test_fresh_are_only_tokens_of_the_very_weights_that_are_trained(tmp_path: Path) -> None:
    """The policy's own movement since the version is no disagreement of numerics, and must not be told as one."""
    stepper = made(tmp_path / "model", "ipo")
    before = own_group(stepper)
    first = stepper.step([before], trainer_version=3).metrics
    second = stepper.step([before], trainer_version=3, unpublished=1).metrics
    assert first["approx_kl_fresh"] == pytest.approx(0.0, abs=1e-9)
    assert first["approx_kl_stale"] == 0.0
    assert second["approx_kl_stale"] > 1e-6, "it did move"
    assert second["approx_kl_fresh"] == second["loss_kl_fresh"] == 0.0


def test_a_later_update_of_a_batch_has_no_fresh_tokens(tmp_path: Path) -> None:
    stepper = made(tmp_path / "model", "ipo", updates_per_batch=2)
    same = own_group(stepper)
    metrics = stepper.step([same, replace(same, group_id="b")], trainer_version=3).metrics
    assert metrics["tokens"] == 4.0
    assert metrics["approx_kl_fresh"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["approx_kl_stale"] > 1e-6


def test_a_snapshot_hides_the_age_that_trusted_values_show(tmp_path: Path) -> None:
    """The same rollouts: against the step-start policy the loss sees no movement; the metrics see it all the same."""
    trusted = made(tmp_path / "one", "ipo").step(GROUPS, trainer_version=4).metrics
    snapshot = made(tmp_path / "two", "ipo", old_logprobs="snapshot").step(GROUPS, trainer_version=4).metrics
    assert trusted["loss_kl_stale"] == pytest.approx(trusted["approx_kl_stale"])
    assert trusted["approx_kl_stale"] > 0.01
    assert snapshot["approx_kl_stale"] == pytest.approx(trusted["approx_kl_stale"])
    assert snapshot["loss_kl_stale"] == pytest.approx(0.0, abs=1e-6)


def test_the_rate_shrinks_when_few_rollouts_dominate(tmp_path: Path) -> None:
    stepper = made(tmp_path / "model", "pg_is", modifiers=[{"name": "vcpo"}])
    metrics = stepper.step([group("a", (1.0, 0.0, 0.0, 1.0))], trainer_version=3).metrics
    assert metrics["learning_rate"] < 3e-4


def test_the_state_beside_the_policy_goes_on_exactly(tmp_path: Path) -> None:
    rest = {"ewma_decay": 0.5, "advantage": "critic"}
    one, other = (made(tmp_path / name, "ppo_ewma", **rest) for name in ("one", "two"))
    one.step(GROUPS, 3)
    other._model.load_state_dict(one._model.state_dict())
    other._optimizer.load_state_dict(one._optimizer.state_dict())
    other.load_state_dict(one.state_dict())
    one.step(GROUPS, 3)
    other.step(GROUPS, 3)
    for name, tensor in one._model.state_dict().items():
        assert torch.equal(tensor, other._model.state_dict()[name]), name
    single = made(tmp_path / "three", "sao", advantage="single")
    single.step(GROUPS, 3)
    assert single.state_dict()["baseline"]["sums"] == pytest.approx(0.5, abs=0.02)


def test_what_is_dropped_is_told_by_length(stepper: Stepper) -> None:
    metrics = stepper.step([group("a", (1.0, 0.0)), group("b", (1.0, 1.0))], trainer_version=3).metrics
    assert metrics["dropped_tokens_mean/zero_advantage"] == 3.0


@pytest.mark.parametrize("trainer_version", [3, 4])
def test_the_silent_bug_and_the_metric_that_reveals_it(tmp_path: Path, trainer_version: int) -> None:
    """An engine that is off by 0.25 nats, let into the loss: a KL of 0.03 that less staleness does not cure."""
    generator = torch.Generator().manual_seed(0)
    stepper = made(tmp_path / "model", "ipo", behaviour_tolerance=5.0)
    tokens = tuple(torch.randint(60, 120, (300,), generator=generator).tolist())
    with torch.no_grad():
        logits = stepper._model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    trusted = logits.log_softmax(-1)[range(300), list(tokens)]
    engine = trusted + 0.25 * torch.randn(300, generator=generator)
    rollouts = []
    for name, reward in (("a-0", 1.0), ("a-1", 0.0)):
        item = verified(name, tokens, reward, 0.0)
        claimed = replace(item.rollout, logprobs=tuple(engine.tolist()))
        rollouts.append(replace(item, rollout=claimed, old_logprobs=tuple(trusted.tolist())))
    batch = [RolloutGroup("a", "sums/0", "sums", PROMPT, 2, tuple(rollouts))]
    metrics = stepper.step(batch, trainer_version).metrics
    age = "fresh" if trainer_version == 3 else "stale"
    assert 0.02 < metrics[f"loss_kl_{age}"] < 0.045, "what looks like staleness, fresh or not"
    assert 0.02 < metrics["engine_kl"] < 0.045, "and is the engine"
    assert metrics[f"approx_kl_{age}"] < 1e-6, "the policy has not moved"


def calling(name: str, answer: tuple[int, ...], said: float, rewards: tuple[float, ...] = (1.0, 0.0)) -> RolloutGroup:
    """Completions of two turns with a tool's answer between them; `said`: the log-probs stored for the answer's tokens."""
    rollouts = []
    for number, reward in enumerate(rewards):
        whole = verified(f"{name}-{number}", (70 + number, 71, *answer, 72, EOS_TOKEN_ID), reward, -5.5)
        segments = (
            Segment.by_model((70 + number, 71)),
            Segment.by_environment(answer),
            Segment.by_model((72, EOS_TOKEN_ID)),
        )
        logprobs = (-5.5, -5.5, *[said] * len(answer), -5.5, -5.5)
        rollouts.append(
            replace(whole, rollout=replace(whole.rollout, segments=segments, logprobs=logprobs), old_logprobs=logprobs)
        )
    return RolloutGroup(name, "sums/0", "sums", PROMPT, len(rewards), tuple(rollouts))


@pytest.mark.parametrize(
    ("loss", "advantage"), [("ipo", "dr_grpo"), ("ppo", "grpo"), ("two_sided", "rloo"), ("sao", "critic")]
)
def test_a_tools_answer_is_seen_but_neither_learned_nor_counted(tmp_path: Path, loss: str, advantage: str) -> None:
    folder = build_tiny_model(tmp_path / "model")

    def step(answer: tuple[int, ...], said: float) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = Optimizer(model.parameters(), OptimizerSettings(lr=3e-4))
        config = TrainerConfig(advantage=advantage, length_target=4, length_penalty=0.01)
        stepper = Stepper(model, make_loss(loss), optimizer, config, temperature=1.0)
        result = stepper.step([calling("a", answer, said)], trainer_version=3)
        assert result.metrics["applied"] == 1.0
        numbers = {name: value for name, value in result.metrics.items() if "seconds" not in name}
        return numbers, {name: tensor.clone() for name, tensor in model.state_dict().items()}

    numbers, weights = step((50, 51, 52), 0.0)
    assert (numbers["tokens"], numbers["completion_tokens_mean"]) == (8.0, 4.0)
    lying, same = step((50, 51, 52), -77.0)
    assert lying == numbers
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    other, _ = step((60, 61, 62), 0.0)
    assert other["tokens"] == 8.0 and other != numbers, "the model goes on behind what it was told"

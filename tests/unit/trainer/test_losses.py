"""Objectives by name: what may be chosen, and what a mistake is answered with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from protocol.errors import OurFault, UserError
from trainer.losses import LOSSES, Alternatives, LossInputs, Need, clamp_behaviour, make_loss, make_objective
from trainer.losses.pg_is import PgIs


def test_a_workers_log_probs_are_confined_to_the_trusted_ones():
    old = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    claimed = torch.tensor([[-1.05, -9.0, 0.0, math.nan]])
    assert clamp_behaviour(claimed, old, 0.1)[0].tolist() == pytest.approx([-1.05, -1.1, -0.9, -1.0])
    assert clamp_behaviour(claimed, old, 0.0).tolist() == old.tolist()
    with pytest.raises(UserError, match="behaviour_tolerance"):
        clamp_behaviour(claimed, old, -0.1)


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("ippo", {}, "async_ppo, cispo"),
        ("ipo", {"eps": 0.2}, "epsilon"),
        ("ipo", {"epsilon": "0.2"}, "must be of type float"),
        ("ipo", {"epsilon": 0.0}, "epsilon must be in"),
        ("ipo", {"tau": -1.0}, "tau"),
        ("ipo", {"aggregation": "mean"}, "token, sequence, constant"),
        ("ipo", {"aggregation": "constant"}, "constant_length"),
        ("ipo", {"constant_length": 8}, "of aggregation 'constant', not of 'token'"),
        ("ipo", {"against": "worker"}, "behaviour, old, prox"),
        ("ppo", {"clip_low": 1.0}, "clip_low"),
        ("ppo", {"clip_high": 0.0}, "clip_high"),
        ("async_ppo", {"ceiling": 1.0}, "ceiling"),
        ("async_ppo", {"max_staleness": True}, "must be of type int"),
        ("async_ppo", {"max_staleness": -2}, "max_staleness"),
        ("two_sided", {"delta": 1.1}, "delta"),
        ("tis", {"cap": 0.5}, "cap"),
        ("icepop", {"low": 1.5}, "enclose 1"),
        ("icepop", {"variant": "half"}, "mismatch, whole"),
        ("cispo", {"clip_low": 2.0}, "clip_low"),
        ("cispo", {"clip_high": -0.1}, "clip_high"),
        ("dppo", {"divergence": "js"}, "tv, kl"),
        ("dppo", {"delta": 0.0}, "delta"),
        ("gspo", {"clip_low": 0.0}, "clip_low"),
        ("decoupled_ppo", {"beyond": "drop"}, "mask, truncate"),
        ("decoupled_ppo", {"cap": 0.5}, "cap"),
        ("m2po", {"moment": 0.0}, "moment"),
        ("sat", {"quantile": 1.5}, "quantile"),
        ("sat", {"exponent": 0.0}, "exponent"),
        ("sao", {"low": 0.0}, "low"),
        ("vtrace", {"cap": 0.0}, "cap"),
        ("klpo", {"draws": -1}, "draws"),
        ("klpo", {"anchor": "teacher"}, "behaviour, reference"),
        ("opd", {"actions": "all"}, "sampled, drawn, top_k, teacher"),
        ("opd", {"count": 0}, "count"),
        ("opd", {"clip_low": 0.0}, "clip_low"),
        ("no.module:Loss", {}, "cannot load"),
        (":", {}, "cannot load"),
        ("trainer.losses.inputs:LossInputs", {}, "derives from"),
    ],
)
def test_errors_name_the_choices(name, params, said):
    with pytest.raises(UserError, match=said):
        make_loss(name, **params)


@pytest.mark.parametrize(
    ("modifiers", "regularizers", "said"),
    [
        ([{"name": "softer"}], [], "seq_drop, soft_staleness, vcpo"),
        ([{"gamma": 0.5}], [], "a table with a name"),
        ([{"name": "soft_staleness", "gamma": 0.0}], [], "gamma"),
        ([{"name": "soft_staleness", "ceiling": -2}], [], "ceiling"),
        ([{"name": "seq_drop", "rule": "mean"}], [], "band, product"),
        ([{"name": "seq_drop", "high": 0.9}], [], "enclose 1"),
        ([{"name": "seq_drop", "bound": 1.0}], [], "bound"),
        ([{"name": "vcpo", "scale_rate": 1}], [], "type bool"),
        ([], [{"name": "kl"}], "entropy, reference_kl"),
        ([], [{"name": "reference_kl", "estimator": "k2"}], "k1, k3"),
        ([], [{"name": "entropy", "beta": -1.0}], "beta"),
        ([], [{"name": "entropy", "weight": 1.0}], "it takes beta"),
    ],
)
def test_errors_of_what_goes_around_a_loss(modifiers, regularizers, said):
    with pytest.raises(UserError, match=said):
        make_objective("ipo", None, modifiers, regularizers)


def test_a_researchers_own_loss_is_found_by_its_import_path():
    assert make_loss("trainer.losses.ipo:Ipo", epsilon=0.1).epsilon == 0.1


@dataclass(frozen=True)
class Hungry(PgIs):
    """Asks for something and then is not given it."""

    def needs(self) -> frozenset[Need]:
        return frozenset({Need.TEACHER})


def test_what_was_not_supplied_is_our_fault():
    zero = torch.zeros(1, 1)
    inputs = LossInputs(zero, zero, zero, zero, torch.ones(1, 1, dtype=torch.bool), zero)
    with pytest.raises(OurFault, match="teacher"):
        inputs.need(Need.TEACHER)
    with pytest.raises(OurFault, match="other tokens"):
        inputs.alternatives()
    others = replace(inputs, teacher_BT=zero, others=Alternatives(zero[..., None], zero[..., None]))
    with pytest.raises(OurFault, match="teacher's log-probs of other tokens"):
        make_loss("opd", actions="drawn", count=1)(others)
    assert Hungry().needs() == {Need.TEACHER}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_each_says_its_formula_and_its_source(name):
    text = __import__("sys").modules[LOSSES[name].__module__].__doc__
    assert "Source" in text
    assert LOSSES[name].__doc__


@dataclass(frozen=True)
class Banded(PgIs):
    """Somebody's own, with fields of other types than the built-in ones."""

    band: tuple[float, float] = (0.5, 2.0)
    needed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.band[0] > self.band[1]:
            raise ValueError("the band is empty")


class Forgetful(PgIs):
    """Without @dataclass."""

    clip: float = 0.2


@dataclass(frozen=True)
class Demanding(PgIs):
    clip: float = field(kw_only=True)


def test_fields_of_ones_own_types_are_taken_and_checked() -> None:
    made = make_loss(f"{__name__}:Banded", band=[0.1, 1.0], needed=3)
    assert (made.band, made.needed) == ((0.1, 1.0), 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("Banded", {"band": [1.0]}, "band must be of type tuple"),
        ("Banded", {"needed": "many"}, "needed must be of type"),
        ("Banded", {"band": [2.0, 1.0]}, "the band is empty"),
        ("Demanding", {}, "clip"),
        ("Forgetful", {"clip": 0.1}, "@dataclass of its own"),
    ],
)
def test_a_mistake_in_ones_own_is_said_in_a_sentence(name: str, params: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_loss(f"{__name__}:{name}", **params)


@pytest.mark.parametrize("source", ["def", "raise OSError('no card')"], ids=["syntax", "raises"])
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "broken_objective.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="cannot load the loss 'broken_objective:Mine'"):
        make_loss("broken_objective:Mine")

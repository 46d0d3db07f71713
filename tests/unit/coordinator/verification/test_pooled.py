"""What a run file may say of the tests over many rollouts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from coordinator.verification.pooled import COMPARISONS, NUMERIC, Pooled
from coordinator.verification.thresholds import Thresholds
from protocol.errors import UserError
from tests.thresholds import BY_HAND, BY_HAND_POOLED


def mapping() -> dict[str, Any]:
    return copy.deepcopy(BY_HAND.to_mapping()["pooled"])


def test_survives_a_mapping() -> None:
    assert Pooled.from_mapping(mapping()) == BY_HAND_POOLED


def test_the_class_is_the_largest_that_is_reached() -> None:
    (test,) = [test for test in BY_HAND_POOLED.tests if test.name == NUMERIC[0]]
    starts = [each.tokens_min for each in test.classes]
    assert [test.for_tokens(start) for start in starts] == list(test.classes)
    assert test.for_tokens(10_000) == test.classes[-1]
    assert test.for_tokens(starts[0] - 1) is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("watch",), 0.0, "watch in"),
        (("watch",), "half", "pooled: watch must be a number"),
        (("source",), None, "pooled: source is missing"),
        (("tests",), 3, "pooled: tests must be a list of tables"),
        (("tests", 0, "action"), "shrug", r"pooled: tests\[0\]: action must be one of alert, strike"),
        (("tests", 0, "name"), "astrology", r"tests\[0\]: no test is named 'astrology'"),
        (("tests", 0, "name"), COMPARISONS.tests[0].name, "two have the same name"),
        (("tests", 0, "alpha"), 0.0, r"alpha must be in \(0, 1\]"),
        (("tests", 0, "classes"), [], "tokens_min must ascend from at least 1"),
        (("tests", 0, "classes", 0, "mean"), -5.0, "floor < mean < cap must hold"),
        (("tests", 0, "classes", 0, "mean"), float("inf"), r"classes\[0\]: mean must be finite"),
        (("tests", 0, "extra"), 1, r"pooled: tests\[0\]: extra is not a field"),
    ],
)
def test_names_the_field_that_is_wrong(path: tuple[Any, ...], value: object, message: str) -> None:
    fields = mapping()
    fields["tests"] = list(fields["tests"])
    inner: Any = fields
    for step in path[:-1]:
        inner = inner[step]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(UserError, match=message):
        Thresholds.from_mapping(BY_HAND.to_mapping() | {"pooled": fields})


def test_thresholds_without_them_still_compare_workers() -> None:
    fields = BY_HAND.to_mapping()
    del fields["pooled"]
    assert Thresholds.from_mapping(fields).pooled == COMPARISONS

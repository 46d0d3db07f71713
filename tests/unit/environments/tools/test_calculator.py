"""The calculator is exact within its bounds, total, and never runs anything."""

from __future__ import annotations

import operator
import string
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.tools.calculator import answer


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("1+2", "3"),
        ("The sum is <<12 * 7 + 5", "89"),
        ("2-3*4-5", "-15"),
        ("8/4/2", "1"),
        ("2*-3", "-6"),
        ("--3", "3"),
        ("-(2+3)*4", "-20"),
        ("((7))", "7"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.3333"),
        ("-2/3", "-0.6667"),
        ("1/80000", "0"),
        ("first 1+1, then 2+2", "4"),
        ("3 and so on", "3"),
        ("999999999999999", "999999999999999"),
    ],
)
def test_values(call: str, value: str) -> None:
    assert answer(call) == value


@pytest.mark.parametrize(
    "call",
    [
        "",
        "what?",
        "1/0",
        "1/(2-2)",
        "1 2",
        "1+",
        "*3",
        "+3",
        "()1",
        "(1",
        "1)",
        "(1)(2)",
        "1..2",
        "2**9",
        "999999999999999+1",
        "1" * 16,
        "9999999999*9999999999",
        "1/99999999999999/99999999999999/99999999999999",
        "(" * 200 + "1",
        "2*" * 100,
        "٣+1",
    ],
)
def test_everything_else_is_an_error(call: str) -> None:
    assert answer(call) == "error"


def test_only_the_end_of_a_long_call_is_looked_at() -> None:
    assert answer("9+" * 1000 + "1" + " " * 100) == answer(("9+" * 1000 + "1" + " " * 100)[-256:])
    assert answer("(" * 100_000 + "1+1") == "error"


@given(st.text(alphabet=string.digits + "+-*/(). ", max_size=300) | st.text(max_size=60))
def test_any_text_has_a_short_answer(call: str) -> None:
    found = answer(call)
    assert found == "error" or (len(found) <= 21 and Fraction(found) is not None)


_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def _joined(parts: tuple[tuple[str, Fraction], str, tuple[str, Fraction]]) -> tuple[str, Fraction]:
    (left, a), sign, (right, b) = parts
    return f"({left}) {sign} ({right})", _OPERATIONS[sign](a, b)


expressions = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(_joined),
    max_leaves=6,
)


@given(expressions)
def test_whole_numbers_are_exact(made: tuple[str, Fraction]) -> None:
    text, value = made
    assert answer(text) == str(value)

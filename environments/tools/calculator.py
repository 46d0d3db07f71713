"""Arithmetic for models that call for it: `+`, `-`, `*`, `/` and parentheses over decimal numbers, exact within bounds.

Nothing is ever evaluated as a program. The work is bounded by the characters that are looked at, numbers by their digits.
"""

from __future__ import annotations

import re
from fractions import Fraction

_LOOKED_AT = 256  # characters before the call's end
_DIGITS = 15  # of every number and every result, before and behind the point
_PLACES = 4  # of an answer that is no whole number
_LARGEST = 10**_DIGITS
_RUN = re.compile(r"[0-9+\-*/(). ]+")
_TOKEN = re.compile(r" *(?:(\d{1,15}(?:\.\d{1,15})?)|([+\-*/()]))")
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}
WRONG = "error"


def answer(call: str) -> str:
    """The value of the last expression in `call`, or "error"."""
    runs = [run.strip() for run in _RUN.findall(call[-_LOOKED_AT:]) if any("0" <= letter <= "9" for letter in run)]
    try:
        return _shown(_value(_tokens(runs[-1])))
    except (IndexError, ValueError, ZeroDivisionError):
        return WRONG


def _tokens(text: str) -> list[str | Fraction]:
    """Numbers, operators and parentheses; a sign before a number or parenthesis is "negate"."""
    found: list[str | Fraction] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"not arithmetic: {text[at:]!r}")
        at = match.end()
        number, sign = match.groups()
        operand_next = not found or (isinstance(found[-1], str) and found[-1] != ")")
        if number is not None:
            found.append(Fraction(number))
        elif sign == "-" and operand_next:
            found.append("negate")
        else:
            found.append(sign)
    return found


def _value(tokens: list[str | Fraction]) -> Fraction:
    """By two stacks, without recursion: how deep parentheses go is the caller's to choose."""
    values: list[Fraction] = []
    waiting: list[str] = []
    operand_next = True
    for token in tokens:
        if isinstance(token, Fraction) or token in ("(", "negate"):
            if not operand_next:
                raise ValueError("an operator is missing")
            if isinstance(token, Fraction):
                values.append(_bounded(token))
                operand_next = False
            else:
                waiting.append(token)
            continue
        if operand_next:
            raise ValueError("a number is missing")
        if token == ")":
            while waiting[-1] != "(":
                _apply(waiting.pop(), values)
            waiting.pop()
            continue
        while waiting and waiting[-1] != "(" and _STRENGTH[waiting[-1]] >= _STRENGTH[token]:
            _apply(waiting.pop(), values)
        waiting.append(token)
        operand_next = True
    while waiting:
        _apply(waiting.pop(), values)
    if len(values) != 1 or operand_next:
        raise ValueError("no expression")
    return values[0]


def _apply(operator: str, values: list[Fraction]) -> None:
    right = values.pop()
    if operator == "negate":
        values.append(-right)
        return
    if operator == "(":
        raise ValueError("a parenthesis is open")
    left = values.pop()
    if operator == "+":
        result = left + right
    elif operator == "-":
        result = left - right
    elif operator == "*":
        result = left * right
    else:
        result = left / right
    values.append(_bounded(result))


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) >= _LARGEST**2 or value.denominator >= _LARGEST**2 or abs(value) >= _LARGEST:
        raise ValueError("too large, or too fine")
    return value


def _shown(value: Fraction) -> str:
    """A whole number as it is, any other rounded half to even."""
    scaled = round(value * 10**_PLACES)
    whole, rest = divmod(abs(scaled), 10**_PLACES)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{whole}" + (f".{rest:0{_PLACES}d}".rstrip("0") if rest else "")

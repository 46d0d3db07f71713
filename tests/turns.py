"""Turns for tests: tokens are bytes, calls end on tokens that a random model writes often, answers tell calls apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from environments.base import ToolUse
from environments.tools.calculator import answer as calculate
from protocol.turns import Tool, TurnRules, Turns
from tests.parity import Parity

CALLS = tuple(range(33, 97))  # a quarter of the vocabulary
EQUALS = ord("=")


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(token_ids: Sequence[int]) -> str:
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")


def backwards(call: str) -> str:
    """A tool whose answer hangs on all of a short call."""
    return f"<{call[-6:][::-1]}>"


def make_turns(
    stops: tuple[int, ...] = CALLS, *, max_calls: int = 2, max_answer_tokens: int = 6, tool: Tool = backwards
) -> Turns:
    rules = TurnRules("backwards", "sha256:tool", "sha256:tokenizer", "", stops, max_calls, max_answer_tokens)
    return Turns(rules, encode, decode, tool)


def make_sums(*, max_calls: int = 2, max_answer_tokens: int = 4) -> Turns:
    """The calculator, called by "="."""
    return make_turns((EQUALS,), max_calls=max_calls, max_answer_tokens=max_answer_tokens, tool=calculate)


@dataclass(frozen=True)
class CallingParity(Parity):
    """Parity for a model that may call the calculator. `stop`: half of a random model's bytes are no letters, and are shown
    as this one."""

    name: ClassVar[str] = "calling-parity"
    stop: str = "\ufffd"
    max_calls: int = 3

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse("calculator", self.stop, self.max_calls, 6)

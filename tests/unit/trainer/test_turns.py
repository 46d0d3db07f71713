"""Evaluations in turns: everybody's first turns at once, then the second turns of those that called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.turns import EQUALS, encode, make_sums
from trainer.turns import complete_turns

EOS = 256
HOW: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16, "eos_token_ids": (EOS,), "seed": 7, "samples": 2}


class Script:
    """A sampler that writes what the test says, call after call, as long as it may."""

    def __init__(self, *lines: list[str]) -> None:
        self._lines = list(lines)
        self.asked: list[tuple[list[list[int]], dict[str, Any]]] = []

    async def start(self, model: Path, longest: int) -> None: ...

    async def complete(self, prompts: Sequence[Sequence[int]], *, samples: int, **how: Any) -> list[list[list[int]]]:
        self.asked.append(([list(prompt) for prompt in prompts], how | {"samples": samples}))
        said = iter(self._lines.pop(0))
        return [
            [
                [EOS if letter == ord("$") else letter for letter in encode(next(said))][: how["max_tokens"]]
                for _ in range(samples)
            ]
            for _ in prompts
        ]

    async def close(self) -> None: ...


async def test_a_single_turn_is_the_samplers() -> None:
    script = Script(["a$", "b$"])
    assert await complete_turns(script, [[1]], None, **HOW) == [[[97, EOS], [98, EOS]]]
    assert script.asked == [([[1]], HOW)]


async def test_those_that_call_go_on_behind_the_answer_and_the_answer_is_not_given_back() -> None:
    script = Script(["1+2=", "no$", "x$", "4="], ["!$"], ["2*3="], ["six$"])
    found = await complete_turns(script, [[1], [2]], make_sums(), **HOW)
    assert found == [
        [[*encode("1+2=!"), EOS], [*encode("no"), EOS]],
        [[*encode("x"), EOS], [*encode("4=2*3=six"), EOS]],
    ]
    assert [prompts for prompts, _ in script.asked] == [
        [[1], [2]],
        [[1, *encode("1+2=3")]],
        [[2, *encode("4=4")]],
        [[2, *encode("4=42*3=6")]],
    ]
    stops = [how["eos_token_ids"] for _, how in script.asked]
    assert stops == [(EOS, EQUALS), (EOS, EQUALS), (EOS, EQUALS), (EOS,)], "behind the last call nothing is one"
    assert len({how["seed"] for _, how in script.asked}) == 4
    assert [how["max_tokens"] for _, how in script.asked] == [16, 11, 13, 8]
    for prompts, how in script.asked:
        assert max(map(len, prompts)) + how["max_tokens"] <= 1 + 16, (
            "an engine refuses what may become longer than it has room for"
        )


async def test_nothing_goes_beyond_the_limit_and_a_call_without_room_is_the_end() -> None:
    script = Script(["12345678901=", "12=", "1" * 16, "1="], ["y" * 20], ["z" * 20])
    first, second = await complete_turns(script, [[1], [2]], make_sums(), **HOW)
    assert first == [encode("12345678901="), [*encode("12="), *encode("y" * 11)]]
    assert second == [encode("1" * 16), [*encode("1="), *encode("z" * 13)]]

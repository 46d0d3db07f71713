"""What a worker must have before it begins: the very tool, the very tokenizer, and the very answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from environments.calculator import Calculator
from environments.turns import require_tool, turns_by, turns_of
from protocol.errors import UserError
from protocol.tokenizer import RunTokenizer
from protocol.turns import Turns
from tests.parity import Parity
from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model

URL = "https://run.example"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> RunTokenizer:
    return RunTokenizer(build_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def turns(tokenizer: RunTokenizer) -> Turns:
    found = turns_of(Calculator(stop="="), tokenizer, (EOS_TOKEN_ID,), 64)
    assert found is not None
    return found


def test_a_worker_that_has_all_carries_out_the_same(turns: Turns, tokenizer: RunTokenizer) -> None:
    require_tool(turns.rules, URL)
    call = tokenizer.encode("6 * 7=")
    assert turns_by(turns.rules, tokenizer).answer(call) == turns.answer(call) == tuple(tokenizer.encode("42"))


def test_a_worker_without_the_tool_is_told_where_to_get_it(turns: Turns) -> None:
    with pytest.raises(UserError, match=r"tool that this worker doesn't have \(.*'search'.*\): install the package"):
        require_tool(replace(turns.rules, tool="search"), URL)


def test_a_worker_with_another_version_of_the_tool_is_told_to_update(turns: Turns) -> None:
    with pytest.raises(
        UserError, match=r"'calculator' in another version .*sha256:0… there, .*: install .*pip install -U"
    ):
        require_tool(replace(turns.rules, tool_digest="sha256:0"), URL)


def test_another_tokenizer_or_other_answers_are_found_before_anything_is_generated(
    turns: Turns, tokenizer: RunTokenizer
) -> None:
    with pytest.raises(UserError, match="another tokenizer"):
        turns_by(replace(turns.rules, tokenizer_digest="sha256:0"), tokenizer)
    with pytest.raises(UserError, match="gives other answers here"):
        turns_by(replace(turns.rules, max_answer_tokens=1), tokenizer)


def test_an_environment_of_single_turns_has_none(tokenizer: RunTokenizer, tmp_path: Path) -> None:
    assert turns_of(Parity(), tokenizer, (EOS_TOKEN_ID,), 8) is None

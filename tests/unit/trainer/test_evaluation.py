"""`trainer evaluate` on a tiny model: numbers, intervals, and that an interruption changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainer.evaluation as module
from environments.turns import turns_of
from protocol.errors import UserError
from protocol.tokenizer import RunTokenizer
from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model
from trainer.evaluation import Plan, Progress, fingerprint, run_evaluation, sections_of, summary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        f"[sampling]\neos_token_ids = [{EOS_TOKEN_ID}]\n[[environments]]\nname = 'sums'\nkind = 'arithmetic'\nmax_tokens = 2\n"
    )
    return path


async def test_scores_and_intervals_are_written(tmp_path: Path, config: Path, model: Path) -> None:
    out = tmp_path / "out" / "evaluation.json"
    result = await run_evaluation(config, Plan(model, tasks=20, samples=2, ks=(1, 2)), out)
    assert json.loads(out.read_text())["environments"]["sums"]["tasks"] == 20
    numbers = result["environments"]["sums"]
    assert 0.0 <= numbers["avg@2"]["low"] <= numbers["avg@2"]["mean"] <= numbers["avg@2"]["high"] <= 1.0
    assert len(numbers["scores"]) == 20
    assert [path.name for path in out.parent.iterdir()] == ["evaluation.json"], "nothing is left lying about"


async def test_an_interruption_changes_nothing(
    tmp_path: Path, config: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(model, tasks=40, samples=2, ks=(1,))
    whole = await run_evaluation(config, plan, tmp_path / "whole.json")
    add, chunks = Progress.add, []

    def interrupted(self: Progress, environment: str, scores: dict[int, list[float]]) -> None:
        chunks.append(min(scores))
        if len(chunks) == 2:
            raise KeyboardInterrupt
        add(self, environment, scores)

    monkeypatch.setattr(Progress, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        await run_evaluation(config, plan, tmp_path / "parts.json")
    with (tmp_path / "parts.json.partial").open("a") as file:
        file.write('{"environment": "su')
    again = await run_evaluation(config, plan, tmp_path / "parts.json")
    assert chunks == [0, 16, 16, 32], "the first chunk was not made again"
    assert again["environments"] == whole["environments"]


class Echo:
    """A sampler that writes the same for every prompt."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    async def start(self, model: Path, longest: int) -> None:
        self.said.append(("start", longest))

    async def complete(self, prompts: Sequence[Sequence[int]], *, samples: int, **how: Any) -> list[list[list[int]]]:
        self.said.append(("complete", len(prompts)))
        assert (how["max_tokens"], how["eos_token_ids"]) == (2, (EOS_TOKEN_ID,))
        return [[[49]] * samples for _ in prompts]

    async def close(self) -> None:
        self.said.append(("close", 0))


async def test_another_engine_may_write(tmp_path: Path, config: Path, model: Path) -> None:
    sampler = Echo()
    plan = Plan(model, tasks=20, samples=2, ks=(1,), engine="vllm")
    result = await run_evaluation(config, plan, tmp_path / "out.json", sampler)
    assert [what for what, _ in sampler.said] == ["start", "complete", "complete", "close"]
    assert sampler.said[0][1] > 2, "a prompt and two tokens"
    assert result["engine"] == "vllm"
    (section,), eos = sections_of(config)
    assert fingerprint(plan, [section], eos) != fingerprint(replace(plan, engine="builtin"), [section], eos)


async def test_a_partial_file_of_something_else_is_refused(tmp_path: Path, config: Path, model: Path) -> None:
    (tmp_path / "out.json.partial").write_text('{"fingerprint": "other"}\n')
    with pytest.raises(UserError, match="another evaluation"):
        await run_evaluation(config, Plan(model), tmp_path / "out.json")


@pytest.mark.parametrize("torn", ["", '{"finger'], ids=["empty", "torn"])
async def test_a_partial_file_without_a_whole_line_is_begun_anew(
    tmp_path: Path, config: Path, model: Path, torn: str
) -> None:
    (tmp_path / "out.json.partial").write_text(torn)
    plan = Plan(model, tasks=4, samples=2, ks=(1,))
    assert (await run_evaluation(config, plan, tmp_path / "out.json"))["environments"]["sums"]["tasks"] == 4


@pytest.mark.parametrize("line", [b"\xff\n", b"{\n", b'{"environment": "sums"}\n', b"\0\0\n", b"[]\n"])
def test_a_damaged_partial_file_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "out.partial"
    Progress(path, "same").add("sums", {0: [1.0]})
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(UserError, match="is damaged"):
        Progress(path, "same")


async def test_a_place_that_takes_no_result_is_said_before_the_work(tmp_path: Path, config: Path, model: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        await run_evaluation(config, Plan(model), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another file"):
        await run_evaluation(config, Plan(model), tmp_path / "file" / "out.json")


async def test_scores_depend_on_the_tokenizer_and_not_on_k(config: Path, model: Path, tmp_path: Path) -> None:
    sections, eos = sections_of(config)
    plan = Plan(model, samples=4, ks=(1,))
    assert fingerprint(replace(plan, ks=(4,)), sections, eos) == fingerprint(plan, sections, eos)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "tokenizer.json").write_text("{}")
    assert fingerprint(replace(plan, model=other), sections, eos) != fingerprint(plan, sections, eos)


def test_a_summary_by_hand() -> None:
    """Tasks solved 2 of 2, 1 of 2 and 0 of 2 times."""
    numbers = summary([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]], (1, 2))
    assert numbers["avg@2"]["mean"] == pytest.approx(0.5)
    assert numbers["pass@1"]["mean"] == pytest.approx(0.5)
    assert numbers["pass@2"]["mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": 0}, "at least 1"),
        ({"ks": (9,)}, "every k"),
        ({"ks": ()}, "every k"),
        ({"temperature": -1.0}, "temp"),
        ({"temperature": 0.0, "engine": "vllm"}, "builtin"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Plan(Path(), **changes)


def test_what_the_run_file_lacks_is_named(tmp_path: Path, config: Path) -> None:
    (section,), eos = sections_of(config)
    assert (section.name, section.kind, section.max_tokens, eos) == ("sums", "arithmetic", 2, (EOS_TOKEN_ID,))
    (tmp_path / "bare.toml").write_text("[run]\n")
    with pytest.raises(UserError, match="eos_token_ids"):
        sections_of(tmp_path / "bare.toml")
    config.write_text(config.read_text().replace("max_tokens = 2\n", ""))
    with pytest.raises(UserError, match="'max_tokens'"):
        sections_of(config)


async def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, config: Path) -> None:
    with pytest.raises(UserError, match="tokenizer"):
        await run_evaluation(config, Plan(tmp_path), tmp_path / "out.json")
    assert module._CHUNK == 16


async def test_tasks_of_several_turns_are_evaluated_with_their_tool(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "turns.toml"
    config.write_text(
        f"[sampling]\neos_token_ids = [{EOS_TOKEN_ID}]\n"
        '[[environments]]\nname = "calling"\nkind = "tests.turns:CallingParity"\nmax_tokens = 24\n'
    )
    plan = Plan(model, tasks=16, samples=2, ks=(1,))
    result = await run_evaluation(config, plan, tmp_path / "one.json")
    again = await run_evaluation(config, plan, tmp_path / "two.json")
    assert result["environments"] == again["environments"]
    assert result["environments"]["calling"]["tasks"] == 16
    (section,), eos = sections_of(config)
    turns = turns_of(section.environment, RunTokenizer(model), eos, 24)
    assert fingerprint(plan, [section], eos) != fingerprint(plan, [replace(section, turns=turns)], eos)

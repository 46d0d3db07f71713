"""Turns put together: the rules of an environment for a run, and what carries out the rules that a run's terms state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from environments.base import Environment, MultiTurn
from environments.tools import find_tool
from protocol.errors import UserError
from protocol.tokenizer import RunTokenizer
from protocol.turns import ANSWER_TOKENS_MAX, CALLS_MAX, STOP_TOKENS_MAX, TurnRules, Turns


def turns_of(
    environment: Environment, tokenizer: RunTokenizer, eos_token_ids: Sequence[int], max_tokens: int
) -> Turns | None:
    """How this environment's tasks take turns, None if they take one. Raises UserError if they can't with this model."""
    if not isinstance(environment, MultiTurn):
        return None
    use, name = environment.tool_use, environment.name
    tool, digest = find_tool(use.tool)
    if not (0 < use.max_calls <= CALLS_MAX and 0 < use.max_answer_tokens <= ANSWER_TOKENS_MAX):
        raise UserError(
            f"{name}: calls must be 1 to {CALLS_MAX}, tokens of an answer 1 to {ANSWER_TOKENS_MAX}; they are "
            f"{use.max_calls} and {use.max_answer_tokens}"
        )
    if use.max_answer_tokens + 2 > max_tokens:
        raise UserError(
            f"{name}: max_tokens = {max_tokens} has no room for a call and its answer of {use.max_answer_tokens} tokens: "
            "it counts everything after the prompt"
        )
    stops = tuple(token for token in tokenizer.ending_in(use.stop) if token not in eos_token_ids) if use.stop else ()
    if not 0 < len(stops) <= STOP_TOKENS_MAX:
        raise UserError(
            f"{name}: {len(stops)} of the model's tokens end in {use.stop!r}, where 1 to {STOP_TOKENS_MAX} must: choose "
            "another text for a call to end on, one that is a token by itself"
        )
    rules = TurnRules(use.tool, digest, tokenizer.digest, use.stop, stops, use.max_calls, use.max_answer_tokens)
    turns = Turns(rules, tokenizer.encode, tokenizer.decode, tool)
    return replace(turns, rules=replace(rules, probe=turns.probe()))


def tool_problem(rules: TurnRules) -> tuple[str, str] | None:
    """Why this machine can't call the very tool that a run's terms name, and what to do; None if it can."""
    try:
        _, digest = find_tool(rules.tool)
    except UserError as error:
        return (
            f"a tool that this worker doesn't have ({error})",
            "install the package that the run's operator names, or update rollswarm",
        )
    if digest != rules.tool_digest:
        return (
            f"the tool {rules.tool!r} in another version than this worker's ({rules.tool_digest[:19]}… there, "
            f"{digest[:19]}… here)",
            "install the run's: `pip install -U rollswarm`, or the tool's own package",
        )
    return None


def require_tool(rules: TurnRules, url: str) -> None:
    """Raise UserError, with the remedy, unless this machine has the very tool."""
    problem = tool_problem(rules)
    if problem is not None:
        raise UserError(f"the tasks of {url} call {problem[0]}: {problem[1]}")


def turns_by(rules: TurnRules, tokenizer: RunTokenizer) -> Turns:
    """What carries out these rules. Raises UserError if it would answer otherwise than the run's own side."""
    tool, _ = find_tool(rules.tool)
    turns = Turns(rules, tokenizer.encode, tokenizer.decode, tool)
    if tokenizer.digest != rules.tokenizer_digest:
        raise UserError(
            "the run's terms name another tokenizer than its weights come with: tell its operator that model.path and the "
            "published versions must have the same tokenizer.json"
        )
    if turns.probe() != rules.probe:
        raise UserError(
            f"the tool {rules.tool!r} gives other answers here than at the run's coordinator, though tool and tokenizer are "
            "the same: install the `tokenizers` and the Python that the run uses"
        )
    return turns

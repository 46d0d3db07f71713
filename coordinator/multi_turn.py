"""Which of a run's environments take several turns, and how."""

from __future__ import annotations

from coordinator.config import RunFile
from environments.registry import make_environment
from environments.turns import turns_of
from protocol.tokenizer import RunTokenizer
from protocol.turns import Turns


def run_turns(run_file: RunFile, tokenizer: RunTokenizer) -> dict[str, Turns]:
    """By environment, of those whose tasks take several. Raises UserError if one can't with this model."""
    found = {
        section.name: turns_of(
            make_environment(section.kind or section.name, section.params),
            tokenizer,
            run_file.sampling.eos_token_ids,
            section.max_tokens,
        )
        for section in run_file.environments
    }
    return {name: turns for name, turns in found.items() if turns is not None}

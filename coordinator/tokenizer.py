"""Text to token ids and back, with the model folder's own tokenizer.json. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protocol.errors import UserError


class RunTokenizer:
    """The policy's tokenizer, as prompts are encoded and completions are scored."""

    def __init__(self, model_path: Path) -> None:
        from tokenizers import Tokenizer

        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"model.path: {file} is missing; the folder must hold a fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, without any special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

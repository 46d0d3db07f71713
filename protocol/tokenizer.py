"""Text to token ids and back, with a policy folder's own tokenizer.json. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from protocol.errors import UserError


class RunTokenizer:
    """The policy's tokenizer, as prompts are encoded, completions scored, and tools asked and answered.

    `digest`: `sha256:<hex>` of the file, by which two sides know that they have the same.
    """

    def __init__(self, model_path: Path) -> None:
        from tokenizers import Tokenizer

        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{file} is missing: a model's folder must hold a fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(file))
        self.digest = "sha256:" + sha256(file.read_bytes()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, without any special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def ending_in(self, ending: str) -> tuple[int, ...]:
        """The tokens, special ones too, whose own text ends so."""
        every = [[token] for token in range(self._tokenizer.get_vocab_size())]
        texts = self._tokenizer.decode_batch(every, skip_special_tokens=False)
        return tuple(token for (token,), text in zip(every, texts, strict=True) if text.endswith(ending))

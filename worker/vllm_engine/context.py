"""How long a sequence may be: what is asked for, but not more than the model has positions for (vLLM refuses to start then)."""

from __future__ import annotations

import json
import logging
from pathlib import Path

log = logging.getLogger(__name__)


def within_context(folder: Path, wanted: int | None) -> int | None:
    """`wanted` tokens, or the model's positions if these are fewer. Where RoPE is stretched, and for None, vLLM decides."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    positions = config.get("max_position_embeddings")
    if (
        wanted is None
        or not isinstance(positions, int)
        or rope.get("rope_type", rope.get("type", "default")) != "default"
    ):
        return wanted
    if wanted > positions:
        log.info(
            "sequences of %d tokens at most: the model has no more positions", positions, extra={"action": "context"}
        )
    return min(wanted, positions)

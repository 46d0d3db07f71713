"""A completion as coloured tokens: how far the worker's log-probability of each is from the one our prefill finds. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.store.rollouts import unpack_payload
from protocol.wire import floats_from_bytes, rollout_from_payload

_STEPS = (0.02, 0.1, 0.3, 1.0)  # nats; a bf16 engine beside a bf16 prefill stays below the second


@dataclass(frozen=True, slots=True)
class ColouredToken:
    """`level` 0 (none) to 4 (more than a nat); `gap` None where nothing was measured. `by_model`: and not by a
    tool."""

    text: str
    token_id: int
    gap: float | None
    level: int
    version: int
    by_model: bool = True


def level_of(gap: float | None) -> int:
    if gap is None:
        return 0
    if not math.isfinite(gap):
        return len(_STEPS)
    return sum(gap > step for step in _STEPS)


def colour(
    token_ids: Sequence[int],
    behaviour: Sequence[float],
    old: Sequence[float],
    spans: Sequence[tuple[int, int]],
    decode: Callable[[Sequence[int]], str],
    by_model: Sequence[bool] = (),
) -> list[ColouredToken]:
    """`old` may be empty (not audited, or forgotten). `spans`: (end, version), ascending. `by_model`: of each token; empty if
    the model wrote all."""
    found = []
    span = 0
    for place, token_id in enumerate(token_ids):
        while span + 1 < len(spans) and place >= spans[span][0]:
            span += 1
        own = by_model[place] if by_model else True
        gap = abs(behaviour[place] - old[place]) if own and place < min(len(old), len(behaviour)) else None
        version = spans[span][1] if spans else 0
        found.append(ColouredToken(decode([token_id]) or "␃", token_id, gap, level_of(gap), version, own))
    return found


def of_stored(payload: bytes | None, old: bytes | None, decode: Callable[[Sequence[int]], str]) -> list[ColouredToken]:
    """The tokens of a stored rollout; none where its payload is kept no longer."""
    if payload is None:
        return []
    rollout = rollout_from_payload(unpack_payload(payload))
    spans = [(span.end, span.version) for span in rollout.spans]
    measured = floats_from_bytes(old) if old else ()
    return colour(rollout.token_ids, rollout.logprobs, measured, spans, decode, rollout.loss_mask)

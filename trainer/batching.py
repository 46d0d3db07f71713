"""From verified groups to tensors: each group's prompt once, its completions side by side behind it.

Shapes: R rows, L tokens in a row, B completions, T tokens in a completion.

A row holds one prompt and several completions of it. Every completion sees the prompt and itself, never its
neighbours, and its positions go on from the prompt's end; so a row gives exactly what each completion alone would,
for little more than the completions' own tokens. A completion's last token is not fed: nothing follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from protocol.policy import staleness
from protocol.rollout import RolloutGroup, VerifiedRollout
from trainer.losses.inputs import LossInputs

PROMPT_SEGMENT = 0
PADDING_SEGMENT = -1


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One completion to learn from: T tokens and, for each, what is known about it.

    `old`: the trusted log-probs, or empty for a rollout that was not audited. `staleness`: per token, in versions.
    `key`: which of the step's completions this is; unique in a step, −1 where nobody asks.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    old: tuple[float, ...]
    behaviour: tuple[float, ...]
    staleness: tuple[int, ...]
    advantage: float
    key: int = -1


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What goes through the model at once.

    `segment_RL`: 0 the prompt, i ≥ 1 the row's i-th completion, −1 padding (on the right).
    `source_BT`: the place in the flattened [R · L] whose hidden state predicts token (b, t).
    `mask_BT`: the tokens that are trained on; wherever it is False all other [B, T] fields are 0.
    `has_old_B`: whether `old_BT` holds trusted values. `key_B`: the completions' keys.
    """

    input_RL: torch.Tensor
    position_RL: torch.Tensor
    segment_RL: torch.Tensor
    source_BT: torch.Tensor
    token_BT: torch.Tensor
    mask_BT: torch.Tensor
    old_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    advantage_BT: torch.Tensor
    staleness_BT: torch.Tensor
    has_old_B: torch.Tensor
    key_B: torch.Tensor

    def to(self, device: torch.device | str) -> Microbatch:
        """The same on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})

    def loss_inputs(
        self, new_BT: torch.Tensor, start_BT: torch.Tensor | None = None, replacing_BT: torch.Tensor | None = None
    ) -> LossInputs:
        """Inputs of a loss at `new_BT`; `behaviour` is the worker's claim, not yet clamped.

        `start_BT`: log-probs under the step-start policy, which stand in for `old` where a rollout was not audited (None:
        `new_BT` itself, since where a step has one update the two policies are the same).
        `replacing_BT`: taken as `old` for all rollouts, audited or not.
        """
        start = new_BT.detach() if start_BT is None else start_BT
        old = torch.where(self.has_old_B[:, None], self.old_BT, start) if replacing_BT is None else replacing_BT
        old = torch.where(self.mask_BT, old, 0.0)
        return LossInputs(new_BT, old, self.behaviour_BT, self.advantage_BT, self.mask_BT, self.staleness_BT)


def sequences_of(
    group: RolloutGroup, advantages: Sequence[float | None], trainer_version: int, first_key: int = 0
) -> list[TrainSequence]:
    """The group's completions with their advantages, in order, those without one (None) left out.

    Staleness is as seen from `trainer_version`; keys count on from `first_key`, also for those left out.
    """
    if len(advantages) != len(group.rollouts):
        raise ValueError(f"{len(advantages)} advantages for {len(group.rollouts)} rollouts")
    return [
        _sequence(group.prompt_token_ids, rollout, advantage, trainer_version, key)
        for key, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True), start=first_key)
        if advantage is not None
    ]


def _sequence(
    prompt: tuple[int, ...], item: VerifiedRollout, advantage: float, version: int, key: int
) -> TrainSequence:
    rollout = item.rollout
    ages = [staleness(version, span.version) for span in rollout.spans for _ in range(len(span))]
    tokens = rollout.token_ids
    old = item.old_logprobs if item.audited else ()
    for what, values in (("log-probs", rollout.logprobs), ("span tokens", ages), ("old log-probs", old or tokens)):
        if len(values) != len(tokens):
            raise ValueError(f"rollout {item.rollout_id}: {len(values)} {what} for {len(tokens)} tokens")
    return TrainSequence(prompt, tokens, rollout.loss_mask, old, rollout.logprobs, tuple(ages), advantage, key)


def pack(
    sequences: Sequence[TrainSequence], *, token_budget: int, row_tokens: int = 512, share_prompts: bool = True
) -> list[Microbatch]:
    """Microbatches of at most `token_budget` padded input tokens each (more only if a single row needs it).

    Completions of the same prompt share a row as long as it has at most `row_tokens` tokens, or have one row each if
    `share_prompts` is False (models whose attention takes no mask of our own). Rows of similar length go together.
    Completions without a trained token are left out. The order depends on the content alone.
    """
    useful = [item for item in sequences if any(item.loss_mask)]
    rows = _rows(useful, row_tokens if share_prompts else 0)
    rows.sort(key=_row_length, reverse=True)
    batches: list[list[list[TrainSequence]]] = []
    for row in rows:
        widest = _row_length(batches[-1][0]) if batches else 0
        if batches and widest * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_microbatch(batch) for batch in batches]


def _rows(sequences: list[TrainSequence], row_tokens: int) -> list[list[TrainSequence]]:
    """Completions that share a row. Each has one prompt, and one completion at least."""
    rows: list[list[TrainSequence]] = []
    ordered = sorted(sequences, key=lambda item: (item.prompt_ids, len(item.token_ids)))
    for _, same_prompt in groupby(ordered, key=lambda item: item.prompt_ids):
        row: list[TrainSequence] = []
        for item in same_prompt:
            if row and _row_length([*row, item]) > row_tokens:
                rows.append(row)
                row = []
            row.append(item)
        rows.append(row)
    return rows


def _row_length(row: list[TrainSequence]) -> int:
    return len(row[0].prompt_ids) + sum(len(item.token_ids) - 1 for item in row)


def _microbatch(rows: list[list[TrainSequence]]) -> Microbatch:
    length = max(_row_length(row) for row in rows)
    inputs, positions, segments, sources = [], [], [], []
    for index, row in enumerate(rows):
        tokens, places, owners, row_sources = _lay_out(row)
        fill = length - len(tokens)
        inputs.append(tokens + [0] * fill)
        positions.append(places + [0] * fill)
        segments.append(owners + [PADDING_SEGMENT] * fill)
        sources += [[index * length + place for place in source] for source in row_sources]
    items = [item for row in rows for item in row]
    mask = _padded([item.loss_mask for item in items], torch.bool)
    return Microbatch(
        input_RL=torch.tensor(inputs),
        position_RL=torch.tensor(positions),
        segment_RL=torch.tensor(segments),
        source_BT=torch.where(mask, _padded(sources, torch.long), 0),
        token_BT=torch.where(mask, _padded([item.token_ids for item in items], torch.long), 0),
        mask_BT=mask,
        old_BT=torch.where(mask, _padded([item.old or [0.0] * len(item.token_ids) for item in items]), 0.0),
        behaviour_BT=torch.where(mask, _padded([item.behaviour for item in items]), 0.0),
        advantage_BT=torch.where(mask, torch.tensor([item.advantage for item in items])[:, None], 0.0),
        staleness_BT=torch.where(mask, _padded([item.staleness for item in items], torch.long), 0),
        has_old_B=torch.tensor([bool(item.old) for item in items]),
        key_B=torch.tensor([item.key for item in items]),
    )


def _lay_out(row: list[TrainSequence]) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """A row's tokens, positions and segments, and for each completion the places that predict its tokens."""
    prompt = row[0].prompt_ids
    tokens, places = list(prompt), list(range(len(prompt)))
    owners = [PROMPT_SEGMENT] * len(prompt)
    sources = []
    for number, item in enumerate(row, start=1):
        fed = item.token_ids[:-1]
        sources.append([len(prompt) - 1, *range(len(tokens), len(tokens) + len(fed))])
        tokens += fed
        places += range(len(prompt), len(prompt) + len(fed))
        owners += [number] * len(fed)
    return tokens, places, owners, sources


def _padded(values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of different lengths as one tensor, filled with 0 on the right."""
    width = max(len(row) for row in values)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in values], dtype=dtype)

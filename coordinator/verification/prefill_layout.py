"""How claimed rollouts are laid out for forwards: what is fed, and where each token's hidden state comes out.

Short rollouts are packed. A unit is one prompt, fed once, with completions of it behind one another, each without its last
token; a row holds several units; a place sees its unit's prompt and its own completion up to itself, and its position goes
on from the prompt's end. So a packed row gives what each rollout alone would, without padding and without a prompt twice.
Long rollouts go in padded batches of similar length (`plan_padded`): there a dense mask would cost more than it saves.

Shapes: R rows of L places; N measured positions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

ROW_TOKENS = 256
PACKED_TOKENS_MAX = 128  # prompt and completion of a rollout that is packed
_PADDING = -1
# A padded batch is as wide as its longest completion: beyond this multiple of its shortest (and a few tokens that cost
# less than another forward would), a new batch begins.
_PADDED_MAX = 1.5
_PADDED_FREE = 2
_BUCKET_GROWTH = 1.25  # rollouts whose lengths differ by less share a batch: bounds padding to a quarter


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """What one version has to say about completion tokens [first, T), given the prompt and all tokens before them.

    `key` is unique within a call. `seed`: 63-bit. Prompt and completion have at least one token each.
    """

    key: Hashable
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    seed: int
    temperature: float
    first: int = 0

    @property
    def fed_tokens(self) -> int:
        """Tokens that a forward of this item alone takes: all but the last."""
        return len(self.prompt_token_ids) + len(self.completion_token_ids) - 1


@dataclass(frozen=True, slots=True)
class Packed:
    """One forward of packed rows.

    `items`: indices in the order of their measured positions. `source_N`: the place in the flattened [R · L] whose hidden
    state says each measured token. `unit_RL` numbers a row's units, `owner_RL` is 0 for a prompt's places and the number of
    the completion for others; −1 is padding, on the right.
    """

    items: tuple[int, ...]
    ids_RL: torch.Tensor
    position_RL: torch.Tensor
    unit_RL: torch.Tensor
    owner_RL: torch.Tensor
    source_N: torch.Tensor

    def allowed(self) -> torch.Tensor:
        """[R, 1, L, L] booleans: whether a place (third) sees a place (fourth). Padding sees earlier padding and itself."""
        same_unit = self.unit_RL[:, :, None] == self.unit_RL[:, None, :]
        same_owner = self.owner_RL[:, :, None] == self.owner_RL[:, None, :]
        prompt = (self.owner_RL == 0)[:, None, :]
        length = self.ids_RL.shape[1]
        causal_LL = torch.ones(length, length, dtype=torch.bool, device=self.ids_RL.device).tril()
        return (causal_LL & same_unit & (same_owner | prompt))[:, None]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Completions, by index, that share one fed prompt; `tokens` that they take together."""

    items: tuple[int, ...]
    tokens: int


def plan_packed(items: Sequence[PrefillItem], chosen: Sequence[int], token_budget: int) -> Iterator[Packed]:
    """Forwards for the items of these indices, R · L within the budget (a single row may go over it)."""
    rows = _rows(_units(items, chosen))
    rows.sort(key=lambda row: -sum(unit.tokens for unit in row))
    forward: list[list[_Unit]] = []
    width = 0
    for row in rows:
        if forward and (len(forward) + 1) * width > token_budget:
            yield _lay_out(items, forward, width)
            forward = []
        width = width if forward else sum(unit.tokens for unit in row)
        forward.append(row)
    if forward:
        yield _lay_out(items, forward, width)


def _units(items: Sequence[PrefillItem], chosen: Sequence[int]) -> list[_Unit]:
    ordered = sorted(chosen, key=lambda index: (items[index].prompt_token_ids, len(items[index].completion_token_ids)))
    units: list[_Unit] = []
    for prompt, indices in groupby(ordered, key=lambda index: items[index].prompt_token_ids):
        members: list[int] = []
        tokens = len(prompt)
        for index in indices:
            more = len(items[index].completion_token_ids) - 1
            if members and tokens + more > ROW_TOKENS:
                units.append(_Unit(tuple(members), tokens))
                members, tokens = [], len(prompt)
            members.append(index)
            tokens += more
        units.append(_Unit(tuple(members), tokens))
    return units


def _rows(units: list[_Unit]) -> list[list[_Unit]]:
    """Units into rows of at most ROW_TOKENS: the largest first, each into the first row with room."""
    rows: list[list[_Unit]] = []
    used: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        place = next((i for i, tokens in enumerate(used) if tokens + unit.tokens <= ROW_TOKENS), None)
        if place is None:
            rows.append([unit])
            used.append(unit.tokens)
        else:
            rows[place].append(unit)
            used[place] += unit.tokens
    return rows


@dataclass(slots=True)
class _Row:
    """A row as it fills up: for each place its token, position, unit and owner."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def append(self, tokens: Sequence[int], *, position: int, unit: int, owner: int) -> int:
        """Add tokens that stand at `position` and on; the first one's place in the row."""
        place = len(self.ids)
        self.ids += tokens
        self.positions += range(position, position + len(tokens))
        self.units += [unit] * len(tokens)
        self.owners += [owner] * len(tokens)
        return place

    def fill(self, width: int) -> None:
        """Pad on the right."""
        self.append([0] * (width - len(self.ids)), position=0, unit=_PADDING, owner=_PADDING)


def _lay_out(items: Sequence[PrefillItem], units_of_rows: list[list[_Unit]], width: int) -> Packed:
    rows: list[_Row] = []
    order: list[int] = []
    source: list[int] = []
    for number, units in enumerate(units_of_rows):
        row = _Row()
        for unit_number, unit in enumerate(units):
            order += unit.items
            places = _add_unit(row, [items[index] for index in unit.items], unit_number)
            source += [number * width + place for place in places]
        row.fill(width)
        rows.append(row)
    return Packed(
        tuple(order),
        ids_RL=torch.tensor([row.ids for row in rows]),
        position_RL=torch.tensor([row.positions for row in rows]),
        unit_RL=torch.tensor([row.units for row in rows]),
        owner_RL=torch.tensor([row.owners for row in rows]),
        source_N=torch.tensor(source),
    )


def _add_unit(row: _Row, members: Sequence[PrefillItem], unit: int) -> list[int]:
    """Feed a prompt and completions of it; the places that say their measured tokens, completion after completion."""
    prompt = members[0].prompt_token_ids
    last = row.append(prompt, position=0, unit=unit, owner=0) + len(prompt) - 1
    places: list[int] = []
    for owner, item in enumerate(members, start=1):
        fed = item.completion_token_ids[:-1]
        start = row.append(fed, position=len(prompt), unit=unit, owner=owner)
        places += [last, *range(start, start + len(fed))][item.first :]
    return places


def plan_padded(items: Sequence[PrefillItem], chosen: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Indices per forward: similar lengths together, then equal prompts; rows times width within the budget.

    An item that is larger than the budget gets a forward of its own.
    """

    def order(index: int) -> tuple[int, tuple[int, ...], int]:
        item = items[index]
        length = len(item.completion_token_ids)
        return int(math.log(length, _BUCKET_GROWTH)), item.prompt_token_ids, length

    batch: list[int] = []
    prompt_width = completion_width = 0
    for index in sorted(chosen, key=order):
        prompt = len(items[index].prompt_token_ids)
        completion = len(items[index].completion_token_ids)
        width = max(prompt_width, prompt) + max(completion_width, completion)
        # The order ascends: a batch's first completion is its shortest, up to a bucket.
        padded = batch and completion > _PADDED_MAX * len(items[batch[0]].completion_token_ids) + _PADDED_FREE
        if batch and (padded or (len(batch) + 1) * width > token_budget):
            yield batch
            batch = []
            prompt_width = completion_width = 0
        prompt_width = max(prompt_width, prompt)
        completion_width = max(completion_width, completion)
        batch.append(index)
    if batch:
        yield batch


def pad(sequences: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids with their true lengths."""
    width = max(len(sequence) for sequence in sequences)
    padded = [sequence + (0,) * (width - len(sequence)) for sequence in sequences]
    return torch.tensor(padded, dtype=torch.int64), torch.tensor([len(sequence) for sequence in sequences])

"""One training on several processes (`torchrun`): who leads, what each takes, what they tell one another.

Every process has all groups of a batch and makes the same microbatches; each computes its part of them and the gradients
are summed. Process 0 leads: it alone talks to coordinator and origin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")

_PATIENCE = timedelta(days=7)  # those who follow wait while the leader waits for rollouts


@dataclass(frozen=True, slots=True)
class Team:
    """`rank` of `size` processes. `control`: a group of their CPUs, for words and waits; None for one alone."""

    rank: int = 0
    size: int = 1
    control: Any = None

    @classmethod
    def join(cls, environment: Mapping[str, str]) -> Team:
        """The team that torchrun's variables describe; a team of one without them."""
        if int(environment.get("WORLD_SIZE", "1")) < 2:
            return cls()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend)
        control = distributed.new_group(backend="gloo", timeout=_PATIENCE)
        return cls(distributed.get_rank(), distributed.get_world_size(), control)

    def leave(self) -> None:
        """The end of the team; nothing for one alone."""
        if self.size > 1:
            distributed.destroy_process_group()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This process's share, as many for each: (item, whether it counts). Others' items fill up, and don't count."""
        if not items:
            return []
        mine = [(item, True) for item in items[self.rank :: self.size]]
        most = -(-len(items) // self.size)
        return mine + [(items[0], False)] * (most - len(mine))

    def tell(self, words: Any) -> Any:
        """What the leader says, heard by all; the others' argument is not looked at."""
        if self.size == 1:
            return words
        box = [words]
        distributed.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, own: T) -> list[T]:
        """Everybody's, in order of rank."""
        if self.size == 1:
            return [own]
        everybody: list[Any] = [None] * self.size
        distributed.all_gather_object(everybody, own, group=self.control)
        return everybody

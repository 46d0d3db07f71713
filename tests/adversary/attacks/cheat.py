"""The shape of a cheat: an honest worker, of which each cheat overrides the one thing that it lies about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import ArrayLike, NDArray

from worker.engine import Generation, GenerationRequest, Weights

# gumbel.select_batch's signature: logits_BV, seeds_B, positions_B, temperatures_B -> tokens_B.
Choose = Callable[[NDArray[Any], Sequence[int], ArrayLike, ArrayLike], NDArray[Any]]


class Cheat:
    """Honest in everything. Hooks are called in this order for each sample; `weights` once per version.

    `commits`: whether its tokens extend the progress that it saw, so that renewals can commit to it. `choose`: the rule
    that picks a token, None for the protocol's. `alters_module`: what is done to the loaded model, None for nothing. Only
    engines that run in this process can be told either.
    """

    commits: ClassVar[bool] = True
    choose: Choose | None = None
    alters_module: Callable[[Any], None] | None = None

    def weights(self, published: Weights, scratch: Path) -> Weights:
        """What is loaded when that version is published. `scratch` is a folder to write other weights into."""
        return published

    def draws(self, issued: GenerationRequest) -> list[GenerationRequest]:
        """What is generated for the issued sample: one request, or several of which `pick` keeps one."""
        return [self.request(issued)]

    def request(self, issued: GenerationRequest) -> GenerationRequest:
        """What is generated instead of the issued sample."""
        return issued

    def pick(self, drawn: Sequence[Generation]) -> Generation:
        """The draw to hand in."""
        return drawn[0]

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        """What is claimed to have been generated."""
        return honest

"""Cheats by the choice of tokens: right weights, right prompt, right seed, and another rule than the largest score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol import gumbel
from tests.adversary.attacks.cheat import Cheat


class TopP(Cheat):
    """Draws from the likeliest tokens alone, that together have probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        self._p = p

    def choose(  # type: ignore[override]
        self, logits_BV: NDArray[Any], seeds: Sequence[int], positions: ArrayLike, temperatures: ArrayLike
    ) -> NDArray[Any]:
        scaled = _scaled(logits_BV, temperatures)
        order = np.argsort(-scaled, axis=1)
        probabilities = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        before = np.cumsum(np.take_along_axis(probabilities, order, 1), axis=1)
        dropped = np.zeros_like(scaled, dtype=bool)
        np.put_along_axis(dropped, order[:, 1:], before[:, :-1] >= self._p, axis=1)
        return _scores(np.where(dropped, -1e9, scaled), seeds, positions).argmax(axis=1)


class NearTies(Cheat):
    """Takes a token that pays wherever one loses by at most `margin`: no single one can be told from rounding."""

    def __init__(self, margin: float, pays: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        self._margin = margin
        self._pays = pays

    def choose(  # type: ignore[override]
        self, logits_BV: NDArray[Any], seeds: Sequence[int], positions: ArrayLike, temperatures: ArrayLike
    ) -> NDArray[Any]:
        scores = _scores(_scaled(logits_BV, temperatures), seeds, positions)
        paying = self._pays(np.arange(scores.shape[1]))
        return (scores + self._margin * paying).argmax(axis=1)


def _scaled(logits_BV: NDArray[Any], temperatures: ArrayLike) -> NDArray[Any]:
    return np.asarray(logits_BV, np.float32) / np.asarray(temperatures, np.float32)[:, None]


def _scores(scaled_BV: NDArray[Any], seeds: Sequence[int], positions: ArrayLike) -> NDArray[Any]:
    ids = np.arange(scaled_BV.shape[1])
    seeds_B1 = np.array([seed % 2**64 for seed in seeds], np.uint64)[:, None]
    return scaled_BV + gumbel.noise(seeds_B1, np.asarray(positions, np.uint64)[:, None], ids)

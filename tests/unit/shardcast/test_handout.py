"""shardcast.handout: each shard to one client, and after a while to more and more who still lack it."""

from __future__ import annotations

import itertools

from shardcast import bits
from shardcast.handout import DOUBLING_S, PATIENCE_S, Handout

ALL = bits.full(4)
ASKERS = itertools.count()


def take(handout: Handout, here: int, wanted: int, now: float) -> int | None:
    """As somebody new."""
    return handout.take(f"client {next(ASKERS)}", here, wanted, now)


def test_each_shard_is_given_once_and_only_what_is_here_and_wanted() -> None:
    handout = Handout()
    assert take(handout, 0, ALL, 0.0) is None
    assert take(handout, bits.of([2]), bits.of([0, 1]), 0.0) is None
    assert [take(handout, bits.of([1, 2]), ALL, 0.0) for _ in range(3)] == [1, 2, None]
    assert [take(handout, ALL, ALL, 1.0) for _ in range(3)] == [0, 3, None]


def test_after_a_while_it_is_free_for_twice_as_many_again_and_again() -> None:
    handout = Handout()
    assert [take(handout, ALL, ALL, float(at)) for at in range(4)] == [0, 1, 2, 3]
    assert handout.next_free(ALL, ALL, 4.0) == PATIENCE_S - 4.0
    assert take(handout, ALL, ALL, PATIENCE_S - 0.1) is None
    total = 1
    for doubled in range(5):
        now = PATIENCE_S + doubled * DOUBLING_S
        taken = [take(handout, ALL, bits.of([0]), now) for _ in range(64)]
        total += taken.count(0)
        assert total == 2 ** (doubled + 1)
        assert handout.next_free(ALL, bits.of([0]), now) == DOUBLING_S


def test_the_least_given_goes_first() -> None:
    handout = Handout()
    assert [take(handout, ALL, ALL, 0.0) for _ in range(4)] == [0, 1, 2, 3]
    assert take(handout, ALL, bits.of([0, 1]), PATIENCE_S) == 0
    assert [take(handout, ALL, ALL, 60.0) for _ in range(4)] == [1, 2, 3, 0]


def test_a_broken_delivery_never_was() -> None:
    handout = Handout()
    assert take(handout, ALL, bits.of([3]), 0.0) == 3
    handout.give_back(3)
    assert handout.next_free(ALL, bits.of([3]), 0.1) is None
    assert take(handout, ALL, bits.of([3]), 0.1) == 3
    assert take(handout, ALL, bits.of([3]), PATIENCE_S + 0.1) == 3
    handout.give_back(3)  # the second delivery broke: the first still counts
    assert handout.next_free(ALL, bits.of([3]), 0.1) == PATIENCE_S


def test_one_who_asks_twice_at_once_gets_no_shard_twice() -> None:
    handout = Handout()
    assert take(handout, ALL, bits.of([0]), 0.0) == 0
    at = PATIENCE_S + 2 * DOUBLING_S
    assert [handout.take("a", ALL, bits.of([0]), at) for _ in range(2)] == [0, None]
    assert handout.take("b", ALL, bits.of([0]), at) == 0
    assert handout.take("a", ALL, bits.of([0]), at + PATIENCE_S) == 0

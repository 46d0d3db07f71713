"""How work is dealt out; the processes themselves are in tests/integration."""

from __future__ import annotations

import pytest

from trainer.team import Team


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (4, [[(0, True), (2, True)], [(1, True), (3, True)]]),
        (3, [[(0, True), (2, True)], [(1, True), (0, False)]]),
        (1, [[(0, True)], [(0, False)]]),
        (0, [[], []]),
    ],
)
def test_everybody_gets_as_many_and_nothing_counts_twice(count, shares):
    assert [Team(rank, 2).part(list(range(count))) for rank in (0, 1)] == shares


def test_one_alone_is_a_team():
    team = Team.join({})
    assert (team.rank, team.size, team.leads) == (0, 1, True)
    assert team.part(["a", "b"]) == [("a", True), ("b", True)]
    assert team.tell("x") == "x"
    assert team.gather(3) == [3]
    team.leave()

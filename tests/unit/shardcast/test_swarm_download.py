"""shardcast.swarm_download: a shard's bytes become its pieces as they come."""

from __future__ import annotations

import pytest

from shardcast.swarm_download import Feed


@pytest.mark.parametrize("step", [1, 7, 10, 25, 100])
def test_a_shard_is_cut_into_its_pieces_however_it_comes(step: int) -> None:
    data = bytes(range(35))
    feed = Feed(range(4, 8), len(data), 10)
    taken = [each for at in range(0, len(data), step) for each in feed.take([data[at : at + step]])]
    assert taken == [(4, data[:10]), (5, data[10:20]), (6, data[20:30]), (7, data[30:])]


def test_chunks_of_one_delivery_are_joined() -> None:
    feed = Feed(range(1), 6, 10)
    assert feed.take([b"ab", b"c"]) == []
    assert feed.take([b"d", b"ef"]) == [(0, b"abcdef")]

"""shardcast.download: the order in which shards are fetched."""

from __future__ import annotations

from shardcast.download import ShardQueue


def take_all(queue: ShardQueue) -> list[int]:
    taken = []
    while (index := queue.take()) is not None:
        taken.append(index)
    return taken


def test_shards_are_taken_in_order_each_once() -> None:
    assert take_all(ShardQueue([4, 0, 2])) == [4, 0, 2]


def test_demanded_shards_come_first_in_the_order_of_demand() -> None:
    queue = ShardQueue(range(5))
    queue.demand(4)
    queue.demand(3)
    queue.demand(4)
    assert take_all(queue) == [4, 3, 0, 1, 2]


def test_what_is_taken_or_unknown_can_not_be_demanded() -> None:
    queue = ShardQueue(range(2))
    assert queue.take() == 0
    queue.demand(0)
    queue.demand(9)
    assert take_all(queue) == [1]

"""shardcast.retention: what makes way when there is no room."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from shardcast.retention import make_room, needed
from shardcast.storage import VersionStore
from tests.factories import TRAINER

SIZES = {1: 10, 2: 10, 3: 10}


@pytest.mark.parametrize(
    ("need", "limit", "never", "last", "gone"),
    [
        (10, 40, [], [], []),
        (10, 30, [3], [], [1]),
        (20, 30, [3], [], [1, 2]),
        (10, 30, [1, 3], [], [2]),
        (10, 30, [3], [1], [2]),
        (20, 30, [3], [1], [1, 2]),
        (30, 30, [3], [], None),
        (31, 30, [], [], None),
        (10, 30, [1, 2, 3], [], None),
    ],
)
def test_what_makes_way(
    need: int, limit: int, never: Collection[int], last: Collection[int], gone: list[int] | None
) -> None:
    assert make_room(SIZES, need, limit, never=never, last=last) == gone


async def test_without_a_coordinator_nothing_is_needed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert await needed(None, VersionStore(tmp_path, [TRAINER.key_id])) == set()

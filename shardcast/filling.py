"""What every way of filling a version has in common: what is filled, from whom, and who is told of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardcast.bandwidth import Throttle
from shardcast.metrics import ShardcastMetrics
from shardcast.partial import PartialVersion
from shardcast.pool import SourcePool
from shardcast.storage import VersionStore

OnShard = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Filling:
    """A partial version, and the sources that it is filled from.

    `store`: complete versions, whose shards are copied where they are the same. `on_shard` is called in the event loop for
    each verified shard, `on_bytes` with the bytes of each piece that came.
    """

    partial: PartialVersion
    pool: SourcePool
    store: VersionStore | None = None
    on_shard: OnShard | None = None
    on_bytes: Callable[[int], None] | None = None
    throttle: Throttle | None = None
    metrics: ShardcastMetrics | None = None
    clock: Callable[[], float] = time.monotonic

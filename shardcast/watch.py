"""Asks one source again and again which shards of a version it has, until it has them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.manifest import Manifest
from shardcast.availability import Availability
from shardcast.config import ClientLimits
from shardcast.pool import SourcePool
from shardcast.pulse import Pulse
from shardcast.sources import Misbehaved, Source, Unavailable, Unknown

_PACE_SHARE = 0.05  # the longer a transfer takes, the rarer the questions: news may be late by this share of it
_PACE_MAX_S = 0.1
_PAUSE_FIRST_S = 0.25
_PAUSE_MAX_S = 5.0


async def watch(
    source: Source,
    manifest: Manifest,
    availability: Availability,
    pool: SourcePool,
    *,
    limits: ClientLimits,
    pulse: Pulse,
    own_id: str,
    on_answer: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    """Return when nothing more can be learned: the source has all, can't say, misbehaves, or is this relay itself.

    `on_answer` is called for each answer: the source is there.
    """
    begin = clock()
    pause = _PAUSE_FIRST_S
    while True:
        holding = availability.of(source.url)
        try:
            have = await source.have(
                manifest.total_digest, len(manifest.shards), holding.epoch, holding.next, limits.have_wait_s
            )
        except Unknown:
            availability.assume(source.url)
            pulse.beat()
            return
        except Misbehaved as fault:
            availability.forget(source.url)
            pool.failed(source, fault)
            pulse.beat()
            return
        except Unavailable as fault:
            availability.forget(source.url)
            pool.failed(source, fault)
            pulse.beat()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_MAX_S)
            continue
        pause = _PAUSE_FIRST_S
        on_answer()
        if have is not None and own_id and have.server_id == own_id:
            pool.exclude(source)
            return
        if have is not None:
            availability.update(source.url, have, clock())
            pulse.beat()
            if have.complete:
                return
        await asyncio.sleep(min(_PACE_MAX_S, _PACE_SHARE * (clock() - begin)))

"""What goes when versions take too much room, and what the run still needs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from protocol.errors import SourceFault
from shardcast.discovery import Coordinator
from shardcast.storage import VersionStore

log = logging.getLogger("shardcast")


async def needed(coordinator: Coordinator | None, store: VersionStore) -> set[int] | None:
    """The versions that the run needs; empty without a coordinator, None if it can't say: then everything stays."""
    if coordinator is None:
        return set()
    try:
        required = await coordinator.required()
        first = (await coordinator.terms()).model_digest
    except SourceFault as fault:
        log.warning("keeping every version: %s", fault, extra={"action": "ask_required"})
        return None
    # The version that the terms name is what newcomers compare the run's model with.
    return required | {version for version in store.versions if store.names.get(version) == first}


def make_room(
    sizes: Mapping[int, int], need: int, limit: int, *, never: Collection[int], last: Collection[int] = ()
) -> list[int] | None:
    """Which versions to remove so that `need` more bytes fit into `limit`; None if nothing makes them fit.

    The oldest go first; those in `last` only if nothing else is left, those in `never` not at all.

    >>> make_room({1: 10, 2: 10, 3: 10}, 10, 30, never=[3], last=[1])
    [2]
    """
    order = sorted(set(sizes) - set(never), key=lambda version: (version in last, version))
    used = sum(sizes.values())
    gone: list[int] = []
    while used + need > limit and order:
        gone.append(order.pop(0))
        used -= sizes[gone[-1]]
    return sorted(gone) if used + need <= limit else None

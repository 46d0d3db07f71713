"""When a client that swaps asks the servers for what its peers claim to have. A pure function; `swarm_download` acts on it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from shardcast.config import SwarmLimits

_WORTH = 1 / 4  # of a server's rate: peers that bring less together are not waited for


class Reliance(enum.Enum):
    """What a client asks of the servers, by how much its peers bring."""

    PEERS = enum.auto()  # what no peer has
    PROBE = enum.auto()  # one shard more, to learn what a server would bring
    SERVERS = enum.auto()  # all that is missing


def judge(
    from_peers: float, of_servers: Sequence[float], *, left: int, elapsed_s: float, limits: SwarmLimits
) -> Reliance:
    """Whether peers are worth waiting for. Rates in bytes per second: of all peers together, and of each server asked so far.

    `left` bytes are missing after `elapsed_s`. Peers send slowly because they are busy, or because they mean to: a server's
    pace tells. Most clients of a large swarm never had anything from a server, and if each of them asked for a shard only to
    learn that, the servers would have no time for what no peer has. So a client without a measure asks for one shard, and
    only when its peers need more than 8 x `patience_s`, or did.
    """
    if elapsed_s <= limits.patience_s:
        return Reliance.PEERS
    if of_servers:
        return Reliance.SERVERS if from_peers < _WORTH * max(of_servers) else Reliance.PEERS
    long_s = 8 * limits.patience_s
    return Reliance.PROBE if elapsed_s > long_s or left > from_peers * long_s else Reliance.PEERS

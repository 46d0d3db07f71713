"""When a client that swaps asks a server for what its peers claim to have. A pure function; `swarm_download` acts on it."""

from __future__ import annotations

import enum

from shardcast.config import SwarmLimits

_WORTH = 1 / 4  # of the server's rate: peers that bring less together are not waited for


class Reliance(enum.Enum):
    """What a client asks of a server, by how much its peers bring."""

    PEERS = enum.auto()  # what no peer has
    PROBE = enum.auto()  # one shard more, to learn what the server would bring
    SERVER = enum.auto()  # all that is missing


def judge(from_peers: float, of_server: float | None, *, left: int, elapsed_s: float, limits: SwarmLimits) -> Reliance:
    """Whether peers are worth waiting for. Rates in bytes per second: of all peers together, and of one request to this server
    (None: not known); so no server is asked for more because another is fast, or was, or says so.

    `left` bytes are missing after `elapsed_s`. Peers send slowly because they are busy, or because they mean to: a server's
    pace tells. Most clients of a large swarm never had anything from a server, and if each of them asked for a shard only to
    learn that, the servers would have no time for what no peer has. So a client without a measure asks for one shard, and
    only when its peers need more than `long_s`, or did.
    """
    if elapsed_s <= limits.patience_s:
        return Reliance.PEERS
    if of_server is not None:
        return Reliance.SERVER if from_peers < _WORTH * of_server else Reliance.PEERS
    slow = are_slow(from_peers, left=left, limits=limits)
    return Reliance.PROBE if slow or elapsed_s > limits.long_s else Reliance.PEERS


def are_slow(from_peers: float, *, left: int, limits: SwarmLimits) -> bool:
    """Whether peers at this rate (bytes per second) need too long for the bytes that are left."""
    return left > from_peers * limits.long_s

"""Who is asked for what, by how much the peers bring."""

from __future__ import annotations

import pytest

from shardcast.config import SwarmLimits
from shardcast.reliance import Reliance, are_slow, judge

MIB = 1 << 20
LIMITS = SwarmLimits(patience_s=30.0, long_s=240.0)


def of(from_peers: float, of_server: float | None = None, *, left: int = 64 * MIB, elapsed_s: float = 31.0) -> Reliance:
    return judge(from_peers, of_server, left=left, elapsed_s=elapsed_s, limits=LIMITS)


def test_peers_have_time_to_begin() -> None:
    assert of(0.0, 1e9, elapsed_s=30.0) is Reliance.PEERS
    assert of(0.0, elapsed_s=30.0) is Reliance.PEERS


@pytest.mark.parametrize(("from_peers", "reliance"), [(249.0, Reliance.SERVER), (250.0, Reliance.PEERS)])
def test_peers_are_held_against_the_server(from_peers: float, reliance: Reliance) -> None:
    assert of(from_peers, 1000.0) is reliance


def test_a_server_whose_pace_is_not_known_is_left_alone_while_peers_end_soon() -> None:
    assert of(64 * MIB / 239) is Reliance.PEERS
    assert of(64 * MIB / 241) is Reliance.PROBE
    assert of(0.0) is Reliance.PROBE


@pytest.mark.parametrize(("from_peers", "slow"), [(0.0, True), (99.0, True), (100.0, False)])
def test_peers_are_slow_that_need_too_long(from_peers: float, slow: bool) -> None:
    assert are_slow(from_peers, left=24_000, limits=LIMITS) is slow


def test_whoever_claims_to_end_soon_is_probed_in_the_end() -> None:
    assert of(1e9, elapsed_s=241.0) is Reliance.PROBE

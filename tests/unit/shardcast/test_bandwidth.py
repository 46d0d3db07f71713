"""shardcast.bandwidth: the token bucket against a clock that the test moves."""

from __future__ import annotations

import pytest

from shardcast.bandwidth import Throttle, TokenBucket


def test_a_burst_is_free_and_then_the_rate_holds() -> None:
    bucket = TokenBucket(rate=100.0, burst=50.0, now=0.0)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(100, 0.0) == pytest.approx(1.0)
    assert bucket.take(100, 1.0) == pytest.approx(1.0)


def test_idle_time_fills_no_more_than_the_burst() -> None:
    bucket = TokenBucket(rate=100.0, burst=50.0, now=0.0)
    assert bucket.take(150, 1000.0) == pytest.approx(1.0)


def test_several_takers_share_the_rate() -> None:
    bucket = TokenBucket(rate=100.0, burst=0.0, now=0.0)
    assert [bucket.take(100, 0.0) for _ in range(3)] == pytest.approx([1.0, 2.0, 3.0])


async def test_within_the_burst_nobody_waits() -> None:
    throttle = Throttle.from_mbit(8.0)
    assert throttle is not None and Throttle.from_mbit(None) is None
    before = throttle._clock()
    await throttle.take(1000)
    assert throttle._clock() - before < 1.0

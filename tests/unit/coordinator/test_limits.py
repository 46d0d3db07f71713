from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.limits import Bucket, Buckets, Door, DoorLimits, Rate, address_group, take
from protocol.errors import Busy

RATE = Rate(per_s=2.0, burst=4.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_full_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket, waits = None, []
    for _ in range(5):
        bucket, wait = take(bucket, RATE, 10.0)
        waits.append(wait)
    assert waits == [0, 0, 0, 0, 0.5]
    assert take(bucket, RATE, 10.5)[1] == 0.0
    assert take(Bucket(0.0, 10.0), RATE, 9.0) == (Bucket(0.0, 10.0), 0.5)


@settings(deadline=None)
@given(st.lists(st.floats(0, 10), max_size=60))
def test_never_more_than_burst_and_rate_allow(gaps: list[float]) -> None:
    bucket, now, passed, begun = None, 0.0, 0, 0.0
    for gap in gaps:
        now += gap
        bucket, wait = take(bucket, RATE, now)
        passed += wait == 0.0
        assert passed <= RATE.burst + RATE.per_s * (now - begun) + 1e-6


def test_only_so_many_are_remembered() -> None:
    buckets = Buckets(RATE, remembered=3)
    for i in range(10):
        buckets.take(f"key {i}", 0.0)
    assert len(buckets) == 3


def door(clock: Clock, told: list[str], **limits: object) -> Door:
    return Door(DoorLimits(**limits), clock, told.append)  # type: ignore[arg-type]


def test_a_key_that_asks_too_often_is_told_when_to_come_back() -> None:
    clock, told = Clock(), []
    gate = door(clock, told, key=RATE)
    for _ in range(4):
        with gate.key("a"):
            pass
    with pytest.raises(Busy) as busy, gate.key("a"):
        pass
    assert busy.value.retry_after_s == 0.5 and told == ["key"]
    with gate.key("b"):
        pass
    clock.now += 0.5
    with gate.key("a"):
        pass


def test_calls_under_way_are_counted_and_let_go_of_when_they_fail() -> None:
    gate = door(Clock(), [], key_calls=2, address_calls=1)
    with gate.key("a"), gate.key("a"), pytest.raises(Busy), gate.key("a"):
        pass
    for _ in range(5):
        with contextlib.suppress(ZeroDivisionError), gate.key("a"):
            raise ZeroDivisionError
    with gate.key("a"), gate.key("a"):
        pass
    with gate.address("10.0.0.1", registers=False):
        with pytest.raises(Busy, match="address_calls"), gate.address("10.0.0.1", registers=False):
            pass
        with gate.address("10.0.0.2", registers=False):
            pass


def test_registrations_have_a_limit_of_their_own_and_loopback_none() -> None:
    gate = door(Clock(), [], registrations=Rate(1.0, 1.0))
    with gate.address("10.0.0.1", registers=True):
        pass
    with pytest.raises(Busy, match="registrations"), gate.address("10.0.0.1", registers=True):
        pass
    with gate.address("10.0.0.1", registers=False):
        pass
    for _ in range(50):
        with gate.address("127.0.0.1", registers=True):
            pass


def test_all_together_are_bounded_loopback_too() -> None:
    gate = door(Clock(), [], calls=1)
    inner = gate.address("10.0.0.1", registers=False)
    with gate.address("127.0.0.1", registers=False), pytest.raises(Busy, match="as much to do"), inner:
        pass
    with gate.address("10.0.0.1", registers=False):
        pass


def test_streams_are_counted_apart_from_calls() -> None:
    told: list[str] = []
    gate = door(Clock(), told, calls=1, address_calls=1, address_streams=2, streams=3)
    with gate.stream("10.0.0.1"), gate.stream("10.0.0.1"), gate.address("10.0.0.1", registers=False):
        with pytest.raises(Busy, match="address_streams") as busy, gate.stream("10.0.0.1"):
            pass
        assert busy.value.retry_after_s == 30.0
        with gate.stream("127.0.0.1"), pytest.raises(Busy, match=r"limits\.streams"), gate.stream("10.0.0.2"):
            pass
        with gate.stream("10.0.0.2"):
            pass
    with gate.stream("10.0.0.1"), gate.stream("10.0.0.1"), gate.stream("127.0.0.1"):
        pass
    assert told == ["address_streams", "streams"]


def test_a_stream_is_charged_to_its_address_as_a_call() -> None:
    gate = door(Clock(), [], address=Rate(1.0, 2.0))
    for _ in range(2):
        with gate.stream("10.0.0.1"):
            pass
    with pytest.raises(Busy, match=r"limits\.address"), gate.stream("10.0.0.1"):
        pass


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("[2001:db8:1:2:3::9]", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("[::1]", "::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("%5Bfe80::1%5D", "fe80::/64"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_whom_limits_take_for_one(address: str, group: str) -> None:
    assert address_group(address) == group

"""shardcast.selection: which shard is asked from whom, as a table of (views, wish, time, randomness)."""

from __future__ import annotations

import random
from dataclasses import replace

from shardcast import bits, selection
from shardcast.routing import SourceStats
from shardcast.selection import Flight, Pick, View, Wish

FAST, SLOW = SourceStats(throughput=8e6), SourceStats(throughput=1e6)


def view(*have: int, stats: SourceStats = FAST, coming: tuple[int, ...] = (), spared: bool = False) -> View:
    return View(stats, bits.of(have), bits.of(coming), spared)


def pick(views: dict[str, View], wish: Wish, seed: int = 0) -> Pick | None:
    return selection.choose(views, wish, 100.0, random.Random(seed), explore=0.0)


def wish(
    *missing: int, urgent: tuple[int, ...] = (), own: tuple[int, ...] = (), only_own: bool = False, spare: bool = True
) -> Wish:
    return Wish(bits.of(missing), bits.of(urgent), bits.of(own), only_own, spare)


def test_a_source_is_asked_only_for_what_it_has() -> None:
    assert pick({"a": view(1), "b": view(2)}, wish(2)) == Pick("b", 2)
    assert pick({"a": view(1)}, wish(2)) is None
    assert pick({"a": view()}, wish(2)) is None


def test_a_source_with_enough_in_flight_is_not_asked() -> None:
    busy = replace(view(1), asked=4)
    assert pick({"a": busy, "b": view(1, stats=SLOW)}, wish(1)) == Pick("b", 1)
    assert pick({"a": busy}, wish(1)) is None
    others = SourceStats(throughput=8e6, in_flight=9)  # requests for other versions don't count
    assert pick({"a": view(1, stats=others)}, wish(1)) == Pick("a", 1)


def test_what_no_other_source_has_goes_first() -> None:
    views = {"a": view(1, 2, 3), "b": view(1, 3, stats=SLOW)}
    assert all(pick(views, wish(1, 2, 3), seed) == Pick("a", 2) for seed in range(20))


def test_clients_of_the_same_sources_begin_at_different_places() -> None:
    views = {"a": view(*range(50)), "b": view(*range(50), stats=SLOW)}
    places = {found.index for seed in range(20) if (found := pick(views, wish(*range(50)), seed))}
    assert len(places) > 10


def test_urgent_shards_go_first() -> None:
    assert pick({"a": view(*range(9))}, wish(*range(9), urgent=(7,))) == Pick("a", 7)


def test_a_spared_source_is_not_asked_for_what_a_sibling_has_or_is_getting() -> None:
    views = {"origin": view(0, 1, 2, 3, spared=True), "sibling": view(1, coming=(2,))}
    found = {pick(views, wish(0, 2, 3), seed) for seed in range(20)}
    assert found == {Pick("origin", 0), Pick("origin", 3)}
    assert pick(views, wish(2)) is None
    assert pick(views, wish(2, spare=False)) == Pick("origin", 2)


def test_a_sibling_whose_requests_fail_binds_nobody() -> None:
    broken = SourceStats(failures_in_row=1, retry_at=200.0)
    liar = SourceStats(bans=1, banned_until=50.0)
    for stats in (broken, liar):
        views = {"origin": view(1, spared=True), "sibling": view(1, stats=stats)}
        assert Pick("origin", 1) in {pick(views, wish(1), seed) for seed in range(20)}


def test_a_relay_takes_its_own_slice_of_the_origin_first_and_in_order() -> None:
    views = {"origin": view(*range(9), spared=True), "sibling": view()}
    assert {pick(views, wish(*range(9), own=(4, 5, 6)), seed) for seed in range(9)} == {Pick("origin", 4)}
    later = {pick(views, wish(0, 1, 2, 8, own=(4, 5, 6)), seed) for seed in range(30)}
    assert len(later) > 2


def test_a_busy_relay_leaves_the_slices_of_its_siblings_to_them() -> None:
    views = {"origin": view(*range(9), spared=True), "sibling": view(8)}
    assert pick(views, wish(0, 1, own=(1,), only_own=True)) == Pick("origin", 1)
    assert pick(views, wish(0, 7, own=(1,), only_own=True)) is None
    assert pick(views, wish(8, own=(1,), only_own=True)) == Pick("sibling", 8)
    assert pick(views, wish(0, own=(1,), only_own=True, spare=False)) == Pick("origin", 0)


def test_slices_cover_a_version_once() -> None:
    ids = ["c", "a", "b"]
    slices = [selection.slice_of(ids, each, 10) for each in ids]
    assert [list(bits.indexes(each)) for each in slices] == [[6, 7, 8, 9], [0, 1, 2], [3, 4, 5]]
    assert selection.slice_of([], "a", 10) == bits.full(10)


def test_siblings_lag_when_their_backlog_would_take_too_long() -> None:
    lag = selection.siblings_lag
    assert not lag(0, 0.0, 60.0, 20.0)  # nothing is awaited from them
    assert not lag(10**9, 0.0, 1.0, 20.0)  # they had no time yet
    assert lag(10**9, 0.0, 5.0, 20.0)  # they bring nothing
    assert lag(100_000_000, 4e6, 5.0, 20.0) and not lag(70_000_000, 4e6, 5.0, 20.0)


def flight(received: int, elapsed: float, source: str = "a", index: int = 1) -> Flight:
    return Flight(source, index, 2_000_000, received, elapsed)


def hedge(*flights: Flight, **views: View) -> Pick | None:
    return selection.choose_hedge(views, wish(), flights, 100.0)


def test_a_straggler_is_asked_from_a_source_that_promises_to_be_much_faster() -> None:
    slow = flight(200_000, 3.0)  # 27 s to go; b needs 0.25 s
    assert hedge(slow, a=view(1), b=view(1)) == Pick("b", 1)
    assert hedge(slow, a=view(1), b=view(2)) is None  # doesn't have it
    assert hedge(slow, a=view(1)) is None  # nobody else
    assert hedge(slow, a=view(1), b=view(1, stats=SourceStats(throughput=1e5))) is None  # slower still
    assert hedge(slow, a=view(1), b=replace(view(1), asked=4)) is None
    assert hedge(slow, a=view(1), b=view(1, stats=SourceStats(8e6, retry_at=101.0))) is None


def test_healthy_requests_are_not_hedged() -> None:
    assert hedge(flight(1_900_000, 1.5), b=view(1)) is None  # nearly there
    assert hedge(flight(0, 0.9), b=view(1)) is None  # young
    assert hedge(flight(0, 1.2), b=view(1)) is None  # the other would need a quarter of a second: not long enough yet


def test_silence_is_judged_by_age() -> None:
    assert hedge(flight(0, 2.0), b=view(1)) == Pick("b", 1)
    unknown = view(1, stats=SourceStats())
    assert hedge(flight(0, 3.0), b=unknown) is None
    assert hedge(flight(0, 5.0), b=unknown) == Pick("b", 1)


def test_the_worst_straggler_goes_first() -> None:
    bad, worse = flight(200_000, 3.0), flight(100_000, 3.0, index=2)
    assert hedge(bad, worse, b=view(1, 2)) == Pick("b", 2)


def test_a_spared_source_races_nobody_while_it_is_spared() -> None:
    origin = view(1, spared=True)
    assert hedge(flight(200_000, 6.0), b=origin) is None
    assert hedge(flight(0, 6.0), b=origin) is None
    impatient = selection.choose_hedge({"b": origin}, wish(spare=False), [flight(200_000, 6.0)], 100.0)
    assert impatient == Pick("b", 1)

"""shardcast.routing: source choice as a table of (statistics, time, randomness)."""

from __future__ import annotations

import random

import pytest

from shardcast import routing
from shardcast.routing import SourceStats


def pick(sources: dict[str, SourceStats], now: float = 100.0, explore: float = 0.0, seed: int = 0) -> str | None:
    return routing.choose(sources, now, random.Random(seed), explore)


def test_the_faster_source_wins() -> None:
    assert pick({"slow": SourceStats(throughput=1e6), "fast": SourceStats(throughput=9e6)}) == "fast"


def test_success_weighs_on_throughput() -> None:
    flaky = SourceStats(throughput=9e6, success=0.1)
    assert pick({"flaky": flaky, "steady": SourceStats(throughput=1e6)}) == "steady"


def test_requests_in_flight_share_the_throughput() -> None:
    busy = SourceStats(throughput=9e6, in_flight=9)
    assert pick({"busy": busy, "idle": SourceStats(throughput=1e6)}) == "idle"


def test_an_untried_source_is_taken_for_as_fast_as_the_best() -> None:
    busy = SourceStats(throughput=5e6, in_flight=1)
    assert pick({"known": busy, "new": SourceStats()}) == "new"


def test_ties_go_to_the_first_named() -> None:
    assert pick({"b": SourceStats(), "a": SourceStats()}) == "b"


def test_none_is_ready_while_all_back_off_or_are_banned() -> None:
    sources = {"later": SourceStats(retry_at=103.0), "banned": SourceStats(banned_until=500.0)}
    assert pick(sources) is None
    assert routing.next_ready(sources, 100.0) == 3.0
    assert routing.next_ready({"banned": sources["banned"]}, 100.0) is None
    assert pick(sources, now=103.0) == "later"


def test_exploration_visits_slow_sources_about_as_often_as_asked() -> None:
    sources = {"fast": SourceStats(throughput=9e6), "slow": SourceStats(throughput=1.0)}
    rng = random.Random(7)
    slow = sum(routing.choose(sources, 0.0, rng, 0.2) == "slow" for _ in range(2000))
    assert 0.06 < slow / 2000 < 0.14  # half of the explored 20 %


def test_exploration_never_visits_a_banned_source() -> None:
    sources = {"good": SourceStats(), "bad": SourceStats(banned_until=1e9)}
    assert {pick(sources, explore=1.0, seed=seed) for seed in range(50)} == {"good"}


def test_throughput_is_an_exponential_average() -> None:
    stats = routing.succeeded(SourceStats(), 100_000, 1.0)
    assert stats.throughput == 100_000.0
    stats = routing.succeeded(stats, 200_000, 1.0)
    assert stats.throughput == pytest.approx(130_000.0)


def test_few_bytes_say_nothing_of_throughput() -> None:
    assert routing.succeeded(SourceStats(), routing.MEASURED_FROM - 1, 1e-3).throughput is None
    assert routing.succeeded(SourceStats(throughput=7.0), 700, 1e-3).throughput == 7.0


def test_failures_back_off_exponentially_up_to_a_cap_and_success_resets() -> None:
    stats = SourceStats()
    waits = []
    now = 50.0
    for _ in range(10):
        stats = routing.failed(stats, "down", now, jitter=1.0)
        waits.append(stats.retry_at - now)
        now = stats.retry_at
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == routing.BACKOFF_MAX_S
    assert stats.success < 0.05 and stats.last_fault == "down"
    recovered = routing.succeeded(stats, 1, 1.0)
    assert recovered.is_ready(now) and recovered.failures_in_row == 0


def test_requests_that_fail_together_are_one_failure() -> None:
    stats = routing.failed(SourceStats(), "down", 50.0, jitter=1.0)
    for _ in range(5):
        stats = routing.failed(stats, "also down", 50.1, jitter=1.0)
    assert (stats.failures_in_row, stats.retry_at, stats.last_fault) == (1, 50.5, "also down")


def test_a_cut_after_some_bytes_starts_the_row_anew() -> None:
    stats = SourceStats(failures_in_row=6)
    assert routing.failed(stats, "cut", 50.0, 1.0, progressed=True).retry_at == 50.5
    assert routing.failed(stats, "down", 50.0, 1.0).retry_at == 80.0


def test_jitter_spreads_retries_between_half_and_all_of_the_pause() -> None:
    assert routing.backoff(3, 0.0) == 1.0
    assert routing.backoff(3, 1.0) == 2.0


def test_bans_double() -> None:
    once = routing.banned(SourceStats(), "bad byte", 0.0, 10.0)
    twice = routing.banned(once, "bad byte", 0.0, 10.0)
    assert (once.banned_until, twice.banned_until) == (10.0, 20.0)
    assert not twice.is_ready(19.0) and twice.is_ready(20.0)


def test_not_yet_is_no_failure() -> None:
    stats = routing.not_yet(SourceStats(), "not yet", 5.0)
    assert stats.success == 1.0 and not stats.is_ready(5.0) and stats.is_ready(5.0 + routing.NOT_YET_S)


def test_in_flight_never_falls_below_zero() -> None:
    assert routing.ended(SourceStats()).in_flight == 0
    assert routing.started(SourceStats()).in_flight == 1


def test_a_source_that_answers_again_is_forgiven_but_not_a_ban() -> None:
    back = routing.answered(SourceStats(success=0.2, failures_in_row=6, retry_at=90.0, banned_until=95.0))
    assert (back.failures_in_row, back.retry_at, back.success, back.banned_until) == (0, 0.0, 0.2, 95.0)


def test_a_fault_stands_until_the_source_answers_again() -> None:
    stats = routing.failed(SourceStats(), "not up yet", 10.0, 0.5)
    assert stats.is_troubled(10.1) and stats.is_troubled(100.0)
    assert not routing.answered(stats).is_troubled(10.1)
    assert not routing.succeeded(stats, 10**6, 1.0).is_troubled(10.1)
    assert routing.banned(routing.answered(stats), "bad byte", 20.0, 600.0).is_troubled(30.0)

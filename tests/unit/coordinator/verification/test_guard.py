"""Rollouts that crash, hang or bloat the process that examines them take no other rollout with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from coordinator.verification import child
from coordinator.verification.guard import Guard, GuardLimits
from protocol.errors import OurFault
from protocol.rollout import Outcome
from tests.unit.coordinator.verification.test_judge import make_pending

FRAGILE = "tests.unit.coordinator.verification.fragile:Fragile"
LONG = GuardLimits(seconds=600.0)


def pending(*ids: str):  # type: ignore[no-untyped-def]
    return [replace(make_pending(number, (0,)), rollout_id=each) for number, each in enumerate(ids)]


class Bench:
    """A guard, and what its child was asked."""

    def __init__(self, folder: Path, limits: GuardLimits) -> None:
        self._log = folder / "batches"
        self._log.touch()
        self.guard = Guard(self._log, limits, FRAGILE)

    @property
    def batches(self) -> list[list[str]]:
        return [line.split() for line in self._log.read_text().splitlines()]

    async def outcomes(self, *ids: str) -> dict[str, Outcome]:
        found = await self.guard.examine(pending(*ids), {})
        assert all(
            "the process that examines rollouts was lost" in v.detail or v.outcome is Outcome.ACCEPTED
            for v in found.values()
        )
        return {key: verdict.outcome for key, verdict in found.items()}


def is_examiner(process: psutil.Process) -> bool:
    """Whether a guard started it; ended but not waited for counts too."""
    return process.status() == psutil.STATUS_ZOMBIE or "multiprocessing.spawn" in " ".join(process.cmdline())


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    before = {each.pid for each in psutil.Process().children()}
    bench = Bench(tmp_path, LONG)
    yield bench
    await bench.guard.close()
    assert not [each for each in psutil.Process().children() if each.pid not in before and is_examiner(each)]


async def test_whoever_kills_it_ends_up_alone_and_the_others_have_their_verdicts(bench: Bench) -> None:
    found = await bench.outcomes("a", "b", "dies", "c", "d")
    assert found == {**dict.fromkeys("abcd", Outcome.ACCEPTED), "dies": Outcome.INCONCLUSIVE}
    assert bench.batches == [["a", "b", "dies", "c", "d"], ["a", "b"], ["dies", "c", "d"], ["dies"], ["c", "d"]]
    died = (await bench.guard.examine(pending("dies"), {}))["dies"]
    assert "ended with status -11" in died.detail and "with this rollout alone" in died.detail
    assert await bench.outcomes("e", "dies", "f") == {
        "e": Outcome.ACCEPTED,
        "f": Outcome.ACCEPTED,
        "dies": Outcome.INCONCLUSIVE,
    }
    assert bench.batches[5:] == [["dies"], ["e", "f"], ["dies"]], "it is known by now"


async def test_what_the_child_says_comes_through(bench: Bench) -> None:
    (verdict,) = (await bench.guard.examine(pending("a"), {})).values()
    assert (verdict.outcome, verdict.old_logprobs, verdict.detail) == (Outcome.ACCEPTED, (-0.5, -1.25), "\u2028")
    assert verdict.metrics["m"] != verdict.metrics["m"], "not a number"
    assert await bench.guard.examine([], {}) == {}
    await bench.guard.warm_up("there", Path("/nowhere"))
    with pytest.raises(OurFault, match="/nowhere holds nothing"):
        await bench.guard.warm_up("missing", Path("/nowhere"))
    assert await bench.outcomes("b") == {"b": Outcome.ACCEPTED}


async def test_an_error_that_nobody_foresaw_takes_no_other_with_it(bench: Bench) -> None:
    """Nor is it a death. Five times, and those beside it would be dropped: honest work, lost."""
    found = await bench.guard.examine(pending("a", "raises", "b"), {})
    outcomes = {key: verdict.outcome for key, verdict in found.items()}
    assert outcomes == {"a": Outcome.ACCEPTED, "b": Outcome.ACCEPTED, "raises": Outcome.INCONCLUSIVE}
    assert "ValueError: unforeseen" in found["raises"].detail and "with this rollout alone" in found["raises"].detail
    assert bench.batches == [["a", "raises", "b"], ["a"], ["raises", "b"], ["raises"], ["b"]]
    child_then = bench.guard._process
    assert (await bench.outcomes("c"))["c"] is Outcome.ACCEPTED and bench.guard._process is child_then


async def test_a_clean_exit_is_a_death_too(bench: Bench) -> None:
    assert await bench.outcomes("exits", "a") == {"exits": Outcome.INCONCLUSIVE, "a": Outcome.ACCEPTED}


async def test_a_hang_ends_with_its_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LONG)
    try:
        assert await bench.outcomes("a") == {"a": Outcome.ACCEPTED}, "it runs"
        bench.guard._limits = GuardLimits(seconds=0.5)
        (verdict,) = (await bench.guard.examine(pending("hangs"), {})).values()
        assert verdict.outcome is Outcome.INCONCLUSIVE and "longer than 0.5 s" in verdict.detail
    finally:
        await bench.guard.close()


async def test_memory_has_a_limit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GuardLimits(600.0, memory_bytes=300 << 20))
    try:
        (verdict,) = (await bench.guard.examine(pending("eats"), {})).values()
        assert verdict.outcome is Outcome.INCONCLUSIVE and "300 are its limit" in verdict.detail
        assert await bench.outcomes("a") == {"a": Outcome.ACCEPTED}
    finally:
        await bench.guard.close()


async def test_a_settings_error_is_our_fault_and_nobody_waits(tmp_path: Path) -> None:
    guard = Guard(None, LONG, "tests.unit.coordinator.verification.fragile:Missing")
    found = await guard.examine(pending("a", "b"), {})
    assert {verdict.outcome for verdict in found.values()} == {Outcome.INCONCLUSIVE}
    assert "did not start (status 1)" in found["a"].detail
    await guard.close()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"verdicts": {}},
        {"verdicts": {"a": {}}},
        {"verdicts": {"a": {"outcome": "fine"}}},
        {"verdicts": {"a": None, "b": None}},
    ],
)
def test_an_answer_that_is_none_is_refused(answer: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        child.read_verdicts(answer, {"a"})

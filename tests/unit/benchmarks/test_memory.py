from __future__ import annotations

import random

from benchmarks.memory import slope

_MIB = 2**20


def samples(per_hour: float, noise: float, seed: int = 0) -> list[tuple[float, float]]:
    """An hour, a sample each ten seconds; a warm-up of a hundred MiB in the first minutes."""
    rng = random.Random(seed)
    found = []
    for number in range(360):
        seconds = number * 10.0
        warm = 100 * _MIB * min(1.0, seconds / 300)
        found.append((seconds, 400 * _MIB + warm + per_hour * seconds / 3600 + rng.gauss(0, noise)))
    return found


def test_a_flat_process_does_not_leak_and_a_growing_one_does() -> None:
    flat, growing = slope(samples(0, 5 * _MIB)), slope(samples(100 * _MIB, 5 * _MIB))
    assert flat is not None and growing is not None
    assert not flat.leaks and abs(flat.per_hour) < flat.uncertainty + _MIB
    assert growing.leaks and abs(growing.per_hour - 100 * _MIB) < growing.uncertainty + 5 * _MIB


def test_growth_within_noise_is_no_leak() -> None:
    noisy = slope(samples(20 * _MIB, 60 * _MIB))
    assert noisy is not None and not noisy.leaks


def test_a_few_samples_say_nothing() -> None:
    assert slope(samples(0, 1)[:20]) is None

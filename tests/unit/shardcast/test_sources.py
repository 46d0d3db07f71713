"""shardcast.sources: how long a socket is left alone, so that reads are few and large."""

from __future__ import annotations

import pytest

from shardcast.sources import nap_s

MB = 1e6


@pytest.mark.parametrize(
    ("came", "left", "rate", "seconds"),
    [
        (128 * 1024, 10**6, 2 * MB, 0.0),  # a read that was worth it
        (20_000, 10**6, 2 * MB, 0.02),  # the longest
        (20_000, 10**6, 20 * MB, 128 * 1024 / (20 * MB)),
        (20_000, 10**6, 1000 * MB, 0.0),  # it would be over before it began
        (20_000, 20_000, 1 * MB, 0.01),  # half of what is left
        (20_000, 1000, 1 * MB, 0.0),
        (20_000, 0, 1 * MB, 0.0),
        (20_000, -5, 1 * MB, 0.0),
    ],
)
def test_naps(came: int, left: int, rate: float, seconds: float) -> None:
    assert nap_s(came, left, rate) == pytest.approx(seconds)

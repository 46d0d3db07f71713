from __future__ import annotations

import pytest

from protocol.joining import solve, work_of


@pytest.mark.parametrize("bits", [0, 1, 8, 12])
def test_a_solution_shows_the_work(bits: int) -> None:
    nonce = solve("run", "key", bits)
    assert work_of("run", "key", nonce) >= bits
    assert all(work_of("run", "key", earlier) < bits for earlier in range(nonce))


def test_work_is_for_one_key_and_one_run() -> None:
    nonce = solve("run", "key", 12)
    assert work_of("run", "other", nonce) < 12
    assert work_of("other", "key", nonce) < 12

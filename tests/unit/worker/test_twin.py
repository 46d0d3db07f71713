from __future__ import annotations

from worker.twin import MESSAGE, Twin


def test_our_own_rollouts_are_never_somebody_elses() -> None:
    twin = Twin()
    assert twin.elsewhere(known=100, handed_in=0, unanswered=3) == 0
    assert twin.elsewhere(known=103, handed_in=2, unanswered=1) == 0  # one's receipt is on its way
    assert twin.elsewhere(known=103, handed_in=3, unanswered=0) == 0
    assert twin.elsewhere(known=102, handed_in=5, unanswered=0) == 0  # some were known before we handed them in again


def test_what_comes_from_elsewhere_is_counted() -> None:
    twin = Twin()
    twin.elsewhere(known=100, handed_in=0, unanswered=0)
    assert twin.elsewhere(known=110, handed_in=4, unanswered=1) == 5
    assert "own identity" in MESSAGE.format(count=5)


def test_the_first_look_may_come_after_the_first_receipts() -> None:
    twin = Twin()
    assert twin.elsewhere(known=12, handed_in=2, unanswered=0) == 0
    assert twin.elsewhere(known=13, handed_in=3, unanswered=0) == 0

from __future__ import annotations

import gc

from coordinator.garbage import settle


def test_what_was_there_is_not_looked_through_again_and_what_comes_later_is() -> None:
    usual = gc.get_threshold()
    try:
        settle()
        assert gc.get_freeze_count() > 0
        circle: list[object] = []
        circle.append(circle)
        del circle
        assert gc.isenabled() and gc.collect() >= 1
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)

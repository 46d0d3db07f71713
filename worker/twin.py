"""Notices another worker that uses the same identity: the coordinator knows of more rollouts than this one handed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Twin:
    """Compares the coordinator's count of this key's rollouts with our own. Counts only grow."""

    _before: int | None = None

    def elsewhere(self, *, known: int, handed_in: int, unanswered: int) -> int:
        """How many rollouts of this key came from elsewhere since the first call.

        `known`: rollouts of the key that the coordinator has. `handed_in`: those that we handed in since the start, with
        a receipt or a refusal. `unanswered`: in the outbox; the coordinator may have some of them already.
        """
        if self._before is None:
            # What we handed in before the first look is in `known`, and so may be everything that waits for its answer.
            self._before = known - handed_in
            return 0
        return max(0, known - self._before - handed_in - unanswered)


MESSAGE = (
    "another worker uses this identity ({count} rollouts came from elsewhere): credits, strikes and a ban are shared. "
    "If that is you, give each machine its own identity (its own --home, not a copy); if not, somebody has your key file: "
    "stop, and join with a new home"
)

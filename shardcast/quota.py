"""How much a relay may still send this calendar month (UTC): what a volunteer's hoster bills by."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardcast.config import MIB

log = logging.getLogger("shardcast")

_SAVE_EVERY_BYTES = 16 * MIB  # at most this much is forgotten by `kill -9`


class MonthlyQuota:
    """Counts bytes sent, in a file that outlives restarts. A file that can't be read counts from zero, and says so.

    Not exact to the byte: what is being sent when the quota ends is sent to its end.
    """

    def __init__(self, file: Path, limit_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.limit_bytes = limit_bytes
        self._file = file
        self._clock = clock
        self._month, self._sent = _read(file)
        self._saved = self._sent

    @property
    def left_bytes(self) -> int:
        """What may still be sent this month; never negative."""
        self._turn()
        return max(0, self.limit_bytes - self._sent)

    @property
    def seconds_to_next_month(self) -> int:
        """Until the count begins anew, rounded up."""
        now = self._now()
        begins = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
        return int((begins - now).total_seconds()) + 1

    def count(self, sent_bytes: int) -> None:
        """These bytes were sent. A full disk is logged, and the count goes on in memory."""
        self._turn()
        self._sent += sent_bytes
        if self._sent - self._saved >= _SAVE_EVERY_BYTES or self._sent >= self.limit_bytes:
            self.save()

    def save(self) -> None:
        """Write the count now."""
        if self._saved == self._sent:
            return
        self._saved = self._sent
        part = self._file.with_suffix(".part")
        try:
            part.write_text(json.dumps({"month": self._month, "sent_bytes": self._sent}))
            part.replace(self._file)
        except OSError as error:
            log.warning("can't keep the month's traffic in %s: %s", self._file, error, extra={"action": "quota"})

    def _turn(self) -> None:
        month = self._now().strftime("%Y-%m")
        if month != self._month:
            self._month, self._sent, self._saved = month, 0, 0

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)


def _read(file: Path) -> tuple[str, int]:
    try:
        found: Any = json.loads(file.read_text())
        month, sent = found["month"], found["sent_bytes"]
        if not isinstance(month, str) or not isinstance(sent, int) or sent < 0:
            raise ValueError("it should hold a month and a number of bytes")
        return month, sent
    except FileNotFoundError:
        return "", 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        with contextlib.suppress(OSError):
            file.replace(file.with_suffix(".bad"))
        log.warning("%s is of no use (%s): the month's traffic is counted from zero", file, error)
        return "", 0

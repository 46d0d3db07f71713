"""How every console script ends: one line per error, never a traceback for what a person can mend.

Exit status: 0 done, 2 the user's mistake, 1 any other failure, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from protocol.errors import RollswarmError, UserError

_EXTRA = ("action", "worker_id", "lease_id", "rollout_id", "version")


class _Formatter(logging.Formatter):
    """`time level message action=… id=…`: plain text that a person reads and a machine can parse."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        extra = " ".join(f"{name}={getattr(record, name)}" for name in _EXTRA if hasattr(record, name))
        return f"{line} {extra}" if extra else line


def set_up_logging(level: int = logging.INFO) -> None:
    """Log to standard error, one line per record."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("aiosqlite", "httpx", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run_app(name: str, app: Callable[[], object]) -> None:
    """Run a console script's app and turn errors into one line and an exit status."""
    try:
        app()
    except UserError as error:
        _fail(name, str(error), 2)
    except RollswarmError as error:
        _fail(name, str(error), 1)
    except KeyboardInterrupt:
        _fail(name, "interrupted", 130)


def _fail(name: str, message: str, status: int) -> None:
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)

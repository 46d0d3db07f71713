"""How every console script ends: one line per error, never a traceback for what a person can mend.

Exit status: 0 done, 2 the user's mistake, 1 any other failure, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from protocol.errors import RollswarmError, UserError

_EXTRA = ("action", "worker_id", "lease_id", "rollout_id", "version")


class _Formatter(logging.Formatter):
    """`time level message action=… id=…`: plain text that a person reads and a machine can parse."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        extra = " ".join(f"{name}={getattr(record, name)}" for name in _EXTRA if hasattr(record, name))
        return f"{line} {extra}" if extra else line


_STRANGERS = ("aiohttp.http_exceptions", "aiohttp.web_protocol")  # where its errors about what was sent are from


def _is_news(record: logging.LogRecord) -> bool:
    """False for what a web server says of bytes that are no HTTP: anybody may send them, and fill a log with tracebacks."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__module__ not in _STRANGERS


def set_up_logging(level: int = logging.INFO) -> None:
    """Log to standard error, one line per record."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("aiohttp.server").addFilter(_is_news)
    for noisy in ("aiosqlite", "httpx", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def version_line(name: str) -> str:
    """What `--version` says: program, protocol, build."""
    from importlib.metadata import PackageNotFoundError, version

    from protocol.terms import PROTOCOL_MAX, PROTOCOL_MIN

    try:
        installed = version("rollswarm")
    except PackageNotFoundError:
        installed = "not installed"
    protocols = str(PROTOCOL_MAX) if PROTOCOL_MIN == PROTOCOL_MAX else f"{PROTOCOL_MIN} to {PROTOCOL_MAX}"
    return f"{name} {installed}, protocol {protocols}, build {build_of(Path(__file__).resolve().parent)}"


def build_of(package: Path) -> str:
    """The commit that the code in `package` is of: as its image or wheel says (BUILD), or its checkout; else "unknown"."""
    for path in (package / "BUILD", package.parent / ".git" / "HEAD"):
        try:
            text = path.read_text().strip()
            if text.startswith("ref: "):
                text = (path.parent / text.removeprefix("ref: ")).read_text().strip()
        except OSError:
            continue
        return text[:12] or "unknown"
    return "unknown"


def run_app(name: str, app: Callable[[], object]) -> None:
    """Run a console script's app and turn errors into one line and an exit status. `--version` is answered here."""
    if sys.argv[1:] == ["--version"]:
        print(version_line(name))
        return
    try:
        app()
    except UserError as error:
        _fail(name, str(error), 2)
    except RollswarmError as error:
        _fail(name, str(error), 1)
    except ModuleNotFoundError as error:
        extra = "relay" if name == "shardcast" else name
        _fail(name, f"{error.name} is not installed: `pip install 'rollswarm[{extra}]'` in a fresh environment", 1)
    except KeyboardInterrupt:
        _fail(name, "interrupted", 130)


def _fail(name: str, message: str, status: int) -> None:
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)

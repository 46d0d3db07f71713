"""The engine's own words: vLLM's errors happen in other processes, which only say so in their log.

vLLM and its subprocesses read the logging configuration that VLLM_LOGGING_CONFIG_PATH names; ours adds a file that errors
are written to, and `last_error` quotes from it.
"""

from __future__ import annotations

import json
from pathlib import Path

_MAX_QUOTE = 600


class EngineLog:
    """The logging configuration and the file of errors, in the engine's folder."""

    def __init__(self, folder: Path, console_level: str) -> None:
        self._errors = folder / "errors.log"
        self.config_path = folder / "logging.json"
        self.config_path.write_text(json.dumps(_configuration(console_level, self._errors)))

    def last_error(self) -> str:
        """The last line of the last traceback that names an error, or the last message, or "" if there was none."""
        try:
            lines = [line.strip() for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        named = [line for line in lines if "Error" in line.split(":", 1)[0] and "See root cause" not in line]
        return (named or lines or [""])[-1][:_MAX_QUOTE]


def _configuration(console_level: str, errors: Path) -> dict[str, object]:
    handlers = {
        "console": {"class": "logging.StreamHandler", "level": console_level, "formatter": "plain"},
        "errors": {"class": "logging.FileHandler", "level": "ERROR", "filename": str(errors), "formatter": "bare"},
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "plain": {"format": "%(levelname)s %(asctime)s %(name)s: %(message)s"},
            "bare": {"format": "%(message)s"},
        },
        "handlers": handlers,
        "loggers": {"vllm": {"handlers": list(handlers), "level": "DEBUG", "propagate": False}},
    }

"""The run file as a tree of values. Each role checks the sections that it reads."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from protocol.errors import UserError


def read_run_file(path: Path) -> dict[str, Any]:
    """Parse a run file (TOML). Raises UserError that names the file and what to do."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no run file {path}: `coordinator init` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the run file {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error

"""The shared token of the private listener: a file, mode 0600, made at the first start."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from protocol.errors import UserError

_MIN_LENGTH = 16


def load_or_create(path: Path) -> str:
    """The token in `path`. Raises UserError if the file can't be used."""
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        return _create(path)
    except OSError as error:
        raise UserError(f"cannot read the trainer token {path}: {error.strerror}") from error
    if len(token) < _MIN_LENGTH:
        raise UserError(f"the trainer token in {path} is too short: delete the file to have one made")
    return token


def load(path: Path) -> str:
    """The token in `path`, which must exist: `coordinator serve` makes it."""
    if not path.exists():
        raise UserError(f"there is no trainer token {path}: `coordinator serve` makes it; copy it here (mode 0600)")
    return load_or_create(path)


def _create(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UserError(f"cannot write the trainer token {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token

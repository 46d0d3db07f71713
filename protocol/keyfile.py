"""Key files: the one place of this package that touches a disk, since every role keeps a key the same way.

A key file is a PKCS#8 PEM, mode 0600, made once and never overwritten.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from protocol.errors import UserError
from protocol.signing import Identity


def load_or_create(path: Path) -> tuple[Identity, bool]:
    """The identity in `path`, made if the file is absent; and whether it was made."""
    try:
        return load(path), False
    except FileNotFoundError:
        pass
    identity = Identity.from_seed(secrets.token_bytes(32))
    write(path, identity)
    return identity, True


def load(path: Path) -> Identity:
    """Read a key file. Raises FileNotFoundError if absent, UserError if it can't be used."""
    try:
        pem = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot read the key file {path}: {error.strerror}") from error
    try:
        identity = Identity.from_pem(pem)
    except UserError as error:
        raise UserError(
            f"the key file {path} is damaged ({error}): restore it from a backup, or move it away"
        ) from error
    if path.stat().st_mode & 0o077:
        raise UserError(f"the key file {path} can be read by others: run `chmod 600 {path}`")
    return identity


def write(path: Path, identity: Identity) -> None:
    """Write a new key file, 0600 from its first byte. Raises UserError if it exists or can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"cannot write the key file {path}: {error.strerror}") from error
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path} exists; a key file is never overwritten") from None
    except OSError as error:
        raise UserError(f"cannot write the key file {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(identity.to_pem())
        file.flush()
        os.fsync(file.fileno())

"""An identity to carry: its key file under a passphrase (PKCS#8 PEM, encrypted), for a backup or another machine."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from protocol import keyfile
from protocol.errors import UserError
from protocol.signing import Identity

_LEAST_PASSPHRASE = 8


def export_identity(source: Path, target: Path, passphrase: str) -> str:
    """Write the identity of key file `source` to `target` under the passphrase; its key id.

    Raises UserError if there is none, the passphrase is too short, or the target exists.
    """
    if len(passphrase) < _LEAST_PASSPHRASE:
        raise UserError(f"the passphrase must have at least {_LEAST_PASSPHRASE} characters")
    try:
        identity = keyfile.load(source)
    except FileNotFoundError:
        raise UserError(f"there is no identity in {source}: `worker join` makes one") from None
    key = serialization.load_pem_private_key(identity.to_pem(), password=None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase.encode()),
    )
    _write(target, sealed)
    return identity.key_id


def import_identity(source: Path, target: Path, passphrase: str) -> str:
    """Make the key file `target` of an exported identity; its key id. Raises UserError; a key file is never overwritten."""
    try:
        sealed = source.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from error
    try:
        key = serialization.load_pem_private_key(sealed, password=passphrase.encode())
    except TypeError:  # not encrypted at all
        raise UserError(
            f"{source} is not an exported identity but a bare key file: copy it to {target}, mode 0600"
        ) from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{source} can't be opened: the passphrase is wrong, or the file is damaged") from error
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        identity = Identity.from_pem(pem)
    except UserError as error:
        raise UserError(f"{source} holds a key that is no worker's: {error}") from error
    keyfile.write(target, identity)
    return identity.key_id


def _write(path: Path, content: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path} exists: choose another file") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())

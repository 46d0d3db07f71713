"""A statement of account: what a worker's ledger adds up to at a time, signed by the coordinator's key.

The ledger's lines are bound by a digest over all of them in order, so that whoever has the lines (the ledger's export, or the
worker's own page) can show that the statement is of exactly these, and that a later one was not made by changing them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256

from protocol.errors import BadSignature
from protocol.ledger import Entry
from protocol.signing import STATEMENT, Identity, SignedEnvelope, open_envelope


@dataclass(frozen=True, slots=True)
class Statement:
    """Credits in verified tokens. `as_of_ms`: Unix time in milliseconds, by the database's clock."""

    run_id: str
    worker_id: str
    credits: int
    strikes: int
    accepted: int
    banned: bool
    entries: int
    entries_digest: str
    as_of_ms: int


def digest_of(entries: Iterable[Entry]) -> str:
    """Over the lines in order: "sha256:<hex>" of each line's JSON (kind, amount, rollout id, note) and a newline."""
    hashed = sha256()
    for entry in entries:
        line = [entry.kind.value, entry.amount, entry.rollout_id, entry.note]
        hashed.update(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return f"sha256:{hashed.hexdigest()}"


def sign_statement(statement: Statement, signer: Identity) -> SignedEnvelope:
    return signer.sign(STATEMENT, json.dumps(asdict(statement), sort_keys=True).encode())


def open_statement(envelope: SignedEnvelope, coordinator_key: str) -> Statement:
    """Raises BadSignature if this coordinator did not sign it, or it is no statement."""
    payload = open_envelope(envelope, STATEMENT, pinned=(coordinator_key,))
    try:
        return Statement(**json.loads(payload))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadSignature(f"signed, but no statement: {error}") from None

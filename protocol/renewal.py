"""A renewal's commitment, signed: whoever breaks it can be shown to have.

Signed, as an envelope of type "renewal" whose payload both sides make from the same facts, so that only the signature travels:
run id ‖ 0 ‖ lease id ‖ 0 ‖ length (8 bytes, big-endian) ‖ sha256 of the first `length` token ids as little-endian uint32.
With the signed submission of the same lease that does not begin with these tokens, this is proof against the key.
"""

from __future__ import annotations

from protocol.errors import BadSignature
from protocol.lease import Commitment
from protocol.signing import RENEWAL, Identity, SignedEnvelope, open_envelope


def _payload(run_id: str, lease_id: str, commitment: Commitment) -> bytes:
    length = commitment.length.to_bytes(8, "big")
    return run_id.encode() + b"\0" + lease_id.encode() + b"\0" + length + commitment.digest


def sign_renewal(identity: Identity, run_id: str, lease_id: str, commitment: Commitment) -> bytes:
    """The signature under a commitment; empty for one to nothing."""
    if commitment.length == 0:
        return b""
    return identity.sign(RENEWAL, _payload(run_id, lease_id, commitment)).signature


def check_renewal(key_id: str, run_id: str, lease_id: str, commitment: Commitment) -> None:
    """Raises BadSignature if the key did not sign this commitment."""
    if commitment.length == 0:
        return
    try:
        open_envelope(
            SignedEnvelope(_payload(run_id, lease_id, commitment), key_id, commitment.signature),
            RENEWAL,
            pinned=(key_id,),
        )
    except BadSignature:
        raise BadSignature(
            f"the commitment to {commitment.length} tokens of lease {lease_id:.64} is not signed"
        ) from None

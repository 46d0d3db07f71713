"""What a run may ask of a key that it has never seen: nothing, an invitation, or proof of work.

    work = number of leading zero bits of
           sha256("rollswarm/v1/join\\0" ‖ run id ‖ "\\0" ‖ key id ‖ "\\0" ‖ nonce as 8 bytes, big-endian)

Bound to run and key, so that work is done once per key and can't be kept for another. A key that has joined may come again.
"""

from __future__ import annotations

from hashlib import sha256

OPEN, INVITE, WORK = "open", "invite", "work"
WORK_BITS_MAX = 40  # days for one core: nobody sets more on purpose
_NONCE_BYTES = 8


def _prefix(run_id: str, key_id: str) -> bytes:
    return b"rollswarm/v1/join\0" + run_id.encode() + b"\0" + key_id.encode() + b"\0"


def work_of(run_id: str, key_id: str, nonce: int) -> int:
    """The work that a nonce shows, in bits. `nonce`: 0 ≤ nonce < 2⁶⁴."""
    digest = sha256(_prefix(run_id, key_id) + nonce.to_bytes(_NONCE_BYTES, "big")).digest()
    return 256 - int.from_bytes(digest, "big").bit_length()


def solve(run_id: str, key_id: str, bits: int, first: int = 0) -> int:
    """The first nonce from `first` on that shows `bits` of work: 2^bits hashes on average (20: about a second)."""
    begun = sha256(_prefix(run_id, key_id))
    limit = 1 << (256 - bits)
    nonce = first
    while True:
        attempt = begun.copy()
        attempt.update(nonce.to_bytes(_NONCE_BYTES, "big"))
        if int.from_bytes(attempt.digest(), "big") < limit:
            return nonce
        nonce += 1

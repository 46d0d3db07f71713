from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BadSignature, UserError
from protocol.signing import RECEIPT, ROLLOUT, Identity, SignedEnvelope, open_envelope, public_key, short_id
from tests.factories import make_identity

ALICE, BOB = make_identity(11), make_identity(12)


def test_what_was_signed_opens() -> None:
    assert open_envelope(ALICE.sign(ROLLOUT, b"payload"), ROLLOUT) == b"payload"
    assert open_envelope(ALICE.sign(ROLLOUT, b""), ROLLOUT, pinned=(ALICE.key_id,)) == b""


def test_an_envelope_of_one_type_is_never_another() -> None:
    with pytest.raises(BadSignature):
        open_envelope(ALICE.sign(ROLLOUT, b"payload"), RECEIPT)


def test_any_changed_bit_is_noticed() -> None:
    envelope = ALICE.sign(ROLLOUT, b"payload")
    flipped = bytes([envelope.signature[0] ^ 1]) + envelope.signature[1:]
    for forged in (
        replace(envelope, payload=b"Payload"),
        replace(envelope, signature=flipped),
        replace(envelope, key_id=BOB.key_id),
    ):
        with pytest.raises(BadSignature, match="does not match"):
            open_envelope(forged, ROLLOUT)


def test_only_pinned_keys_count() -> None:
    with pytest.raises(BadSignature, match="not a key this run pins"):
        open_envelope(BOB.sign(ROLLOUT, b"x"), ROLLOUT, pinned=(ALICE.key_id,))


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_signature_has_64_bytes(length: int) -> None:
    with pytest.raises(BadSignature, match="64 bytes"):
        open_envelope(replace(ALICE.sign(ROLLOUT, b"x"), signature=bytes(length)), ROLLOUT)


@pytest.mark.parametrize("key_id", ["", "ed25519:", "rsa:" + "0" * 68, "ed25519:" + "g" * 64, "ed25519:" + "0" * 63])
def test_a_malformed_key_id_is_refused(key_id: str) -> None:
    with pytest.raises(BadSignature):
        public_key(key_id)


def test_signing_is_deterministic() -> None:
    assert ALICE.sign(ROLLOUT, b"x") == ALICE.sign(ROLLOUT, b"x"), "so the same submission gets the same receipt"


def test_a_key_has_one_id() -> None:
    """By another spelling it would be another worker: with leases of its own, and without its ban."""
    signed = ALICE.sign(ROLLOUT, b"x")
    spelled = "ed25519:" + ALICE.key_id.removeprefix("ed25519:").upper()
    assert spelled != ALICE.key_id
    with pytest.raises(BadSignature, match="lower case"):
        open_envelope(replace(signed, key_id=spelled), ROLLOUT)


@pytest.mark.parametrize("passphrase", [None, b"open sesame"])
def test_a_key_survives_its_pem(passphrase: bytes | None) -> None:
    assert Identity.from_pem(ALICE.to_pem(passphrase), passphrase).key_id == ALICE.key_id


def test_what_is_no_ed25519_key_is_the_users_mistake() -> None:
    other = X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for pem in (b"", b"not a key", other, ALICE.to_pem(b"secret")):
        with pytest.raises(UserError):
            Identity.from_pem(pem)


def test_a_seed_has_32_bytes() -> None:
    with pytest.raises(UserError, match="32 bytes"):
        Identity.from_seed(b"short")


def test_short_ids_are_eight_digits_of_the_key() -> None:
    assert ALICE.key_id.removeprefix("ed25519:").startswith(short_id(ALICE.key_id))
    assert len(short_id(ALICE.key_id)) == 8


key_ids = st.one_of(
    st.text(max_size=80),
    st.text("0123456789abcdefABCDEF ", min_size=64, max_size=64).map("ed25519:".__add__),
    st.sampled_from([ALICE.key_id, BOB.key_id]),
)
signatures = st.one_of(st.binary(max_size=70), st.binary(min_size=64, max_size=64))


@given(st.binary(max_size=40), key_ids, signatures, st.booleans())
def test_whatever_an_envelope_holds_it_is_refused_unless_it_was_signed(
    payload: bytes, key_id: str, signature: bytes, pin: bool
) -> None:
    with pytest.raises(BadSignature):
        open_envelope(SignedEnvelope(payload, key_id, signature), ROLLOUT, pinned=(ALICE.key_id,) if pin else None)


@given(st.binary(max_size=64), st.integers(0, 511), st.integers(0, 63), st.integers(1, 255))
def test_one_changed_byte_of_payload_or_signature_is_noticed(payload: bytes, at: int, place: int, by: int) -> None:
    signed = ALICE.sign(ROLLOUT, payload)
    assert open_envelope(signed, ROLLOUT) == payload
    signature = bytearray(signed.signature)
    signature[place] ^= by
    with pytest.raises(BadSignature):
        open_envelope(replace(signed, signature=bytes(signature)), ROLLOUT)
    if payload:
        changed = bytearray(payload)
        changed[at % len(payload)] ^= by
        with pytest.raises(BadSignature):
            open_envelope(replace(signed, payload=bytes(changed)), ROLLOUT)

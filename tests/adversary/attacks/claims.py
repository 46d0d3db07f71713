"""Cheats by claims: the generation is honest, what is said about it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from protocol import toploc
from protocol.rollout import VersionSpan
from tests.adversary.attacks.cheat import Cheat
from worker.engine import Generation, GenerationRequest

MakeProofs = Callable[[VersionSpan, tuple[bytes, ...]], tuple[bytes, ...]]


class LyingLogprobs(Cheat):
    """Claims less likely tokens than they were, to scale the importance ratios: one by `one`, all by `every` nats."""

    def __init__(self, *, one: float = 0.0, every: float = 0.0) -> None:
        self._one, self._every = one, every

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        first, *rest = (logprob - self._every for logprob in honest.logprobs)
        return replace(honest, logprobs=(first - self._one, *rest))


class HostileProofs(Cheat):
    """Proofs that were made without a forward pass, or to break whoever reads them: `make(span, honest proofs)`."""

    def __init__(self, make: MakeProofs) -> None:
        self._make = make

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        pairs = zip(honest.spans, honest.proofs, strict=True)
        return replace(honest, proofs=tuple(self._make(span, proofs) for span, proofs in pairs))


def zero_modulus(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(b"\0\0" + proof[2:] for proof in proofs)


def too_few(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return proofs[:-1]


def too_many(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (*proofs, proofs[-1])


def none_at_all(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return ()


def empty(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(b"" for _ in proofs)


def two_bytes(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(proof[:2] for proof in proofs)


def huge(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(proof[:2] + bytes(4 << 20) for proof in proofs)


def not_numbers(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """A polynomial whose values are the bits of NaNs."""
    import numpy as np

    def of_nans(k: int) -> bytes:
        bits = (0x7F81 + np.arange(k) % 100).astype(np.uint16)
        return toploc.encode(np.arange(k), bits)

    return tuple(of_nans((len(proof) - 2) // 2) for proof in proofs)


def constant(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Claims the same likely bits everywhere."""
    return polynomial(degree=0)(_, proofs)


def polynomial(degree: int, coefficient: int = 0x3F80) -> MakeProofs:
    """Proofs whose first coefficients up to that degree are set, and no other."""

    def make(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
        def one(proof: bytes) -> bytes:
            words = (len(proof) - 2) // 2
            set_ones = min(degree + 1, words)
            return (
                toploc.PRIME.to_bytes(2, "big")
                + coefficient.to_bytes(2, "big") * set_ones
                + bytes(2 * (words - set_ones))
            )

        return tuple(one(proof) for proof in proofs)

    return make


def of_another(_: VersionSpan, proofs: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Honest proofs, of something else: those of the hidden states of a chunk of ones."""
    import numpy as np

    return tuple(
        toploc.encode(np.arange(k), (0x3F80 + np.arange(k) % 64).astype(np.uint16))
        for k in ((len(proof) - 2) // 2 for proof in proofs)
    )

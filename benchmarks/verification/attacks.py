"""Every cheat of the adversary suite against the verifier: how many of its rollouts pass, and how soon it is banned.

Cheats write as an engine would, many rollouts at once, in the precision of this machine's engine (`tests.adversary.batch`).
"Caught" is the first refused rollout, "banned" as a run bans: fraud at once, other failures by strikes, and the tests over
many rollouts. Tokens are what a worker has handed in by then, drawn from what was measured.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import share_interval
from benchmarks.verification import samples
from benchmarks.verification.measured import Measured, Verifier
from benchmarks.verification.simulate import Delay, delays, median_interval
from coordinator.verification.resident import ResidentModels
from coordinator.verification.thresholds import Thresholds
from protocol.ledger import FRAUD
from tests.adversary.attacks import Attack, Cheat, make_cheat
from tests.adversary.attacks.prefilled import FlatteringCut, LyingSpans, Prefilled
from tests.adversary.attacks.weights import StaleWeights, noise
from tests.adversary.batch import write_all
from worker.engine import Generation, GenerationRequest, Weights

# A version some way back in a run: adjacent ones can't be told apart, and needn't be (docs/threat-model.md).
_OLDER_BY = 0.03
_MAX_STRIKES = 3
_WORKERS = 500
_ROLLOUTS_MAX = 3_000
# Where a completion is this long, a cheat has had to be right many times.
_LONG = 16
# Nothing but the draw is another: what it left as it would have been is the honest rollout.
_DRAWS = (Attack.OTHER_TEMPERATURE, Attack.WRONG_SEED, Attack.BEST_OF_N, Attack.TOP_P, Attack.NEAR_TIES)
# The strongest form of those that change the draw: flawless proofs and log-probs for what was written.
_WITH_THE_RIGHT_PROOFS = (
    Attack.WRONG_SEED,
    Attack.BEST_OF_N,
    Attack.OTHER_TEMPERATURE,
    Attack.HIDDEN_PROMPT,
    Attack.EDITED_EARLY,
    Attack.EDITED_TOKEN,
    Attack.EDITED_LAST,
    Attack.TRUNCATED,
    Attack.REPLAY,
    Attack.INT8,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A cheat under a name."""

    name: str
    cheat: Cheat


def cases(dtype: str) -> Iterator[Case]:
    """The honest worker first, then every cheat."""
    own = {  # these compute as well
        Attack.FLATTERING_CUT: lambda: FlatteringCut(places=8, dtype=dtype),
        Attack.LYING_SPANS: lambda: LyingSpans(dtype=dtype),
        Attack.SMALL_MODEL: lambda: Prefilled(make_cheat(Attack.OTHER_MODEL), dtype=dtype),
    }
    for attack in Attack:
        yield Case(str(attack), own[attack]() if attack in own else make_cheat(attack))
    for attack in _WITH_THE_RIGHT_PROOFS:
        yield Case(f"{attack}, prefilled", Prefilled(make_cheat(attack), dtype=dtype))


class Bench:
    """Writes and measures. `scratch`: a folder for weights."""

    def __init__(self, folder: Path, dtype: str, thresholds: Thresholds, scratch: Path) -> None:
        self._folder = folder
        self._dtype = dtype
        self._thresholds = thresholds
        self._scratch = scratch
        self._published = Weights(1, f"sha256:{1:064x}", folder)
        older = noise(_OLDER_BY).weights(Weights(0, f"sha256:{0:064x}", folder), scratch)
        self._older = older
        folders = {weights.manifest_digest: weights.path for weights in (older, self._published)}
        models = ResidentModels(folders.__getitem__, max_resident=2, dtype=getattr(torch, dtype))
        self._verifier = Verifier(models, thresholds)
        self._honest: list[Generation] = []

    def row(self, case: Case, asked: Sequence[GenerationRequest]) -> dict[str, Any]:
        """What becomes of the cheat's rollouts for these samples."""
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            written = self._write(case.cheat, asked, Path(scratch))
        kept = [n for n, each in enumerate(written) if self._is_a_lie(case, each, n)]
        if not kept:
            return {"attack": case.name, "as_honest": 1.0, "rollouts": 0}
        measured = self._verifier.measure(
            samples.claims([written[n] for n in kept], [asked[n] for n in kept], self._folder)
        )
        row = _row(case.name, len(asked), measured, self._thresholds)
        print(f"{time.perf_counter() - begun:.0f} s: {row}", flush=True)
        return row

    def _write(self, cheat: Cheat, asked: Sequence[GenerationRequest], scratch: Path) -> list[Generation]:
        """A cheat that only lies about what it generated starts from the honest worker's generations."""
        if isinstance(cheat, StaleWeights | LyingSpans):
            cheat.weights(self._older, scratch)
        weights = cheat.weights(self._published, scratch)
        honestly = weights.path == self._published.path and cheat.choose is None and cheat.alters_module is None
        if not self._honest:
            self._honest = write_all(Cheat(), asked, self._published, scratch, dtype=self._dtype)
        if not honestly or any(cheat.draws(each) != [each] for each in asked[:1]):
            return write_all(cheat, asked, self._published, scratch, dtype=self._dtype)
        return [cheat.falsify(each, issued) for each, issued in zip(self._honest, asked, strict=True)]

    def _is_a_lie(self, case: Case, written: Generation, number: int) -> bool:
        """Whether a rollout differs from the honest one at all; what a cheat leaves as it was is no cheat.

        Where only the draw is another, and with the right proofs, only other tokens do. Where the weights differ, all
        rollouts count.
        """
        if case.name == Attack.HONEST:
            return True
        honest = self._honest[number]
        prefilled = isinstance(case.cheat, Prefilled) and not isinstance(case.cheat, LyingSpans)
        only_tokens = prefilled or case.name in _DRAWS
        return written.token_ids != honest.token_ids if only_tokens else written != honest


def measure(
    folder: Path,
    dtype: str,
    thresholds: Thresholds,
    *,
    rollouts: int,
    tokens: int,
    eos: Sequence[int],
    only: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """A row for each cheat."""
    asked = samples.requests(folder, count=rollouts, tokens=tokens, eos=eos, seed=5_000)
    with tempfile.TemporaryDirectory(prefix="cheats-") as scratch:
        bench = Bench(folder, dtype, thresholds, Path(scratch))
        return [bench.row(case, asked) for case in cases(dtype) if not only or case.name in only]


def _row(name: str, written: int, measured: Sequence[Measured], thresholds: Thresholds) -> dict[str, Any]:
    passed = sum(each.accepted for each in measured)
    long = [each for each in measured if each.tokens >= _LONG]
    reasons = sorted({each.reason for each in measured if each.reason})
    ban = _ban(measured, thresholds, _WORKERS)
    interval = median_interval(measured, lambda drawn, workers: _ban(drawn, thresholds, workers))
    return {
        "attack": name,
        "as_honest": 1 - len(measured) / written,
        "rollouts": len(measured),
        "accepted": passed / len(measured),
        "long": len(long),
        "accepted_long": sum(each.accepted for each in long) / len(long) if long else None,
        "accepted_ci95": list(share_interval(passed, len(measured))),
        "refused_for": " ".join(reasons),
        "caught_tokens": _finite(_caught(measured)),
        "ban_tokens": _finite(ban.median_tokens),
        "ban_tokens_p90": _finite(ban.p90_tokens),
        "ban_tokens_ci95": [_finite(value) for value in interval],
        "banned": ban.banned,
        "by": ban.by,
    }


def _caught(measured: Sequence[Measured]) -> float:
    """Mean tokens handed in until the first refusal: those of a rollout over the share that is refused."""
    refused = sum(not each.accepted for each in measured) / len(measured)
    mean = sum(each.tokens for each in measured) / len(measured)
    return mean / refused if refused else math.inf


def _ban(measured: Sequence[Measured], thresholds: Thresholds, workers: int) -> Delay:
    return delays(
        measured,
        thresholds.pooled,
        workers=workers,
        rollouts_max=_ROLLOUTS_MAX,
        max_strikes=_MAX_STRIKES,
        fraud=frozenset(map(str, FRAUD)),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

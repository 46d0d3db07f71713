"""A worker's engine for measurements: many prompts at once, left-padded, one token a step, with a KV cache.

Shapes: B rollouts side by side, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.pooling.attacks import Attack
from coordinator.verification.checks import Claim
from coordinator.verification.replay import replay
from coordinator.verification.weights import build_module
from protocol import toploc
from protocol.rollout import Rollout, SamplingParams, Segment, StopReason, VersionSpan

DIGEST = "sha256:" + "0" * 64


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate."""

    name: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    sampling: SamplingParams


class BatchEngine:
    """Generates with the weights of `folder`, or what `attack` makes of them. `batch`: rollouts side by side."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, batch: int, attack: Attack | None = None) -> None:
        self._model: Any = build_module(folder, dtype, "cpu")
        self._batch = batch
        if attack is not None:
            attack(self._model)

    def generate(self, requests: Sequence[Request]) -> list[Claim]:
        """A claim for each request, as a worker would submit it, at temperature 1. Similar lengths go side by side."""
        claims: list[Claim] = []
        ordered = sorted(requests, key=lambda request: request.sampling.max_tokens)
        for at in range(0, len(ordered), self._batch):
            claims += self._batch_of(ordered[at : at + self._batch])
        return claims

    @torch.inference_mode()
    def _batch_of(self, requests: Sequence[Request]) -> list[Claim]:
        rows = [_Row(request) for request in requests]
        lengths = [len(request.prompt_token_ids) for request in requests]
        width = max(lengths)
        padding = [width - length for length in lengths]
        ids_BT = torch.tensor(
            [[0] * pad + list(row.request.prompt_token_ids) for pad, row in zip(padding, rows, strict=True)]
        )
        mask_BT = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
        cache: Any = None
        while not all(row.done for row in rows):
            positions_BT = (mask_BT.cumsum(-1) - 1).clamp_min(0)[:, -ids_BT.shape[1] :]
            output = self._model.get_decoder()(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                position_ids=positions_BT,
                past_key_values=cache,
                use_cache=True,
            )
            cache = output.past_key_values
            ids_BT = self._step(rows, output.last_hidden_state[:, -1])[:, None]
            mask_BT = torch.cat([mask_BT, torch.ones(len(rows), 1, dtype=torch.int64)], dim=1)
        return [row.claim(self._model.config) for row in rows]

    def _step(self, rows: list[_Row], hidden_BD: torch.Tensor) -> torch.Tensor:
        """Choose a token for each row that goes on; what is fed next."""
        scores_BV = self._model.get_output_embeddings()(hidden_BD).float().log_softmax(-1)
        drawn = replay(
            scores_BV,
            scores_BV.exp(),
            seeds_N=torch.tensor([row.request.seed for row in rows]),
            positions_N=torch.tensor([row.position for row in rows]),
            tokens_N=scores_BV.argmax(-1),
        )
        logprobs_B = scores_BV.gather(1, drawn.winners_N[:, None])[:, 0]
        bits_BD = hidden_BD.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        for row, token, logprob, bits_D in zip(
            rows, drawn.winners_N.tolist(), logprobs_B.tolist(), bits_BD, strict=True
        ):
            if not row.done:
                row.extend(token, logprob, bits_D)
        return drawn.winners_N


class _Row:
    """A rollout as it grows."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._bits: list[np.ndarray] = []

    @property
    def done(self) -> bool:
        sampling = self.request.sampling
        return bool(self._tokens) and (
            self._tokens[-1] in sampling.eos_token_ids or len(self._tokens) >= sampling.max_tokens
        )

    @property
    def position(self) -> int:
        """Of the token fed last."""
        return len(self.request.prompt_token_ids) + len(self._tokens) - 1

    def extend(self, token: int, logprob: float, bits_D: np.ndarray) -> None:
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._bits.append(bits_D.copy())

    def claim(self, config: Any) -> Claim:
        tokens = tuple(self._tokens)
        ended = tokens[-1] in self.request.sampling.eos_token_ids
        rollout = Rollout(
            run_id="benchmark",
            lease_id="lease",
            sample_id=self.request.name,
            segments=(Segment.by_model(tokens),),
            logprobs=tuple(self._logprobs),
            spans=(VersionSpan(0, DIGEST, 0, len(tokens)),),
            proofs=(tuple(toploc.build_proofs(np.stack(self._bits))),),
            stop_reason=StopReason.EOS if ended else StopReason.LENGTH,
        )
        request = self.request
        return Claim(
            rollout,
            request.prompt_token_ids,
            request.sampling,
            request.seed,
            config.vocab_size,
            config.hidden_size,
        )

"""Log-probabilities of completions under a model, by float32 and at the trained positions only.

Shapes: R rows, L tokens in a row, B completions, T tokens in a completion, N trained tokens, U places in [R · L] that
predict at least one of them, M other tokens at each place, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from protocol.errors import UserError
from trainer.batching import PADDING_SEGMENT, PROMPT_SEGMENT, Microbatch

# Places whose logits are held at once: at most CHUNK · V numbers, whatever the batch.
CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model says of a microbatch's tokens, at the run's temperature; 0 where the batch's mask is False.

    `logprob_BT` (nats), `entropy_BT` (nats), `others_BTM`: log-probs of the tokens asked for, None if none were.
    """

    logprob_BT: torch.Tensor
    entropy_BT: torch.Tensor
    others_BTM: torch.Tensor | None = None


def score(
    model: Any,
    batch: Microbatch,
    temperature: float,
    *,
    chunk: int = CHUNK,
    entropy_gradient: bool = False,
    others_BTM: torch.Tensor | None = None,
) -> Scores:
    """Log-probs with gradient; entropies with one if `entropy_gradient`; those of the token ids `others_BTM` too.

    `model` is a causal LM of transformers. The LM head is applied to U places, `chunk` at a time; beyond one chunk its
    logits are computed again in the backward pass, so that no more than chunk · V of them are ever held.
    Raises UserError for a model whose logits are more than a linear head of its hidden states.
    """
    places = _Places.of(model, batch)
    others_NM = None if others_BTM is None else others_BTM[batch.mask_BT]
    compute = partial(_chunk_scores, model.get_output_embeddings(), temperature, entropy_gradient)
    logprob_N, entropy_N, picked_NM = places.by_chunks(compute, chunk, batch.token_BT[batch.mask_BT], others_NM)
    picked = None if others_NM is None else places.spread(picked_NM)
    return Scores(places.spread(logprob_N), places.spread(entropy_N), picked)


@torch.no_grad()
def choose_tokens(
    model: Any,
    batch: Microbatch,
    temperature: float,
    count: int,
    generator: torch.Generator | None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids_BTM, logprob_BTM): `count` tokens drawn from the model at each place, or its likeliest without a generator."""
    places = _Places.of(model, batch)
    compute = partial(_chunk_choice, model.get_output_embeddings(), temperature, count, generator)
    parts = [
        compute(places.hidden_UD[start : start + chunk], places.place_N[chosen_N] - start)
        for start, chosen_N in places.starts(chunk)
    ]
    order_N = torch.cat([chosen_N for _, chosen_N in places.starts(chunk)]).argsort()
    ids_NM, logprob_NM = (torch.cat(list(part))[order_N] for part in zip(*parts, strict=True))
    return places.spread(ids_NM), places.spread(logprob_NM)


@dataclass(frozen=True, slots=True)
class _Places:
    """Hidden states of the U places, and for each of N tokens the place that predicts it."""

    hidden_UD: torch.Tensor
    place_N: torch.Tensor
    mask_BT: torch.Tensor

    @staticmethod
    def of(model: Any, batch: Microbatch) -> _Places:
        _check_head(model)
        hidden_RLD = hidden_states(model, batch)
        source_U, place_N = torch.unique(batch.source_BT[batch.mask_BT], return_inverse=True)
        return _Places(hidden_RLD.flatten(0, 1)[source_U], place_N, batch.mask_BT)

    def starts(self, chunk: int) -> list[tuple[int, torch.Tensor]]:
        """For each chunk of places: where it starts, and which tokens it predicts."""
        count = self.hidden_UD.shape[0]
        return [
            (start, ((self.place_N >= start) & (self.place_N < start + chunk)).nonzero().squeeze(1))
            for start in range(0, max(count, 1), chunk)
        ]

    def by_chunks(
        self, compute: Callable[..., Any], chunk: int, token_N: torch.Tensor, others_NM: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`compute` of all chunks, put together in the order of the tokens."""
        if self.hidden_UD.shape[0] <= chunk:
            return compute(self.hidden_UD, self.place_N, token_N, others_NM)
        parts, order = [], []
        for start, chosen in self.starts(chunk):
            others = None if others_NM is None else others_NM[chosen]
            arguments = (self.hidden_UD[start : start + chunk], self.place_N[chosen] - start, token_N[chosen], others)
            parts.append(checkpoint(compute, *arguments, use_reentrant=False))
            order.append(chosen)
        order_N = torch.cat(order).argsort()
        logprob_N, entropy_N, picked_NM = (torch.cat(list(part))[order_N] for part in zip(*parts, strict=True))
        return logprob_N, entropy_N, picked_NM

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[N, …] as [B, T, …], 0 outside the mask."""
        empty = torch.zeros((*self.mask_BT.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
        return empty.index_put(self.mask_BT.nonzero(as_tuple=True), values)


def hidden_states(model: Any, batch: Microbatch) -> torch.Tensor:
    """[R, L, D]: the inputs of the LM head."""
    return model.base_model(
        input_ids=batch.input_RL,
        attention_mask=attention_mask(batch),
        position_ids=batch.position_RL,
        use_cache=False,
    ).last_hidden_state


def attention_mask(batch: Microbatch) -> torch.Tensor:
    """What may be looked at: [R, L] for rows with one completion, else [R, 1, L, L] for shared prompts.

    A place of the prompt sees the prompt up to itself; a place of a completion sees the prompt and its completion up
    to itself. Padding sees itself alone, so that no row of the softmax is empty. The 4-d mask is boolean, as SDPA takes it.
    """
    if int(batch.segment_RL.max()) <= 1:
        return (batch.segment_RL != PADDING_SEGMENT).long()
    return block_causal(batch.segment_RL)[:, None]


def block_causal(segment_RL: torch.Tensor) -> torch.Tensor:
    """allowed_RLL[r, q, k]: whether place q of row r attends to place k."""
    length = segment_RL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=segment_RL.device).tril()
    same = segment_RL[:, :, None] == segment_RL[:, None, :]
    prompt = (segment_RL == PROMPT_SEGMENT)[:, None, :]
    padding = (segment_RL == PADDING_SEGMENT)[:, :, None]
    itself = torch.eye(length, dtype=torch.bool, device=segment_RL.device)
    return torch.where(padding, itself, causal_LL & (same | prompt))


def _chunk_scores(
    head: Any,
    temperature: float,
    entropy_gradient: bool,
    hidden_UD: torch.Tensor,
    place_N: torch.Tensor,
    token_N: torch.Tensor,
    others_NM: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits_UV = head(hidden_UD).float() / temperature
    total_U = torch.logsumexp(logits_UV, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_U = total_U - (torch.softmax(logits_UV, dim=-1) * logits_UV).sum(dim=-1)
    ids_NM = token_N[:, None] if others_NM is None else others_NM
    picked_NM = logits_UV[place_N[:, None], ids_NM] - total_U[place_N, None]
    return logits_UV[place_N, token_N] - total_U[place_N], entropy_U[place_N], picked_NM


def _chunk_choice(
    head: Any,
    temperature: float,
    count: int,
    generator: torch.Generator | None,
    hidden_UD: torch.Tensor,
    place_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    logprob_NV = torch.log_softmax(head(hidden_UD).float() / temperature, dim=-1)[place_N]
    if generator is None:
        logprob_NM, ids_NM = logprob_NV.topk(min(count, logprob_NV.shape[-1]), dim=-1)
        return ids_NM, logprob_NM
    ids_NM = torch.multinomial(logprob_NV.exp(), count, replacement=True, generator=generator)
    return ids_NM, logprob_NV.gather(1, ids_NM)


def _check_head(model: Any) -> None:
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise UserError(f"models with {name} are not supported: their logits are more than a linear head")

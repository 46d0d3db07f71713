"""Log-probabilities of completions under a model, by float32 and at the trained positions only.

Shapes: R rows, L tokens in a row, B completions, T tokens in a completion, N trained tokens, U places in [R · L] that
predict at least one of them, D hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from protocol.errors import UserError
from trainer.batching import PADDING_SEGMENT, PROMPT_SEGMENT, Microbatch

# Places whose logits are held at once: at most CHUNK · V numbers, whatever the batch.
CHUNK = 1024


def completion_logprobs(
    model: Any, batch: Microbatch, temperature: float, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """(new_BT, entropy_BT): log-probs (nats, with gradient) and entropies (nats, without) at `temperature`.

    `model` is a causal LM of transformers. Both results are 0 where the batch's mask is False. The LM head is applied
    to U places, `chunk` at a time; beyond one chunk its logits are computed again in the backward pass.
    Raises UserError for a model whose logits are more than a linear head of its hidden states.
    """
    _check_head(model)
    hidden_RLD = model.base_model(
        input_ids=batch.input_RL,
        attention_mask=attention_mask(batch, model),
        position_ids=batch.position_RL,
        use_cache=False,
    ).last_hidden_state
    source_U, place_N = torch.unique(batch.source_BT[batch.mask_BT], return_inverse=True)
    hidden_UD = hidden_RLD.flatten(0, 1)[source_U]
    logprob_N, entropy_N = _head_logprobs(
        model.get_output_embeddings(), hidden_UD, place_N, batch.token_BT[batch.mask_BT], temperature, chunk
    )
    new_BT = torch.zeros(batch.mask_BT.shape, device=logprob_N.device).masked_scatter(batch.mask_BT, logprob_N)
    entropy_BT = torch.zeros_like(new_BT).masked_scatter(batch.mask_BT, entropy_N)
    return new_BT, entropy_BT


def attention_mask(batch: Microbatch, model: Any) -> torch.Tensor:
    """What may be looked at: [R, L] for rows with one completion, else [R, 1, L, L] for shared prompts.

    A place of the prompt sees the prompt up to itself; a place of a completion sees the prompt and its completion up
    to itself. Padding sees itself alone, so that no row of the softmax is empty. The 4-d mask is boolean for SDPA and
    additive for eager attention; other implementations can't take it.
    """
    if int(batch.segment_RL.max()) <= 1:
        return (batch.segment_RL != PADDING_SEGMENT).long()
    allowed = block_causal(batch.segment_RL)[:, None]
    kind = model.config._attn_implementation
    if kind == "sdpa":
        return allowed
    if kind == "eager":
        dtype = next(model.parameters()).dtype
        return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    raise UserError(f"shared prompts need SDPA or eager attention, not {kind}: set share_prompts = false")


def block_causal(segment_RL: torch.Tensor) -> torch.Tensor:
    """allowed_RLL[r, q, k]: whether place q of row r attends to place k."""
    length = segment_RL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=segment_RL.device).tril()
    same = segment_RL[:, :, None] == segment_RL[:, None, :]
    prompt = (segment_RL == PROMPT_SEGMENT)[:, None, :]
    padding = (segment_RL == PADDING_SEGMENT)[:, :, None]
    itself = torch.eye(length, dtype=torch.bool, device=segment_RL.device)
    return torch.where(padding, itself, causal_LL & (same | prompt))


def _head_logprobs(
    head: Any, hidden_UD: torch.Tensor, place_N: torch.Tensor, token_N: torch.Tensor, temperature: float, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of N tokens, token n being predicted at place_N[n]."""
    compute = partial(_chunk_logprobs, head, temperature)
    count = hidden_UD.shape[0]
    if count <= chunk:
        return compute(hidden_UD, place_N, token_N)
    logprob_N = hidden_UD.new_zeros(place_N.shape, dtype=torch.float32)
    entropy_N = torch.zeros_like(logprob_N)
    for start in range(0, count, chunk):
        chosen = ((place_N >= start) & (place_N < start + chunk)).nonzero().squeeze(1)
        arguments = (hidden_UD[start : start + chunk], place_N[chosen] - start, token_N[chosen])
        logprobs, entropies = checkpoint(compute, *arguments, use_reentrant=False)
        logprob_N = logprob_N.index_copy(0, chosen, logprobs)
        entropy_N[chosen] = entropies
    return logprob_N, entropy_N


def _chunk_logprobs(
    head: Any, temperature: float, hidden_UD: torch.Tensor, place_N: torch.Tensor, token_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_UV = head(hidden_UD).float() / temperature
    total_U = torch.logsumexp(logits_UV, dim=-1)
    with torch.no_grad():
        entropy_U = total_U - (torch.softmax(logits_UV, dim=-1) * logits_UV).sum(dim=-1)
    return logits_UV[place_N, token_N] - total_U[place_N], entropy_U[place_N]


def _check_head(model: Any) -> None:
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise UserError(f"models with {name} are not supported: their logits are more than a linear head")

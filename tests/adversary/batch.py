"""Many rollouts written at once, in step, without an engine: enough of them for statistics, in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coordinator.verification.prefill import PrefillModel
from protocol import gumbel, toploc
from protocol.rollout import StopReason, VersionSpan
from tests.adversary.attacks.cheat import Cheat, Choose
from worker.engine import Generation, GenerationRequest, Weights


def write_all(
    cheat: Cheat,
    requests: Sequence[GenerationRequest],
    published: Weights,
    scratch: Path,
    *,
    dtype: str = "bfloat16",
) -> list[Generation]:
    """What a worker with that cheat hands in. All prompts that are fed have one length. `dtype`: the engine's."""
    model = PrefillModel(cheat.weights(published, scratch).path, dtype=getattr(torch, dtype))
    if cheat.alters_module is not None:
        cheat.alters_module(model.module)
    draws = [cheat.draws(request) for request in requests]
    written = iter(_write(model, [draw for several in draws for draw in several], published, cheat.choose))
    picked = [cheat.pick([next(written) for _ in several]) for several in draws]
    return [cheat.falsify(generation, request) for generation, request in zip(picked, requests, strict=True)]


@torch.inference_mode()
def _write(
    model: PrefillModel, requests: Sequence[GenerationRequest], weights: Weights, choose: Choose | None
) -> list[Generation]:
    """B sequences, one token each per step; those that have ended go on unseen until all have."""
    choose = choose or gumbel.select_batch
    fed = torch.tensor([request.prompt_token_ids for request in requests])
    temperatures = [request.sampling.temperature for request in requests]
    seeds, eos = [request.seed for request in requests], set(requests[0].sampling.eos_token_ids)
    cache: Any = None
    steps: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
    ended = np.zeros(len(requests), bool)
    position = fed.shape[1] - 1
    for _ in range(requests[0].sampling.max_tokens):
        output = model.module.get_decoder()(input_ids=fed, past_key_values=cache, use_cache=True)  # type: ignore[operator]
        cache, hidden_BD = output.past_key_values, output.last_hidden_state[:, -1]
        logits_BV = model.module.get_output_embeddings()(hidden_BD).float()  # type: ignore[misc]
        tokens_B = choose(logits_BV.numpy(), seeds, [position] * len(seeds), temperatures)
        scores_BV = (logits_BV / torch.tensor(temperatures)[:, None]).log_softmax(-1)
        logprobs_B = scores_BV.gather(1, torch.tensor(tokens_B)[:, None])[:, 0].numpy()
        bits_BD = hidden_BD.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        steps.append((tokens_B, logprobs_B, bits_BD))
        ended |= np.isin(tokens_B, list(eos))
        if ended.all():
            break
        fed, position = torch.tensor(tokens_B)[:, None], position + 1
    tokens_BT, logprobs_BT, bits_BTD = (np.stack(column, axis=1) for column in zip(*steps, strict=True))
    rows = zip(tokens_BT, logprobs_BT, bits_BTD, strict=True)
    return [_generation(tokens, logprobs, bits, eos, weights) for tokens, logprobs, bits in rows]


def _generation(
    tokens_T: NDArray[Any], logprobs_T: NDArray[Any], bits_TD: NDArray[Any], eos: set[int], weights: Weights
) -> Generation:
    ends = np.flatnonzero(np.isin(tokens_T, list(eos)))
    length = int(ends[0]) + 1 if ends.size else len(tokens_T)
    return Generation(
        tuple(map(int, tokens_T[:length])),
        tuple(map(float, logprobs_T[:length])),
        (VersionSpan(weights.version, weights.manifest_digest, 0, length),),
        (toploc.build_proofs(bits_TD[:length]),),
        StopReason.EOS if ends.size else StopReason.LENGTH,
    )

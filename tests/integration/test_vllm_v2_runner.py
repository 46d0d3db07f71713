"""The V2 model runner, which every GPU worker uses, run on a CPU by Triton's interpreter in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from protocol.rollout import StopReason, VersionSpan
from tests.integration.prefill_check import assert_honest, examine
from tests.integration.triton_interpreter import generate
from tests.tiny_model import build_other_tiny_model, build_tiny_model
from worker.engine import Generation, Weights

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
INTERPRETER = Path(__file__).parent / "triton_interpreter"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Weights]:
    folder = tmp_path_factory.mktemp("models")
    first, second = build_tiny_model(folder / "0"), build_other_tiny_model(folder / "1")
    return Weights(0, "sha256:0", first), Weights(1, "sha256:1", second)


@pytest.fixture(scope="module")
def result(versions: tuple[Weights, Weights], tmp_path_factory: pytest.TempPathFactory) -> dict:
    output = tmp_path_factory.mktemp("v2") / "result.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(INTERPRETER), str(ROOT)]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    command = [sys.executable, str(INTERPRETER / "generate.py"), *(str(each.path) for each in versions), str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


def generations(result: dict) -> list[Generation]:
    return [
        Generation(
            tuple(found["token_ids"]),
            tuple(found["logprobs"]),
            tuple(VersionSpan(**span) for span in found["spans"]),
            tuple(tuple(bytes.fromhex(proof) for proof in span) for span in found["proofs"]),
            StopReason(found["stop_reason"]),
        )
        for found in result["generations"]
    ]


def test_the_v2_runner_really_ran_and_freed_its_rows(result: dict) -> None:
    assert result["runner"] == "v2"
    assert result["usage"] == [0, 0]


def test_native_seeds_proofs_and_logprobs_are_the_protocols(result: dict, versions: tuple[Weights, Weights]) -> None:
    found = generations(result)
    assert len(found) == generate.REQUESTS
    findings = [
        examine(generation, generate.request(number), span, versions[generation.spans[span].version])
        for number, generation in enumerate(found)
        for span in range(len(generation.spans))
    ]
    assert_honest(findings)
    assert sum(len(each.margins) for each in findings) == generate.REQUESTS * generate.TOKENS


def test_a_swap_in_flight_gives_two_spans(result: dict, versions: tuple[Weights, Weights]) -> None:
    swapped = [generation for generation in generations(result) if len(generation.spans) == 2]
    assert swapped, "no request was in flight at the swap"
    for number, generation in enumerate(generations(result)):
        assert [span.version for span in generation.spans] == list(range(len(generation.spans)))
        if len(generation.spans) == 2:
            wrong = examine(generation, generate.request(number), 1, versions[0])
            assert np.min(wrong.mismatches) > 60

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import OurFault
from worker.config import WorkerConfig
from worker.within_memory import is_out_of_memory, samples_at_once, within_memory


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", True),
        ("ValueError: Free memory on device (3.1/8 GiB) on startup is less than desired GPU memory utilization", True),
        ("capture memory is full: what proofs are made of is kept for fewer samples at once", True),
        ("the engine died: signal 11", False),
    ],
)
def test_want_of_memory_is_known_by_its_words(text: str, short: bool) -> None:
    assert is_out_of_memory(OurFault(text)) is short


async def test_it_is_tried_with_half_until_it_fits(tmp_path: Path) -> None:
    tried, said = [], []

    async def work(config: WorkerConfig) -> None:
        at_once = config.concurrency or 8  # what suits
        tried.append(at_once)
        with samples_at_once(at_once):
            if at_once > 2:
                raise OurFault("the engine died: CUDA out of memory")

    await within_memory(work, WorkerConfig(home=tmp_path), said.append)
    assert tried == [8, 4, 2]
    assert said[-1] == "out of memory with 4 samples at once: starting again with 2"


async def test_if_nothing_fits_the_remedies_are_named(tmp_path: Path) -> None:
    async def work(config: WorkerConfig) -> None:
        with samples_at_once(1):
            raise OurFault("CUDA out of memory")

    with pytest.raises(OurFault, match="--gpu-memory-utilization"):
        await within_memory(work, WorkerConfig(home=tmp_path, concurrency=1), lambda text: None)


async def test_any_other_failure_is_not_tried_again(tmp_path: Path) -> None:
    tried = []

    async def work(config: WorkerConfig) -> None:
        tried.append(config)
        with samples_at_once(8):
            raise OurFault("the engine died")

    with pytest.raises(OurFault, match="died"):
        await within_memory(work, WorkerConfig(home=tmp_path), lambda text: None)
    assert len(tried) == 1

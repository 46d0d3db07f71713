"""An engine that runs out of memory is started again with fewer samples at once, until it fits; each step is said."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator

from protocol.errors import OurFault
from worker.config import WorkerConfig

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|Cannot allocate memory|No available memory for the cache blocks"
    r"|capture memory is full|KV cache .*larger than the available|Free memory on device .* is less than desired",
    re.IGNORECASE,
)


class OutOfMemory(OurFault):
    """An engine ran out of memory with so many samples `at_once`."""

    def __init__(self, text: str, at_once: int) -> None:
        super().__init__(text)
        self.at_once = at_once


@contextlib.contextmanager
def samples_at_once(count: int) -> Iterator[None]:
    """What fails in the block for want of memory says with how many."""
    try:
        yield
    except OurFault as error:
        if is_out_of_memory(error):
            raise OutOfMemory(str(error), count) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an engine's failure says that memory was short, in the words of torch, vLLM or the system."""
    return _OUT_OF_MEMORY.search(str(error)) is not None


async def within_memory(
    work: Callable[[WorkerConfig], Awaitable[None]], config: WorkerConfig, say: Callable[[str], None]
) -> None:
    """Work; again with less after each failure for want of memory. Raises OurFault if even one sample is too many.

    Leases were given back and what is finished is in the outbox, so nothing is lost by starting again.
    """
    while True:
        try:
            await work(config)
            return
        except OutOfMemory as error:
            if error.at_once == 1:
                raise OurFault(
                    f"the engine ran out of memory with one sample at once ({error}): end what else uses the GPU, "
                    "set --gpu-memory-utilization lower if the display shares it, or --max-model-len to the run's lengths"
                ) from error
            less = error.at_once // 2
            say(f"out of memory with {error.at_once} samples at once: starting again with {less}")
            config = config.model_copy(update={"concurrency": less})

"""vLLM's processes end with the worker that started them, also when it is killed and can't tell them."""

from __future__ import annotations

import os
import select
import threading


def end_with(owner: int) -> None:
    """End this process as soon as process `owner` is gone. (Linux; elsewhere vLLM's own shutdown has to do.)

    A process file descriptor becomes readable when its process ends, whoever inherits its children, and never means
    another process that got the same number later.
    """
    if owner == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel without them, or one that forbids them
        return
    threading.Thread(target=_wait_and_end, args=(descriptor,), name="end with the worker", daemon=True).start()


def _wait_and_end(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os._exit(1)

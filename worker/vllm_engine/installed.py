"""Whether vLLM is installed here, found without importing it, and what to do if not."""

from __future__ import annotations

from importlib.util import find_spec

from protocol.errors import UserError

MISSING = "vLLM is not installed"
REMEDY = "`pip install 'rollswarm[worker]'` on a GPU, `EXTRAS=worker-cpu bash deploy/install.sh` without"


def require_vllm() -> None:
    """Raise UserError with the remedy if vLLM is not installed."""
    if find_spec("vllm") is None:
        raise UserError(f"{MISSING}: {REMEDY}")

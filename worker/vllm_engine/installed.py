"""Whether vLLM is installed here and can be imported, found without importing it into this process, and what to do if not."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from protocol.errors import UserError

MISSING = "vLLM is not installed"
REMEDY = "`pip install 'rollswarm[worker]'` on a GPU, `EXTRAS=worker-cpu bash deploy/install.sh` without"


def require_vllm() -> None:
    """Raise UserError with the remedy if vLLM is not installed."""
    if find_spec("vllm") is None:
        raise UserError(f"{MISSING}: {REMEDY}")


# vLLM asks for them and nothing here needs them; a build that isn't torch's own breaks the import of transformers.
_ADDONS = ("torchvision", "torchaudio", "torchcodec")
_IMPORT = "import vllm.v1.engine.async_llm"
_IMPORT_S = 300.0  # the first import compiles all of vLLM


def import_problem() -> str:
    """Why vLLM can't be imported, in its own last words; "" if it can. Takes as long as the import: seconds, a minute once."""
    try:
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, timeout=_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its import took more than {_IMPORT_S:.0f} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else f"its import ended with status {done.returncode}"


def remedy_of(problem: str) -> str:
    """What to do about such words; "" if they don't tell."""
    if any(addon in problem for addon in _ADDONS):
        packages = " ".join(_ADDONS)
        return (
            f"`{sys.executable} -m pip uninstall {packages}`: they don't match this torch, and nothing here needs them"
        )
    return ""

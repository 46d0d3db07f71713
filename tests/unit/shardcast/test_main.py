"""shardcast.main: `--help` loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "vllm", "grpc", "sqlalchemy", "aiohttp", "numpy")


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    code = f"import sys, shardcast.main; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_client_and_the_servers_need_no_torch() -> None:
    code = (
        "import sys, shardcast.client, shardcast.publish, shardcast.serve;"
        f"print([name for name in {HEAVY[:5]!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

"""What this machine is, in words for the operator."""

from __future__ import annotations

import os
import platform
import subprocess


def describe() -> str:
    """The GPUs as the driver names them, else processor and cores; at most 128 characters."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return f"{platform.machine()} CPU, {os.cpu_count()} cores"[:128]
    names = [name.strip() for name in listed if name.strip()]
    return ", ".join(f"{names.count(name)}× {name}" for name in dict.fromkeys(names))[:128]

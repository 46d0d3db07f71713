"""Which checkpoints may be loaded, and loaded in place of another: decided from safetensors headers alone.

Checked before the engine is paused, since a reload that fails half-way leaves weights of two versions. A checkpoint must
hold `lm_head.weight` explicitly: where it is missing, the engine would go on with the head it had (vLLM's CPU build keeps
a tied model's old head), and every log-prob would be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from protocol.errors import OurFault

HEAD = "lm_head.weight"
_MAX_HEADER_BYTES = 100 << 20

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def tensor_index(folder: Path) -> Tensors:
    """Name -> (dtype, shape) of every tensor in the folder's *.safetensors. Raises OurFault if they cannot be read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise OurFault(f"{folder} holds no *.safetensors: fetch the version again")
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        tensors.update(_header(file))
    return tensors


def require_loadable(folder: Path) -> Tensors:
    """The folder's tensors. Raises OurFault if an engine could not, or must not, load them."""
    if not (folder / "config.json").is_file():
        raise OurFault(f"{folder} has no config.json: fetch the version again")
    tensors = tensor_index(folder)
    if HEAD not in tensors:
        raise OurFault(f"{folder} has no {HEAD}: publish the LM head explicitly, even of a tied model")
    return tensors


def require_replaceable(current: Tensors, new: Tensors) -> None:
    """Raise OurFault unless `new` has the same tensors, of the same shapes, as what is loaded."""
    missing, surplus = sorted(current.keys() - new.keys()), sorted(new.keys() - current.keys())
    if missing or surplus:
        raise OurFault(f"the new weights are of another model: missing {missing[:3]}, surplus {surplus[:3]}")
    for name, (_, shape) in current.items():
        if new[name][1] != shape:
            raise OurFault(f"the new weights are of another model: {name} is {list(new[name][1])}, not {list(shape)}")


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 0 < size <= _MAX_HEADER_BYTES:
                raise ValueError(f"header of {size} bytes")
            entries = json.loads(stream.read(size))
        found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items() if name[0] != "_"}
        needed = (
            8 + size + max((entry["data_offsets"][1] for name, entry in entries.items() if name[0] != "_"), default=0)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise OurFault(f"{file} is not a readable safetensors file ({error}): fetch the version again") from error
    if file.stat().st_size != needed:
        raise OurFault(f"{file} has {file.stat().st_size} bytes where its header says {needed}: fetch it again")
    return found

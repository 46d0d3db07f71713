"""Checkpoints that hold everything, are whole or absent, and never the only copy.

A checkpoint is a folder `checkpoint-<step, 8 digits>`:

    weights.safetensors    the model's parameters and buffers as it computes with them
    optimizer.pt           the optimizer's state, float32 masters among it; tensors and plain values (read with weights_only)
    companions.pt          state of what trains beside the policy (a critic, averages); only where there is any
    state.json             step, policy version, counters, generator states, and the SHA-256 of the others and of itself

It is written beside its place, synced, and renamed there: a folder with that name is complete, and one that was damaged
since (by its digests) is passed over for the one before it. Where a step is saved again, its folder is moved aside first, to
`.checkpoint-<step>.replaced`, and counts as the step's own until the new one is in its place.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from protocol.disk import sync
from protocol.errors import OurFault, UserError

_NAME = re.compile(r"checkpoint-(\d{8,})|\.checkpoint-(\d{8,})\.replaced")
_FORMAT = 2
_UNREADABLE = (OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError, SafetensorError, UnpicklingError)
_PARTS = ("weights.safetensors", "optimizer.pt")
_COMPANIONS = "companions.pt"
_KNOWN = (*_PARTS, _COMPANIONS)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What training needs to go on as if it had not stopped.

    `step` counts batches trained on, `policy_version` published versions. `extra`: counters and whatever else the caller
    must find again, JSON values only. `companions`: tensors and plain values. `random_state`: of Python, NumPy and torch,
    from `random_state()`.
    """

    step: int
    policy_version: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    random_state: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    companions: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(root: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write `checkpoint` below `root` and delete all but the newest `keep` ≥ 1 up to it. Returns its folder.

    Later ones are damaged, or the trainer would have gone on from them: they don't count, and stay until they are replaced.

    Raises OurFault if the disk refuses; what was there before is still there then.
    """
    if keep < 1:
        raise UserError(f"checkpoint: keep must be at least 1, got {keep}")
    target = root / f"checkpoint-{checkpoint.step:08d}"
    scratch = root / f".{target.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        _write_parts(scratch, checkpoint)
        # A step that was saved before is moved aside, never deleted before its successor is in place.
        if target.exists():
            shutil.rmtree(_aside(target), ignore_errors=True)
            target.rename(_aside(target))
        scratch.rename(target)
        sync(root)
        for _, folder in numbered(root):
            shutil.rmtree(_aside(folder), ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # how files, torch and safetensors say it
        raise OurFault(f"cannot write the checkpoint {target}: {error}; free space or fix permissions") from error
    for old in [folder for step, folder in numbered(root) if step <= checkpoint.step][keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_latest(root: Path) -> tuple[Checkpoint, list[str]] | None:
    """The newest whole checkpoint and a sentence for each damaged one passed over; None if there never was one.

    Raises UserError if there are checkpoints and none of them is whole: starting anew is not for us to decide.
    """
    damaged: list[str] = []
    for folder in checkpoints(root):
        try:
            return load_checkpoint(folder), damaged
        except UserError as error:
            damaged.append(str(error))
    if damaged:
        raise UserError(f"no whole checkpoint in {root} ({damaged[0]}): restore one, or move the folder away")
    return None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint. Raises UserError if it is incomplete, damaged or of another format."""
    try:
        state = json.loads((folder / "state.json").read_text())
        if state["format"] != _FORMAT:
            raise UserError(f"{folder.name} has format {state['format']}; this trainer reads format {_FORMAT}")
        if state.pop("seal") != _seal(state):
            raise UserError(f"{folder.name}: state.json is damaged (its digest differs)")
        for name in {*_PARTS, *state["digests"]}:
            if name not in _KNOWN or _digest(folder / name) != state["digests"][name]:
                raise UserError(f"{folder.name}: {name} is damaged (its digest differs)")
        return Checkpoint(
            step=state["step"],
            policy_version=state["policy_version"],
            weights=load_file(folder / "weights.safetensors"),
            optimizer=torch.load(folder / "optimizer.pt", weights_only=True),
            random_state=state["random_state"],
            extra=state["extra"],
            companions=_companions(folder, state["digests"]),
        )
    except UserError:
        raise
    except _UNREADABLE as error:
        raise UserError(f"{folder.name} is incomplete ({type(error).__name__}: {error})") from error


def random_state() -> dict[str, Any]:
    """The states of the three global generators, as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the three global generators where `random_state` found them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))


def _write_parts(folder: Path, checkpoint: Checkpoint) -> None:
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.weights.items()}
    save_file(weights, folder / "weights.safetensors")
    torch.save(checkpoint.optimizer, folder / "optimizer.pt")
    names: tuple[str, ...] = _PARTS
    if checkpoint.companions:
        torch.save(checkpoint.companions, folder / _COMPANIONS)
        names = _KNOWN
    state = {
        "format": _FORMAT,
        "step": checkpoint.step,
        "policy_version": checkpoint.policy_version,
        "random_state": checkpoint.random_state,
        "extra": checkpoint.extra,
        "digests": {name: _digest(folder / name) for name in names},
    }
    (folder / "state.json").write_text(json.dumps({**state, "seal": _seal(json.loads(json.dumps(state)))}))
    for path in (*(folder / name for name in names), folder / "state.json", folder):
        sync(path)


def _seal(state: dict[str, Any]) -> str:
    """SHA-256 of everything else in state.json."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _companions(folder: Path, digests: dict[str, str]) -> dict[str, Any]:
    return torch.load(folder / _COMPANIONS, weights_only=True) if _COMPANIONS in digests else {}


def checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders, the newest (highest step) first."""
    return [path for _, path in numbered(root)]


def numbered(root: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders with their steps, the newest first."""
    if not root.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir(), reverse=True):  # one that was moved aside comes after its successor
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1] or match[2]), path)
    return sorted(found.items(), reverse=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()

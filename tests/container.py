"""Runs one command as a container of a compose file would: its own root over this machine's, its mounts, its user.

`python container.py SPEC` (JSON) as root within namespaces of its own (`unshare --mount`). The root is an overlay of this
machine's, read-only if the service says so; nothing of the machine is changed. What an image would bring is this machine's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Spec:
    """`mounts`: (source, target, "ro" or "rw"). `visible`: paths of this machine that are kept, whatever hides them."""

    work: str  # an empty folder, for the overlay
    argv: Sequence[str]
    environment: Mapping[str, str]
    mounts: Sequence[tuple[str, str, str]]
    tmpfs: Sequence[str]
    files: Mapping[str, str]  # of the image: path -> text; those in a bin folder can be run
    visible: Sequence[str]
    user: tuple[int, int]
    read_only: bool
    folder: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def enter(spec: Spec) -> None:
    """Become the command. Never returns."""
    work = Path(spec.work)
    _mount("-t", "tmpfs", "tmpfs", work)
    for name in ("upper", "work", "root"):
        (work / name).mkdir()
    root = work / "root"
    layers = f"lowerdir=/,upperdir={work / 'upper'},workdir={work / 'work'}"
    _mount("-t", "overlay", "overlay", "-o", layers, root)
    for system in ("proc", "dev", "sys"):
        _mount("--rbind", f"/{system}", root / system)
    for path, text in spec.files.items():
        _file(root, path, text)
    for target in spec.tmpfs:
        _folder(root, target)
        _mount("-t", "tmpfs", "-o", f"mode=1777,uid={spec.user[0]},gid={spec.user[1]}", "tmpfs", _inside(root, target))
    for path in spec.visible:
        _open_parents(root, path)
        _bind(root, path, path, "ro")
    for source, target, mode in spec.mounts:
        _bind(root, source, target, mode)
    if spec.read_only:
        _mount("-o", "remount,ro", root)
    os.chroot(root)
    os.chdir(spec.folder)
    os.setgroups([])
    os.setgid(spec.user[1])
    os.setuid(spec.user[0])
    os.execvpe(spec.argv[0], list(spec.argv), dict(spec.environment))


def _bind(root: Path, source: str, target: str, mode: str) -> None:
    if Path(source).is_dir():
        _folder(root, target)
    else:
        _folder(root, str(Path(target).parent))
        _inside(root, target).touch()
    _mount("--bind", source, _inside(root, target))
    if mode == "ro":
        _mount("-o", "remount,bind,ro", _inside(root, target))


def _file(root: Path, path: str, text: str) -> None:
    _folder(root, str(Path(path).parent))
    _inside(root, path).write_text(text)
    if "bin" in Path(path).parts:
        _inside(root, path).chmod(0o755)


def _open_parents(root: Path, path: str) -> None:
    """In an image everybody may read code; here it may lie below a closed folder."""
    for parent in Path(path).parents:
        inside = _inside(root, str(parent))
        if inside.is_dir() and not inside.stat().st_mode & 0o001:
            inside.chmod(inside.stat().st_mode | 0o011)


def _folder(root: Path, path: str) -> None:
    _inside(root, path).mkdir(parents=True, exist_ok=True)


def _inside(root: Path, path: str) -> Path:
    """The path under the new root. Links (/var/run) are followed first: an absolute one would lead out of it."""
    return root / os.path.realpath(path).lstrip("/")


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


if __name__ == "__main__":
    enter(Spec(**json.loads(sys.argv[1])))

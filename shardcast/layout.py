"""Names of folders, and what a version's folder must look like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from protocol.errors import UserError
from protocol.manifest import Digest, Manifest


def check_folder(folder: Path, manifest: Manifest) -> None:
    """The folder holds exactly the manifest's files, regular, at their sizes; else UserError."""
    expected = {file.path: file.size for file in manifest.files}
    found = dict(list_files(folder))
    for path, size in expected.items():
        if found.get(path) != size:
            there = "it is absent" if path not in found else f"it has {found[path]}"
            raise UserError(f"{folder / path} should have {size} bytes; {there}")
    surplus = sorted(set(found) - set(expected))
    if surplus:
        raise UserError(f"{folder / surplus[0]} is not in the manifest: remove it")


def list_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Relative POSIX path and size of every file below a folder. Raises UserError on links and special files."""
    if not folder.is_dir() or folder.is_symlink():
        raise UserError(f"{folder} is not a folder")
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise UserError(f"{path} is a link or a special file; a version holds regular files only")
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path.stat().st_size


def incoming_folder(root: Path, version: int) -> Path:
    """Where the trainer puts the files of a version for the origin that uses this root."""
    return root / "incoming" / str(version)


def incoming_delta(root: Path, version: int) -> Path:
    """Where the trainer puts the delta that makes a version, if it has one: beside its folder."""
    return root / "incoming" / f"{version}.delta"


def incoming_packed(root: Path, version: int) -> Path:
    """Where the trainer puts the packed form of a version, if it has one: beside its folder."""
    return root / "incoming" / f"{version}.packed"


def packed_folder_name(target: str) -> str:
    """Where the packed form of the version with the folder name `target` is received."""
    return f"{target}.packed"


def delta_folder_name(target: str, version: int) -> str:
    """Where the delta of `version` is received that serves to make the version with the folder name `target`."""
    return f"{target}.{version}.delta"


def owner_of(name: str) -> str:
    """The folder name of the version that something in `partial/` is received for."""
    return name.partition(".")[0]


def incoming_torrent(root: Path, version: int) -> Path:
    """Where the trainer puts the torrent of a version for the origin that uses this root."""
    return root / "incoming" / f"{version}.torrent"


def version_name(version: int, digest: Digest) -> str:
    """The folder name of a version."""
    return f"{version}-{digest.short}"


def version_of(name: str) -> int | None:
    """The number in a version's folder name, or None for any other name."""
    number, _, rest = name.partition("-")
    return int(number) if number.isascii() and number.isdigit() and len(rest) == 16 else None

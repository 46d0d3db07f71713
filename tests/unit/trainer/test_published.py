"""trainer.published: the last versions, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.manifest import sign_manifest
from shardcast.publish import build_manifest
from tests.factories import RUN_ID, TRAINER
from trainer.published import Published, PublishedVersions, delta_base


def keep(root: Path, version: int, content: str = "weights") -> Published:
    scratch = root / "scratch"
    (scratch / "files").mkdir(parents=True)
    (scratch / "files" / "w").write_text(content)
    manifest = build_manifest(scratch / "files", run_id=RUN_ID, policy_version=version)
    return PublishedVersions(root / "published").keep(scratch, sign_manifest(manifest, TRAINER), manifest)


def test_what_is_kept_is_found_also_by_another_process(tmp_path: Path) -> None:
    kept = keep(tmp_path, 3)
    found = PublishedVersions(tmp_path / "published").find(3)
    assert found == kept and found.delta is None
    assert (found.files / "w").read_text() == "weights"
    assert PublishedVersions(tmp_path / "published").find(4) is None
    assert PublishedVersions(tmp_path / "nowhere").versions == []


def test_a_version_takes_the_place_of_what_had_its_number(tmp_path: Path) -> None:
    keep(tmp_path, 3)
    again = keep(tmp_path, 3, "other")
    assert PublishedVersions(tmp_path / "published").find(3) == again
    assert (again.files / "w").read_text() == "other"


@pytest.mark.parametrize("damage", ["manifest.json", "files/w", "files"])
def test_what_is_damaged_is_not_there(tmp_path: Path, damage: str) -> None:
    folder = keep(tmp_path, 3).folder
    if damage == "files":
        (folder / "files" / "w").unlink()
        (folder / "files").rmdir()
    elif damage == "manifest.json":
        (folder / damage).write_text("{}")
    else:
        (folder / "files").rename(folder / "elsewhere")
    assert PublishedVersions(tmp_path / "published").find(3) is None


def test_only_the_newest_and_the_one_before_it_stay(tmp_path: Path) -> None:
    for version in (1, 2, 4, 9):
        keep(tmp_path, version)
    versions = PublishedVersions(tmp_path / "published")
    versions.prune(4)  # 9 is of an older life of this folder
    assert versions.versions == [2, 4]
    versions.prune(4)
    assert versions.versions == [2, 4]


@pytest.mark.parametrize(
    ("version", "full_every", "kept", "base"),
    [
        (0, 10, [], None),
        (1, 10, [], None),
        (1, 10, [0], 0),
        (7, 10, [5, 6], 6),
        (7, 10, [5, 6, 7, 8], 6),
        (10, 10, [9], None),
        (20, 10, [19], None),
        (21, 10, [20], 20),
        (3, 1, [2], None),
        (4, 3, [3], 3),
    ],
)
def test_what_a_version_is_the_difference_to(version: int, full_every: int, kept: list[int], base: int | None) -> None:
    assert delta_base(version, full_every, kept) == base

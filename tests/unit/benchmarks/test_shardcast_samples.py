"""benchmarks.shardcast.samples: a run in pieces is one run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.shardcast.report import Sample
from benchmarks.shardcast.samples import Samples


def sample(last: float) -> Sample:
    return Sample((1.0, last), 0.5, 100, 100, 400, {"origin": 1.0})


def test_pieces_add_up(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for last in (2.0, 3.0):
        Samples(path).add("full", sample(last))
    third = Samples(path)
    third.add("raw", sample(4.0))
    found = third.of(["raw"])
    assert found == {"raw": [sample(4.0)], "full": [sample(2.0), sample(3.0)]}
    assert Samples(path).of(["full"]) == found


def test_without_a_file_nothing_is_kept() -> None:
    one = Samples()
    one.add("full", sample(2.0))
    assert one.of([]) == {"full": [sample(2.0)]} and Samples().of([]) == {}

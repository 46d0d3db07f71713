"""A small run against both doors of a real coordinator; `python -m tests.adversary.fuzz --http 50000 --grpc 50000` is long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.postgres import Postgres
from tests.adversary.fuzz.doors import fuzz_doors
from tests.adversary.fuzz.site import Site

HTTP, GRPC = 400, 300
OPENED = 40  # connections to the database among them, of which a pool opens more while many ask
GROWN_MIB = 48  # far more than pools and caches take after the warm-up; a leak of all that comes in is more


@pytest.fixture
def site(postgres: Postgres, tmp_path: Path) -> Iterator[Site]:
    """On PostgreSQL: it refuses more than SQLite does."""
    with Site(tmp_path, postgres.create("doors")) as site:
        yield site
    postgres.drop("doors")


def test_nothing_hostile_breaks_a_door(site: Site) -> None:
    outcome = fuzz_doors(site, HTTP, GRPC, seed=1)
    assert outcome.trouble == []
    answers = sum((report.answers for report in outcome.reports), start=type(outcome.reports[0].answers)())
    for reached in ("http 200", "http 303", "http 400", "http 401", "http 404", "http 405"):
        assert answers[reached] > 0, reached
    for reached in ("OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "FAILED_PRECONDITION", "UNIMPLEMENTED"):
        assert answers[f"grpc {reached}"] > 0, reached
    assert answers["described 200"] > 0 and answers["described 400"] > 0
    assert outcome.after.files <= outcome.before.files + OPENED
    assert outcome.after.resident - outcome.before.resident < GROWN_MIB * 2**20

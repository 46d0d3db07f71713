from __future__ import annotations

from pathlib import Path

import pytest

from docs.check_links import anchors, broken, main, unreachable


def test_the_projects_pages_have_no_broken_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    page = tmp_path / "README.md"
    page.write_text(
        "# One `code` head\n[a](none.md) [b](#one-code-head) [c](#two) [d](https://x.example) `[e](no.md)`\n"
    )
    assert [problem.partition(": ")[2] for problem in broken(page)][:2] == [
        "none.md is not there",
        "#two: no such heading",
    ]
    assert len(unreachable(tmp_path)) == 1
    assert anchors("# A, b & c\n```\n# no heading\n```\n") == {"a-b--c"}

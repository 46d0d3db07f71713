"""shardcast.status_page: readable, and nothing that a source says becomes markup."""

from __future__ import annotations

from shardcast.status_page import render_page


def test_the_page_says_what_is_here_and_escapes_what_sources_say() -> None:
    source = {"url": "http://up", "state": "dropped", "mbytes_per_s": 1.5, "last_fault": "<script>alert(1)</script>"}
    page = render_page(
        {
            "role": "relay",
            "status": "ok",
            "head": 7,
            "head_digest": None,
            "complete": 6,
            "versions": [5, 6],
            "receiving": ["version 7: 1 of 9 shards"],
            "sources": [source],
        }
    )
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "5, 6" in page and "version 7: 1 of 9 shards" in page and "none yet" in page


def test_an_origin_without_versions_has_a_page() -> None:
    page = render_page({"role": "origin", "status": "ok", "head": None, "versions": [], "sources": []})
    assert "shardcast origin" in page and "none yet" in page

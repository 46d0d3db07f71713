"""shardcast.status_page: readable, and nothing that a source says becomes markup."""

from __future__ import annotations

from typing import Any

from shardcast.status_page import render_page

SOURCE = {
    "url": "http://up",
    "peer": True,
    "state": "dropped",
    "mbytes_per_s": 1.5,
    "last_fault": "<script>alert(1)</script>",
}
RELAY: dict[str, Any] = {
    "role": "relay",
    "status": "ok",
    "head": 7,
    "head_digest": None,
    "complete": 6,
    "versions": [5, 6],
    "behind_s": 12.3,
    "mbytes_per_s_out": 24.6,
    "bytes_sent": 3 * 2**30,
    "receiving": [{"version": 7, "have": 1, "of": 9}],
    "delta_fallbacks": ["2 × blob_absent"],
    "sources": [SOURCE],
}


def test_the_page_says_what_is_here_and_escapes_what_sources_say() -> None:
    page = render_page(RELAY)
    assert "<script" not in page and "&lt;script&gt;" in page
    for said in (
        "5, 6",
        "1 of 9 shards",
        "none yet",
        "24.6",
        "3.0<small> GiB",
        "sibling",
        "all is well",
        ">12<",
        "2 × blob_absent",
    ):
        assert said in page, said


def test_trouble_is_said_first() -> None:
    page = render_page({**RELAY, "status": "can't follow <at all>"})
    assert "can&#x27;t follow &lt;at all&gt;" in page and "all is well" not in page


def test_who_cant_follow_doesnt_know_how_far_behind_it_is() -> None:
    page = render_page({**RELAY, "following": False})
    assert ">unknown<" in page and ">12<" not in page


def test_an_origin_without_versions_has_a_page() -> None:
    page = render_page({"role": "origin", "status": "ok", "head": None, "versions": [], "sources": []})
    assert "shardcast origin" in page and "none yet" in page and "On its way" not in page


def test_little_is_not_shown_as_nothing() -> None:
    assert "11.4<small> MiB" in render_page({**RELAY, "bytes_sent": 12 * 10**6})


def test_on_a_narrow_screen_each_cell_says_what_it_is() -> None:
    page = render_page(RELAY)
    assert 'title="MB/s per request">1.5' in page and 'title="last fault">' in page and "max-width" in page

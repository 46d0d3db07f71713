"""shardcast.fetch_command: what `shardcast status` prints."""

from __future__ import annotations

from shardcast.fetch_command import status_lines


def test_a_person_reads_units_and_words() -> None:
    health = {
        "status": "ok",
        "head": None,
        "versions": [],
        "following": True,
        "behind_s": 3.5,
        "mbytes_per_s_out": 0.25,
        "bytes_sent": 12 * 10**6,
        "quota_left_bytes": 0,
        "receiving": [{"version": 7, "have": 1, "of": 9}],
        "sources": [{"url": "http://up", "state": "ok", "last_fault": ""}],
    }
    assert list(status_lines(health)) == [
        "status           ok",
        "head             none yet",
        "versions         none yet",
        "behind           3.5 s",
        "sent now         0.25 MB/s",
        "sent             11.4 MiB",
        "quota left       0 B",
        "receiving        version 7: 1 of 9 shards",
        "source           http://up: ok",
    ]


def test_who_cant_follow_doesnt_know_how_far_behind_it_is() -> None:
    assert list(status_lines({"following": False, "behind_s": 31.0})) == ["behind           unknown"]


def test_a_server_may_say_anything() -> None:
    assert list(status_lines({"bytes_sent": "x", "head": {}})) == ["bytes_sent       x", "head             {}"]
    assert list(status_lines({"sources": [7], "receiving": "x"})) == []
    assert len(list(status_lines({"bytes_sent": 10**400, "quota_left_bytes": -1}))) == 2

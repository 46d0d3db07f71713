"""shardcast.swarm: what libtorrent is allowed to do, and that its failures are heard of."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import libtorrent
import pytest

from protocol.errors import OurFault
from shardcast.swarm import Swarm, SwarmConfig, session_settings
from shardcast.torrent import Layout, PieceHasher

KIB = 2**10
SOON = 10.0


def test_nothing_finds_peers_but_the_runs_servers() -> None:
    settings = session_settings(SwarmConfig(), libtorrent)
    for name in ("enable_dht", "enable_lsd", "enable_upnp", "enable_natpmp"):
        assert settings[name] is False
    assert settings["listen_interfaces"] == "0.0.0.0:8611,[::]:8611"
    assert 0 < settings["connections_limit"] < 1000
    unknown = set(settings) - set(libtorrent.default_settings())
    assert not unknown, "libtorrent ignores settings that it doesn't know"


def test_port_0_listens_nowhere_and_rates_are_bytes() -> None:
    settings = session_settings(SwarmConfig(port=0, max_upload_mbit=8.0), libtorrent)
    assert settings["listen_interfaces"] == "" and settings["enable_incoming_tcp"] is False
    assert settings["upload_rate_limit"] == 1_000_000
    assert session_settings(SwarmConfig(), libtorrent)["upload_rate_limit"] == 0


async def test_a_swarm_that_never_joined_has_no_session_to_close() -> None:
    swarm = Swarm(SwarmConfig())
    assert swarm.port is None and swarm.members == []
    await swarm.close()


@pytest.fixture
def pieces() -> list[bytes]:
    return [random.Random(number).randbytes(64 * KIB) for number in range(3)]


def torrent_of(pieces: list[bytes]) -> tuple[Layout, bytes]:
    size = sum(map(len, pieces))
    layout = Layout.for_files(1, [size], [0])
    assert layout is not None and layout.pieces == len(pieces)
    hasher = PieceHasher(layout)
    for piece in pieces:
        hasher.update(piece)
    hasher.end_file()
    return layout, layout.torrent(hasher.digest())


async def test_pieces_that_came_another_way_are_written_and_told_of(tmp_path: Path, pieces: list[bytes]) -> None:
    layout, torrent = torrent_of(pieces)
    folder = tmp_path / "version"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "weights").write_bytes(pieces[0] + bytes(2 * 64 * KIB))
    swarm, done = Swarm(SwarmConfig(port=0)), asyncio.Event()
    member = swarm.join(layout, torrent, ["sub/weights"], folder, [True, False, False])
    seen: set[int] = set()

    def on_piece(piece: int) -> None:
        seen.add(piece)
        if seen >= {1, 2}:
            done.set()

    member.on_piece = on_piece
    with pytest.raises(OurFault, match="version 1"):
        swarm.join(layout, torrent, ["sub/weights"], folder, [False] * 3)
    member.add_piece(1, pieces[1])
    member.add_piece(2, pieces[2])
    async with asyncio.timeout(SOON):
        await done.wait()
        moved = tmp_path / "elsewhere"
        folder.rename(moved)
        member.moved_to(moved)
        await swarm.leave(member)
        assert swarm.members == []
        await swarm.leave(member)  # once more does no harm
        await swarm.close()
    assert_only_file(moved / "sub" / "weights", b"".join(pieces), below=tmp_path)


def assert_only_file(path: Path, content: bytes, below: Path) -> None:
    assert path.read_bytes() == content
    assert [each for each in below.rglob("*") if each.is_file()] == [path]


async def test_what_can_not_be_written_is_heard_of_and_let_go(tmp_path: Path, pieces: list[bytes]) -> None:
    layout, torrent = torrent_of(pieces)
    (tmp_path / "file").write_text("in the way")
    swarm = Swarm(SwarmConfig(port=0))
    member = swarm.join(layout, torrent, ["weights"], tmp_path / "file", [False] * 3)
    member.add_piece(0, pieces[0])
    async with asyncio.timeout(SOON):
        await member.failed.wait()
        assert member.error is not None
        await swarm.leave(member)
        await swarm.close()
    assert (tmp_path / "file").read_text() == "in the way"

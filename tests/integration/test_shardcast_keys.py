"""Rotation of the trainer's key: from the operator's command through origin and relay to clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from protocol import keyfile
from protocol.errors import SourceFault, UserError
from protocol.manifest import envelope_to_json, manifest_digest
from protocol.rotation import chain_to_json, sign_rotation
from protocol.signing import Identity
from shardcast.publish import announce
from shardcast.storage import VersionStore
from tests.shardcast_network import (
    KEYS,
    SOON,
    STRANGER,
    TRAINER,
    FakeSource,
    assert_same,
    client,
    make_version,
    origin_in_process,
    publish,
    relay_in_process,
    run_command,
)

NEW = Identity.from_seed(b"n" * 32)
ROTATION = sign_rotation("run", TRAINER, NEW.key_id, 1)


async def post(url: str, body: bytes) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/keys", data=body) as response:
        return response.status, await response.text()


async def test_a_rotation_is_followed_by_relays_and_clients_and_stored(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "relay", url) as (relay_url, catalog),
    ):
        first = await publish(url, origin, make_version(tmp_path / "v1", 1))
        async with client([relay_url], tmp_path / "cache") as worker:
            assert_same(await worker.fetch(1, first.digest), first)
        assert await post(url, chain_to_json([ROTATION])) == (200, '{"new": 1}')
        assert await post(url, chain_to_json([ROTATION])) == (200, '{"new": 0}')
        second = await publish(url, origin, make_version(tmp_path / "v2", 2, signer=NEW))
        async with client([relay_url], tmp_path / "cache") as worker:
            assert_same(await worker.fetch(2, second.digest), second)
            assert worker.store.keys.ring.statements == (ROTATION,)
        assert catalog.store.keys.ring.statements == (ROTATION,)
        async with client([relay_url], tmp_path / "new") as newcomer:  # pins the first key, as everyone does for ever
            head = await newcomer.head(wait_s=SOON)
            assert head is not None and head.version == 2
            assert_same(await newcomer.fetch(2), second)
    assert VersionStore(tmp_path / "cache", KEYS).versions == [1, 2]
    assert VersionStore(tmp_path / "cache", [STRANGER.key_id]).versions == []


async def test_a_key_that_was_rotated_away_signs_nothing_more(tmp_path: Path) -> None:
    stolen = make_version(tmp_path / "stolen", 7)
    async with asyncio.timeout(SOON), origin_in_process(tmp_path / "origin") as (url, origin):
        await publish(url, origin, make_version(tmp_path / "v1", 1))
        await post(url, chain_to_json([ROTATION]))
        with pytest.raises(UserError, match=r"403.*rotated away after version 1"):
            await announce(url, stolen.envelope)
        async with FakeSource(stolen).serving() as thief, client([thief, url], tmp_path / "cache") as worker:
            await worker.head()  # whoever asks an honest source once knows
            with pytest.raises(SourceFault, match="rotated away after version 1"):
                await worker.fetch(7)
            assert worker.source_stats[thief].bans


async def test_what_a_stolen_key_signed_goes_when_the_rotation_is_heard_of(tmp_path: Path) -> None:
    stolen, mine = make_version(tmp_path / "stolen", 7), make_version(tmp_path / "mine", 8, signer=NEW)
    honest = FakeSource(mine, rotations=[ROTATION])
    async with asyncio.timeout(SOON), FakeSource(stolen).serving() as thief, honest.serving() as good:
        async with client([thief], tmp_path / "cache") as worker:
            await worker.fetch(7)
            assert worker.store.versions == [7]
        async with client([good], tmp_path / "cache") as worker:
            assert_same(await worker.fetch(8), mine)
            assert worker.store.versions == [8]
    assert VersionStore(tmp_path / "cache", KEYS).versions == [8]


async def test_forks_loops_and_rubbish_are_refused_and_change_nothing(tmp_path: Path) -> None:
    fork = sign_rotation("run", TRAINER, STRANGER.key_id, 0)
    loop = sign_rotation("run", NEW, TRAINER.key_id, 3)
    forged = sign_rotation("run", STRANGER, NEW.key_id, 3)
    async with asyncio.timeout(SOON), origin_in_process(tmp_path / "origin") as (url, origin):
        await publish(url, origin, make_version(tmp_path / "v5", 5))
        status, said = await post(url, chain_to_json([ROTATION]))  # version 5 is signed by the old key
        assert status == 400 and "name the last version" in said
        good = sign_rotation("run", TRAINER, NEW.key_id, 5)
        assert (await post(url, chain_to_json([good])))[0] == 200
        for statement, why in ((fork, "second"), (loop, "used before"), (forged, "no pinned key leads to")):
            status, said = await post(url, chain_to_json([statement]))
            assert status == 400 and why in said
        for body in (b"", b"{}", envelope_to_json(good), b"x" * 10**6):
            assert (await post(url, body))[0] == 400
        assert origin.catalog.store.keys.ring.statements == (good,)


async def test_a_source_that_serves_rubbish_for_keys_is_dropped(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    liar = FakeSource(version, rotations=[version.envelope] * 99)
    async with asyncio.timeout(SOON), liar.serving() as bad, FakeSource(version).serving() as good:
        async with client([bad, good], tmp_path / "cache") as worker:
            assert_same(await worker.fetch(0), version)
            assert worker.source_stats[bad].bans == 1
        assert manifest_digest(version.envelope.payload) == version.digest


async def test_a_statement_that_doesnt_extend_the_chain_is_passed_over(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    odd = FakeSource(version, rotations=[sign_rotation("run", STRANGER, NEW.key_id, 3)])
    async with asyncio.timeout(SOON), odd.serving() as url, client([url], tmp_path / "cache") as worker:
        assert_same(await worker.fetch(0), version)
        assert worker.store.keys.ring.statements == ()


async def test_the_operators_command_rotates_the_key(tmp_path: Path) -> None:
    old, new = tmp_path / "old.key", tmp_path / "new.key"
    keyfile.write(old, TRAINER)
    arguments = ("rotate-key", "--old-key", str(old), "--new-key", str(new), "--origin")
    async with asyncio.timeout(2 * SOON), origin_in_process(tmp_path / "origin") as (url, origin):
        status, _, err = await run_command(*arguments, url)
        assert status == 2 and "nothing was published yet" in err and not new.exists()
        await publish(url, origin, make_version(tmp_path / "v3", 3))
        status, out, err = await run_command(*arguments, url)
        assert status == 0 and "signs no version of run run above 3" in out, err
        made = keyfile.load(new)
        await publish(url, origin, make_version(tmp_path / "v4", 4, signer=made))
        third = tmp_path / "third.key"
        status, _, err = await run_command(*arguments[:3], "--new-key", str(third), "--origin", url)
        assert status == 2 and "refuses (400): " in err and len(err.strip().splitlines()) == 1
        assert "{" not in err and not third.exists() and keyfile.load(new).key_id == made.key_id
        status, _, err = await run_command("rotate-key", "--old-key", "none", "--new-key", str(new), "--origin", url)
        assert status == 2 and "isn't there" in err
    status, _, err = await run_command(*arguments, "http://127.0.0.1:9")
    assert status == 1 and "start `shardcast origin`" in err

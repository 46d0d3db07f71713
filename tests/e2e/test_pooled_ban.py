"""A cheat that no single rollout shows, as a real process beside an honest worker: banned by what its rollouts show together.

Single rollouts are held to thresholds that 1 % noise in the weights passes; the tests over many are calibrated for the tiny
model here, on honest rollouts of the reference engine in either precision that a worker may choose for its machine.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import torch

from coordinator.calibration.collect import Asked, compare, verifier_settings
from coordinator.calibration.pooled import fit_pooled
from coordinator.calibration.report import to_toml
from coordinator.calibration.run import published_form
from coordinator.verification.thresholds import Thresholds
from protocol.rollout import SamplingParams
from tests.adversary.attacks import Attack
from tests.network import Network
from tests.thresholds import BY_HAND
from tests.tiny_model import EOS_TOKEN_ID
from tests.unit.coordinator.verification.claims import generate, make_request
from worker.engine import Generation, GenerationRequest, Weights
from worker.reference_engine import ReferenceEngine

_MAX_TOKENS = 12  # the network's
_ROLLOUTS = 72  # of each engine precision
_MOST_UNTIL_BAN = 48
_UNUSED = "state IN ('pending', 'verifying', 'accepted')"


def tiny_thresholds(model: Path, scratch: Path) -> Thresholds:
    """Wide ones for single rollouts, and bounds for the tests over many that were measured on this model."""
    folder = published_form(model, scratch / "published")
    asked = []
    for number in range(_ROLLOUTS):
        request = make_request(number, max_tokens=1 + number % _MAX_TOKENS, prompt_tokens=25)
        eos = (EOS_TOKEN_ID,) if number % 2 else ()
        asked.append(
            Asked(str(number), request.prompt_token_ids, replace(request.sampling, eos_token_ids=eos), request.seed)
        )
    measures = []
    for dtype in ("bfloat16", "float32"):
        written = asyncio.run(_write(dtype, folder, asked))
        found = compare(
            folder,
            asked,
            written,
            engine=dtype,
            verifiers=verifier_settings(torch.bfloat16),
            device="cpu",
            progress=lambda _: None,
        )
        measures += [measure for _, measure in found]
    pooled = fit_pooled(measures, false_bans=1e-3, rollouts_per_month=100_000, source="the test's own")
    return replace(BY_HAND, pooled=pooled)


async def _write(dtype: str, folder: Path, asked: list[Asked]) -> list[Generation]:
    engine = ReferenceEngine(dtype)
    await engine.start(Weights(0, "sha256:" + "0" * 64, folder))
    try:
        return [
            await generate(
                engine,
                GenerationRequest(
                    each.key,
                    each.prompt_token_ids,
                    SamplingParams(1.0, each.sampling.max_tokens, each.sampling.eos_token_ids),
                    each.seed,
                ),
            )
            for each in asked
        ]
    finally:
        await engine.close()


def test_one_percent_of_noise_is_banned_by_its_rollouts_together_and_an_honest_worker_is_not(tmp_path: Path) -> None:
    cheat = f"cheater:{Attack.NOISE_1}"
    with Network(tmp_path, versions=100) as network:
        run_file = network.config.read_text()
        for field in (("groups_per_batch = 2", "groups_per_batch = 16"), ("lease_term_s = 4.0", "lease_term_s = 30.0")):
            run_file = run_file.replace(*field)
        network.config.write_text(run_file)
        (tmp_path / "thresholds.toml").write_text(to_toml(tiny_thresholds(network.model, tmp_path)))
        network.start_servers()
        network.wait("version 0 is published", lambda: network.count("SELECT count(*) FROM policy_versions") > 0)
        network.kill("trainer")  # nothing is consumed: all that the cheat got accepted is there to be purged
        network.start("worker", "--engine", "reference")
        network.start(cheat)

        def standing(role: str, columns: str) -> tuple[object, ...]:
            (row,) = network.query(f"SELECT {columns} FROM workers WHERE worker_id = ?", network.key_id(role))
            return row

        def banned() -> bool:
            return network.count("SELECT count(*) FROM workers WHERE banned") > 0

        network.wait("the cheat is banned", banned, 300, allow_end=(cheat,))
        accepted, rejected, reason = standing(cheat, "accepted, rejected, ban_reason")
        assert isinstance(accepted, int) and 0 < accepted <= _MOST_UNTIL_BAN
        assert isinstance(rejected, int) and rejected < 3, "strikes alone would not have banned it"
        assert str(reason).startswith("pooled: "), reason
        mine = "SELECT count(*) FROM rollouts WHERE worker_id = ?"
        assert network.count(f"{mine} AND {_UNUSED}", network.key_id(cheat)) == 0
        purged = network.count(f"{mine} AND state = 'dropped' AND drop_reason = 'banned'", network.key_id(cheat))
        assert purged >= accepted, "what was accepted is purged, and what came after it"
        live = "SELECT count(*) FROM leases WHERE state = 'live' AND worker_id = ?"
        assert network.count(live, network.key_id(cheat)) == 0

        def honest_has(rollouts: int) -> bool:
            return int(str(standing("worker", "accepted")[0])) >= rollouts

        network.wait("the honest worker has done as many", lambda: honest_has(2 * accepted), 300, allow_end=(cheat,))
        assert standing("worker", "rejected, strikes, banned") == (0, 0, 0)
        honest = "SELECT count(*) FROM evidence WHERE worker_id = ? AND alarmed_at IS NOT NULL"
        assert network.count(honest, network.key_id("worker")) == 0
        network.check_invariants()

"""One process of a team that trains a tiny model; started by torchrun.

    python fsdp_member.py MODEL OUT

trains STEPS steps into OUT/team-<way>, then goes on from OUT/one-<way> for MORE steps into OUT/team-after-one-<way>, for
every way of training.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.unit.trainer.test_loop import make_group
from trainer.checkpoint import Checkpoint, load_latest, save_checkpoint
from trainer.config import TrainerConfig, TrainerRun
from trainer.crew import Crew
from trainer.team import Team

STEPS, MORE = 3, 2
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "critic": {"advantage": "critic"},
    "ewma": {"old_logprobs": "ewma", "ewma_decay": 0.8},
    "muon": {"optimizer": "muon", "weight_decay": 0.1},
    "lora": {"lora_rank": 3},
    "vcpo": {"modifiers": ({"name": "vcpo", "baseline": True},)},
}


def make_crew(model: Path, team: Team, way: str) -> Crew:
    # A small budget makes an odd number of microbatches, so that one process has one more.
    common: dict[str, Any] = {"learning_rate": 3e-4, "token_budget": 16, "threads": 1, "share_prompts": False}
    config = TrainerConfig(**common, **WAYS[way])
    return Crew(TrainerRun(model_path=model, trainer=config), 1.0, team)


def train(crew: Crew, first: int, steps: int, out: Path) -> None:
    """Steps, then a checkpoint and the last step's numbers below `out`."""
    numbers: dict[str, float] = {}
    for step in range(first, first + steps):
        numbers = crew.step([make_group(step, number) for number in range(3)], step).metrics
    save_checkpoint(out, Checkpoint(step=first + steps, policy_version=first + steps, **crew.state()))
    (out / "numbers.json").write_text(json.dumps({**numbers, "published": len(crew.weights())}))


def resume(crew: Crew, checkpoints: Path) -> int:
    """Go on from the newest checkpoint; its step."""
    found = load_latest(checkpoints)
    assert found is not None
    crew.restore(found[0])
    return found[0].step


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    team = Team.join(os.environ)
    for way in WAYS:
        crew = make_crew(model, team, way)
        if not team.leads:
            crew.follow()
            continue
        train(crew, 0, STEPS, out / f"team-{way}")
        train(crew, resume(crew, out / f"one-{way}"), MORE, out / f"team-after-one-{way}")
        crew.dismiss()
    team.leave()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))

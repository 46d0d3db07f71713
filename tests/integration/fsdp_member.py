"""One process of a team that trains a tiny model; started by torchrun.

    python fsdp_member.py MODEL OUT CHECKPOINTS

trains STEPS steps into OUT/team, then goes on from CHECKPOINTS for MORE steps into OUT/team-after-one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.unit.trainer.test_loop import make_group
from trainer.checkpoint import Checkpoint, load_latest, save_checkpoint
from trainer.config import TrainerConfig, TrainerRun
from trainer.crew import Crew
from trainer.team import Team

STEPS, MORE = 3, 2


def make_crew(model: Path, team: Team) -> Crew:
    # A small budget makes an odd number of microbatches, so that one process has one more.
    config = TrainerConfig(learning_rate=3e-4, token_budget=16, threads=1, share_prompts=False, loss="ipo")
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


def main(model: Path, out: Path, checkpoints: Path) -> None:
    torch.set_num_threads(1)
    team = Team.join(os.environ)
    crew = make_crew(model, team)
    if not team.leads:
        crew.follow()
    else:
        train(crew, 0, STEPS, out / "team")
        train(crew, resume(crew, checkpoints), MORE, out / "team-after-one")
        crew.dismiss()
    team.leave()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))

"""One process of a team that trains a tiny model; started by torchrun, or alone. Writes weights and numbers at the end.

python fsdp_member.py MODEL OUT STEPS [CHECKPOINT]
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


def main(model: Path, out: Path, steps: int, resume: Path | None) -> None:
    torch.set_num_threads(1)
    team = Team.join(os.environ)
    # A small budget makes an odd number of microbatches, so that one process has one more.
    config = TrainerConfig(learning_rate=1e-3, token_budget=16, threads=1, share_prompts=False, loss="ipo")
    crew = Crew(TrainerRun(model_path=model, trainer=config), 1.0, team)
    if not team.leads:
        crew.follow()
        team.leave()
        return
    first = 0
    if resume is not None:
        found = load_latest(resume)
        assert found is not None
        crew.restore(found[0])
        first = found[0].step
    numbers = {}
    for step in range(first, first + steps):
        groups = [make_group(step, number) for number in range(3)]
        numbers = crew.step(groups, step).metrics
    save_checkpoint(out, Checkpoint(step=first + steps, policy_version=first + steps, **crew.state()))
    published = crew.weights()
    (out / "numbers.json").write_text(json.dumps({**numbers, "published": len(published)}))
    crew.dismiss()
    team.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]) if len(sys.argv) > 4 else None)

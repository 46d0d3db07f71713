"""`trainer run | evaluate | rollback | identity`. Imports nothing heavy until a command runs."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import typer

from protocol.cli import run_app, set_up_logging


class Engine(enum.StrEnum):
    """Who writes an evaluation's completions."""

    BUILTIN = "builtin"
    VLLM = "vllm"
    REFERENCE = "reference"


app = typer.Typer(
    help="The trainer pulls verified rollouts, steps, and publishes new policy versions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would double the time of --help
)


@app.command()
def run(config: Annotated[Path, typer.Option("--config", "-c", help="The run file (TOML).")]) -> None:
    """Train until the run's budget of versions is published; resumes by itself from the newest checkpoint."""
    import asyncio

    from trainer.run import run_trainer

    set_up_logging()
    asyncio.run(run_trainer(config, os.environ))


@app.command()
def evaluate(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run file (TOML): environments, EOS ids.")],
    model: Annotated[
        Path, typer.Option("--model", help="Folder of the policy: the initial one, or a published version.")
    ],
    out: Annotated[Path, typer.Option("--out", help="JSON file for the result.")] = Path("evaluation.json"),
    tasks: Annotated[int, typer.Option(help="Held-out tasks of each environment, at most.")] = 200,
    samples: Annotated[int, typer.Option(help="Completions per task: n.")] = 4,
    k: Annotated[list[int] | None, typer.Option("--k", "-k", help="pass@k; may be given several times.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="The run file's own unless given; 0 is greedy.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    engine: Annotated[
        Engine, typer.Option(help="Who writes: the trainer's own sampling, or an engine as workers have it.")
    ] = Engine.BUILTIN,
    concurrency: Annotated[int, typer.Option(min=1, help="Completions that vLLM writes at once.")] = 32,
) -> None:
    """avg@n and pass@k on held-out tasks, with 95 % intervals. Goes on where it was interrupted."""
    import asyncio

    from trainer.evaluation import Plan, run_evaluation, temperature_of
    from worker.completions import engine_sampler

    set_up_logging()
    ks = tuple(sorted(set(k or [1, samples])))
    chosen = temperature_of(config) if temperature is None else temperature
    plan = Plan(model, tasks, samples, ks, chosen, seed, engine.value)
    sampler = None if engine is Engine.BUILTIN else engine_sampler(engine.value, concurrency)
    result = asyncio.run(run_evaluation(config, plan, out, sampler))
    for name, numbers in result["environments"].items():
        for what, value in numbers.items():
            if "@" in what:
                typer.echo(f"{name} {what} {value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]")


@app.command()
def rollback(
    version: Annotated[int, typer.Argument(min=0, help="The newest version that stays.")],
    config: Annotated[Path, typer.Option("--config", "-c", help="The run file (TOML).")],
) -> None:
    """Withdraw every version after VERSION and go back to the newest checkpoint up to it. Stop `trainer run` first."""
    import asyncio

    from trainer.rollback import run_rollback

    set_up_logging()
    typer.echo(asyncio.run(run_rollback(config, version)))


@app.command()
def identity(key: Annotated[Path, typer.Option("--key", help="The trainer's key file.")] = Path("trainer.key")) -> None:
    """Print the key id that signs policy versions (run.trainer_key in the run file); made if there is none."""
    from protocol import keyfile

    loaded, made = keyfile.load_or_create(key)
    typer.echo(f"{loaded.key_id}\n{'made' if made else 'kept'} in {key}: who has this file can publish weights")


def main() -> None:
    """Console script."""
    run_app("trainer", app)


if __name__ == "__main__":
    main()

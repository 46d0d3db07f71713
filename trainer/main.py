"""`trainer run | identity`. Imports nothing heavy until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protocol.cli import run_app, set_up_logging

app = typer.Typer(
    help="The trainer pulls verified rollouts, steps, and publishes new policy versions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def run(config: Annotated[Path, typer.Option("--config", "-c", help="The run file (TOML).")]) -> None:
    """Train until the run's budget of versions is published; resumes by itself from the newest checkpoint."""
    import asyncio

    from trainer.run import run_trainer

    set_up_logging()
    asyncio.run(run_trainer(config))


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

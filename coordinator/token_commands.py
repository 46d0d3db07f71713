"""`coordinator token create | list | revoke`: who may look at the run and change it. Works on the run's database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Tokens for the dashboard and `coordinator admin`.", no_args_is_help=True)

ConfigPath = Annotated[Path, typer.Option("--config", "-c", help="The run file (TOML).")]
Name = Annotated[str, typer.Option("--name", help="Whose it is: shown in the audit log.")]


@app.command()
def create(
    config: ConfigPath,
    name: Name,
    role: Annotated[str, typer.Option("--role", help="viewer (looks), operator (acts) or admin (settings too).")],
    days: Annotated[
        float | None, typer.Option("--days", min=0.001, help="How long it is good; for ever if not given.")
    ] = None,
) -> None:
    """Make a token. It is shown once; only its hash is stored."""
    from coordinator.config import load_run_file
    from coordinator.operate import make_token
    from coordinator.operators import parse_role

    database = load_run_file(config).run.database
    typer.echo(asyncio.run(make_token(database, name, parse_role(role), days)))


@app.command("list")
def list_all(config: ConfigPath) -> None:
    """Every token that was made: whose, which role, whether it is in force."""
    from coordinator.config import load_run_file
    from coordinator.operate import list_tokens

    for line in asyncio.run(list_tokens(load_run_file(config).run.database)):
        typer.echo(line)


@app.command()
def revoke(config: ConfigPath, name: Name) -> None:
    """End a token, and the sessions that were opened with it, at once."""
    from coordinator.config import load_run_file
    from coordinator.operate import revoke_token

    asyncio.run(revoke_token(load_run_file(config).run.database, name))
    typer.echo(f"the token of {name} is revoked")

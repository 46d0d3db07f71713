"""`coordinator admin …`: the dashboard's actions from anywhere, over the API, with a token (`coordinator token create`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Act on a run from anywhere, with a token.", no_args_is_help=True)

Url = Annotated[
    str, typer.Option("--url", envvar="ROLLSWARM_URL", help="The coordinator's URL, with #sha256=… if it has one.")
]
Token = Annotated[
    Path, typer.Option("--token-file", envvar="ROLLSWARM_TOKEN_FILE", help="File that holds your token (mode 0600).")
]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="The authority of its certificate, if not pinned or public.")
]
Reason = Annotated[str, typer.Option("--reason", help="For the worker and the audit log.")]


@app.command()
def pause(url: Url, token_file: Token, ca: Authority = None) -> None:
    """Grant no more leases. What is out may still come in."""
    _act(url, token_file, ca, "pause")


@app.command()
def drain(url: Url, token_file: Token, ca: Authority = None) -> None:
    """Begin no more groups; those that are open are finished."""
    _act(url, token_file, ca, "drain")


@app.command()
def resume(url: Url, token_file: Token, ca: Authority = None) -> None:
    """Grant leases again."""
    _act(url, token_file, ca, "resume")


@app.command()
def ban(worker: str, url: Url, token_file: Token, ca: Authority = None, reason: Reason = "") -> None:
    """Take nothing more from a worker and purge its untrained rollouts."""
    _act(url, token_file, ca, "ban", worker=worker, reason=reason)


@app.command()
def pardon(worker: str, url: Url, token_file: Token, ca: Authority = None, reason: Reason = "") -> None:
    """Lift a ban and clear strikes and evidence. Credits are untouched."""
    _act(url, token_file, ca, "pardon", worker=worker, reason=reason)


@app.command()
def admit(hardware: str, url: Url, token_file: Token, ca: Authority = None) -> None:
    """Take a hardware class at its word, exactly as it is listed."""
    _act(url, token_file, ca, "admit", hardware=hardware)


@app.command()
def refuse(hardware: str, url: Url, token_file: Token, ca: Authority = None) -> None:
    """Lease nothing more to a hardware class, exactly as it is listed."""
    _act(url, token_file, ca, "refuse", hardware=hardware)


@app.command()
def invite(
    url: Url,
    token_file: Token,
    ca: Authority = None,
    uses: Annotated[int, typer.Option("--uses", min=1, help="How many new keys it lets in.")] = 1,
    days: Annotated[float, typer.Option("--days", min=0.001, help="How long it is good.")] = 7.0,
    note: Annotated[str, typer.Option("--note", help="For whom, for the audit log.")] = "",
) -> None:
    """Make an invitation. It is shown once; only its hash is stored."""
    _act(url, token_file, ca, "invite", uses=str(uses), days=str(days), note=note)


@app.command("set")
def set_knob(name: str, value: str, url: Url, token_file: Token, ca: Authority = None) -> None:
    """Change a setting while the run goes on: audit_fraction, max_staleness or worker_share."""
    _act(url, token_file, ca, "set", name=name, value=value)


def _act(url: str, token_file: Path, ca: Path | None, action: str, **arguments: str) -> None:
    from coordinator.admin_client import act, read_token

    typer.echo(asyncio.run(act(url, read_token(token_file), ca, action, arguments)))

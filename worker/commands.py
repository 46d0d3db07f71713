"""`worker doctor | config | leave | identity`: what a person asks before, beside and after `worker join`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Home = Annotated[Path | None, typer.Option("--home", help="Where identity, outbox and weights are kept.")]
Passphrase = Annotated[
    Path | None, typer.Option("--passphrase-file", help="First line of this file, instead of being asked for it.")
]
Configure = Callable[..., Any]
_LEAVE_MARGIN_S = 60.0


def add_to(app: typer.Typer, configure: Configure) -> None:
    """Add the commands. `configure`: flags to a WorkerConfig."""
    identities = typer.Typer(
        help="Show, export or import this worker's identity.", invoke_without_command=True, rich_markup_mode=None
    )
    _add_doctor(app, configure)
    _add_config(app, configure)
    _add_leave(app, configure)
    _add_identity(identities, configure)
    app.add_typer(identities, name="identity")


def _add_doctor(app: typer.Typer, configure: Configure) -> None:
    @app.command()
    def doctor(
        coordinator: Annotated[str, typer.Option("--coordinator", help="The run's URL, as `worker join` takes it.")],
        home: Home = None,
        ca: Annotated[Path | None, typer.Option("--ca", help="As `worker join` takes it.")] = None,
        json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    ) -> None:
        """Find what would keep this machine from working for a run, and say what to do. Exit status 1 if anything would."""
        import asyncio

        from worker.doctor.examine import examine
        from worker.doctor.findings import as_json, as_lines, exit_status

        findings = asyncio.run(examine(coordinator, configure(home=home), ca))
        typer.echo(as_json(findings) if json else "\n".join(as_lines(findings)))
        raise typer.Exit(exit_status(findings))


def _add_config(app: typer.Typer, configure: Configure) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(context_settings=settings)
    def config(context: typer.Context) -> None:
        """Show every setting and where it comes from. Takes the flags of `worker join`, for a look before."""
        from worker.config import config_path, origins

        flags = parse_flags(context.args)
        values = configure(**flags)
        found = origins(flags)
        width = max(map(len, found))
        for name, origin in found.items():
            shown = _shown(name, getattr(values, name))
            typer.echo(f"{name.ljust(width)}  {shown}  ({origin})")
        typer.echo(f"\nflags before environment before {config_path()} before defaults")


def _shown(name: str, value: object) -> object:
    """A setting's value as a person reads it."""
    if value is None:
        return "no limit" if name.endswith("_mbit") else "automatic"
    return "none" if value == "" else value


# Flags of `worker join` that are not called as their settings are.
_SPELT = {"--compile": "--no-enforce-eager"}


def parse_flags(arguments: list[str]) -> dict[str, str | bool]:
    """`--max-model-len 128 --peers --compile` by the names of the settings. Raises UserError for anything else."""
    from protocol.errors import UserError
    from worker.config import WorkerConfig

    fields = WorkerConfig.model_fields.items()
    switches = {name for name, field in fields if field.annotation in (bool, bool | None)}
    known = ", ".join("--" + name.replace("_", "-") for name in WorkerConfig.model_fields)
    found: dict[str, str | bool] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = _SPELT.get(argument, argument).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and not equals and name.removeprefix("no_") in switches:
            found[name.removeprefix("no_")] = name in switches
        elif not flag.startswith("--") or name not in WorkerConfig.model_fields:
            raise UserError(f"{flag} is no setting; there are {known}")
        elif not equals and not rest:
            raise UserError(f"{flag} needs a value")
        else:
            found[name] = value if equals else rest.pop(0)
    return found


def _add_leave(app: typer.Typer, configure: Configure) -> None:
    @app.command()
    def leave(home: Home = None) -> None:
        """Let the worker that runs with this home finish what is begun, hand it in, and end."""
        from worker.home import leave as leave_home

        config = configure(home=home)
        process = leave_home(config.home, config.drain_s + _LEAVE_MARGIN_S)
        waiting = sum(1 for _ in config.home.glob("runs/*/outbox/*.rollout"))
        typer.echo(f"process {process} has ended")
        if waiting:
            typer.echo(f"{waiting} rollouts wait in the outbox: the next `worker join` hands them in")


def _add_identity(app: typer.Typer, configure: Configure) -> None:
    def show_at(home: Path | None) -> None:
        from protocol import keyfile

        path = configure(home=home).identity_path
        key, made = keyfile.load_or_create(path)
        whose = "whoever has this file has this worker's credits"
        typer.echo(f"{key.key_id}\n{'made' if made else 'kept'} in {path}: {whose}")

    @app.callback()
    def identity(context: typer.Context, home: Home = None) -> None:
        """Show this worker's identity, made if there is none; or export or import one."""
        context.obj = home
        if context.invoked_subcommand is None:
            show_at(home)

    @app.command()
    def show(context: typer.Context, home: Home = None) -> None:
        """Print the key id, and where the key is kept."""
        show_at(home or context.obj)

    @app.command("export")
    def export_command(
        context: typer.Context,
        file: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")],
        home: Home = None,
        passphrase_file: Passphrase = None,
    ) -> None:
        """Write the identity to a file that only a passphrase opens: a backup of your credits."""
        from worker.identity_file import export_identity

        path = configure(home=home or context.obj).identity_path
        key_id = export_identity(path, file, _passphrase(passphrase_file, confirm=True))
        typer.echo(f"wrote {key_id} to {file}: keep it and the passphrase apart; without both it can't be opened")

    @app.command("import")
    def import_command(
        context: typer.Context,
        file: Annotated[Path, typer.Argument(help="What `worker identity export` wrote.")],
        home: Home = None,
        passphrase_file: Passphrase = None,
    ) -> None:
        """Take an exported identity into a home that has none."""
        from worker.identity_file import import_identity

        path = configure(home=home or context.obj).identity_path
        key_id = import_identity(file, path, _passphrase(passphrase_file, confirm=False))
        typer.echo(f"{key_id} is now in {path}; let only one worker use it at a time")


def _passphrase(file: Path | None, *, confirm: bool) -> str:
    from protocol.errors import UserError

    if file is None:
        return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm))
    try:
        return file.read_text().splitlines()[0]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise UserError(f"cannot read a passphrase from {file}: {error}") from error

"""`coordinator init | certificate | calibrate | serve | verify | …`. Commands import what is heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.cli import run_app, set_up_logging

if TYPE_CHECKING:
    import asyncio

    from coordinator.serve import Addresses

app = typer.Typer(
    help="The coordinator leases samples to workers, has their rollouts verified, and feeds the trainer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Option("--config", "-c", help="The run file (TOML).")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the new run.")],
    model: Annotated[Path, typer.Option("--model", help="Hugging Face folder of the policy.")],
    name: Annotated[
        str | None, typer.Option("--name", help="What the run is called; as the folder if not given.")
    ] = None,
    relay: Annotated[
        list[str] | None, typer.Option("--relay", help="URL of a relay that workers use. May be repeated.")
    ] = None,
    advertise_host: Annotated[
        list[str] | None,
        typer.Option(
            "--advertise-host",
            help="Name or address by which workers elsewhere reach this machine: makes an authority and a certificate for "
            "it. May be repeated; without it only this machine is served.",
        ),
    ] = None,
) -> None:
    """Make a run folder: a run file, the coordinator's key, the trainer's key, and certificates if others shall join."""
    from coordinator.init import init_run

    path = init_run(
        folder,
        name=name or folder.resolve().name,
        model=model,
        relays=tuple(relay or ()),
        hosts=tuple(advertise_host or ()),
    )
    typer.echo(f"wrote {path}: look at it, then `coordinator calibrate --config {path}`, once per model")


@app.command()
def calibrate(
    config: ConfigPath,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for thresholds and evidence; `calibration` beside the run file."),
    ] = None,
    rollouts: Annotated[int, typer.Option("--rollouts", min=16, help="Honest rollouts of each engine setting.")] = 256,
    false_bans: Annotated[
        float, typer.Option("--false-bans", min=1e-9, max=0.5, help="Most false bans per honest worker and month.")
    ] = 1e-3,
    rollouts_per_month: Annotated[
        float, typer.Option("--rollouts-per-month", min=1, help="What a busy worker hands in within a month.")
    ] = 100_000,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option("--kv-cache-gib", help="Of each engine; 2 on a CPU and vLLM's choice on a GPU if not given."),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also calibrate on a compiled engine.")] = False,
    device: Annotated[str, typer.Option("--device", help="Where the prefill runs.")] = "cpu",
) -> None:
    """Measure how far honest rollouts of the run's model are from our prefill, and write the run's thresholds."""
    from coordinator.calibration.run import Bound, Options, calibrate
    from coordinator.config import load_run_file

    set_up_logging()
    folder = out or config.resolve().parent / "calibration"
    fitted = calibrate(
        load_run_file(config),
        folder,
        Bound(false_bans, rollouts_per_month),
        Options(rollouts, kv_cache_gib, compiled, device),
        lambda line: typer.echo(line),
    )
    rejected = sum(fitted.exceeded.values())
    typer.echo(
        f"fitted on {fitted.calibrated_on} comparisons; {rejected} of {fitted.tried_on} others exceed a threshold"
    )
    typer.echo(f"wrote {folder / 'thresholds.toml'}: name it as thresholds_file in [verification]")


@app.command()
def certificate(
    config: ConfigPath,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", help="Host name or address that workers use. May be repeated; as before if not given."),
    ] = None,
) -> None:
    """Renew the server's certificate (or make the first one), by the run's own authority. `serve` takes it up by itself."""
    import datetime as dt

    from coordinator.config import load_run_file
    from coordinator.init import renew_certificate

    for line in renew_certificate(load_run_file(config), config, tuple(name or ()), dt.datetime.now(dt.UTC)):
        typer.echo(line)


@app.command()
def serve(config: ConfigPath) -> None:
    """Serve workers, the trainer, and the status page."""
    import asyncio

    from coordinator import trainer_token
    from coordinator.config import load_run_file
    from coordinator.serve import serve as run_server
    from protocol import keyfile

    set_up_logging()
    run_file = load_run_file(config)
    folder = config.resolve().parent
    identity, made = keyfile.load_or_create(folder / "coordinator.key")
    if made:
        typer.echo(f"made the coordinator's key {folder / 'coordinator.key'}: keep a copy, workers pin it")
    token = trainer_token.load_or_create(folder / "trainer.token")

    async def run() -> None:
        await run_server(run_file, identity=identity, trainer_token=token, stop=_stop_event(), on_ready=_print_ready)

    asyncio.run(run())


@app.command()
def verify(
    config: ConfigPath,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Where weights are kept; beside the run file if not given.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where the prefill runs.")] = "cpu",
) -> None:
    """Verify rollouts. Start as many as there are trusted accelerators; they share the work through the database."""
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.verification.process import run_verifier

    set_up_logging()
    run_file = load_run_file(config)
    folder = cache or config.resolve().parent / "verifier-cache"

    async def run() -> None:
        await run_verifier(run_file, cache=folder, device=device, stop=_stop_event())

    asyncio.run(run())


@app.command()
def ban(config: ConfigPath, worker: str, reason: Annotated[str, typer.Option("--reason")] = "by the operator") -> None:
    """Take nothing more from a worker (its key id, or the first digits of it) and purge its untrained rollouts."""
    _set_standing(config, worker, reason, banned=True)


@app.command()
def pardon(
    config: ConfigPath, worker: str, reason: Annotated[str, typer.Option("--reason")] = "by the operator"
) -> None:
    """Lift a ban and clear the strikes. Credits are untouched."""
    _set_standing(config, worker, reason, banned=False)


@app.command()
def pause(config: ConfigPath) -> None:
    """Grant no more leases. What is out may still come in."""
    _set_paused(config, True)


@app.command()
def resume(config: ConfigPath) -> None:
    """Grant leases again."""
    _set_paused(config, False)


def _set_standing(config: Path, worker: str, reason: str, *, banned: bool) -> None:
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.operate import set_standing

    worker_id = asyncio.run(set_standing(load_run_file(config).run.database, worker, reason, banned=banned))
    typer.echo(f"{worker_id} is {'banned' if banned else 'pardoned'}")


def _set_paused(config: Path, paused: bool) -> None:
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.operate import set_paused

    asyncio.run(set_paused(load_run_file(config).run.database, paused))
    typer.echo("paused: no leases are granted" if paused else "leases are granted again")


def _print_ready(addresses: Addresses) -> None:
    print(f"workers join by: worker join --coordinator {addresses.join}", flush=True)
    print(f"ready url={addresses.http} grpc={addresses.grpc} trainer={addresses.trainer}", flush=True)


def _stop_event() -> asyncio.Event:
    """Set by SIGTERM or Ctrl-C."""
    import asyncio
    import signal

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def main() -> None:
    """Console script."""
    run_app("coordinator", app)


if __name__ == "__main__":
    main()

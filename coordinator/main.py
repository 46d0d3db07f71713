"""`coordinator init | calibrate | serve | verify | ban | pardon | classes | admit | refuse | pause | resume`.

Commands import what is heavy.
"""

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
) -> None:
    """Make a run folder: a run file, the coordinator's key, the trainer's key."""
    from coordinator.init import init_run

    path = init_run(folder, name=name or folder.resolve().name, model=model, relays=tuple(relay or ()))
    typer.echo(f"wrote {path}: look at it, then `coordinator calibrate --config {path}`, once per model")


@app.command()
def calibrate(
    config: ConfigPath,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for thresholds and evidence; `calibration` beside the run file, or a class's folder there.",
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", help="The class that the engines compute in: bf16, fp8, kv-fp8, kv-int4.")
    ] = "bf16",
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
    own = "" if precision == "bf16" else precision
    folder = out or config.resolve().parent / "calibration" / own
    fitted = calibrate(
        load_run_file(config),
        folder,
        Bound(false_bans, rollouts_per_month),
        Options(rollouts, kv_cache_gib, compiled, device, precision),
        lambda line: typer.echo(line),
    )
    rejected = sum(fitted.exceeded.values())
    typer.echo(
        f"fitted on {fitted.calibrated_on} comparisons; {rejected} of {fitted.tried_on} others exceed a threshold"
    )
    field = f"{own} in [verification.classes]" if own else "thresholds_file in [verification]"
    typer.echo(f"wrote {folder / 'thresholds.toml'}: name it as {field}")


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
def classes(config: ConfigPath) -> None:
    """List the run's kinds of hardware: those in shadow, which wait for `admit` or `refuse`, come first."""
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.operate import list_hardware

    lines = asyncio.run(list_hardware(load_run_file(config).run.database))
    for line in lines:
        why = ", ".join(f"{count} for {reason}" for reason, count in (line.rejections or {}).items())
        tried = f"{line.accepted} accepted, {line.rejected} rejected in shadow{f' ({why})' if why else ''}"
        typer.echo(
            f"{line.state:9} {line.workers:4} workers  {line.name}  {'' if line.rejections is None else tried}".rstrip()
        )
    if not lines:
        typer.echo("no worker has joined yet")


@app.command()
def admit(
    config: ConfigPath, hardware: Annotated[str, typer.Argument(help="As `coordinator classes` names it.")]
) -> None:
    """Take a kind of hardware at its word: from now on its rejections count. Calibrate on it first, or look at how it does."""
    _decide(config, hardware, "admitted")


@app.command()
def refuse(
    config: ConfigPath, hardware: Annotated[str, typer.Argument(help="As `coordinator classes` names it.")]
) -> None:
    """Lease nothing more to workers on a kind of hardware."""
    _decide(config, hardware, "refused")


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


def _decide(config: Path, name: str, state: str) -> None:
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.hardware import HardwareState
    from coordinator.operate import decide_hardware

    asyncio.run(decide_hardware(load_run_file(config).run.database, name, HardwareState(state)))
    typer.echo(f"{name} is {state}")


def _set_paused(config: Path, paused: bool) -> None:
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.operate import set_paused

    asyncio.run(set_paused(load_run_file(config).run.database, paused))
    typer.echo("paused: no leases are granted" if paused else "leases are granted again")


def _print_ready(addresses: Addresses) -> None:
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

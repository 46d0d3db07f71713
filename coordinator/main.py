"""`coordinator init | certificate | calibrate | serve | verify | …`. Commands import what is heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator import admin_commands, token_commands
from protocol.cli import run_app, set_up_logging

if TYPE_CHECKING:
    import asyncio

    from coordinator.serve import Addresses

app = typer.Typer(
    help="The coordinator leases samples to workers, has their rollouts verified, and feeds the trainer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would double the time of --help
)

app.add_typer(admin_commands.app, name="admin")
app.add_typer(token_commands.app, name="token")

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
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Objective and schedule written out: ipo, intellect2, dapo or sao (recipes/)."),
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
        recipe=recipe,
    )
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
    import uvloop

    from coordinator import trainer_token
    from coordinator.config import load_run_file
    from coordinator.garbage import settle
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

    settle()
    uvloop.run(run())


@app.command()
def verify(
    config: ConfigPath,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Where weights are kept; beside the run file if not given.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where the prefill runs.")] = "cpu",
) -> None:
    """Verify rollouts. Start as many as there are trusted accelerators; they share the work through the database."""
    import uvloop

    from coordinator.config import load_run_file
    from coordinator.garbage import settle
    from coordinator.verification.process import run_verifier

    set_up_logging()
    run_file = load_run_file(config)
    folder = cache or config.resolve().parent / "verifier-cache"

    async def run() -> None:
        await run_verifier(run_file, cache=folder, device=device, stop=_stop_event())

    settle()
    uvloop.run(run())


@app.command()
def plan(
    batch: Annotated[int, typer.Option("--batch", help="Rollouts per optimizer step (groups · group size).")],
    step_s: Annotated[float, typer.Option("--step-s", help="Seconds that the trainer takes for one.")],
    tokens_per_s: Annotated[float, typer.Option("--tokens-per-s", help="What one worker generates.")],
    mean_length: Annotated[float, typer.Option("--mean-length", help="Tokens of a completion.")],
    verify_tokens_per_s: Annotated[float, typer.Option("--verify-tokens-per-s", help="What one verifier prefills.")],
    dissemination_s: Annotated[
        float, typer.Option("--dissemination-s", help="Seconds until a new version has reached the workers.")
    ] = 0.0,
    in_flight: Annotated[int, typer.Option("--in-flight", help="Samples that a worker generates at once.")] = 32,
    longest: Annotated[float, typer.Option("--longest", help="Longest completion to keep; the mean if 0.")] = 0.0,
    audit_fraction: Annotated[float, typer.Option("--audit-fraction", help="Share that is prefilled.")] = 1.0,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="As many as balance if not given.")] = None,
    verifiers: Annotated[int | None, typer.Option("--verifiers", min=1, help="Likewise.")] = None,
) -> None:
    """How many workers and verifiers a run needs, what bounds it, and the least max_staleness that drops nothing."""
    from coordinator.plan import Load, lines
    from coordinator.plan import plan as make

    load = Load(
        batch=batch,
        step_s=step_s,
        worker_rate=tokens_per_s,
        mean_length=mean_length,
        verifier_rate=verify_tokens_per_s,
        dissemination_s=dissemination_s,
        in_flight=in_flight,
        longest=longest,
        audit_fraction=audit_fraction,
    )
    for line in lines(load, make(load, workers=workers, verifiers=verifiers)):
        typer.echo(line)


@app.command()
def export(
    config: ConfigPath,
    out: Annotated[Path, typer.Option("--out", help="The Parquet file.")],
    rejected: Annotated[bool, typer.Option("--rejected", help="Rejected ones too, with their reasons.")] = False,
) -> None:
    """Write verified rollouts to a Parquet file: prompts, tokens, log-probs, rewards, versions."""
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.export import export as write

    outcomes = ("accepted", "rejected") if rejected else ("accepted",)
    count = asyncio.run(write(load_run_file(config).run.database, out, outcomes=outcomes))
    typer.echo(f"{count} rollouts in {out}")


@app.command()
def ledger(
    config: ConfigPath,
    out: Annotated[Path, typer.Option("--out", help="The file: a JSON object per line and entry.")],
) -> None:
    """Write the whole ledger, and a statement per worker that the coordinator's key signs, as JSON lines."""
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.export_ledger import export_ledger
    from protocol import keyfile

    identity = keyfile.load(config.resolve().parent / "coordinator.key")
    count = asyncio.run(export_ledger(load_run_file(config).run.database, out, identity))
    typer.echo(f"{count} entries in {out}")


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
def invite(
    config: ConfigPath,
    uses: Annotated[int, typer.Option("--uses", min=1, help="How many new keys it lets in.")] = 1,
    days: Annotated[float, typer.Option("--days", min=0.001, help="How long it is good.")] = 7.0,
    note: Annotated[str, typer.Option("--note", help="For whom, for the audit log.")] = "",
) -> None:
    """Make an invitation, for a run whose [join] door is "invite". It is shown once; only its hash is stored."""
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.operate import invite as make

    token = asyncio.run(make(load_run_file(config).run.database, uses=uses, days=days, note=note))
    typer.echo(f"worker join --invite {token} --coordinator URL")


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
    _perform(config, "admit", hardware=hardware)


@app.command()
def refuse(
    config: ConfigPath, hardware: Annotated[str, typer.Argument(help="As `coordinator classes` names it.")]
) -> None:
    """Lease nothing more to workers on a kind of hardware."""
    _perform(config, "refuse", hardware=hardware)


@app.command()
def pause(config: ConfigPath) -> None:
    """Grant no more leases. What is out may still come in."""
    _perform(config, "pause")


@app.command()
def drain(config: ConfigPath) -> None:
    """Begin no more groups; those that are open are finished."""
    _perform(config, "drain")


@app.command()
def resume(config: ConfigPath) -> None:
    """Grant leases again."""
    _perform(config, "resume")


@app.command("set")
def set_knob(config: ConfigPath, name: str, value: str) -> None:
    """Change a setting while the run goes on: audit_fraction, max_staleness or worker_share."""
    _perform(config, "set", name=name, value=value)


def _set_standing(config: Path, worker: str, reason: str, *, banned: bool) -> None:
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.operate import set_standing

    worker_id = asyncio.run(set_standing(load_run_file(config).run.database, worker, reason, banned=banned))
    typer.echo(f"{worker_id} is {'banned' if banned else 'pardoned'}")


def _perform(config: Path, action: str, **arguments: str) -> None:
    import asyncio

    from coordinator.config import load_run_file
    from coordinator.operate import perform

    typer.echo(asyncio.run(perform(load_run_file(config).run.database, action, arguments)))


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

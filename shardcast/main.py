"""`shardcast origin | relay | fetch | status`. Imports nothing heavy until a command runs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.cli import run_app, set_up_logging

app = typer.Typer(
    help="SHARDCAST carries new weights to every worker: an origin serves, relays pass on, clients fetch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would double the time of --help
)

DataDir = Annotated[Path, typer.Option("--data-dir", help="Where versions are kept.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
TrainerKey = Annotated[
    list[str], typer.Option("--trainer-key", help="Pinned key id of the trainer, ed25519:<hex>. May be repeated.")
]
HelpPeers = Annotated[
    bool,
    typer.Option(
        "--peers/--no-peers",
        help="Help clients that opted in (fetch --peers, worker join --peers) to find and feed one another.",
    ),
]
Keep = Annotated[int, typer.Option("--keep", min=1, help="How many of the newest versions are kept.")]


@app.command()
def origin(
    data_dir: DataDir,
    trainer_key: TrainerKey,
    host: Host = "127.0.0.1",
    port: Port = 8600,
    keep: Keep = 8,
    coordinator: Annotated[
        str | None,
        typer.Option("--coordinator", help="Its URL: versions that it still needs are kept, whatever --keep says."),
    ] = None,
    peers: HelpPeers = True,
) -> None:
    """Serve the versions that the trainer announces. Runs beside the trainer, on the same disk."""
    from shardcast import serve

    _run(lambda: serve.serve_origin(data_dir, trainer_key, host, port, keep, coordinator, peers))


@app.command()
def relay(
    origin: Annotated[list[str], typer.Option("--origin", help="URL of an origin or another relay. May be repeated.")],
    trainer_key: TrainerKey,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer", help="URL of a sibling: relays that fill from one another spare the origin. Repeatable."
        ),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option("--coordinator", help="Its URL: siblings are learnt from it, and which versions are needed."),
    ] = None,
    data_dir: DataDir = Path("shardcast-relay"),
    host: Host = "0.0.0.0",
    port: Port = 8601,
    keep: Keep = 3,
    max_bandwidth_mbit: Annotated[
        float | None, typer.Option("--max-bandwidth-mbit", min=0.1, help="Most megabits per second sent to clients.")
    ] = None,
    monthly_quota_gib: Annotated[
        float | None,
        typer.Option(
            "--monthly-quota-gib", min=0.01, help="Most sent in a calendar month (UTC); then clients ask others."
        ),
    ] = None,
    peers: HelpPeers = True,
    max_disk_gib: Annotated[
        float | None, typer.Option("--max-disk-gib", min=0.01, help="Most room for versions; older ones make way.")
    ] = None,
    max_connections: Annotated[int, typer.Option("--max-connections", min=1, help="Connections at once.")] = 1024,
    max_connections_per_address: Annotated[
        int, typer.Option("--max-connections-per-address", min=1, help="And from one address (IPv6: one /64).")
    ] = 256,
) -> None:
    """Pass versions on. A relay can be slow or absent; it can't corrupt anything."""
    from shardcast import serve

    options = serve.RelayOptions(
        origins=origin,
        peers=[each for each in peer or () if each],  # deploy/relay gives an empty one
        trainer_keys=trainer_key,
        data_dir=data_dir,
        host=host,
        port=port,
        keep=keep,
        coordinator=coordinator,
        max_bandwidth_mbit=max_bandwidth_mbit,
        max_disk_gib=max_disk_gib,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
        help_peers=peers,
        monthly_quota_gib=monthly_quota_gib,
    )
    _run(lambda: serve.serve_relay(options))


@app.command()
def fetch(
    source: Annotated[list[str], typer.Option("--source", help="URL of a relay or an origin. May be repeated.")],
    trainer_key: TrainerKey,
    out: Annotated[Path, typer.Option("--out", help="Folder that holds the versions; one is resumed if begun.")],
    version: Annotated[int | None, typer.Option("--version", min=0, help="Which one; the newest if not given.")] = None,
    digest: Annotated[str | None, typer.Option("--digest", help="Refuse it unless its manifest has this one.")] = None,
    max_bandwidth_mbit: Annotated[
        float | None, typer.Option("--max-bandwidth-mbit", min=0.1, help="Most megabits per second received, and sent.")
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers/--no-peers",
            help="Swap pieces with other clients that do the same, while fetching. They see your address, you theirs.",
        ),
    ] = False,
    peer_port: Annotated[
        int,
        typer.Option(
            "--peer-port", min=0, max=65535, help="Where peers reach you; 0: only call others. Busy: the next."
        ),
    ] = 8611,
    deadline: Annotated[
        float, typer.Option("--deadline", min=1, help="Give up when no byte came for so many seconds.")
    ] = 120.0,
) -> None:
    """Fetch a version, verify it, and print the folder that holds it."""
    from shardcast import fetch_command

    _run(
        lambda: fetch_command.run(
            source,
            trainer_key,
            out,
            version,
            digest,
            max_mbit=max_bandwidth_mbit,
            deadline_s=deadline,
            peer_port=peer_port if peers else None,
        )
    )


@app.command("rotate-key")
def rotate_key(
    old_key: Annotated[Path, typer.Option("--old-key", help="Key file that signs the run's versions now.")],
    new_key: Annotated[Path, typer.Option("--new-key", help="Key file that signs them from now on; made if absent.")],
    origin: Annotated[str, typer.Option("--origin", help="URL of the run's origin.")] = "http://127.0.0.1:8600",
    after_version: Annotated[
        int | None,
        typer.Option("--after-version", min=0, help="Last version that the old key signs; the newest if not given."),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="The run; that of the newest version otherwise.")
    ] = None,
) -> None:
    """Let another key sign the run's versions. Relays, workers and verifiers follow by themselves."""
    from shardcast import rotate_command

    _run(lambda: rotate_command.run(origin, old_key, new_key, after_version, run_id))


@app.command()
def status(url: Annotated[str, typer.Argument(help="URL of an origin or a relay.")]) -> None:
    """Show what a server has, and how it stands with its sources."""
    from shardcast import fetch_command

    _run(lambda: fetch_command.show_status(url))


def _run(start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    import asyncio

    set_up_logging()
    asyncio.run(start())


def main() -> None:
    """Console script."""
    run_app("shardcast", app)


if __name__ == "__main__":
    main()

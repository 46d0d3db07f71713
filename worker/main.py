"""`worker join | status | identity | doctor | config | leave`. Imports nothing heavy until a command runs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.cli import run_app, set_up_logging
from worker import commands

app = typer.Typer(
    help="A worker generates rollouts with its own GPU (or CPU) for a run, proves them, and earns credits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would double the time of --help
)

Home = Annotated[Path | None, typer.Option("--home", help="Where identity, outbox and weights are kept.")]
CoordinatorUrl = Annotated[
    str,
    typer.Option("--coordinator", help="The coordinator's URL as its operator gave it, with #sha256=… if it has one."),
]
Authority = Annotated[
    Path | None,
    typer.Option("--ca", help="The authority of the coordinator's certificate, if neither public nor pinned."),
]


class EngineName(enum.StrEnum):
    """`reference` is slow, single-sequence, and meant for tests."""

    VLLM = "vllm"
    REFERENCE = "reference"


@app.command()
def join(
    coordinator: CoordinatorUrl,
    home: Home = None,
    ca: Authority = None,
    name: Annotated[str | None, typer.Option("--name", help="Shown on the dashboard.")] = None,
    invite: Annotated[
        str | None, typer.Option("--invite", help="The operator's invitation, where a run asks for one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="auto, bfloat16 or float32.")] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="bf16, or a class that the run admits beside it: fp8, kv-fp8, kv-int4."),
    ] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Samples generated at once.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Prompt plus completion, in tokens.")
    ] = None,
    kv_cache_gib: Annotated[float | None, typer.Option("--kv-cache-gib", help="Memory for the KV cache.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option("--gpu-memory-utilization", help="Share of GPU memory.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", help="GPUs that share each layer, for models too large for one.")
    ] = None,
    enforce_eager: Annotated[
        bool | None,
        typer.Option("--enforce-eager/--compile", help="Whether to do without compiling the model; on a CPU, yes."),
    ] = None,
    max_download_mbit: Annotated[
        float | None, typer.Option("--max-download-mbit", help="Cap on weights traffic.")
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option("--drain-s", help="Seconds to finish what is begun when stopped.")
    ] = None,
    peers: Annotated[
        bool | None,
        typer.Option(
            "--peers/--no-peers",
            help="Swap weights with other workers that do the same (off by default): they see your address, you theirs.",
        ),
    ] = None,
    peer_port: Annotated[
        int | None,
        typer.Option("--peer-port", help="Where peers reach you (8611); 0: only call others. No port need be open."),
    ] = None,
    max_upload_mbit: Annotated[float | None, typer.Option("--max-upload-mbit", help="Cap on what peers get.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the status as JSON lines.")] = False,
    engine: Annotated[EngineName, typer.Option("--engine", hidden=True)] = EngineName.VLLM,
) -> None:
    """Join a run and work until stopped."""
    import asyncio

    from worker import home as home_lock
    from worker import join as joining
    from worker.within_memory import within_memory

    set_up_logging()
    config = _config(
        home=home,
        name=name,
        invite=invite,
        dtype=dtype,
        precision=precision,
        concurrency=concurrency,
        max_model_len=max_model_len,
        kv_cache_gib=kv_cache_gib,
        gpu_memory_utilization=gpu_memory_utilization,
        tensor_parallel=tensor_parallel,
        enforce_eager=enforce_eager,
        max_download_mbit=max_download_mbit,
        drain_s=drain_s,
        peers=peers,
        peer_port=peer_port,
        max_upload_mbit=max_upload_mbit,
    )
    factory = joining.vllm_engine if engine is EngineName.VLLM else joining.reference_engine
    with home_lock.held(config.home):
        asyncio.run(
            within_memory(
                lambda fitting: joining.join(coordinator, fitting, factory, as_json=json, ca=ca),
                config,
                lambda text: typer.echo(text, err=True),
            )
        )


@app.command()
def status(coordinator: CoordinatorUrl, home: Home = None, ca: Authority = None) -> None:
    """Show this worker's credits, strikes, and the latest verdicts with their reasons."""
    import asyncio

    from worker.status_command import show_status

    asyncio.run(show_status(coordinator, _config(home=home), ca))


def _config(**flags: Any) -> Any:
    """The worker's configuration; flags that were not given leave environment and defaults in force."""
    from pydantic import ValidationError

    from protocol.errors import UserError, explain_validation
    from worker.config import WorkerConfig, check_environment

    check_environment()
    try:
        return WorkerConfig(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        raise UserError(explain_validation(error.errors(), "worker settings")) from None


commands.add_to(app, _config)


def main() -> None:
    """Console script."""
    run_app("worker", app)


if __name__ == "__main__":
    main()

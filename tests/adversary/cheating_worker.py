"""`python -m tests.adversary.cheating_worker --attack KIND …`: `worker join` with an engine that cheats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protocol.cli import run_app, set_up_logging
from protocol.errors import UserError
from tests.adversary.attacks import Attack, CheatingEngine, make_cheat

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def join(
    attack: Annotated[Attack, typer.Option("--attack")],
    coordinator: Annotated[str, typer.Option("--coordinator")],
    home: Annotated[Path, typer.Option("--home")],
    name: Annotated[str, typer.Option("--name")] = "cheater",
    concurrency: Annotated[int, typer.Option("--concurrency")] = 8,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len")] = None,
    kv_cache_gib: Annotated[float | None, typer.Option("--kv-cache-gib")] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager")] = False,
    engine: Annotated[str, typer.Option("--engine")] = "vllm",
) -> None:
    """Join a run as a cheat."""
    import asyncio

    from protocol.terms import RunTerms
    from worker import join as joining
    from worker.config import WorkerConfig
    from worker.engine import Engine
    from worker.reference_engine import ReferenceEngine

    set_up_logging()
    config = WorkerConfig(
        home=home,
        name=name,
        concurrency=concurrency,
        max_model_len=max_model_len,
        kv_cache_gib=kv_cache_gib,
        enforce_eager=enforce_eager,
    )
    cheat = make_cheat(attack)
    if cheat.choose is not None and engine == "vllm":
        raise UserError(f"{attack} chooses tokens itself, which vLLM's own process does: use --engine reference")

    def make(config: WorkerConfig, terms: RunTerms) -> Engine:
        return CheatingEngine(inner(config, terms), cheat)

    def inner(config: WorkerConfig, terms: RunTerms) -> Engine:
        if cheat.choose is not None:
            return ReferenceEngine(choose=cheat.choose)
        return (joining.vllm_engine if engine == "vllm" else joining.reference_engine)(config, terms)

    asyncio.run(joining.join(coordinator, config, make, as_json=False))


if __name__ == "__main__":
    run_app("cheating-worker", app)

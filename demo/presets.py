"""The demo's two presets: a real pretrained model, and a tiny one for quick looks and CI."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from protocol.signing import Identity

# Written by `coordinator calibrate` for the two models; evidence-<name>.json beside them says from what.
THRESHOLDS = Path(__file__).resolve().parent / "thresholds"
# Padded tokens in a microbatch: what a trainer holds of a forward pass grows with them.
_TOKEN_BUDGET = 1024


@dataclass(frozen=True, slots=True)
class Preset:
    """What differs between the presets. Lengths in tokens, `versions` to publish after version 0.

    `gain_floor`: the demo promises that the whole confidence interval of the held-out gain lies above it.
    """

    name: str
    model_name: str
    versions: int
    learning_rate: float
    groups_per_batch: int
    group_size: int
    max_staleness: int
    counting_weight: float
    counting_tokens: int
    arithmetic_tokens: int
    template: str
    checkpoint_every: int
    concurrency: int
    kv_cache_gib: float
    max_model_len: int
    trainer_threads: int
    worker_threads: int
    verifier_threads: int
    time_limit_s: float
    gain_floor: float


PRESETS = {
    "smollm2": Preset(
        name="smollm2",
        model_name="SmolLM2-135M-Instruct",
        versions=10,
        learning_rate=3e-5,
        groups_per_batch=6,
        group_size=16,
        max_staleness=1,
        counting_weight=0.04,
        counting_tokens=56,
        arithmetic_tokens=6,
        template="What is {a} + {b}?\n{a} + {b} =",
        checkpoint_every=7,
        concurrency=24,
        kv_cache_gib=0.5,
        max_model_len=160,
        trainer_threads=1,
        worker_threads=1,
        verifier_threads=1,
        time_limit_s=1500.0,
        gain_floor=0.2,
    ),
    "tiny": Preset(
        name="tiny",
        model_name="tiny-llama",
        versions=16,
        learning_rate=1e-4,
        groups_per_batch=16,
        group_size=16,
        max_staleness=2,
        counting_weight=0.06,
        counting_tokens=56,
        arithmetic_tokens=8,
        template="Question: What is {a} + {b}?\nAnswer:",
        checkpoint_every=4,
        concurrency=8,
        kv_cache_gib=0.25,
        max_model_len=160,
        trainer_threads=1,
        worker_threads=1,
        verifier_threads=1,
        time_limit_s=900.0,
        gain_floor=0.05,
    ),
}


@dataclass(frozen=True, slots=True)
class Ports:
    """Free ports on loopback for one run."""

    grpc: int
    http: int
    trainer: int
    origin: int
    relay: int

    @classmethod
    def free(cls) -> Ports:
        """Ask the system for ports that nobody uses now."""
        sockets = [socket.socket() for _ in range(5)]
        try:
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return cls(*(each.getsockname()[1] for each in sockets))
        finally:
            for each in sockets:
                each.close()


def run_file(preset: Preset, ports: Ports, *, model: Path, eos: list[int], trainer: Identity) -> str:
    """The run file of the demo, as an operator would write it."""
    return f"""\
# Written by `make demo`; a run file like any other.
[run]
name = "demo"
trainer_key = {json.dumps(trainer.key_id)}

[model]
name = {json.dumps(preset.model_name)}
path = {json.dumps(str(model))}

[sampling]
temperature = 1.0
eos_token_ids = {json.dumps(eos)}

[scheduling]
groups_per_batch = {preset.groups_per_batch}
group_size = {preset.group_size}
min_group = {preset.group_size // 2}
max_staleness = {preset.max_staleness}
lease_term_s = 30.0
group_deadline_s = 300.0
newcomer_share = 0.5
probation_rollouts = 32

[[environments]]
name = "arithmetic"
weight = {1.0 - preset.counting_weight}
max_tokens = {preset.arithmetic_tokens}
params = {{ template = {json.dumps(preset.template)} }}

[[environments]]
name = "counting"
weight = {preset.counting_weight}
max_tokens = {preset.counting_tokens}

[verification]
max_strikes = 3
thresholds_file = {json.dumps(str(THRESHOLDS / preset.name / "thresholds.toml"))}
resident_versions = 3
claim_rollouts = 96
threads = {preset.verifier_threads}

[server]
grpc_port = {ports.grpc}
http_port = {ports.http}
trainer_port = {ports.trainer}

[shardcast]
relays = ["http://127.0.0.1:{ports.relay}"]

[trainer]
coordinator = "127.0.0.1:{ports.trainer}"
origin = "http://127.0.0.1:{ports.origin}"
origin_data = "origin"
versions = {preset.versions}
learning_rate = {preset.learning_rate}
checkpoint_every = {preset.checkpoint_every}
threads = {preset.trainer_threads}
token_budget = {_TOKEN_BUDGET}
"""

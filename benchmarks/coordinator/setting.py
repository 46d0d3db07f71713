"""A run without a model: the folder, the run file, and the keys, all made from nothing."""

from __future__ import annotations

import json
import shutil
import string
from dataclasses import dataclass
from pathlib import Path

from demo.presets import THRESHOLDS, Ports
from protocol.signing import Identity

# SmolLM2-135M's shape: 258 bytes of proof for 32 tokens.
VOCABULARY, HIDDEN_SIZE, EOS = 49_152, 576, 2
TRAINER = Identity.from_seed(b"benchmarks.coordinator's trainer".ljust(32, b"\0"))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the load. `capacity` in batches of groups × samples; it must hold every worker's leases."""

    workers: int = 1000
    leases: int = 8
    tokens: int = 200
    groups_per_batch: int = 64
    group_size: int = 16
    max_staleness: int = 15


def worker_identity(number: int) -> Identity:
    """Always the same key for the same number."""
    return Identity.from_seed(b"worker" + number.to_bytes(26, "big"))


def write_model(folder: Path) -> None:
    """What the coordinator reads of a model: its shape, and a tokenizer of one token per character."""
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "hidden_size": HIDDEN_SIZE}))
    symbols = ["<unknown>", *string.printable]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unknown>")).save(str(folder / "tokenizer.json"))


def write_run(folder: Path, name: str, database: str, shape: Shape, ports: Ports) -> Path:
    """A run file in `folder`, beside its model. Replicas of a run have the same folder and database, and other ports."""
    write_model(folder / "model")
    shutil.copy(THRESHOLDS / "smollm2" / "thresholds.toml", folder)
    path = folder / f"{name}.toml"
    path.write_text(f"""\
[run]
name = "benchmark"
trainer_key = "{TRAINER.key_id}"
database = "{database}"
[model]
name = "none"
path = "model"
[sampling]
temperature = 1.0
eos_token_ids = [{EOS}]
[scheduling]
groups_per_batch = {shape.groups_per_batch}
group_size = {shape.group_size}
max_staleness = {shape.max_staleness}
lease_term_s = 300.0
group_deadline_s = 900.0
newcomer_share = 1.0
[[environments]]
name = "arithmetic"
max_tokens = {shape.tokens}
[verification]
thresholds_file = "thresholds.toml"
claim_rollouts = 256
[server]
grpc_port = {ports.grpc}
http_port = {ports.http}
trainer_port = {ports.trainer}
[shardcast]
relays = ["http://127.0.0.1:1"]
""")
    return path

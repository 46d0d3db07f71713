"""The schema. `coordinator/migrations` creates it; a test compares the two.

States of the three things that move:
    sample   waiting → leased → submitted → accepted → (its group is served)      back to waiting on expiry or rejection
    rollout  pending → verifying → accepted → served → trained | rejected | dropped
    group    open → ready → served → done | dropped
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)
# SQLite counts rows by itself only in a column that is declared INTEGER.
_RowId = BigInteger().with_variant(Integer, "sqlite")


def _when(condition: str) -> Any:
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


runs = Table(
    "runs",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("secret", LargeBinary, nullable=False),  # 32 bytes: seeds, audit draws and tokens derive from it
    Column("trainer_key", String(80), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("paused", Boolean, nullable=False, default=False),
)

workers = Table(
    "workers",
    metadata,
    Column("worker_id", String(80), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("hardware", String(128), nullable=False),
    Column("software", String(64), nullable=False),
    Column("address", String(64), nullable=False),
    Column("registered_at", Float, nullable=False),
    Column("last_seen_at", Float, nullable=False),
    # Folded from the ledger in the transaction that adds the entries; a test folds again and compares.
    Column("credits", BigInteger, nullable=False, default=0),
    Column("strikes", Integer, nullable=False, default=0),
    Column("accepted", BigInteger, nullable=False, default=0),
    Column("rejected", BigInteger, nullable=False, default=0),
    Column("banned", Boolean, nullable=False, default=False),
    Column("ban_reason", Text, nullable=False, default=""),
    Column("clean_tokens", BigInteger, nullable=False, default=0, server_default=text("0")),  # since the last strike
    # Tests over many rollouts hold something against it: it is audited in full.
    Column("watched", Boolean, nullable=False, default=False, server_default=false()),
    # What it declared last: see protocol.declaration.
    Column("precision", String(16), nullable=False, default="bf16", server_default="bf16"),
    Column("hardware_class", String(128), nullable=False, default="undeclared", server_default="undeclared"),
)

# Kinds of hardware that the run file does not admit: in shadow until the operator's decision ("admitted", "refused").
hardware = Table(
    "hardware",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("seen_at", Float, nullable=False),
    Column("decision", String(16)),
    Column("decided_at", Float),
    Column("accepted", BigInteger, nullable=False, default=0),  # verdicts on rollouts in shadow
    Column("rejected", BigInteger, nullable=False, default=0),
)

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("manifest_digest", String(80), nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("key_id", String(80), nullable=False),
    Column("signature", LargeBinary, nullable=False),
    Column("announced_at", Float, nullable=False),
    Column("withdrawn", Boolean, nullable=False, default=False),
    UniqueConstraint("manifest_digest"),
)

batches = Table(
    "batches",
    metadata,
    Column("batch", BigInteger, primary_key=True, autoincrement=False),
    Column("trainer_version", BigInteger, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("acknowledged_at", Float),
)

groups = Table(
    "groups",
    metadata,
    Column("group_id", String(64), primary_key=True),
    Column("ordinal", BigInteger, nullable=False),  # order of dispatch
    Column("environment", String(64), nullable=False),
    Column("task_index", BigInteger, nullable=False),
    Column("prompt", Text, nullable=False),
    Column("prompt_token_ids", LargeBinary, nullable=False),  # little-endian uint32
    Column("reference", JSON, nullable=False),  # the answer; never leaves our side
    Column("max_tokens", Integer, nullable=False),
    Column("n_samples", Integer, nullable=False),
    Column("state", String(16), nullable=False, default="open"),
    Column("created_at", Float, nullable=False),
    Column("deadline", Float, nullable=False),
    Column("batch", BigInteger, ForeignKey("batches.batch")),
    Column("compared", Boolean, nullable=False, default=False, server_default=false()),  # its workers, with one another
    UniqueConstraint("ordinal"),
    Index("ix_groups_state", "state", "ordinal"),
    Index("ix_groups_batch", "batch"),
)

samples = Table(
    "samples",
    metadata,
    Column("sample_id", String(80), primary_key=True),
    Column("group_id", String(64), ForeignKey("groups.group_id"), nullable=False),
    Column("ordinal", BigInteger, nullable=False),  # order in which samples are leased
    Column("seed", BigInteger, nullable=False),  # 63 bits; drawn once, never again
    Column("state", String(16), nullable=False, default="waiting"),
    Column("attempts", Integer, nullable=False, default=0),
    Index("ix_samples_state", "state", "ordinal"),
    Index("ix_samples_group", "group_id"),
)

leases = Table(
    "leases",
    metadata,
    Column("lease_id", String(64), primary_key=True),
    Column("sample_id", String(80), ForeignKey("samples.sample_id"), nullable=False),
    Column("worker_id", String(80), ForeignKey("workers.worker_id"), nullable=False),
    Column("min_version", BigInteger, nullable=False),
    Column("acquired_at", Float, nullable=False),
    Column("deadline", Float, nullable=False),
    Column("state", String(16), nullable=False, default="live"),
    Column("committed_length", Integer, nullable=False, default=0),
    Column("committed_digest", LargeBinary, nullable=False, default=b""),
    Column("committed_version", BigInteger, nullable=False, default=0),
    Column("committed_signature", LargeBinary),  # None: by a version of this program that asked for none
    # [length, digest, signature], the latter two in hex; oldest first
    Column("earlier_commitments", JSON, nullable=False, default=list),
    # As its worker had declared when it took the lease: no later declaration changes how the rollout is judged.
    Column("hardware", String(128), nullable=False, default="undeclared", server_default="undeclared"),
    Column("shadow", Boolean, nullable=False, default=False, server_default=false()),
    # One live lease per sample, kept by the database itself.
    Index("uq_leases_live_sample", "sample_id", unique=True, **_when("state = 'live'")),
    Index("ix_leases_state", "state", "deadline"),
    Index("ix_leases_worker", "worker_id", "state"),
    Index("ix_leases_sample", "sample_id"),
    Index("ix_leases_shadow", "hardware", **_when("shadow")),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("rollout_id", String(80), primary_key=True),  # digest of the submitted bytes
    Column("sample_id", String(80), ForeignKey("samples.sample_id"), nullable=False),
    Column("group_id", String(64), ForeignKey("groups.group_id"), nullable=False),
    Column("lease_id", String(64), ForeignKey("leases.lease_id"), nullable=False),
    Column("worker_id", String(80), ForeignKey("workers.worker_id"), nullable=False),
    Column("received_at", Float, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("oldest_version", BigInteger, nullable=False),
    Column("newest_version", BigInteger, nullable=False),
    Column("spans", Integer, nullable=False),
    Column("state", String(16), nullable=False, default="pending"),
    Column("drop_reason", String(32)),
    Column("verifier", String(64)),
    Column("claim_deadline", Float),
    Column("attempts", Integer, nullable=False, default=0),
    Column("precision", String(16), nullable=False, default="bf16", server_default="bf16"),
    UniqueConstraint("lease_id"),
    # One rollout per sample that is under way or used: rejected and dropped ones make room for another attempt.
    Index("uq_rollouts_live_sample", "sample_id", unique=True, **_when("state NOT IN ('rejected', 'dropped')")),
    Index("ix_rollouts_state", "state", "received_at"),
    Index("ix_rollouts_group", "group_id", "state"),
    Index("ix_rollouts_worker", "worker_id", "state"),
    Index("ix_rollouts_worker_received", "worker_id", "received_at"),
    Index("ix_rollouts_received", "received_at"),
)

payloads = Table(
    "payloads",
    metadata,
    Column("rollout_id", String(80), ForeignKey("rollouts.rollout_id"), primary_key=True),
    Column("payload", LargeBinary, nullable=False),  # zstd of the bytes as they came
    Column("key_id", String(80), nullable=False),
    Column("signature", LargeBinary, nullable=False),
)

# Submissions that broke a signed commitment, as they came: with that signature, proof against their key.
offences = Table(
    "offences",
    metadata,
    Column("rollout_id", String(80), primary_key=True),
    Column("lease_id", String(64), ForeignKey("leases.lease_id"), nullable=False),
    Column("worker_id", String(80), ForeignKey("workers.worker_id"), nullable=False),
    Column("detail", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),  # zstd of the bytes as they came
    Column("signature", LargeBinary, nullable=False),
    Column("at", Float, nullable=False),
    Index("ix_offences_worker", "worker_id"),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("rollout_id", String(80), ForeignKey("rollouts.rollout_id"), primary_key=True),
    Column("outcome", String(16), nullable=False),
    Column("reason", String(16)),
    Column("detail", Text, nullable=False),
    Column("reward", Float),
    Column("audited", Boolean, nullable=False),
    Column("old_logprobs", LargeBinary, nullable=False),
    Column("entropies", LargeBinary, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("admitted", JSON),  # the bounds of those metrics that have one
    Column("observations", JSON),  # what tests over many rollouts took from it
    Column("verifier", String(64), nullable=False),
    Column("verified_at", Float, nullable=False),
    Index("ix_verdicts_verified", "verified_at"),
    Index("ix_verdicts_reason", "reason", **_when("reason IS NOT NULL")),
)

consumptions = Table(
    "consumptions",
    metadata,
    # The primary key is the promise: a rollout is trained on at most once, and only with a verdict.
    Column("rollout_id", String(80), ForeignKey("verdicts.rollout_id"), primary_key=True),
    Column("batch", BigInteger, ForeignKey("batches.batch"), nullable=False),
    Column("staleness", Integer, nullable=False),
    Column("trained", Boolean, nullable=False, default=False),
    Index("ix_consumptions_batch", "batch"),
)

ledger = Table(
    "ledger",
    metadata,
    Column("entry_id", _RowId, primary_key=True, autoincrement=True),
    Column("worker_id", String(80), ForeignKey("workers.worker_id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("rollout_id", String(80)),
    Column("note", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("uq_ledger_rollout_kind", "rollout_id", "kind", unique=True, **_when("rollout_id IS NOT NULL")),
    Index("ix_ledger_worker", "worker_id"),
)

# What tests over many rollouts hold against a worker: see coordinator.verification.pooling.
evidence = Table(
    "evidence",
    metadata,
    Column("worker_id", String(80), ForeignKey("workers.worker_id"), primary_key=True),
    Column("test", String(32), primary_key=True),
    Column("bets", JSON, nullable=False),  # log(1 + M) per stake
    Column("log_e", Float, nullable=False),  # of all stakes together
    Column("rollouts", BigInteger, nullable=False),  # observations: rollouts, or groups
    Column("tokens", BigInteger, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("alarmed_at", Float),
)

drops = Table(
    "drops",
    metadata,
    Column("drop_id", _RowId, primary_key=True, autoincrement=True),
    Column("rollout_id", String(80)),
    Column("reason", String(32), nullable=False),
    Column("tokens", Integer, nullable=False),  # dropping late stragglers biases against long answers: keep the length
    Column("count", Integer, nullable=False, default=1),
    Column("dropped_at", Float, nullable=False),
    Index("ix_drops_reason", "reason"),
    Index("ix_drops_counting", "drop_id", **_when("rollout_id IS NULL")),
)

# How far upkeep has come: see coordinator.store.marks.
marks = Table(
    "marks",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("at", Float, nullable=False),
)

# What lies before a mark, counted: see coordinator.store.tallies.
tallies = Table(
    "tallies",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("key", String(80), primary_key=True),
    Column("amount", BigInteger, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("batch", BigInteger, primary_key=True, autoincrement=False),
    Column("trainer_version", BigInteger, nullable=False),
    Column("optimizer_steps", BigInteger, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("dropped", JSON, nullable=False),
    Column("reported_at", Float, nullable=False),
)

invites = Table(
    "invites",
    metadata,
    Column("token_hash", String(64), primary_key=True),
    Column("note", String(120), nullable=False),
    Column("uses_left", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    CheckConstraint("uses_left >= 0", name="ck_invites_uses_left"),
)

# Who may look at the run and change it. Tokens are stored as hashes.
operators = Table(
    "operators",
    metadata,
    Column("token_hash", String(64), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked", Boolean, nullable=False, default=False),
    UniqueConstraint("name"),
)

# What was changed while the run goes on; the run file's value holds for what is not here.
knobs = Table(
    "knobs",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Float, nullable=False),
    Column("changed_at", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("event_id", _RowId, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("actor", String(80), nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", String(120), nullable=False),
    Column("detail", Text, nullable=False),
    Index("ix_events_action", "action", "event_id"),
)

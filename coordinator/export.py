"""`coordinator export`: verified rollouts as Parquet (zstd), written page by page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Row

from coordinator.export_file import exporting
from coordinator.store import verified
from coordinator.store.database import Database
from coordinator.store.groups import unpack_tokens
from coordinator.store.rollouts import unpack_payload
from protocol.wire import floats_from_bytes, rollout_from_payload

_PAGE = 512
SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("sample_id", pa.string()),
        ("group_id", pa.string()),
        ("worker_id", pa.string()),
        ("environment", pa.string()),
        ("task_index", pa.int64()),
        ("prompt", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("segment_authors", pa.list_(pa.string())),
        ("segment_lengths", pa.list_(pa.int32())),
        ("behaviour_logprobs", pa.list_(pa.float32())),
        ("old_logprobs", pa.list_(pa.float32())),
        ("span_versions", pa.list_(pa.int64())),
        ("span_ends", pa.list_(pa.int32())),
        ("stop_reason", pa.string()),
        ("reward", pa.float64()),
        ("outcome", pa.string()),
        ("reason", pa.string()),
        ("audited", pa.bool_()),
        ("state", pa.string()),
        ("received_at", pa.float64()),
        ("verified_at", pa.float64()),
    ]
)


async def export(url: str, out: Path, *, outcomes: tuple[str, ...] = ("accepted",)) -> int:
    """Write the rollouts with these outcomes to `out`; how many there were. Raises UserError if it can't be written."""
    count = 0
    async with exporting(url, out) as (db, scratch):
        with pq.ParquetWriter(scratch, SCHEMA, compression="zstd") as writer:
            after = (-1.0, "")
            while rows := await _page(db, after, outcomes):
                await asyncio.to_thread(writer.write_table, _table(rows))
                after = (rows[-1].received_at, rows[-1].rollout_id)
                count += len(rows)
    return count


async def _page(db: Database, after: tuple[float, str], outcomes: tuple[str, ...]) -> Sequence[Row]:
    async with db.read() as connection:
        return await verified.page(connection, after=after, limit=_PAGE, outcomes=outcomes)


def _table(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist([_record(row) for row in rows], schema=SCHEMA)


def _record(row: Row) -> dict[str, Any]:
    rollout = rollout_from_payload(unpack_payload(row.payload))
    own = {name: getattr(row, name) for name in SCHEMA.names if name in row._fields}
    return own | {
        "prompt_token_ids": unpack_tokens(row.prompt_token_ids),
        "token_ids": rollout.token_ids,
        "loss_mask": rollout.loss_mask,
        "segment_authors": [segment.author.name.lower() for segment in rollout.segments],
        "segment_lengths": [len(segment.token_ids) for segment in rollout.segments],
        "behaviour_logprobs": rollout.logprobs,
        "old_logprobs": floats_from_bytes(row.old_logprobs),
        "span_versions": [span.version for span in rollout.spans],
        "span_ends": [span.end for span in rollout.spans],
        "stop_reason": rollout.stop_reason.value,
    }

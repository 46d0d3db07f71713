"""what is over is counted once, and gone through once by retention; leases are found by their sample"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def _when(condition: str) -> Any:
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def upgrade() -> None:
    # Rejected after their group was closed, they waited for ever, before all others.
    op.execute(
        "UPDATE samples SET state = 'dropped' WHERE state = 'waiting' AND group_id IN"
        " (SELECT group_id FROM groups WHERE state NOT IN ('open', 'ready'))"
    )
    op.create_table(
        "marks",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_marks")),
    )
    op.create_table(
        "tallies",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("key", sa.String(length=80), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "key", name=op.f("pk_tallies")),
    )
    op.create_index("ix_verdicts_reason", "verdicts", ["reason"], **_when("reason IS NOT NULL"))
    op.create_index("ix_leases_sample", "leases", ["sample_id"])
    op.create_index("ix_drops_counting", "drops", ["drop_id"], **_when("rollout_id IS NULL"))


def downgrade() -> None:
    op.drop_index("ix_drops_counting", table_name="drops")
    op.drop_index("ix_leases_sample", table_name="leases")
    op.drop_index("ix_verdicts_reason", table_name="verdicts")
    op.drop_table("tallies")
    op.drop_table("marks")

"""evidence over many rollouts, and what it is drawn from"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "evidence",
        sa.Column("worker_id", sa.String(length=80), nullable=False),
        sa.Column("test", sa.String(length=32), nullable=False),
        sa.Column("bets", sa.JSON(), nullable=False),
        sa.Column("log_e", sa.Float(), nullable=False),
        sa.Column("rollouts", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("alarmed_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.worker_id"], name=op.f("fk_evidence_worker_id")),
        sa.PrimaryKeyConstraint("worker_id", "test", name=op.f("pk_evidence")),
    )
    # Plain ADD COLUMN: no table that others refer to is made anew.
    op.add_column("workers", sa.Column("clean_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column("workers", sa.Column("watched", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("groups", sa.Column("compared", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("verdicts", sa.Column("admitted", sa.JSON(), nullable=True))
    op.add_column("verdicts", sa.Column("observations", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("verdicts", "observations")
    op.drop_column("verdicts", "admitted")
    op.drop_column("groups", "compared")
    op.drop_column("workers", "watched")
    op.drop_column("workers", "clean_tokens")
    op.drop_table("evidence")

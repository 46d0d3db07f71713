"""signatures under renewals, and the submissions that broke them"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "offences",
        sa.Column("rollout_id", sa.String(length=80), nullable=False),
        sa.Column("lease_id", sa.String(length=64), nullable=False),
        sa.Column("worker_id", sa.String(length=80), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("signature", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.lease_id"], name=op.f("fk_offences_lease_id")),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.worker_id"], name=op.f("fk_offences_worker_id")),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_offences")),
    )
    op.create_index("ix_offences_worker", "offences", ["worker_id"])
    op.add_column("leases", sa.Column("committed_signature", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("leases", "committed_signature")
    op.drop_table("offences")

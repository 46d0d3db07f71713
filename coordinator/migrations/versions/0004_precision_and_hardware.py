"""precision classes, and hardware that is tried in shadow"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "hardware",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("decision", sa.String(length=16), nullable=True),
        sa.Column("decided_at", sa.Float(), nullable=True),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.Column("rejected", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_hardware")),
    )
    # Plain ADD COLUMN: no table that others refer to is made anew.
    op.add_column("workers", sa.Column("precision", sa.String(length=16), server_default="bf16", nullable=False))
    op.add_column(
        "workers", sa.Column("hardware_class", sa.String(length=128), server_default="undeclared", nullable=False)
    )
    op.add_column("leases", sa.Column("hardware", sa.String(length=128), server_default="undeclared", nullable=False))
    op.add_column("leases", sa.Column("shadow", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_index(
        "ix_leases_shadow",
        "leases",
        ["hardware"],
        sqlite_where=sa.text("shadow"),
        postgresql_where=sa.text("shadow"),
    )
    op.add_column("rollouts", sa.Column("precision", sa.String(length=16), server_default="bf16", nullable=False))


def downgrade() -> None:
    op.drop_column("rollouts", "precision")
    op.drop_index("ix_leases_shadow", table_name="leases")
    op.drop_column("leases", "shadow")
    op.drop_column("leases", "hardware")
    op.drop_column("workers", "hardware_class")
    op.drop_column("workers", "precision")
    op.drop_table("hardware")

"""when the newest rollout came and the newest verdict was written, without looking at all of them"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_rollouts_received", "rollouts", ["received_at"])
    op.create_index("ix_verdicts_verified", "verdicts", ["verified_at"])


def downgrade() -> None:
    op.drop_index("ix_verdicts_verified", table_name="verdicts")
    op.drop_index("ix_rollouts_received", table_name="rollouts")

"""PostgreSQL keeps what is large of a short rollout in its row, and compresses nothing that is compressed or random already"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# Two rows fill a page. Beyond that, PostgreSQL moves a value out in pieces, each a row of another table with an index.
_INLINE_BYTES = 4080
_LARGE = {"payloads": ("payload",), "verdicts": ("old_logprobs", "entropies")}


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, columns in _LARGE.items():
        op.execute(f"ALTER TABLE {table} SET (toast_tuple_target = {_INLINE_BYTES})")
        for column in columns:
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")


def downgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, columns in _LARGE.items():
        op.execute(f"ALTER TABLE {table} RESET (toast_tuple_target)")
        for column in columns:
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTENDED")

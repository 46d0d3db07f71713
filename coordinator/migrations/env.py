"""Alembic's entry: migrates on the connection, and inside the transaction, that `coordinator.migrate` hands in."""

from alembic import context

from coordinator.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the caller's transaction holds it all
)
context.run_migrations()

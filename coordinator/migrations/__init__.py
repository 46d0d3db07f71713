"""Alembic's migrations, run by `coordinator.migrate`."""

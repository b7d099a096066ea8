"""Runs migrations on the connection that db.session hands over, or on DATABASE_URL from the shell."""

from __future__ import annotations

import os

from alembic import context
from alembic.operations import Operations
from sqlalchemy import Connection, inspect

from openrecycle.db.models import Base


def run(connection: Connection) -> None:
    # render_as_batch: SQLite can't alter a column in place.
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()
        _add_columns(connection)


def _add_columns(connection: Connection) -> None:
    """Until the first release: those that the models have got since the tables were made, where they have a default."""
    operations, tables = Operations(context.get_context()), inspect(connection)
    for table in Base.metadata.sorted_tables:
        known = {column["name"] for column in tables.get_columns(table.name)}
        for column in table.columns:
            if column.name not in known:
                operations.add_column(table.name, column)


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    from openrecycle.db.session import Database

    with Database(os.environ["DATABASE_URL"]).engine.begin() as own:
        run(own)

"""Runs migrations on the connection that db.session hands over, or on DATABASE_URL from the shell."""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from openrecycle.db.models import Base


def run(connection: Connection) -> None:
    # render_as_batch: SQLite can't alter a column in place.
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    from openrecycle.db.session import Database

    with Database(os.environ["DATABASE_URL"]).engine.begin() as own:
        run(own)

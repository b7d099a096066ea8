"""Runs migrations on the connection that db.session hands over, or on DATABASE_URL from the shell."""

from __future__ import annotations

import os

from alembic import context
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from openrecycle.db.models import Base

# What databases of before the first release say that they are at.
BEFORE = "release_2"


def adopt(connection: Connection) -> None:
    """A database of before the first release lacks a name and two columns."""
    if MigrationContext.configure(connection).get_current_revision() == BEFORE:
        connection.execute(text("alter table job rename column patience to choice_timeout"))
        for column in ("lead_term bigint", "lead_node integer"):
            connection.execute(text(f"alter table job add column {column} default 0 not null"))
        connection.execute(text("update alembic_version set version_num = 'first_release'"))


def run(connection: Connection) -> None:
    adopt(connection)
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

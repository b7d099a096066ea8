"""Runs migrations on the connection that db.session hands over, or on DATABASE_URL from the shell."""

from __future__ import annotations

import os

from alembic import context
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from openrecycle.db.models import Base

# What databases of before the first release say that they are at, and what they lack beside what all of them do.
BEFORE = {
    "release_1": (
        "generation add column partition text default '[]' not null",
        "generation add column moved_at bigint",
    ),
    "release_2": (),
}


def adopt(connection: Connection) -> None:
    """Makes the first release's of a database of before it."""
    lacks = BEFORE.get(MigrationContext.configure(connection).get_current_revision() or "")
    if lacks is not None:
        leads = (f"job add column {column} default 0 not null" for column in ("lead_term bigint", "lead_node integer"))
        for change in ("job rename column patience to choice_timeout", *leads, *lacks):
            connection.execute(text(f"alter table {change}"))
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

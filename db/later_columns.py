"""Until the first release: columns that a table has got since it was made, and what was stored elsewhere before. With
the first migration after that release this file goes.
"""

from __future__ import annotations

import json
import re

from sqlalchemy import Connection, Table, bindparam, inspect, or_, select, text, update

from openrecycle.db.models import Base, GenerationRow
from openrecycle.planner.jobs.words import STAND_BY

FIRST = "first_release"
"""The only migration as long as this is done."""
LOCK_SECONDS = 2.0
"""How long a table is waited for. Whoever wants to read it meanwhile waits behind."""

_ASKED = re.compile(r".* asked (W[0-9]+_[0-9]+) to leave", re.DOTALL)
_STANDS_BY = f" is to {STAND_BY}", f" are to {STAND_BY}"


def add_columns(connection: Connection) -> None:
    """Those of the models that have a default, to tables that are there. On PostgreSQL what holds a table longer than
    LOCK_SECONDS makes it fail."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    operations, tables = Operations(MigrationContext.configure(connection)), inspect(connection)
    there = set(tables.get_table_names())
    for table in Base.metadata.sorted_tables:
        if table.name not in there:
            continue
        known = {column["name"] for column in tables.get_columns(table.name)}
        for column in table.columns:
            if column.name in known:
                continue
            if connection.dialect.name != "sqlite":
                connection.execute(text(f"set local lock_timeout = {round(1000 * LOCK_SECONDS)}"))
            operations.add_column(table.name, column)
            if column is GenerationRow.__table__.c.let_go:
                _fill_let_go(connection)


def let_go_of(reason: str, failed: str) -> str:
    """What a generation of before says in its reason alone, as agent.coordination.generations words it: who was asked
    to go, by a person, and who stands by. failed, and what is returned: as GenerationRow has it."""
    asked, by = set[str](), set[str]()
    for words in reason.split("; "):
        if found := _ASKED.fullmatch(words):
            asked.add(found[1])
        elif words.endswith(_STANDS_BY):
            by.update(re.findall(r"W[0-9]+_[0-9]+", words))
    return json.dumps([(name, name not in asked) for name in json.loads(failed) if name in asked | by])


def _fill_let_go(connection: Connection) -> None:
    table = GenerationRow.__table__
    assert isinstance(table, Table)
    key = table.c.job_id == bindparam("_job"), table.c.generation == bindparam("_number")
    columns = table.c.job_id, table.c.generation, table.c.reason, table.c.failed
    told = or_(table.c.reason.contains("to leave"), table.c.reason.contains(f"to {STAND_BY}"))
    filled = [
        {"_job": row.job_id, "_number": row.generation, "_let_go": let_go}
        for row in connection.execute(select(*columns).where(told))
        if (let_go := let_go_of(row.reason, row.failed)) != "[]"
    ]
    if filled:
        connection.execute(update(table).where(*key).values(let_go=bindparam("_let_go")), filled)

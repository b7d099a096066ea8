"""Rows of workers, thousands at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Table, bindparam, update
from sqlalchemy.orm import Session

from openrecycle.db.models import WorkerRow


def update_workers(session: Session, job_id: str, workers: Iterable[Mapping[str, Any]]) -> None:
    """Updates many rows per statement.

    Whoever else does so takes the same rows, in the same order: one of two transactions that take them in different
    ones is ended by PostgreSQL. So all rows are taken by the first statement, sorted; it sets what all have, and those
    after it what only some have.
    """
    rows = sorted(workers, key=lambda row: str(row["name"]))
    if not rows:
        return
    common = set(rows[0]).intersection(*rows[1:]) - {"name"}
    if common:
        _update_columns(session, job_id, tuple(sorted(common)), rows)
    others: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if more := row.keys() - common - {"name"}:
            others.setdefault(tuple(sorted(more)), []).append(row)
    for columns, some in others.items():
        _update_columns(session, job_id, columns, some)


def _update_columns(session: Session, job_id: str, columns: tuple[str, ...], rows: Sequence[Mapping[str, Any]]) -> None:
    table = WorkerRow.__table__
    assert isinstance(table, Table)
    statement = (
        update(table)
        .where(table.c.job_id == bindparam("_job"), table.c.name == bindparam("_name"))
        .values({c: bindparam(f"_{c}_") for c in columns})
    )
    values = [{"_job": job_id, "_name": row["name"], **{f"_{c}_": row[c] for c in columns}} for row in rows]
    session.connection().execute(statement, values)

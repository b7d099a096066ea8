"""Until the first release: adds columns that the models have got since a table was created, fills some of them from the
sentences in older rows, and lets columns be empty that may be by now. This file is to be deleted with the first
migration after that release.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    TableClause,
    Text,
    bindparam,
    column,
    inspect,
    or_,
    select,
    table,
    text,
    true,
    tuple_,
    update,
)

from openrecycle.db.models import Base, GenerationRow, WorkerRow
from openrecycle.planner.jobs.words import STAND_BY

Row = dict[str, Any]
_Begin = Callable[[], AbstractContextManager[Connection]]

FIRST = "first_release"
"""The only migration, as long as this file is used."""
LOCK_SECONDS = 2.0
"""How long to wait for a table. Others that want to read it meanwhile wait behind this."""
BATCH = 500
"""How many old rows one transaction fills."""

# For these columns, old rows have the content only in sentences. Such a column has the suffix until it is filled: if a
# process ends half way, the next one finds it by the suffix.
_TOLD = {"job.unheard", "worker.let_go", "generation.let_go", "generation.lost"}
_UNFILLED = "_unfilled"

# The wording of agent.coordination: in reasons of generations, in details of workers, and in the reason of a halted
# job.
_WORKER, _LONGEST_ACTOR = re.compile(r"\bW[0-9]{1,6}_[0-9]{1,6}\b"), 80
_ASKED = re.compile(r".* asked (W[0-9]+_[0-9]+) to leave", re.DOTALL)
_STANDS_BY = f" is to {STAND_BY}", f" are to {STAND_BY}"
_ASKED_BY, _STANDS_BY_FOR = "asked to leave by ", "stands by for "
_UNHEARD = "halted: no worker has been heard for "
_DRAINED = '"drained"'


def compared(connection: Connection) -> tuple[list[Column[Any]], bool]:
    """Return the columns of the models that are missing, not filled yet, or not yet allowed to be empty, in tables that
    exist; and whether there is a column that only a newer program knows."""
    tables, missing, unknown = inspect(connection), list[Column[Any]](), False
    there = set(tables.get_table_names())
    for ours in Base.metadata.sorted_tables:
        if ours.name in there:
            found = tables.get_columns(ours.name)
            known = {one["name"].removesuffix(_UNFILLED): one["name"] for one in found}
            never_empty = {one["name"] for one in found if not one["nullable"]}
            missing += [
                *(one for one in ours.columns if known.get(one.name) != one.name),
                *(one for one in ours.columns if one.nullable and one.name in never_empty),
            ]
            unknown |= not known.keys() <= set(ours.columns.keys())
    return missing, unknown


def add(connection: Connection, missing: Iterable[Column[Any]]) -> None:
    """Add columns, or let them be empty. Fails on PostgreSQL if something holds a table for longer than
    LOCK_SECONDS."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    operations, tables = Operations(MigrationContext.configure(connection)), inspect(connection)
    _wait_at_most(connection)
    for new in missing:
        known = {one["name"] for one in tables.get_columns(new.table.name)}
        if new.name in known:
            with operations.batch_alter_table(new.table.name, copy_from=new.table) as table_:
                table_.alter_column(new.name, nullable=True)
        elif new.name + _UNFILLED not in known:
            operations.add_column(new.table.name, new)
            if str(new) in _TOLD:
                _rename(connection, new, new.name, new.name + _UNFILLED)


def fill(begin: _Begin, missing: Iterable[Column[Any]]) -> None:
    """Fill the new columns of old rows. begin: starts a transaction; each one is short."""
    unfilled = {str(column) for column in missing} & _TOLD
    if "job.unheard" in unfilled:
        job = _table("job", "state", "reason", "unheard_unfilled")
        silent = job.c.state == "halted", job.c.reason.startswith(_UNHEARD)
        with begin() as connection:
            connection.execute(update(job).where(*silent).values(unheard_unfilled=true()))
    if "worker.let_go" in unfilled:
        _fill_workers(begin)
    if names := unfilled & {"generation.let_go", "generation.lost"}:
        _fill_generations(begin, names)


def named(connection: Connection, missing: Iterable[Column[Any]]) -> None:
    """Remove the suffix of columns that have been filled. Fails as `add` does."""
    _wait_at_most(connection)
    for new in missing:
        if str(new) in _TOLD:
            _rename(connection, new, new.name + _UNFILLED, new.name)


def _wait_at_most(connection: Connection) -> None:
    if connection.dialect.name != "sqlite":
        connection.execute(text(f"set local lock_timeout = {round(1000 * LOCK_SECONDS)}"))


def _rename(connection: Connection, new: Column[Any], before: str, after: str) -> None:
    connection.execute(text(f"alter table {new.table.name} rename column {before} to {after}"))


# -- what old rows say in sentences ---------------------------------------------------------------


def worker_of_before(row: Row) -> Row:
    """Read from a worker's details whether it was let go, and which of its processes stand by. row: a WorkerRow with
    `detail` and `processes`. Returns the columns `let_go` and `processes`."""
    processes = json.loads(row["processes"])
    for process in processes:
        if process.get("ended") == "drained" and process.get("detail", "").startswith(_STANDS_BY_FOR):
            process["stands_by"] = True
    return {"let_go": json.dumps(_release(row["detail"])), "processes": json.dumps(processes)}


def _release(detail: str) -> tuple[str, bool, list[str]] | None:
    if detail.startswith(_ASKED_BY):
        return detail.removeprefix(_ASKED_BY)[:_LONGEST_ACTOR], False, []
    if detail.startswith(_STANDS_BY_FOR):
        return "", True, _WORKER.findall(detail.rpartition(" (")[0])
    return None


class GenerationsOfBefore:
    """Reads the old generations of one job. processes: of all its workers, as in WorkerRow; they tell which worker was
    drained where the reason of a generation does not name all."""

    def __init__(self, processes: Iterable[Row]) -> None:
        self._before: Row | None = None
        self._held: dict[str, list[tuple[float, Row]]] = {}
        for process in processes:
            for role, since in process["held"]:
                self._held.setdefault(role, []).append((since, process))

    def read(self, row: Row) -> Row:
        """Returns the columns `let_go` and `lost` of a generation, from its other columns. Must be called for one
        generation after the other, beginning with the first."""
        before, self._before = self._before, row
        failed, out = json.loads(row["failed"]), set(json.loads(before["failed"]) if before else ())
        let_go = {**_let_go(row["reason"]), **dict(json.loads(row.get("let_go") or "[]"))}
        let_go |= self._drained([name for name in failed if name not in out] if before else [], row["opened_at"])
        known = [(name, let_go[name]) for name in failed if name in let_go]
        lost = _lost(before, row, [name for name, _ in known]) if before else []
        return {"let_go": json.dumps(known), "lost": json.dumps(lost)}

    def _drained(self, roles: Sequence[str], opened_at: float) -> dict[str, bool]:
        found = dict[str, bool]()
        for role in roles:
            held = [(since, process) for since, process in self._held.get(role, ()) if since <= opened_at]
            process = max(held, key=lambda pair: pair[0])[1] if held else {}
            if process.get("ended") == "drained" and process["held"][-1][0] == role:
                found[role] = process.get("detail", "").startswith(_STANDS_BY_FOR)
        return found


def _let_go(reason: str) -> dict[str, bool]:
    """Return the workers that a reason says were let go; True: the worker stands by, False: it was asked to leave."""
    found = dict[str, bool]()
    for words in reason.split("; "):
        if asked := _ASKED.fullmatch(words):
            found[asked[1]] = False
        elif words.endswith(_STANDS_BY):
            found = dict.fromkeys(_WORKER.findall(words), True) | found
    return found


def _lost(before: Row, row: Row, let_go: Iterable[str]) -> list[str]:
    """Return the workers of the generation before that are out now, or join anew. Left out are those that were let go,
    and those whose process took another place. A worker that joined before and has no state yet has not died, nor has a
    worker of a stage whose state is lost as a whole (such a reason begins with the stage)."""
    reason = row["reason"]
    stayed = {*json.loads(before["failed"]), *(source for source, _ in json.loads(row["moves"])), *let_go}
    joins = {n for n in json.loads(row["joining"]) if not reason.startswith(f"stage {n.partition('_')[2]}: ")}
    # A worker that joined before, and is named in the reason, joins with a new process.
    same = {name for name in json.loads(before["joining"]) if not re.search(rf"\b{name}\b", reason)}
    return sorted(({*json.loads(row["failed"])} | (joins - same)) - stayed)


# -- filling the columns --------------------------------------------------------------------------


def _fill_workers(begin: _Begin) -> None:
    row, after = WorkerRow, ("", "")
    told = or_(
        row.detail.startswith(_ASKED_BY), row.detail.startswith(_STANDS_BY_FOR), row.processes.contains(_DRAINED)
    )
    query = select(row.job_id, row.name, row.detail, row.processes).where(told).order_by(row.job_id, row.name)
    columns = {"let_go": "let_go_unfilled", "processes": "processes"}
    while True:
        with begin() as connection:
            newer = query.where(tuple_(row.job_id, row.name) > tuple_(*after)).limit(BATCH)
            found = [dict(one) for one in connection.execute(newer).mappings()]
            if not found:
                return
            _fill(connection, "worker", "name", columns, [one | worker_of_before(one) for one in found])
        after = found[-1]["job_id"], found[-1]["name"]


def _fill_generations(begin: _Begin, unfilled: Set[str]) -> None:
    """unfilled: the columns that need filling; one of the two may have been added before the other."""
    columns = {name: name + _UNFILLED * (f"generation.{name}" in unfilled) for name in ("let_go", "lost")}
    row, drained = GenerationRow, select(WorkerRow.job_id).where(WorkerRow.processes.contains(_DRAINED))
    query = select(
        *(row.job_id, row.generation, row.reason, row.failed, row.joining, row.moves, row.opened_at),
        column(columns["let_go"], Text()).label("let_go"),
    ).order_by(row.generation)
    with begin() as connection:
        with_drained = set(connection.scalars(drained.distinct()))
        jobs = list(connection.scalars(select(row.job_id).distinct().order_by(row.job_id)))
    for job_id in jobs:
        past, after = GenerationsOfBefore(()), 0
        while True:
            with begin() as connection:
                if not after and job_id in with_drained:
                    texts = connection.scalars(select(WorkerRow.processes).where(WorkerRow.job_id == job_id))
                    past = GenerationsOfBefore(process for text in texts for process in json.loads(text))
                newer = query.where(row.job_id == job_id, row.generation > after).limit(BATCH)
                found = [dict(one) for one in connection.execute(newer).mappings()]
                if not found:
                    break
                read = [one | past.read(one) for one in found]
                told = [one for one in read if (one["let_go"], one["lost"]) != ("[]", "[]")]
                _fill(connection, "generation", "generation", columns, told)
            after = found[-1]["generation"]


def _fill(connection: Connection, name: str, key: str, columns: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Update rows. columns: the present column names, by their names in `rows`."""
    if rows:
        filled = _table(name, "job_id", key, *columns.values())
        same = filled.c.job_id == bindparam("_job_id"), filled.c[key] == bindparam(f"_{key}")
        values: dict[str, Any] = {now: bindparam(f"_{known}") for known, now in columns.items()}
        given = [{f"_{known}": row[known] for known in ("job_id", key, *columns)} for row in rows]
        connection.execute(update(filled).where(*same).values(values), given)


def _table(name: str, *columns: str) -> TableClause:
    """Return a table with the columns that it has at present."""
    return table(name, *map(column, columns))

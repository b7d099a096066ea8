"""Until the first release: columns that a table has got since it was made, and what was stored before in sentences
alone. With the first migration after that release this file goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Table, bindparam, inspect, or_, select, text, true, update

from openrecycle.db.models import Base, GenerationRow, JobRow, WorkerRow
from openrecycle.planner.jobs.words import STAND_BY

Row = dict[str, Any]

FIRST = "first_release"
"""The only migration as long as this is done."""
LOCK_SECONDS = 2.0
"""How long a table is waited for. Whoever wants to read it meanwhile waits behind."""

# As agent.coordination worded it: in reasons of generations, in details of workers, and of a job that is halted.
_ASKED = re.compile(r".* asked (W[0-9]+_[0-9]+) to leave", re.DOTALL)
_STANDS_BY = f" is to {STAND_BY}", f" are to {STAND_BY}"
_ASKED_BY, _STANDS_BY_FOR = "asked to leave by ", "stands by for "
_UNHEARD = "halted: no worker has been heard for "
_DRAINED = '"drained"'


def add_columns(connection: Connection) -> None:
    """Those of the models that have a default, to tables that are there. On PostgreSQL what holds a table longer than
    LOCK_SECONDS makes it fail."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    operations, tables = Operations(MigrationContext.configure(connection)), inspect(connection)
    there, came = set(tables.get_table_names()), set[str]()
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
            came.add(f"{table.name}.{column.name}")
    if "job.unheard" in came:
        silent = JobRow.state == "halted", JobRow.reason.startswith(_UNHEARD)
        connection.execute(update(JobRow).where(*silent).values(unheard=true()))
    if "worker.let_go" in came:
        _fill_workers(connection)
    if came & {"generation.let_go", "generation.lost"}:
        _fill_generations(connection)


# -- what rows of before say in sentences ---------------------------------------------------------


def worker_of_before(row: Row) -> Row:
    """What its details alone say: whether the worker was let go, and which of its processes stand by; as WorkerRow has
    it, of which there are `detail` and `processes`."""
    processes = json.loads(row["processes"])
    for process in processes:
        if process.get("ended") == "drained" and process.get("detail", "").startswith(_STANDS_BY_FOR):
            process["stands_by"] = True
    return {"let_go": json.dumps(_release(row["detail"])), "processes": json.dumps(processes)}


def _release(detail: str) -> tuple[str, bool, list[str]] | None:
    if detail.startswith(_ASKED_BY):
        return detail.removeprefix(_ASKED_BY), False, []
    if detail.startswith(_STANDS_BY_FOR):
        return "", True, detail.removeprefix(_STANDS_BY_FOR).rpartition(" (")[0].split(", ")
    return None


class GenerationsOfBefore:
    """Of one job. processes: of all its workers, as WorkerRow has them: who was drained, where the reason of a
    generation does not name all."""

    def __init__(self, processes: Iterable[Row]) -> None:
        self._before: Row | None = None
        self._held: dict[str, list[tuple[float, Row]]] = {}
        for process in processes:
            for role, since in process["held"]:
                self._held.setdefault(role, []).append((since, process))

    def read(self, row: Row) -> Row:
        """Who was let go, and who was lost; as GenerationRow has it and the others of its columns. To be called for one
        after the other, the first one first."""
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
    """By name, whether it stands by or a person has asked it to leave."""
    found = dict[str, bool]()
    for words in reason.split("; "):
        if asked := _ASKED.fullmatch(words):
            found[asked[1]] = False
        elif words.endswith(_STANDS_BY):
            found = dict.fromkeys(re.findall(r"W[0-9]+_[0-9]+", words), True) | found
    return found


def _lost(before: Row, row: Row, let_go: Iterable[str]) -> list[str]:
    """Who was in the generation before, and is out, or joins anew; but for those that were let go, and for whose
    process took another's place. Nor has anybody died who joined before and has no state yet, nor, where the state of a
    whole stage is gone, one of those that have held it (StateLost begins with the stage)."""
    reason = row["reason"]
    stayed = {*json.loads(before["failed"]), *(source for source, _ in json.loads(row["moves"])), *let_go}
    joins = {n for n in json.loads(row["joining"]) if not reason.startswith(f"stage {n.partition('_')[2]}: ")}
    # One that joined before, and is named, joins with a new process.
    same = {name for name in json.loads(before["joining"]) if not re.search(rf"\b{name}\b", reason)}
    return sorted(({*json.loads(row["failed"])} | (joins - same)) - stayed)


# -- into the columns -----------------------------------------------------------------------------


def _fill_workers(connection: Connection) -> None:
    row = WorkerRow
    told = or_(
        row.detail.startswith(_ASKED_BY), row.detail.startswith(_STANDS_BY_FOR), row.processes.contains(_DRAINED)
    )
    found = connection.execute(select(row.job_id, row.name, row.detail, row.processes).where(told)).mappings()
    _fill(connection, WorkerRow, "name", [dict(one) | worker_of_before(dict(one)) for one in found])


def _fill_generations(connection: Connection) -> None:
    row, drained = GenerationRow, select(WorkerRow.job_id).where(WorkerRow.processes.contains(_DRAINED))
    with_drained = set(connection.scalars(drained.distinct()))
    columns = row.generation, row.reason, row.failed, row.joining, row.moves, row.let_go, row.opened_at
    for job_id in list(connection.scalars(select(row.job_id).distinct())):
        of_job = select(WorkerRow.processes).where(WorkerRow.job_id == job_id)
        texts = connection.scalars(of_job) if job_id in with_drained else ()
        past = GenerationsOfBefore(process for text in texts for process in json.loads(text))
        rows = connection.execute(select(*columns).where(row.job_id == job_id).order_by(row.generation)).mappings()
        read = [{"job_id": job_id, "generation": one["generation"]} | past.read(dict(one)) for one in rows]
        _fill(connection, row, "generation", [one for one in read if (one["let_go"], one["lost"]) != ("[]", "[]")])


def _fill(connection: Connection, model: type[Base], key: str, rows: Sequence[dict[str, Any]]) -> None:
    table = model.__table__
    assert isinstance(table, Table)
    if rows:
        same = table.c.job_id == bindparam("_job_id"), table.c[key] == bindparam(f"_{key}")
        values: dict[str, Any] = {name: bindparam(f"_{name}") for name in rows[0] if name not in ("job_id", key)}
        given = [{f"_{name}": value for name, value in row.items()} for row in rows]
        connection.execute(update(table).where(*same).values(values), given)

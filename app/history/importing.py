"""A checked file becomes a job: stored in small steps, beside a console that has other things to do."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from openrecycle.app.history.reading import History, HistoryError, importable
from openrecycle.app.history.tables import TableFormat, format_of
from openrecycle.db.job_index import OVER
from openrecycle.db.job_rows import IMPORTING, JobRows, Record
from openrecycle.db.session import Database

BATCH = 500
REST = 0.005
"""Seconds between two transactions: SQLite has one writer, and others wait."""
LONGEST = 6 * 3600.0
"""Seconds after which an import on another host, of which nothing more is known, counts as ended."""
# In a job that is over nothing is under way, whatever its file says.
_AT_REST = {"broken": "", "moves": "[]"}
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Imported:
    """rows: of all tables together."""

    job_id: str
    rows: int
    plans: int


def import_history(
    database: Database,
    path: Path,
    *,
    new_id: str | None = None,
    actor: str = "CLI",
    rest: Callable[[float], None] = time.sleep,
) -> Imported:
    """Stores the job, all of it or nothing; the whole file is checked first. new_id: instead of its own.

    A job that had not ended is stopped: its processes do not know this console. Raises HistoryError,
    SQLAlchemyError.
    """
    if new_id is not None and not _IDENTIFIER.fullmatch(new_id):
        raise HistoryError(f"id: got {new_id!r:.80}, expected 1 to 64 letters, digits, _ or -")
    rows = JobRows(database)
    with History(path) as history:
        job = format_of("job").to_row(next(history.lines("job")))
        job_id = job["id"] = new_id or job["id"]
        if rows.exists(job_id):
            _clear(rows, job_id, rest)
        history.check()
        if job["state"] not in OVER:
            job["reason"] = f"it was {job['state']} when its history was exported; imported, it does not go on"
            job["state"] = "stopped"
        job |= _AT_REST
        if not rows.begin(job, _note()):
            raise _taken(job_id)
        try:
            _store(rows, history, job_id, rest)
            audit = {"at": time.time(), "actor": actor, "action": "import", "job_id": job_id, "target": job_id}
            rows.finish(job, {**audit, "detail": f"exported as {history.manifest.job}"[:2000]})
        except BaseException:
            delete_job(rows, job_id, rest)
            raise
        manifest = history.manifest
    return Imported(job_id, sum(t.rows for n, t in manifest.tables.items() if n != "audit"), len(manifest.plans))


def delete_job(rows: JobRows, job_id: str, rest: Callable[[float], None] = time.sleep) -> None:
    """All of a hidden job (db.job_rows), in small steps. Raises SQLAlchemyError."""
    while rows.delete_some(job_id):
        rest(REST)


def abandoned(note: str) -> bool:
    """Has the process ended that left this note with a job on its way in?"""
    try:
        host, pid, at = note.rsplit(" ", 2)
        if host != socket.gethostname():
            return time.time() - float(at) > LONGEST
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OSError):
        return False
    return False


def _note() -> str:
    return f"{socket.gethostname()} {os.getpid()} {time.time():.0f}"


def _clear(rows: JobRows, job_id: str, rest: Callable[[float], None]) -> None:
    """The id is taken: by a job, or by what is left of one."""
    left = {hidden: (state, note) for hidden, state, note in rows.hidden()}
    if job_id not in left or (left[job_id][0] == IMPORTING and not abandoned(left[job_id][1])):
        raise _taken(job_id)
    delete_job(rows, job_id, rest)


def _store(rows: JobRows, history: History, job_id: str, rest: Callable[[float], None]) -> None:
    known: set[str] = set()  # plans that rows of this job hold
    for form in importable():
        for batch in _batches(history, form):
            named = {row[c] for row in batch for c in ("fingerprint", "plan_fingerprint") if c in row} - known
            rows.add(form.name, job_id, batch, ((f, history.plan(f)) for f in sorted(named)))
            known |= named
            rest(REST)


def _batches(history: History, form: TableFormat) -> Iterator[list[Record]]:
    """A row that brings a plan along, which may be large, has few others beside it."""
    size = 8 if form.name in ("job_plan", "generation") else BATCH
    lines = history.lines(form.name)
    while batch := [form.to_row(line) for line in islice(lines, size)]:
        yield batch


def _taken(job_id: str) -> HistoryError:
    return HistoryError(
        f"job: {job_id} is there already, and is not overwritten; delete it first, or import under another id (--as)"
    )

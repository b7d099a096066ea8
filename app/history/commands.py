"""The command line's histories: `openrecycle history export`, `import` and `delete`, on the console's database."""

from __future__ import annotations

import getpass
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NoReturn, TextIO

import typer
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.app.history.archive import export
from openrecycle.app.history.importing import delete_job, import_history
from openrecycle.app.history.reading import HistoryError
from openrecycle.app.settings import default_database_url
from openrecycle.db.job_index import OVER
from openrecycle.db.job_rows import JobRows
from openrecycle.db.leadership import LeaderSession
from openrecycle.db.session import Database, DatabaseError
from openrecycle.db.store import Store
from openrecycle.planner.commands.output import destination, is_stdout
from openrecycle.planner.jobs.errors import InputError

DatabaseUrl = Annotated[
    str,
    typer.Option(envvar="DATABASE_URL", help="The console's database, as for serve.", show_default=False),
]
JobId = Annotated[str, typer.Option("--job", help="Id of the job.")]


def install(cli: typer.Typer) -> None:
    cli.command("export")(export_command)
    cli.command("import")(import_command)
    cli.command("delete")(delete_command)


def export_command(
    job: JobId,
    out: Annotated[
        Path, typer.Option(help="File to write, - for standard output; an old one of that name is replaced.")
    ],
    database_url: DatabaseUrl = "",
) -> None:
    """Write all that is stored of a job into a file (zip)."""
    if is_stdout(out):
        with TemporaryDirectory() as folder:
            whole = Path(folder) / "job.zip"
            _export(job, whole, database_url, file=sys.stderr)
            with whole.open("rb") as data:
                shutil.copyfileobj(data, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    try:
        target = destination(out)
    except InputError as error:
        _fail(str(error))
    _export(job, target, database_url, file=sys.stdout)


def _export(job: str, out: Path, database_url: str, *, file: TextIO) -> None:
    with _opened(database_url) as database:
        manifest = export(database, job, out)
    if manifest is None:
        _fail(f"--job: got {job!r}, expected the id of a job of this database")
    rows = sum(table.rows for table in manifest.tables.values())
    print(f"{out}: job {job}, {rows:,} rows, {len(manifest.plans):,} plans, {out.stat().st_size:,} bytes", file=file)


def import_command(
    file: Annotated[Path, typer.Argument(help="What export has written.", show_default=False)],
    as_id: Annotated[str | None, typer.Option("--as", help="Id of the job here, instead of its own.")] = None,
    database_url: DatabaseUrl = "",
) -> None:
    """Store the job of a file, all of it or nothing. A console that runs shows it within seconds."""
    with _opened(database_url) as database:
        done = import_history(database, file, new_id=as_id, actor=_who())
    print(f"job {done.job_id}: {done.rows:,} rows, {done.plans:,} plans")


def delete_command(job: JobId, database_url: DatabaseUrl = "") -> None:
    """Delete a job with everything of it: one that has ended, or any while no console runs on the database."""
    with _opened(database_url) as database:
        row = next((row for row in Store(database).jobs() if row["id"] == job), None)
        if row is None:
            _fail(f"--job: got {job!r}, expected the id of a job of this database")
        with nullcontext() if row["state"] in OVER else _no_console(database, job, row["state"]):
            rows = JobRows(database)
            audit = {"at": time.time(), "actor": _who(), "action": "delete", "job_id": job, "target": job}
            rows.hide(job, {**audit, "detail": row["name"]})
            delete_job(rows, job)
    print(f"job {job} is deleted")


@contextmanager
def _no_console(database: Database, job: str, state: str) -> Iterator[None]:
    """Keeps consoles from the database meanwhile: one that runs looks after the job."""
    refusal = f"--job: {job} is {state}, and a console runs on this database; delete the job there, or stop the console"
    if database.is_sqlite:
        try:
            database.lead()
        except DatabaseError:
            _fail(refusal)
        yield
        return
    session = LeaderSession(database, secrets.token_hex(8))
    try:
        if not session.try_lock():
            _fail(refusal)
        yield
    finally:
        session.close()


@contextmanager
def _opened(database_url: str) -> Iterator[Database]:
    """What is refused ends the program: a sentence, status 2."""
    try:
        database = Database(database_url or default_database_url())
        try:
            database.upgrade()
            yield database
        finally:
            database.close()
    except (HistoryError, DatabaseError) as error:
        _fail(str(error))
    except SQLAlchemyError as error:
        _fail(f"the database can't take this now ({type(error).__name__}); nothing of it is left")
    except OSError as error:
        _fail(f"{error.filename or 'the file'} can't be written: {error.strerror or error}")


def _who() -> str:
    try:
        return f"{getpass.getuser()} (command line)"[:80]
    except (KeyError, OSError):
        return "command line"


def _fail(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)

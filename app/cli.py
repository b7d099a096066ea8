"""The command line: `openrecycle serve` and `demo`; `token` and `history`, on the console's database."""

from __future__ import annotations

import getpass
import json
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NoReturn, TextIO

import typer
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.membership import FailureTimeouts
from openrecycle.app.observing.history import HistoryError, delete_job, export, import_history
from openrecycle.app.runtime.errors import ConsoleError, SettingsError, unavailable
from openrecycle.app.runtime.processes import prepare_children
from openrecycle.app.runtime.settings import RetentionLimits, Settings, default_database_url, read_token, seconds
from openrecycle.app.security.access import AuditLog, Tokens, read_oidc
from openrecycle.db.access import AuditStore, TokenStore, audit_row
from openrecycle.db.job_rows import OVER, JobRows
from openrecycle.db.session import Database, DatabaseError, InUse, LeaderSession
from openrecycle.db.store import Store
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.output import destination, is_stdout, writing
from openrecycle.planner.output import run as run_command
from openrecycle.scratch import scratch

tokens = typer.Typer(help="Tokens that let others view, operate, or report to a console.", no_args_is_help=True)


@tokens.command()
def create(
    role: Annotated[str, typer.Option(help="view, operate or agent.")],
    job: Annotated[str | None, typer.Option(help="Id of the only job that an agent's token is good for.")] = None,
    name: Annotated[str, typer.Option(help="Whose it is, for the audit log.")] = "",
    days: Annotated[float | None, typer.Option(help="Days until it expires; without, it never does.")] = None,
    database_url: DatabaseUrl = "",
) -> None:
    """Make a token and print it.

    It is shown this once: the console keeps only a hash of it.
    """
    with _store(database_url, make=True) as database:
        made, audit = Tokens(TokenStore(database)), AuditLog(AuditStore(database))
        if job is not None and all(row["id"] != job for row in Store(database).jobs()):
            _no_such_job(job, database)
        try:
            token, text = made.create(role, created_by=_actor(), name=name, job_id=job, days=days)
        except ConsoleError as error:  # about a field of the API, which is called like the option
            fail(f"--{error.field}: {error.said}" if error.field else str(error))
        audit.record(_actor(), "create token", token.id, job_id=job, detail=token.name)
    print(text)
    ends = "it does not expire" if token.expires_at is None else f"it expires on {_day(token.expires_at)}"
    may = f"{token.name!r} may {_words(token.role, job)}, at a console on {database.shown_url}"
    print(f"{may}; {ends}. It is not shown again.", file=sys.stderr)


@tokens.command("list")
def listed(database_url: DatabaseUrl = "") -> None:
    """Show every token, newest first, without its secret."""
    with _store(database_url) as database:
        found = Tokens(TokenStore(database)).list()
    now = time.time()
    rows = [("ID", "ROLE", "NAME", "CREATED", "LAST USED", "STATE")]
    for token in found:
        state = "revoked" if token.revoked_at else "valid" if token.valid(now) else "expired"
        if state == "valid" and token.expires_at:
            state = f"until {_day(token.expires_at)}"
        used = _day(token.last_used_at) if token.last_used_at else "-"
        role = f"{token.role} of {token.job_id}" if token.job_id else token.role.value
        rows.append((token.id, role, token.name, _day(token.created_at), used, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@tokens.command()
def revoke(
    token: Annotated[str, typer.Argument(help="The token's id, as `openrecycle token list` shows it.")],
    database_url: DatabaseUrl = "",
) -> None:
    """End a token.

    A console that runs notices within two seconds.
    """
    with _store(database_url) as database:
        gone = Tokens(TokenStore(database)).revoke(token)
        AuditLog(AuditStore(database)).record(_actor(), "revoke token", gone.id, job_id=gone.job_id, detail=gone.name)
    print(f"{gone.name!r} ({gone.id}) is revoked", file=sys.stderr)


@contextmanager
def _store(database_url: str, *, make: bool = False) -> Iterator[Database]:
    """Opens the database, with its tables up to date. make: creates it if needed. Any error ends the program with one
    sentence and status 2."""
    try:
        database = Database(database_url or default_database_url(), make=make)
        try:
            database.upgrade()
            yield database
        finally:
            database.close()
    except (ConsoleError, HistoryError, DatabaseError) as error:
        fail(str(error))
    except UnicodeEncodeError as error:
        fail(f"got {error.object!r:.100}, expected text in UTF-8")
    except SQLAlchemyError as error:
        fail(str(unavailable(error)))
    except OSError as error:
        fail(f"{error.filename or 'the file'} can't be written: {error.strerror or error}")


def _no_such_job(job: str, database: Database) -> NoReturn:
    fail(f"--job: got {job!r}, expected the id of a job in the database {database.shown_url}")


def _words(role: str, job: str | None) -> str:
    if role == "agent":
        return f"report on job {job} alone" if job else "create jobs and report on them"
    return "look at everything" if role == "view" else "look at everything and operate"


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _actor() -> str:
    try:
        return f"{getpass.getuser()} on the command line"[:80]
    except (KeyError, OSError):
        return "the command line"


DatabaseUrl = Annotated[
    str,
    typer.Option(envvar="DATABASE_URL", help="The console's database, as for serve.", show_default=False),
]
JobId = Annotated[str, typer.Option("--job", help="Id of the job.")]


cli = typer.Typer(
    help="The console: watch and repair training jobs from a browser.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # names in brackets are no marks of style
)

_DEFAULT = FailureTimeouts()

Host = Annotated[str, typer.Option(help="Address to listen on. Any but loopback needs a token.")]
Port = Annotated[int, typer.Option(help="Port; 0 takes any free one.")]
ConsoleDatabaseUrl = Annotated[
    str,
    typer.Option(
        envvar="DATABASE_URL",
        help="sqlite:///path or postgresql://user:password@host/name. Default: a file in the user's state folder.",
        show_envvar=True,
        show_default=False,
    ),
]


@cli.command()
def serve(
    host: Host = "127.0.0.1",
    port: Port = 8501,
    database_url: ConsoleDatabaseUrl = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File (mode 0600) with the token; else OPENRECYCLE_TOKEN.")
    ] = None,
    host_name: Annotated[
        list[str] | None, typer.Option(help="Host name under which it is reached, through a proxy, say.")
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a proxy that says who the client is. Default: this machine."),
    ] = None,
    connections_per_address: Annotated[
        int, typer.Option(help="Connections that one address may have, proxies apart. Default: half of all.")
    ] = 0,
    oidc: Annotated[
        Path | None, typer.Option(help="TOML file (mode 0600) with Streamlit's [auth]: people sign in with an account.")
    ] = None,
    oidc_operators: Annotated[
        str, typer.Option(help="Who may operate: ada@x.org,*@ops.x.org,group:NAME.", show_default=False)
    ] = "",
    oidc_viewers: Annotated[str, typer.Option(help="Who may look on, in the same form.", show_default=False)] = "",
    api_only: Annotated[bool, typer.Option("--api-only", help="Serve the REST API without the pages.")] = False,
    advertise: Annotated[
        str,
        typer.Option(
            help="Address of this console for people, where another one is its standby. Default: host and port."
        ),
    ] = "",
    heartbeat: Annotated[float, typer.Option(help="Seconds between two reports of a worker.")] = _DEFAULT.heartbeat,
    suspect: Annotated[float, typer.Option(help="Seconds of silence that make a suspect.")] = _DEFAULT.suspect,
    dead: Annotated[float, typer.Option(help="Seconds of silence after which a worker is out.")] = _DEFAULT.dead,
    tolerance: Annotated[
        int, typer.Option(min=0, max=8, help="Plans are made ahead for up to this many failures.")
    ] = 2,
    keep_seconds: Annotated[str, typer.Option(help="How long a worker's samples of one second are kept.")] = "15m",
    keep_minutes: Annotated[str, typer.Option(help="Those of one minute.")] = "2d",
    keep_hours: Annotated[str, typer.Option(help="Those of one hour.")] = "400d",
    keep_events: Annotated[
        int, typer.Option(help="Lines of each job's event feed that are kept.")
    ] = RetentionLimits.events,
) -> None:
    """Serve the pages and the REST API until Ctrl-C."""
    with suppress(OSError):  # if it fails, whatever needs a child reports that
        prepare_children()  # runs beside the imports that follow, which take as long
    from openrecycle.app.server import serve as run
    from openrecycle.db.session import DatabaseError

    try:
        for option, people in (("--oidc-operators", oidc_operators), ("--oidc-viewers", oidc_viewers)):
            if people and oidc is None:
                raise SettingsError(f"{option}: got {people!r}, expected --oidc beside it")
        settings = Settings(
            host=host,
            port=port,
            database_url=database_url,
            token=read_token(token_file),
            failure_timeouts=_timeouts(heartbeat, suspect, dead),
            tolerance=tolerance,
            api_only=api_only,
            names=tuple(host_name or ()),
            proxies=tuple(proxy or Settings.proxies),
            connections_per_address=connections_per_address,
            oidc=None if oidc is None else read_oidc(oidc, _listed(oidc_operators), _listed(oidc_viewers)),
            keep=RetentionLimits(
                seconds=seconds(keep_seconds, "--keep-seconds"),
                minutes=seconds(keep_minutes, "--keep-minutes"),
                hours=seconds(keep_hours, "--keep-hours"),
                events=keep_events,
            ),
            advertise=advertise,
        )
        run(settings)
    except (SettingsError, PlannerError, DatabaseError) as error:
        fail(str(error))


def _timeouts(heartbeat: float, suspect: float, dead: float) -> FailureTimeouts:
    """Makes the time-outs from the options. Raises InputError that names the option."""
    try:
        return FailureTimeouts(heartbeat=heartbeat, suspect=suspect, dead=dead)
    except InputError as error:
        raise InputError(f"--{error.field}", error.value, error.expected) from None


@cli.command()
def demo(
    host: Host = "127.0.0.1",
    port: Port = 8501,
    database_url: ConsoleDatabaseUrl = "",
    pipelines: Annotated[int, typer.Option(help="Data-parallel pipelines.")] = 3,
    stages: Annotated[int, typer.Option(help="Pipeline stages.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per pipeline and iteration.")] = 6,
    iterations: Annotated[int, typer.Option(help="Iterations to commit; the default is some days' worth.")] = 1_000_000,
    layers: Annotated[int, typer.Option(help="Of the model; each is on one stage, and may move to another.")] = 44,
    pace: Annotated[
        str, typer.Option(help="Each op of a layer is stretched to this; the computation inside is real.")
    ] = "F=4ms,I=4ms,W=4ms",
) -> None:
    """The console and a real training job here, until Ctrl-C."""
    from openrecycle.app.demo import DemoOptions, run

    grid = ("--pipelines", str(pipelines), "--stages", str(stages), "--micro-batches", str(micro_batches))
    model = {"layers": layers, "width": 8, "heads": 1, "sequence": 4, "batch": 1}  # two cores run all 12 workers
    workload = ("--workload-options", json.dumps(model))
    job = ("--name", "demo GPT", "--iterations", str(iterations), "--pace", pace, "--pace-per", "layer", *workload)
    database = ("--database-url", database_url) if database_url else ()
    try:
        settings = Settings(host=host, port=port, token=read_token(None))
        status = run(DemoOptions(settings, database, grid + job), lambda line: print(line, flush=True))
    except SettingsError as error:
        fail(str(error))
    raise SystemExit(status)


@cli.command("export")
def export_command(
    job: JobId,
    out: Annotated[
        Path, typer.Option(help="File to write, - for standard output; an old one of that name is replaced.")
    ],
    database_url: DatabaseUrl = "",
) -> None:
    """Write all that is stored of a job into a file (zip)."""
    if is_stdout(out):
        with TemporaryDirectory(dir=scratch()) as folder:
            whole = Path(folder) / "job.zip"
            _export_to(job, whole, database_url, out, file=sys.stderr)
            with whole.open("rb") as data:
                shutil.copyfileobj(data, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    try:
        _export_to(job, destination(out), database_url, out, file=sys.stdout)
    except InputError as error:
        fail(str(error))


def _export_to(job: str, target: Path, database_url: str, out: Path, *, file: TextIO) -> None:
    """out: what the user calls the file. Raises InputError if it can't be written."""
    with _store(database_url) as database:
        with writing(out):
            manifest = export(database, job, target)
        if manifest is None:
            _no_such_job(job, database)
    rows = sum(table.rows for table in manifest.tables.values())
    print(f"{out}: job {job}, {rows:,} rows, {len(manifest.plans):,} plans, {target.stat().st_size:,} bytes", file=file)


@cli.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="What export has written.", show_default=False)],
    as_id: Annotated[str | None, typer.Option("--as", help="Id of the job here, instead of its own.")] = None,
    database_url: DatabaseUrl = "",
) -> None:
    """Store the job of a file, all of it or nothing. A console that runs shows it within seconds."""
    with _store(database_url, make=True) as database:
        done = import_history(database, file, new_id=as_id, actor=_actor())
    print(f"job {done.job_id}: {done.rows:,} rows, {done.plans:,} plans")


@cli.command("delete")
def delete_command(job: JobId, database_url: DatabaseUrl = "") -> None:
    """Delete a job with everything of it.

    It must have ended, where a console runs on the database.
    """
    with _store(database_url) as database:
        row = next((row for row in Store(database).jobs() if row["id"] == job), None)
        if row is None:
            _no_such_job(job, database)
        with nullcontext() if row["state"] in OVER else _no_console(database, job, row["state"]):
            rows = JobRows(database)
            audit = audit_row(_actor(), "delete", job, job_id=job, detail=row["name"])
            if (hidden := rows.hide(job, audit)) is not None:
                delete_job(rows, hidden)
    print(f"job {job} is deleted")


@contextmanager
def _no_console(database: Database, job: str, state: str) -> Iterator[None]:
    """Keeps consoles off the database inside; ends the program if one runs, since that looks after the job."""
    refusal = f"--job: {job} is {state}, and a console runs on this database; delete the job there, or stop the console"
    if database.is_sqlite:
        try:
            database.lead()
        except InUse:
            fail(refusal)
        yield
        return
    session = LeaderSession(database, secrets.token_hex(8))
    try:
        if not session.try_lock():
            fail(refusal)
        yield
    finally:
        session.close()


cli.add_typer(tokens, name="token")


def main() -> None:
    """Runs the command line; unknown commands and options are refused in one sentence."""
    run_command(cli)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in (part.strip() for part in text.split(",")) if part)


def fail(sentence: str) -> NoReturn:
    """Prints one sentence on stderr and ends the program with status 2."""
    print(sentence, file=sys.stderr)
    raise SystemExit(2)

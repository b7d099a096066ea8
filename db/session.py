"""Opens a database: SQLite in a file (WAL) or PostgreSQL; brings its tables up to date; and which of the consoles on
one PostgreSQL database leads.

`Database.write()` is a transaction that may read and then write: on SQLite it takes the write lock
at its start, so that it can't fail half way because another writer came first. On PostgreSQL, where
several consoles share a database, it first makes sure that its own is still the one that leads.

Who leads is two things together. A *lock* (an advisory lock of one session) falls free the moment a console's
process dies. A *lease* (a row with a term, renewed every second) runs out when the process is there
and does not run, or its machine is gone and the database has not noticed. Each new leader has a
higher term, and a transaction that writes checks its own: one of an earlier leader fails.
When it was renewed is the database's time, and for how long it was not is measured by whoever watches: no clock is
compared with another, and each may be set.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Executable,
    RootTransaction,
    Table,
    create_engine,
    event,
    insert,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from openrecycle.db.models import AuditRow, Base

if TYPE_CHECKING:
    from alembic.config import Config

# Any numbers, so that our advisory locks don't meet those of other users of the database; db.session has another.
_MIGRATION_LOCK, _AUDIT_LOCK = 0x0C1E_0001, 0x0C1E_0003

# -- opens a database ---------------------------------------------------------------------------

NOT_LEADING = -1
"""The term of a console that does not lead: it may read, and write nothing."""

# Seconds until a PostgreSQL server that has become unreachable without a word counts as lost.
_CONNECT_SECONDS, _UNANSWERED_SECONDS = 4, 5

# Of an SQLite file that another process writes: how long a transaction waits; and once one has waited in vain, each of
# those behind it, until one gets its turn. There may be dozens, and the last would wait for all before it.
PATIENCE_SECONDS, _HELD_SECONDS = 5.0, 0.05

# On PostgreSQL, where others read a table that gets a column: how often that is tried, and seconds between two tries.
_UPGRADES, _BETWEEN_UPGRADES = 5, 0.5
_LOCK_NOT_AVAILABLE = "55P03"
# How often it is looked whether a console that runs has added the columns, with the same seconds between: one that has
# just begun to lead is about to.
_LOOKS = 10
# How long a command that looks whether a console has an SQLite file may hold that console's lock.
_LOOK_SECONDS = 0.1

_MIGRATING = threading.Lock()
"""Alembic keeps what it is at in names of its module: two threads, each with a database of its own, break both."""

HERE = Path(__file__).parent

# What its files begin with; one that is empty becomes one.
_SQLITE = b"SQLite format 3\0"

# SQLite's write-ahead log needs memory shared between processes, which these do not have.
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "afs", "ceph", "lustre", "glusterfs", "fuse.sshfs", "fuse.glusterfs")


Record = dict[str, Any]
"""A row by the names of its columns."""


class DatabaseError(Exception):
    """The database can't be used. `str(error)` is one sentence, without the password."""


class WriteFenced(SQLAlchemyError):
    """A write of a console that does not lead, or leads no more. Nothing of it has been stored."""


class FileGone(SQLAlchemyError):
    """The SQLite file is not there any more, or another one is. Nothing has been stored. `str(error)` says which."""


class Database:
    """One database. Thread-safe.

    url: `sqlite:///path/to/file.db` or `postgresql://user:password@host/name`. me: the console whose
    connections these are. term: the one in which it leads (db.session); its writes raise Fenced, and
    call `on_fenced`, as soon as there is a later one. None: written to whoever leads. make: an SQLite file that is not
    there. patience: seconds that a write waits for another process that writes the same SQLite file.
    Raises DatabaseError when it can't be opened.
    """

    def __init__(
        self,
        url: str,
        *,
        me: str = "",
        term: int | None = None,
        on_fenced: Callable[[], None] = lambda: None,
        make: bool = True,
    ) -> None:
        self.url = _parse(url)
        self._term, self._on_fenced = term, on_fenced
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        # SQLite has one writer; waiting here is fairer and quicker than its own polling.
        self._writer = threading.Lock()
        self.patience = PATIENCE_SECONDS
        self._held = False  # has the last one found that another process writes, and goes on to?
        self._lead: IO[str] | None = None
        if self.is_sqlite:
            self._path = _sqlite_path(self.url, make=make)
            self._file = _identity(self._path)
            # Nothing makes another one in the place of a file that is gone.
            there = self.url.set(database=f"file://{quote(str(self._path))}")
            there = there.update_query_dict({"mode": "rw", "uri": "true"})
            self.engine = create_engine(there, pool_size=16, max_overflow=16)
            _prepare_sqlite(self.engine)
            event.listen(self.engine, "do_connect", lambda *_: self.check_file())
        else:
            arguments = connect_arguments(self.url, me)
            self.engine = create_engine(
                self.url, pool_pre_ping=True, pool_size=8, max_overflow=8, connect_args=arguments
            )

    @property
    def shown_url(self) -> str:
        """The address without the password."""
        return self.url.render_as_string(hide_password=True)

    def lead(self) -> None:
        """Claims an SQLite file for this process until `close`: two consoles would decide twice.

        Raises DatabaseError when another console has it. Who leads on PostgreSQL: db.session.
        """
        assert self.is_sqlite
        claimed = self._claimed()
        if claimed is None:
            time.sleep(_LOOK_SECONDS)
            claimed = self._claimed()
        if claimed is None:
            raise DatabaseError(
                f"database {self.shown_url} is in use by another console; stop that one, or name another database"
            )
        self._lead = claimed

    def _claimed(self) -> IO[str] | None:
        """The lock of an SQLite file, until it is closed; None: another has it."""
        handle = Path(f"{self._path}.lock").open("w")  # noqa: SIM115 (whoever has it closes it)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            return None
        return handle

    def upgrade(self) -> None:
        """Brings the tables to this version of the program. Processes that start together take turns. Raises
        DatabaseError, also where a console runs that does not know what is to be added: nobody would ever fill it in
        what that console writes."""
        with explained(self.shown_url):
            for left in reversed(range(_LOOKS)):
                with self._alone():
                    if self._upgraded():
                        return
                if left:
                    time.sleep(_BETWEEN_UPGRADES)  # a console of this version adds them meanwhile
        raise DatabaseError(
            f"database {self.shown_url} is in use by a console that has not added the columns of this version; if it "
            "is of an older version, stop it first"
        )

    def _upgraded(self) -> bool:
        """False: a console runs that has not added columns."""
        from openrecycle.db import later_columns

        if self._migrate() != [later_columns.FIRST]:
            return True
        with self.read() as session:
            missing, unknown = later_columns.compared(session.connection())
        if unknown:
            raise self._of_another_version()
        if missing:
            if self._console_runs():
                return False
            self._patiently(lambda connection: later_columns.add(connection, missing))
            later_columns.fill(self._writing, missing)
            self._patiently(lambda connection: later_columns.named(connection, missing))
        return True

    def _migrate(self) -> Sequence[str]:
        """To the newest revisions, which it returns."""
        # 0.15 CPU seconds, which child processes that read a database have no use for.
        from alembic import command
        from alembic.script import ScriptDirectory
        from alembic.util import CommandError

        with _MIGRATING, self._writing() as connection:
            config = alembic_config(connection)
            try:
                command.upgrade(config, "head")
            except CommandError:
                raise self._of_another_version() from None
            return ScriptDirectory.from_config(config).get_heads()

    def _patiently(self, change: Callable[[Connection], None]) -> None:
        """A change of tables that others may be reading."""
        for left in reversed(range(_UPGRADES)):
            try:
                with self._writing() as connection:
                    change(connection)
                return
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", "") != _LOCK_NOT_AVAILABLE:
                    raise
                if not left:
                    raise DatabaseError(
                        f"database {self.shown_url}: a table that gets a column is in use all the time; end what "
                        "reads it, such as a backup, and start again"
                    ) from None
            time.sleep(_BETWEEN_UPGRADES)  # those who have waited behind this one get their turn

    def _of_another_version(self) -> DatabaseError:
        return DatabaseError(
            f"database {self.shown_url} was used by another version of this program, whose tables this one "
            "does not know: run that version, or name another database"
        )

    def _console_runs(self) -> bool:
        """Another than this one. Nothing is kept from one that starts later: it waits in its `upgrade` before it
        writes."""
        if self._lead is not None or self._term is not None:  # this one, which leads
            return False
        if self.is_sqlite:
            free = self._claimed()
            if free is not None:
                free.close()
            return free is None
        with self._session() as connection:
            return not connection.scalar(text("select pg_try_advisory_lock(:key)"), {"key": _LOCK})

    @contextmanager
    def _session(self) -> Iterator[Connection]:
        """On PostgreSQL, for locks: they are free when it ends."""
        with self.engine.connect() as made:
            connection = made.execution_options(isolation_level="AUTOCOMMIT")
            connection.detach()  # it is closed, and not used again
            yield connection

    def check_file(self) -> None:
        """Raises FileGone where SQLite's file is not the one that was opened. What is written to that is in no folder
        any more, and goes with this process; and what opens the file anew makes another one, or reads it."""
        if self.is_sqlite and _identity(self._path) != self._file:
            raise FileGone(f"{self._path} was moved, deleted or replaced")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """SQLite does not wait for its lock while a new file changes to WAL: whoever comes second waits here."""
        if not self.is_sqlite:
            with self._session() as connection:
                connection.execute(text("select pg_advisory_lock(:key)"), {"key": _MIGRATION_LOCK})
                yield
            return
        with Path(f"{self._path}.upgrade").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextmanager
    def read(self) -> Iterator[Session]:
        with Session(self.engine) as session:
            yield session

    def rows(self, query: Executable) -> list[Record]:
        with self.read() as session:
            return [dict(row) for row in session.execute(query).mappings()]

    def row(self, query: Executable) -> Record | None:
        """The first; None: there is none."""
        with self.read() as session:
            found = session.execute(query).mappings().first()
            return None if found is None else dict(found)

    def scalar(self, query: Executable) -> Any:
        """The first column of the first row; None: there is none."""
        with self.read() as session:
            return session.scalar(query)

    def scalars(self, query: Executable) -> list[Any]:
        """The first column of every row."""
        with self.read() as session:
            return list(session.scalars(query))

    @contextmanager
    def write(self, *, lasting: bool = True) -> Iterator[Session]:
        """Commits at the end, rolls back on an exception. lasting: what is committed is there also after the machine
        has lost its power; else on SQLite the last moments of it may not be, and nothing waits for the disk."""
        with self._writing(lasting) as connection, Session(connection) as session:
            yield session
            session.flush()

    def write_audit(self, session: Session, line: Mapping[str, Any]) -> None:
        """Adds a line to the audit log, as the last thing that a transaction does: those who add others wait for its
        end, so that ids rise as lines come to be seen, and whoever reads on after an id misses none."""
        if not self.is_sqlite:  # which has one writer anyway
            session.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _AUDIT_LOCK})
        session.execute(insert(AuditRow).values(dict(line)))

    def insert_new(self, model: type[Base]) -> Any:
        """INSERT that leaves a row alone which is there already."""
        assert isinstance(model.__table__, Table)
        dialect = sqlite if self.is_sqlite else postgresql
        return dialect.insert(model.__table__).on_conflict_do_nothing()

    def close(self) -> None:
        self._lead_no_more()
        self.engine.dispose()

    def _lead_no_more(self) -> None:
        if self._lead is not None:
            self._lead.close()
            self._lead = None

    @contextmanager
    def _writing(self, lasting: bool = True) -> Iterator[Connection]:
        if not self.is_sqlite:
            with self.engine.begin() as connection:
                self._check_term(connection)
                yield connection
            return
        with self._writer, self.engine.connect() as made:
            connection = made.execution_options(immediate=True, lasting=lasting)
            with self._turn(connection):
                yield connection

    def _turn(self, connection: Connection) -> RootTransaction:
        """Begins a transaction that writes an SQLite file, once no other process does. Raises FileGone."""
        self.check_file()
        driver: Any = connection.connection.driver_connection
        driver.execute(_busy(_HELD_SECONDS if self._held else self.patience))
        try:
            transaction = connection.begin()
        except OperationalError as error:
            self._held = "locked" in str(error.orig)
            raise
        finally:
            driver.execute(_busy(PATIENCE_SECONDS))
        self._held = False
        return transaction

    def _check_term(self, connection: Connection) -> None:
        """Holds the row of the lead until the transaction ends: a new leader waits for it before it leads."""
        if self._term is None:
            return
        held = text("select 1 from leadership where id = 1 and term = :term for key share")
        if connection.scalar(held, {"term": self._term}) is None:
            self._on_fenced()
            raise WriteFenced("this console does not lead")


@contextmanager
def explained(shown_url: str) -> Iterator[None]:
    """Turns errors of the database into a DatabaseError."""
    try:
        yield
    except DBAPIError as error:
        first = str(error.orig).strip().splitlines()[0]
        raise DatabaseError(f"database {shown_url} can't be used: {first}") from None
    except SQLAlchemyError as error:
        raise DatabaseError(f"database {shown_url} can't be used: {error}") from None


def application_name(me: str) -> str:
    """What PostgreSQL lists the connections of the console `me` under."""
    return f"openrecycle {me}".strip()


def connect_arguments(url: URL, me: str) -> dict[str, Any]:
    """For psycopg: a server that is gone without a word is noticed in seconds. What `url` says goes first."""
    ours = {
        "application_name": application_name(me),
        "connect_timeout": _CONNECT_SECONDS,
        "keepalives_idle": 2,
        "keepalives_interval": 1,
        "keepalives_count": 3,
        "tcp_user_timeout": _UNANSWERED_SECONDS * 1000,
    }
    # Consoles find each other's connections by this name; it is not the user's to choose.
    return {key: value for key, value in ours.items() if key not in url.query or key == "application_name"}


def alembic_config(connection: Connection) -> Config:
    """Alembic's configuration; migrations run on `connection`, inside its transaction."""
    from alembic.config import Config

    config = Config(str(HERE / "alembic.ini"))
    config.set_main_option("script_location", str(HERE / "migrations"))
    config.attributes["connection"] = connection
    return config


def _parse(url: str) -> URL:
    expected = "sqlite:///path/to/file.db or postgresql://user:password@host/name"
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except (ArgumentError, ValueError):
        # The text may hold a password: it is not repeated.
        raise DatabaseError(f"--database-url: can't be read as an address, expected {expected}") from None
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise DatabaseError(f"--database-url: got a {backend} database, expected {expected}")
    return parsed


def _sqlite_path(url: URL, *, make: bool) -> Path:
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise DatabaseError("--database-url: got an SQLite database in memory, expected sqlite:///path/to/file.db")
    path = Path(url.database).absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError:  # no address can hold it
        raise DatabaseError(f"--database-url: got the file {str(path)!r}, expected a name in UTF-8") from None
    newest = Path(f"{path.resolve()}-wal")  # beside the file that a link leads to
    # Beside a file that is not there, or empty, SQLite deletes it; a console that runs may have it open.
    if _size(newest) and not _size(path):
        raise DatabaseError(
            f"database file {path} is not there, or empty, and {newest} has what was stored last: "
            "put the file back, or delete that one too"
        )
    if not make and not path.exists():
        raise DatabaseError(f"database file {path} is not there, expected the one that `openrecycle serve` uses")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        special = path.exists() and not path.is_file() and not path.is_dir()  # a device, or a pipe, which opens never
        # Tells "not allowed" from other troubles before SQLite's own "unable to open database file".
        if not special:
            with path.open("a+b") as file:
                file.seek(0)
                begins = file.read(len(_SQLITE))
    except OSError as error:
        raise DatabaseError(f"database file {path} can't be written: {error.strerror or error}") from None
    # Before anything is written beside it.
    if special or begins not in (b"", _SQLITE):
        raise DatabaseError(f"database file {path} can't be used: file is not a database")
    kind = file_system(path)
    if kind.startswith(_NETWORK_FILE_SYSTEMS):
        raise DatabaseError(
            f"database file {path} is on a network file system ({kind}), which SQLite does not bear; "
            "name a file on a local disk, or a PostgreSQL database"
        )
    return path


def _size(path: Path) -> int:
    """Bytes; 0: there is no such file, or it can't be seen."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _identity(path: Path) -> tuple[int, int] | None:
    """Of the file that has this name; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that `path` is on; empty where that can't be told."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    resolved = path.resolve()
    for line in lines:
        _, where, fs, *_ = line.split(" ")
        point = Path(where.replace("\\040", " "))
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fs
    return kind


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver's own BEGIN comes too late: ours is below
        cursor = connection.cursor()
        cursor.execute(_busy(PATIENCE_SECONDS))
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("immediate"):
            # With WAL, FULL is one more wait for the disk in each transaction: 8 ms where it is slow.
            connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if options['lasting'] else 'NORMAL'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("immediate") else "BEGIN")


def _busy(seconds: float) -> str:
    return f"PRAGMA busy_timeout={round(1000 * seconds)}"


# -- which of the consoles on one PostgreSQL database leads -------------------------------------

# Any number, so that our lock doesn't meet those of other users of the database.
_LOCK = 0x0C1E_0002

STATEMENT_SECONDS = 4.0
"""The longest that one question may take before the database counts as not answering."""
WRITERS_SECONDS = 2.0
"""How long a new leader waits for the transactions of the one before, which it has ended by then."""

_NOW = "extract(epoch from clock_timestamp())"


@dataclass(frozen=True)
class Lease:
    """What the database holds of the lead.

    term: how many leads there were. holder: the console that leads, "" after it has resigned; address:
    where it is reached. age: for how long whoever reads has seen it not renewed, in seconds. renewed: when it was, by
    the database's clock, which may be set: to be compared with itself alone.
    """

    term: int
    holder: str
    address: str
    age: float = 0.0
    renewed: float = 0.0


class LeaderSession:
    """One console's session with the database, about nothing but the lead. Not thread-safe.

    me: what this process calls itself, no two the same. Every method raises SQLAlchemyError when the
    database does not answer; the session, and a lock that it held, may be gone then: close it.
    Opening it raises DatabaseError.
    """

    def __init__(self, database: Database, me: str) -> None:
        self._me = me
        milliseconds = round(STATEMENT_SECONDS * 1000)
        arguments = connect_arguments(database.url, me)
        own = f"-c statement_timeout={milliseconds}"
        arguments["options"] = f"{database.url.query.get('options', '')} {own}".strip()
        with explained(database.shown_url):
            engine = create_engine(database.url, connect_args=arguments, poolclass=NullPool)
            self._connection: Connection = engine.connect()

    def try_lock(self) -> bool:
        """Takes the lock if it is free, and keeps it until `close`."""
        with self._connection.begin():
            return bool(self._connection.scalar(text("select pg_try_advisory_lock(:key)"), {"key": _LOCK}))

    def lease(self) -> Lease | None:
        """None in a database whose tables are older than leases."""
        with self._connection.begin():
            if self._connection.scalar(text("select to_regclass('leadership')")) is None:
                return None
            row = self._connection.execute(
                text("select term, holder, address, renewed_at from leadership where id = 1")
            ).one()
        return Lease(row[0], row[1], row[2], renewed=float(row[3]))

    def claim(self, address: str) -> int:
        """The new term, in which this console leads. Call with the lock held.

        From its return on, nothing that another console writes reaches the database any more.
        """
        with self._connection.begin():
            self._connection.execute(text(f"set local lock_timeout = {round(WRITERS_SECONDS * 1000)}"))
            # Writing transactions share this row until they end: here they are waited for.
            before = self._connection.scalar(text("select term from leadership where id = 1 for update"))
            term = int(before or 0) + 1
            self._connection.execute(
                text(
                    f"update leadership set term = :term, holder = :me, address = :address, renewed_at = {_NOW} "
                    "where id = 1"
                ),
                {"term": term, "me": self._me, "address": address},
            )
        return term

    def renew(self, term: int) -> bool:
        """False when another console has a later term."""
        with self._connection.begin():
            done = self._connection.execute(
                text(f"update leadership set renewed_at = {_NOW} where id = 1 and term = :term and holder = :me"),
                {"term": term, "me": self._me},
            )
            return done.rowcount == 1

    def resign(self, term: int) -> None:
        """Says that nobody leads; the lock goes with `close`."""
        with self._connection.begin():
            self._connection.execute(
                text("update leadership set holder = '' where id = 1 and term = :term and holder = :me"),
                {"term": term, "me": self._me},
            )

    def evict(self, holder: str, renewed: float | None) -> int:
        """Ends every session of the console `holder`, if it still holds the lead and has not renewed its lease since
        `renewed` (None: also if it has); returns how many. Its transactions are rolled back, its lock falls free."""
        with self._connection.begin():
            ended = self._connection.execute(
                text(
                    "select pg_terminate_backend(a.pid) from pg_stat_activity a, leadership l "
                    "where a.datname = current_database() and a.application_name = :name and a.pid <> pg_backend_pid() "
                    "and l.id = 1 and l.holder = :holder and l.renewed_at = coalesce(:renewed, l.renewed_at)"
                ),
                {"name": application_name(holder), "holder": holder, "renewed": renewed},
            )
            return len(ended.all())

    def close(self) -> None:
        """Gives up the lock."""
        with suppress(SQLAlchemyError):
            self._connection.close()

"""Opens a database, SQLite in a file (WAL) or PostgreSQL, and brings its tables up to date. Also decides which of the
consoles on one PostgreSQL database leads.

`Database.write()` is a transaction that may read and then write. On SQLite it takes the write lock at its start, so
that it can't fail half way because another process wrote first. On PostgreSQL, where several consoles share a database,
it first makes sure that its own console still leads.

Leadership has two parts. A *lock* (an advisory lock of one session) becomes free the moment the leader's process
dies. A *lease* (a row with a term, renewed every second) runs out when the process exists but does not run, or when its
machine is gone and the database has not noticed. Each new leader has a higher term, and a transaction that writes
checks its own term, so a write of an earlier leader fails. The time of renewal is the database's. How long it has not
been renewed is measured by the console that watches. So no two clocks are compared, and each may be set.
"""

from __future__ import annotations

import fcntl
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
    inspect,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from openrecycle.db.models import AuditRow, Base
from openrecycle.planner.jobs import words

if TYPE_CHECKING:
    from alembic.config import Config

# Arbitrary numbers, so that our advisory locks don't meet those of other users of the database; _LOCK is another.
_MIGRATION_LOCK, _AUDIT_LOCK = 0x0C1E_0001, 0x0C1E_0003

# -- opening a database -------------------------------------------------------------------------

NOT_LEADING = -1
"""The term of a console that does not lead: it may read, but writes nothing."""

# Seconds until a PostgreSQL server that no longer answers counts as lost.
_CONNECT_SECONDS, _UNANSWERED_SECONDS = 4, 5

# How long a transaction waits while another process writes the same SQLite file. Once one has waited in vain, each of
# those behind it waits for the second time only, until one succeeds: there may be dozens, and the last would wait for
# all before it.
PATIENCE_SECONDS, _HELD_SECONDS = 5.0, 0.05

_MIGRATING = threading.Lock()
"""Alembic keeps its state in global names of its module: two threads with a database each would break both."""

_OPENING = threading.Lock()
_OPEN = Counter[tuple[int, int] | None]()
"""How many Databases of this process have each SQLite file open. The system's locks on a file belong to the process,
and are gone as soon as it closes the file once: SQLite knows this of its own connections, but not of others. Without
them, the next process that closes the database takes itself for the last one, and deletes the log."""

HERE = Path(__file__).parent

# An SQLite file begins with these bytes; an empty file becomes an SQLite file.
_SQLITE = b"SQLite format 3\0"

# SQLite's write-ahead log needs memory that processes share, which these file systems do not have.
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "afs", "ceph", "lustre", "glusterfs", "fuse.sshfs", "fuse.glusterfs")


Record = dict[str, Any]
"""A row, by column names."""


class DatabaseError(Exception):
    """The database can't be used. `str(error)` is one sentence, without the password."""


class InUse(DatabaseError):
    """Another console has claimed the SQLite file."""


class NotThere(DatabaseError):
    """The PostgreSQL server can't be reached, or is starting or ending: a little later it may be there."""


class WriteFenced(SQLAlchemyError):
    """A write of a console that does not lead, or no longer leads. Nothing of it has been stored."""


class FileGone(SQLAlchemyError):
    """The SQLite file is gone, or another file has its name. Nothing has been stored. `str(error)` says which file."""


class LogGone(FileGone):
    """The file is there, but its log (`-wal`), which has what was stored last, is gone, or another one has its name."""


class Database:
    """One database. Thread-safe.

    url: `sqlite:///path/to/file.db` or `postgresql://user:password@host/name`. me: the name of the console whose
    connections these are. term: the one in which the console leads; once there is a later term, its writes raise
    WriteFenced and call `on_fenced`. None: writes are not checked. make: create an SQLite file that does not exist.
    patience: seconds that a write waits for another process that writes the same SQLite file.
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
        # SQLite has one writer at a time; to wait for this lock is fairer and quicker than SQLite's own polling.
        self._writer = threading.Lock()
        self.patience = PATIENCE_SECONDS
        self._closed = False
        self._held = False  # has the last write waited in vain for another process?
        self._lead: IO[str] | None = None
        # Of a database that leads: a connection that stays open, so that SQLite keeps its log; and which file this is.
        self._keeper: Connection | None = None
        self._log: tuple[int, int] | None = None
        if self.is_sqlite:
            with _OPENING:
                self._path = _sqlite_path(self.url, make=make)
                self._file = _identity(self._path)
                _OPEN[self._file] += 1
            self.url = self.url.set(database=str(self._path))  # people see in which folder it is
            # mode=rw: SQLite must not create a new file in the place of one that is gone.
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
        """Claims an SQLite file for this process until `close`, so that no second console decides as well.

        From then on `check_file` knows the file's log, too. Raises InUse when another console has it,
        DatabaseError when it can't be read or locked. On PostgreSQL, consoles decide by LeaderSession who leads.
        """
        assert self.is_sqlite
        claim = _claim(self._path)
        handle: IO[str] | None = None
        try:
            handle = claim.open("w")  # `close` closes it
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if handle is not None:
                handle.close()
            if isinstance(error, BlockingIOError):
                raise InUse(
                    f"database {self.shown_url} is in use by another console; stop that one, or name another database"
                ) from None
            raise DatabaseError(f"{claim} can't be locked: {error.strerror or error}") from None
        self._lead = handle
        with explained(self.shown_url), self._alone():
            self._keeper = self.engine.connect()
            self._keeper.detach()  # closed at the end, not returned to the pool
            self._keeper.execute(text("select 1 from sqlite_master"))
            self._keeper.rollback()
        self._log = _identity(_log(self._path))

    def upgrade(self) -> None:
        """Creates the tables in an empty database. Processes that start together take turns. Raises DatabaseError,
        also where the tables are of another version of the program: rows would lack what one of the two needs."""
        # Importing alembic takes 0.15 CPU seconds, which child processes that only read need not spend.
        from alembic import command
        from alembic.migration import MigrationContext
        from alembic.util import CommandError

        with explained(self.shown_url), self._alone(), _MIGRATING, self._writing() as connection:
            there = inspect(connection).get_table_names()
            taken = [table for table in there if table in Base.metadata.tables]
            if taken and not MigrationContext.configure(connection).get_current_heads():
                raise DatabaseError(
                    f"database {self.shown_url} has tables that this program has ({words.names(taken)}), and no entry "
                    "in alembic_version that says which version made them: another program uses it, or it is a copy "
                    "that is not whole; name another database (--database-url or DATABASE_URL)"
                )
            try:
                command.upgrade(alembic_config(connection), "head")
                known = _has_our_columns(connection)
            except CommandError:  # of a revision that there is not
                known = False
            if not known:
                raise DatabaseError(
                    f"database {self.shown_url} was used by another version of this program, whose tables this one "
                    "does not know: run that version, or name another database (--database-url or DATABASE_URL)"
                )

    def check_file(self) -> None:
        """Raises FileGone where SQLite's file is not the one that was opened, LogGone where its log is not. What is
        written to an unlinked file is lost with this process, and a new connection would create or read another."""
        if self.is_sqlite and _identity(self._path) != self._file:
            raise FileGone(f"{self._path} was moved, deleted or replaced")
        if self._log is not None and _identity(_log(self._path)) != self._log:
            raise LogGone(f"{_log(self._path)} was moved, deleted or replaced")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets one process at a time upgrade. SQLite does not wait for its lock while a new file changes to WAL."""
        if not self.is_sqlite:
            # A session of its own: the lock becomes free when it ends.
            with self.engine.connect() as made:
                connection = made.execution_options(isolation_level="AUTOCOMMIT")
                connection.detach()  # closed at the end, not returned to the pool
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
        """Returns the first row; None if there is none."""
        with self.read() as session:
            found = session.execute(query).mappings().first()
            return None if found is None else dict(found)

    def scalar(self, query: Executable) -> Any:
        """Returns the first column of the first row; None if there is none."""
        with self.read() as session:
            return session.scalar(query)

    def scalars(self, query: Executable) -> list[Any]:
        """Returns the first column of every row."""
        with self.read() as session:
            return list(session.scalars(query))

    @contextmanager
    def write(self, *, lasting: bool = True) -> Iterator[Session]:
        """Commits at the end, rolls back on an exception. lasting: what is committed survives a loss of power; if
        False, SQLite does not wait for the disk, and the last moments may be lost."""
        with self._writing(lasting) as connection, Session(connection) as session:
            yield session
            session.flush()

    def write_audit(self, session: Session, line: Mapping[str, Any]) -> None:
        """Adds a line to the audit log. This must be the last action of a transaction: others that add a line wait for
        its end. So lines become visible in the order of their ids, and a reader that goes on after an id misses
        none."""
        if not self.is_sqlite:  # SQLite has one writer anyway
            session.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _AUDIT_LOCK})
        session.execute(insert(AuditRow).values(dict(line)))

    def insert_new(self, model: type[Base]) -> Any:
        """Makes an INSERT that leaves an existing row as it is."""
        assert isinstance(model.__table__, Table)
        dialect = sqlite if self.is_sqlite else postgresql
        return dialect.insert(model.__table__).on_conflict_do_nothing()

    def close(self) -> None:
        self._lead_no_more()
        self.engine.dispose()
        if self.is_sqlite and not self._closed:
            self._closed = True
            with _OPENING:
                _OPEN[self._file] -= 1

    def _lead_no_more(self) -> None:
        self._log = None
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
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
        """Begins a writing transaction on an SQLite file once no other process writes. Raises FileGone."""
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
        """Locks the leadership row until the transaction ends: a new leader waits for it before it leads."""
        if self._term is None:
            return
        held = text("select 1 from leadership where id = 1 and term = :term for key share")
        if connection.scalar(held, {"term": self._term}) is None:
            self._on_fenced()
            raise WriteFenced("this console does not lead")


def _has_our_columns(connection: Connection) -> bool:
    """Do the tables have the columns of the models, and no others?"""
    tables = inspect(connection).get_multi_columns(filter_names=list(Base.metadata.tables))
    found = {name: {(one["name"], one["nullable"]) for one in columns} for (_, name), columns in tables.items()}
    ours = Base.metadata.tables.items()
    return found == {name: {(one.name, one.nullable) for one in table.columns} for name, table in ours}


# Words of libpq and of the server, names in quotes left out: when a connection fails, psycopg gives no code.
_NOT_THERE = re.compile(
    "Connection (refused|reset|timed out)|socket *failed: No such file or directory|No route to host|timeout expired|"
    "Temporary failure in name resolution|Name or service not known|could not translate host name|"
    "closed the connection|starting up|shutting down|recovery|"
    "not yet accepting connections|too many clients|remaining connection slots"
)


@contextmanager
def explained(shown_url: str) -> Iterator[None]:
    """Turns errors of the database into a DatabaseError."""
    try:
        yield
    except DBAPIError as error:
        first = str(error.orig).strip().splitlines()[0]
        kind = NotThere if _NOT_THERE.search(re.sub('"[^"]*"', "", first)) else DatabaseError
        raise kind(f"database {shown_url} can't be used: {first}") from None
    except SQLAlchemyError as error:
        raise DatabaseError(f"database {shown_url} can't be used: {error}") from None


def application_name(me: str) -> str:
    """Return the name under which PostgreSQL lists the connections of the console `me`."""
    return f"openrecycle {me}".strip()


def connect_arguments(url: URL, me: str) -> dict[str, Any]:
    """Return arguments for psycopg, so that a lost server is noticed in seconds. Values in `url` take precedence."""
    ours = {
        "application_name": application_name(me),
        "connect_timeout": _CONNECT_SECONDS,
        "keepalives_idle": 2,
        "keepalives_interval": 1,
        "keepalives_count": 3,
        "tcp_user_timeout": _UNANSWERED_SECONDS * 1000,
    }
    # Consoles find each other's connections by this name, so a user can't choose it.
    return {key: value for key, value in ours.items() if key not in url.query or key == "application_name"}


def alembic_config(connection: Connection) -> Config:
    """Return Alembic's configuration; migrations run on `connection`, inside its transaction."""
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
        # The text may hold a password, so the error does not repeat it.
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
    except UnicodeEncodeError:  # a URL can't hold such a name
        raise DatabaseError(f"--database-url: got the file {str(path)!r}, expected a name in UTF-8") from None
    newest = _log(path)
    # If the file is gone or empty, SQLite deletes its log; a running console may have the log open.
    if _size(newest) and not _size(path):
        raise DatabaseError(
            f"database file {path} is not there, or empty, and {newest} has what was stored last: "
            "put the file back, or delete that one too"
        )
    # The console that has the deleted log open would copy old pages over what a second log has. SQLite makes the log
    # before its index, and deletes it after that.
    index = Path(f"{path.resolve()}-shm")
    if _size(path) and not newest.exists() and index.exists() and _is_led(path) and not newest.exists():
        raise DatabaseError(
            f"{newest}, which has what was stored last in database {path}, was moved, deleted or replaced under a "
            "console that runs: put it back, or stop the console with Ctrl-C"
        )
    if not make and not path.exists():
        raise DatabaseError(f"database file {path} is not there, expected the one that `openrecycle serve` uses")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        special = path.exists() and not path.is_file() and not path.is_dir()  # a device, or a pipe, which never opens
        begins = _SQLITE  # of a file that is open here already
        # Finds out the reason before SQLite says only "unable to open database file".
        if not special and ((there := _identity(path)) is None or not _OPEN[there]):
            with path.open("a+b") as file:
                file.seek(0)
                begins = file.read(len(_SQLITE))
    except OSError as error:
        raise DatabaseError(f"database file {path} can't be written: {error.strerror or error}") from None
    # Checked before anything is written beside the file.
    if special or begins not in (b"", _SQLITE):
        raise DatabaseError(f"database file {path} can't be used: file is not a database")
    kind = file_system(path)
    if kind.startswith(_NETWORK_FILE_SYSTEMS):
        raise DatabaseError(
            f"database file {path} is on a network file system ({kind}), which SQLite does not bear; "
            "name a file on a local disk, or a PostgreSQL database"
        )
    return path


def _log(path: Path) -> Path:
    """Return where SQLite has the log of the database `path`: beside the file that a link points to."""
    return Path(f"{path.resolve()}-wal")


def _is_led(path: Path) -> bool:
    """Has a console claimed the file?"""
    try:
        with _claim(path).open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _claim(path: Path) -> Path:
    """Return the file that the console that leads keeps locked."""
    return Path(f"{path}.lock")


def _size(path: Path) -> int:
    """Return the size in bytes; 0 if there is no such file, or it can't be seen."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file with this name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of the file system that `path` is on; empty where that is not known."""
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
            # With WAL, FULL means one more wait for the disk in each transaction: 8 ms on a slow disk.
            connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if options['lasting'] else 'NORMAL'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("immediate") else "BEGIN")


def _busy(seconds: float) -> str:
    return f"PRAGMA busy_timeout={round(1000 * seconds)}"


# -- which console leads, of several on one PostgreSQL database ---------------------------------

# An arbitrary number, so that our lock doesn't meet those of other users of the database.
_LOCK = 0x0C1E_0002

STATEMENT_SECONDS = 4.0
"""The longest time for one statement before the database counts as not answering."""
WRITERS_SECONDS = 2.0
"""How long a new leader waits for transactions of the one before, which it has ended by then."""

_NOW = "extract(epoch from clock_timestamp())"


@dataclass(frozen=True)
class Lease:
    """The leadership row in the database.

    term: number of leaderships so far. holder: the console that leads, "" after it has resigned; address: where it is
    reached. renewed: when it was renewed last, by the database's clock; since that may be set, it is compared only with
    other values of itself. age: seconds for which the reader has seen `renewed` unchanged.
    """

    term: int
    holder: str
    address: str
    age: float = 0.0
    renewed: float = 0.0


class LeaderSession:
    """One console's session with the database, for leadership alone. Not thread-safe.

    me: the name of this process; no two have the same. Every method raises SQLAlchemyError when the database does not
    answer. The session, and a lock that it held, may be gone then: close it. Opening it raises DatabaseError.
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
        """Takes the lock if it is free, and keeps it until `close`. Returns whether it has the lock."""
        with self._connection.begin():
            return bool(self._connection.scalar(text("select pg_try_advisory_lock(:key)"), {"key": _LOCK}))

    def lease(self) -> Lease | None:
        """Reads the lease; None in a database that has no tables yet."""
        with self._connection.begin():
            if self._connection.scalar(text("select to_regclass('leadership')")) is None:
                return None
            row = self._connection.execute(
                text("select term, holder, address, renewed_at from leadership where id = 1")
            ).one()
        return Lease(row[0], row[1], row[2], renewed=float(row[3]))

    def claim(self, address: str) -> int:
        """Begins a new term in which this console leads, and returns it. Call this with the lock held.

        After it returns, no other console can write to the database any more.
        """
        with self._connection.begin():
            self._connection.execute(text(f"set local lock_timeout = {round(WRITERS_SECONDS * 1000)}"))
            # Writing transactions share a lock on this row until they end, so this waits for them.
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
        """Renews the lease. Returns False when another console has a later term."""
        with self._connection.begin():
            done = self._connection.execute(
                text(f"update leadership set renewed_at = {_NOW} where id = 1 and term = :term and holder = :me"),
                {"term": term, "me": self._me},
            )
            return done.rowcount == 1

    def resign(self, term: int) -> None:
        """Records that nobody leads; the lock is released by `close`."""
        with self._connection.begin():
            self._connection.execute(
                text("update leadership set holder = '' where id = 1 and term = :term and holder = :me"),
                {"term": term, "me": self._me},
            )

    def evict(self, holder: str, renewed: float | None) -> int:
        """Ends every session of the console `holder`, if it still leads and has not renewed its lease since
        `renewed` (None: even if it has). Returns how many were ended. Their transactions are rolled back, and the lock
        becomes free."""
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
        """Closes the session, and so releases the lock."""
        with suppress(SQLAlchemyError):
            self._connection.close()

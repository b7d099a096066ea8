"""Opens a database: SQLite in a file (WAL) or PostgreSQL; brings its tables up to date.

`Database.write()` is a transaction that may read and then write: on SQLite it takes the write lock
at its start, so that it can't fail half way because another writer came first.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from db.models import Base

# Any two numbers, so that our advisory locks don't meet those of other users of the database.
_MIGRATION_LOCK = 0x0C1E_0001
_LEADER_LOCK = 0x0C1E_0002

HERE = Path(__file__).parent

# SQLite's write-ahead log needs memory shared between processes, which these do not have.
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "afs", "ceph", "lustre", "glusterfs", "fuse.sshfs", "fuse.glusterfs")


class DatabaseError(Exception):
    """The database can't be used. `str(error)` is one sentence, without the password."""


class Database:
    """One database. Thread-safe.

    url: `sqlite:///path/to/file.db` or `postgresql://user:password@host/name`.
    Raises DatabaseError when it can't be opened.
    """

    def __init__(self, url: str) -> None:
        self.url = _parse(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        # SQLite has one writer; waiting here is fairer and quicker than its own polling.
        self._writer = threading.Lock()
        self._lease: IO[str] | Connection | None = None
        if self.is_sqlite:
            self._path = _sqlite_path(self.url)
            self.engine = create_engine(self.url, connect_args={"timeout": 5.0}, pool_size=16, max_overflow=16)
            _prepare_sqlite(self.engine)
        else:
            self.engine = create_engine(self.url, pool_pre_ping=True, pool_size=8, max_overflow=8)

    @property
    def shown_url(self) -> str:
        """The address without the password."""
        return self.url.render_as_string(hide_password=True)

    def lead(self) -> None:
        """Claims the database for this process until `close`: two consoles would decide twice.

        Raises DatabaseError when another console has it.
        """
        taken = f"database {self.shown_url} is in use by another console; stop that one, or name another database"
        if self.is_sqlite:
            handle = Path(f"{self._path}.lock").open("w")  # noqa: SIM115 (held until close)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                handle.close()
                raise DatabaseError(taken) from None
            self._lease = handle
            return
        with self._explained():
            connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            if not connection.scalar(text("select pg_try_advisory_lock(:key)"), {"key": _LEADER_LOCK}):
                connection.close()
                raise DatabaseError(taken)
        self._lease = connection

    def upgrade(self) -> None:
        """Brings the tables to this version of the program. Processes that start together take turns."""
        with self._explained(), self._alone(), self._writing() as connection:
            if not self.is_sqlite:
                connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            command.upgrade(alembic_config(connection), "head")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """SQLite does not wait for its lock while a new file changes to WAL: whoever comes second waits here."""
        if not self.is_sqlite:
            yield
            return
        with Path(f"{self._path}.upgrade").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextmanager
    def read(self) -> Iterator[Session]:
        with Session(self.engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Commits at the end, rolls back on an exception."""
        with self._writing() as connection, Session(connection) as session:
            yield session
            session.flush()

    def insert_new(self, model: type[Base]) -> Any:
        """INSERT that leaves a row alone which is there already."""
        assert isinstance(model.__table__, Table)
        dialect = sqlite if self.is_sqlite else postgresql
        return dialect.insert(model.__table__).on_conflict_do_nothing()

    def close(self) -> None:
        if self._lease is not None:
            if isinstance(self._lease, Connection):
                # The server drops a closed connection's lock in its own time; a successor may be waiting.
                with suppress(SQLAlchemyError):
                    self._lease.execute(text("select pg_advisory_unlock(:key)"), {"key": _LEADER_LOCK})
            self._lease.close()
            self._lease = None
        self.engine.dispose()

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if not self.is_sqlite:
            with self.engine.begin() as connection:
                yield connection
            return
        with self._writer, self.engine.connect() as connection:
            connection = connection.execution_options(immediate=True)
            with connection.begin():
                yield connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            first = str(error.orig).strip().splitlines()[0]
            raise DatabaseError(f"database {self.shown_url} can't be used: {first}") from None
        except SQLAlchemyError as error:
            raise DatabaseError(f"database {self.shown_url} can't be used: {error}") from None


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration; migrations run on `connection`, inside its transaction."""
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


def _sqlite_path(url: URL) -> Path:
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise DatabaseError("--database-url: got an SQLite database in memory, expected sqlite:///path/to/file.db")
    path = Path(url.database).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Tells "not allowed" from other troubles before SQLite's own "unable to open database file".
        with path.open("ab"):
            pass
    except OSError as error:
        raise DatabaseError(f"database file {path} can't be written: {error.strerror or error}") from None
    kind = file_system(path)
    if kind.startswith(_NETWORK_FILE_SYSTEMS):
        raise DatabaseError(
            f"database file {path} is on a network file system ({kind}), which SQLite does not bear; "
            "name a file on a local disk, or a PostgreSQL database"
        )
    return path


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
        cursor.execute("PRAGMA busy_timeout=5000")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        immediate = connection.get_execution_options().get("immediate")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

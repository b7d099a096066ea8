from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import URL, event, text
from sqlalchemy.exc import OperationalError

from openrecycle.db.session import Database, DatabaseError, FileGone, InUse, LogGone, NotThere, explained, file_system
from tests.databases import sqlite_in
from tests.golden import golden


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://u:secret@h/d", "got a mysql database, expected sqlite:///"),
        ("sqlite://", "in memory, expected sqlite:///path/to/file.db"),
        ("sqlite:///:memory:", "in memory"),
        ("no address, secret", golden("cant-be-read-as-an")),
        ("sqlite:////dev/null/x.db", golden("cant-be-written")),
        ("sqlite:////tmp/\udcff.db", golden("expected-a-name-in-utf-8")),
    ],
)
def test_an_address_that_is_none_is_refused_without_repeating_secrets(url: str, says: str) -> None:
    with pytest.raises(DatabaseError) as error:
        Database(url)
    assert says in str(error.value)
    assert "secret" not in str(error.value)


def test_a_server_that_is_not_there_is_one_sentence_without_the_password() -> None:
    database = Database("postgresql://user:secret@127.0.0.1:1/none")
    with pytest.raises(DatabaseError) as error:
        database.upgrade()
    assert golden("cant-be-used") in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("this is not a database, whatever its name says\n" * 100)
    with pytest.raises(DatabaseError, match=golden("cant-be-used-file-is")):
        Database(f"sqlite:///{path}").upgrade()


@pytest.mark.parametrize("kind", ["text", "device", "pipe"])
def test_beside_a_file_that_is_no_database_nothing_is_written(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    if kind == "text":
        path.write_text("notes")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(DatabaseError, match=golden("cant-be-used-file-is")):
        Database(f"sqlite:///{path}").lead()
    assert [*tmp_path.iterdir()] == [path] and (kind != "text" or path.read_text() == "notes")


@pytest.mark.parametrize("name", ["a b%20#?é.db", "/console.db"])
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    """And two slashes before it, as `sqlite:////$PWD/x.db` has."""
    file = f"/{tmp_path}{name}" if name[0] == "/" else f"{tmp_path}/{name}"
    database = Database(URL.create("sqlite", database=file).render_as_string())
    with database.write() as session:
        session.execute(text("create table made (x)"))
    database.close()
    other = sqlite3.connect(file)
    assert other.execute("select count(*) from made").fetchone() == (0,)
    other.close()


@pytest.mark.processes
def test_a_second_database_of_a_process_leaves_the_first_its_locks(tmp_path: Path) -> None:
    """Else another program that closes the file takes itself for the last one, and deletes the log."""
    database = sqlite_in(tmp_path)
    database.lead()
    Database(f"sqlite:///{tmp_path / 'console.db'}").close()
    program = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('select * from sqlite_master'); c.close()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "console.db")], check=True)
    database.check_file()
    database.close()


def test_why_a_file_can_not_be_led_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database, other = sqlite_in(tmp_path), Database(f"sqlite:///{tmp_path / 'console.db'}")
    database.lead()
    with pytest.raises(InUse):
        other.lead()
    database.close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", full)
    with pytest.raises(DatabaseError) as refused:
        other.lead()
    assert not isinstance(refused.value, InUse)
    other.close()


# What libpq and a server say, and whether it may be better a little later.
SAID = {
    "FATAL:  the database system is in recovery mode": True,
    'server on socket "/run/.s.PGSQL.5432" failed: No such file or directory': True,
    "[Errno -2] Name or service not known": True,
    'could not translate host name "db" to address: Name or service not known': True,
    'FATAL:  database "recovery" does not exist': False,
    'could not open certificate file "/etc/ca.pem": No such file or directory': False,
}


@pytest.mark.parametrize(("said", "later"), SAID.items())
def test_a_server_that_is_not_there_yet_is_told_from_a_mistake(said: str, later: bool) -> None:
    with pytest.raises(DatabaseError) as refused, explained("the address"):
        raise OperationalError("", {}, Exception(f"connection failed: {said}"))
    assert isinstance(refused.value, NotThere) is later


def test_sqlite_keeps_a_write_ahead_log_and_foreign_keys(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'console.db'}")
    with database.engine.connect() as connection:
        pragmas = {
            name: connection.execute(text(f"pragma {name}")).scalar_one()
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 5000}
    database.close()


def test_sqlite_waits_for_the_disk_where_something_has_to_last(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'console.db'}")
    for lasting in (True, False, True):
        with database.write(lasting=lasting) as session:
            assert session.scalar(text("pragma synchronous")) == (2 if lasting else 1)
    with database.write() as session:
        assert session.scalar(text("pragma synchronous")) == 2
    database.close()


def test_a_file_that_another_process_holds_is_waited_for_once(tmp_path: Path) -> None:
    """Dozens may want to write: the last would wait for all before it, each as long as the first."""
    database = sqlite_in(tmp_path)
    other = sqlite3.connect(tmp_path / "console.db", isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")
    database.patience = 0.1
    with pytest.raises(OperationalError, match="locked"), database.write():
        pass
    database.patience = 1000.0
    let_go = threading.Timer(60, other.execute, ("rollback",))
    let_go.start()
    with pytest.raises(OperationalError, match="locked"), database.write():
        pass
    let_go.cancel()
    other.execute("rollback")
    with database.write() as session:
        assert session.scalar(text("pragma busy_timeout")) == 5000, "as what reads has it, too"

    # It is waited for again: the other ends while the write waits for it. A disk that fails before is no other.
    def fail(_connection: object) -> None:
        raise OperationalError("begin", {}, Exception("disk I/O error"))

    event.listen(database.engine, "begin", fail, insert=True)
    with pytest.raises(OperationalError, match="disk"), database.write():
        pass
    event.remove(database.engine, "begin", fail)
    other.execute("begin immediate")
    let_go = threading.Timer(0.2, other.execute, ("rollback",))
    let_go.start()
    with database.write():
        pass
    let_go.join()
    other.close()
    database.close()


def test_nothing_is_written_to_a_file_that_is_not_there_any_more(tmp_path: Path) -> None:
    """It would be gone with this process, and nobody would have been told."""
    file, elsewhere = tmp_path / "console.db", tmp_path / "moved.db"
    database = sqlite_in(tmp_path)
    query = text("select name from job")

    def refused() -> None:
        with pytest.raises(FileGone, match=golden("was-moved-deleted-or-replaced")), database.write():
            pass

    with database.write():
        pass
    file.rename(elsewhere)
    refused()
    assert database.rows(query) == [], "what was stored can be read"
    assert not file.exists()
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("create table job (name)")
    other.execute("insert into job values ('of another')")
    other.commit()
    other.close()
    (tmp_path / "other.db").rename(file)
    refused()
    with database.read() as session:
        assert session.scalars(query).all() == []
        with pytest.raises(FileGone):  # by one more connection
            database.rows(query)
    file.unlink()
    elsewhere.rename(file)
    with database.write():
        pass
    file.rename(elsewhere)
    database.engine.dispose()
    with pytest.raises(FileGone):
        database.rows(query)
    assert not file.exists(), "a new one would have no tables"
    database.close()


def test_nothing_is_written_to_a_log_that_is_not_there_any_more(tmp_path: Path) -> None:
    """`sqlite3` deletes it if the file is away at that moment. What has been written is stored at the console's end."""
    log, elsewhere = tmp_path / "console.db-wal", tmp_path / "moved"
    database = sqlite_in(tmp_path)
    database.lead()
    database.engine.dispose()  # the last of the others may be closed: the log stays
    made = text("create table note (words text)")
    with database.write() as session:
        session.execute(made)
    log.rename(elsewhere)
    with pytest.raises(LogGone), database.write():
        pass
    elsewhere.rename(log)
    with database.write() as session:
        session.execute(text("insert into note values ('kept')"))
    log.unlink()
    with pytest.raises(LogGone), database.write():
        pass
    database.close()
    again = sqlite_in(tmp_path)
    assert again.scalars(text("select words from note")) == ["kept"]
    again.close()


def test_nobody_writes_beside_a_console_whose_log_is_gone(tmp_path: Path) -> None:
    """What a command stored in a log of its own, such as a token, made the file unreadable at the console's end."""
    database = sqlite_in(tmp_path)
    database.lead()
    with database.write() as session:
        session.execute(text("create table note (words text)"))
        session.execute(text("insert into note values ('kept')"))
    with database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")
    (tmp_path / "console.db-wal").unlink()
    with pytest.raises(DatabaseError):
        Database(f"sqlite:///{tmp_path / 'console.db'}")
    database.close()
    (tmp_path / "console.db-shm").touch()  # as after a console that was killed: nobody has it open
    again = sqlite_in(tmp_path)
    assert again.scalars(text("select words from note")) == ["kept"]
    again.close()


@pytest.mark.parametrize("emptied", [False, True])
def test_what_was_stored_last_outlives_a_file_that_is_away(tmp_path: Path, emptied: bool) -> None:
    """A child of the console, or a command beside it, opens the address while the console's file was moved: SQLite
    deletes what lies beside an empty one."""
    file, newest, elsewhere = (tmp_path / name for name in ("console.db", "console.db-wal", "moved.db"))
    database = sqlite_in(tmp_path)
    row = "insert into job (id, name, spec, state, reason, created_at) values ('a', 'a', '{}', 's', '', 0)"
    with database.write() as session:
        session.execute(text(row))
    held = newest.stat().st_size
    file.rename(elsewhere)
    if emptied:
        file.touch()
    link = tmp_path / "link.db"
    link.symlink_to(file)
    for address in (file, link):
        with pytest.raises(DatabaseError, match=golden("has-what-was-stored-last")):
            Database(f"sqlite:///{address}").rows(text("select 1"))
    assert held and newest.stat().st_size == held
    assert file.exists() == emptied
    elsewhere.replace(file)
    again = sqlite_in(tmp_path)
    assert again.scalars(text("select id from job")) == ["a"]
    again.close()
    database.close()


def test_a_failed_transaction_leaves_nothing(database: Database) -> None:
    insert = "insert into job (id, name, spec, state, reason, created_at) values ('a', 'a', '{}', 's', '', 0)"
    with pytest.raises(ZeroDivisionError), database.write() as session:
        session.execute(text(insert))
        raise ZeroDivisionError
    with database.read() as session:
        assert session.execute(text("select count(*) from job")).scalar_one() == 0


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    share = tmp_path / "the share"
    named = str(share).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {named} nfs4 rw 0 0\n")
    assert file_system(share / "console.db", mounts) == "nfs4"
    assert file_system(tmp_path / "console.db", mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "none") == ""
    monkeypatch.setattr("openrecycle.db.session.file_system", lambda path: "nfs4")
    with pytest.raises(DatabaseError, match=golden("on-a-network-file-system")):
        Database(f"sqlite:///{share / 'console.db'}")

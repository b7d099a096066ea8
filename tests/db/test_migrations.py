from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import IntegrityError

from openrecycle.db import later_columns, session
from openrecycle.db.later_columns import FIRST, compared
from openrecycle.db.models import Base, IterationRow
from openrecycle.db.session import Database, DatabaseError, LeaderSession, alembic_config
from openrecycle.db.store import Store
from tests.conftest import new_database
from tests.db.test_job_index import generation
from tests.golden import golden

# Reasons as older versions wrote them, and who was let go of W0_0, W0_1, W0_2 and W1_1, which are out.
OF_BEFORE: dict[str, list[list[object]]] = {
    "W0_0: silent": [],
    "Ann asked W0_1 to leave": [["W0_1", False]],
    "W0_0 re-joins; Ann asked Bob asked W1_0 to leave; Ann asked W0_1 to leave": [["W0_1", False]],
    "stand by; W0_1 is to stand by": [["W0_1", True]],
    "W0_0: silent; W0_1, W1_1 are to stand by; A, B asked W0_2 to leave": [
        ["W0_1", True],
        ["W0_2", False],
        ["W1_1", True],
    ],
    "W0_1, W1_1 and 3 more are to stand by": [["W0_1", True], ["W1_1", True]],
    "W0_1 is to stand by: said Ann": [],
    "it asked W0_1 to leave at once": [],
}


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """One of its own, as tables are changed."""
    database = Database(database_url)
    database.upgrade()
    yield database
    database.close()


def test_the_migrations_make_the_tables_of_the_models(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_an_upgrade_of_an_up_to_date_database_changes_nothing(database: Database) -> None:
    before = inspect(database.engine).get_table_names()
    database.upgrade()
    assert inspect(database.engine).get_table_names() == before


def test_a_column_that_came_later_has_its_default_in_rows_of_before(database: Database) -> None:
    store = Store(database)
    store.create_job("j", name="j", spec="{}", state="running", created_at=0.0, workers=[])
    store.apply("j", generation(1, ["W0_0"]))
    with database.engine.begin() as connection:
        connection.execute(text("alter table generation drop column let_go"))
    database.upgrade()
    assert [(row["living"], row["let_go"]) for row in store.generations("j")] == [(["W0_0"], [])]
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_a_column_that_may_be_empty_by_now_may_be_in_a_table_of_before(database: Database) -> None:
    store = Store(database)
    store.create_job("j", name="j", spec="{}", state="running", created_at=0.0, workers=[])
    row = {"loss": 0.5, "loss_hex": (0.5).hex(), "seconds": 1.0, "generation": 1, "living": 4, "committed_at": 3.0}
    store.add_iterations("j", [{"iteration": 0, **row}])
    with database.engine.begin() as connection:
        before = Operations(MigrationContext.configure(connection))
        with before.batch_alter_table("iteration", copy_from=IterationRow.__table__) as table:
            table.alter_column("loss", nullable=False)
    lost = {"iteration": 1, **row, "loss": None, "loss_hex": "nan"}
    with pytest.raises(IntegrityError):
        store.add_iterations("j", [lost])
    with database.engine.begin() as connection:
        connection.execute(text("alter table iteration drop column skipped"))
    database.upgrade()
    store.add_iterations("j", [lost])
    assert [found["loss"] for found in store.iterations("j")] == [0.5, None]
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_who_was_let_go_is_filled_in_once_from_the_reason(database: Database) -> None:
    store = Store(database)
    store.create_job("j", name="j", spec="{}", state="running", created_at=0.0, workers=[])
    for number, reason in enumerate(OF_BEFORE, 1):
        update = generation(number, ["W1_0"])
        assert update.generation is not None
        update.generation.update(reason=reason, failed=["W0_0", "W0_1", "W0_2", "W1_1"])
        store.apply("j", update)
    with database.engine.begin() as connection:
        connection.execute(text("alter table generation drop column let_go"))
    database.upgrade()
    assert {row["reason"]: row["let_go"] for row in store.all_generations("j")} == OF_BEFORE
    with database.engine.begin() as connection:
        connection.execute(text("update generation set let_go = '[]'"))
    database.upgrade()
    assert not any(row["let_go"] for row in store.all_generations("j")), "the reason is read no more"


def test_a_table_that_is_not_there_is_not_asked_for_its_columns(database_url: str) -> None:
    """As of an empty database, which a developer asks for its revision."""
    database = Database(database_url)
    with database.engine.begin() as connection:
        command.current(alembic_config(connection))
        assert compared(connection) == ([], False)
    assert "generation" not in inspect(database.engine).get_table_names()
    database.close()


def test_once_there_is_a_second_migration_it_says_what_columns_there_are(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "second.py").write_text(f'revision, down_revision = "second", "{FIRST}"\ndef upgrade() -> None: ...\n')

    def config(connection: Connection) -> Config:
        made = alembic_config(connection)
        made.set_main_option("version_locations", f"{session.HERE / 'migrations' / 'versions'}:{tmp_path}")
        return made

    monkeypatch.setattr(session, "alembic_config", config)
    with database.engine.begin() as connection:
        connection.execute(text("alter table generation drop column let_go"))
    database.upgrade()
    assert "let_go" not in columns(database, "generation")
    with database.engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == "second"


def test_nobody_waits_for_long_behind_a_column_that_waits_for_a_reader(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a backup is made. Each try that has to wait gives up, and the last one is told."""
    url = new_database(postgres_url)
    database, other = Database(url), Database(url)
    database.upgrade()
    with database.engine.begin() as connection:
        connection.execute(text("alter table generation drop column let_go"))
    monkeypatch.setattr(later_columns, "LOCK_SECONDS", 0.05)
    tries: list[float] = []

    def between(seconds: float) -> None:
        tries.append(seconds)
        with other.engine.begin() as connection:  # who has come meanwhile gets its turn
            connection.execute(text("set local lock_timeout = 1"))
            connection.execute(text("select count(*) from generation"))
        if len(tries) == enough:
            reader.rollback()

    monkeypatch.setattr(session.time, "sleep", between)
    with other.engine.connect() as reader:
        enough = -1
        reader.execute(text("select count(*) from generation"))
        with pytest.raises(DatabaseError):
            database.upgrade()
        assert len(tries) > 1
        enough = len(tries) + 1
        database.upgrade()
    assert "let_go" in columns(database, "generation")
    database.close()
    other.close()


@contextmanager
def leading(url: str) -> Iterator[Database]:
    """A console, as far as the database knows of it."""
    with ExitStack() as stack:
        term: int | None = None
        if url.startswith("postgresql"):
            idle = Database(url)
            stack.callback(idle.close)
            session = LeaderSession(idle, "leads")
            stack.callback(session.close)
            assert session.try_lock()
            term = session.claim("")
        database = Database(url, term=term)
        stack.callback(database.close)
        if database.is_sqlite:
            database.lead()
        yield database


def test_no_table_changes_under_a_console_that_does_not_know_of_it(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever fill what it writes. Another console that leads changes them."""
    monkeypatch.setattr(session.time, "sleep", lambda seconds: None)
    with database.engine.begin() as connection:
        connection.execute(text("alter table generation drop column lost"))
    with leading(database_url) as console:
        with pytest.raises(DatabaseError):
            database.upgrade()
        assert "lost" not in columns(database, "generation")
        console.upgrade()
        assert "lost" in columns(database, "generation")
        database.upgrade()
    with database.engine.begin() as connection:
        connection.execute(text("alter table generation drop column lost"))
    database.upgrade()
    with leading(database_url):
        assert "lost" in columns(database, "generation"), "and nothing is kept from whoever leads next"


def test_a_console_can_start_while_a_command_fills_new_columns(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits with its own upgrade until that is done."""
    with database.engine.begin() as connection:
        connection.execute(text("alter table generation drop column lost"))
    done, fill = list[str](), later_columns.fill

    def filling(*given: Any) -> None:
        with leading(database_url):
            done.append("leads")
        fill(*given)

    monkeypatch.setattr(later_columns, "fill", filling)
    database.upgrade()
    assert done == ["leads"] and "lost" in columns(database, "generation")


def test_a_command_waits_for_a_console_that_is_about_to_add_columns(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the same version, which leads already."""
    with database.engine.begin() as connection:
        connection.execute(text("alter table generation drop column lost"))
    with leading(database_url) as console:
        monkeypatch.setattr(session.time, "sleep", lambda seconds: console.upgrade())
        database.upgrade()
    assert "lost" in columns(database, "generation")


def test_a_look_whether_a_console_runs_keeps_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite it has the lock for a moment."""
    looks, console = (Database(f"sqlite:///{tmp_path / 'console.db'}") for _ in range(2))
    looks.lead()
    monkeypatch.setattr(session.time, "sleep", lambda seconds: looks.close())
    console.lead()
    with pytest.raises(DatabaseError):
        looks.lead()
    console.close()


def test_a_database_with_columns_of_a_newer_version_is_refused(database: Database) -> None:
    """What this one writes would be without them."""
    with database.engine.begin() as connection:
        connection.execute(text("alter table generation add column newer text default ''"))
        connection.execute(text("alter table generation drop column lost"))
    with pytest.raises(DatabaseError):
        database.upgrade()
    assert "lost" not in columns(database, "generation")


def columns(database: Database, table: str) -> set[str]:
    return {column["name"] for column in inspect(database.engine).get_columns(table)}


def test_a_table_of_somebody_else_is_left_to_them(database_url: str) -> None:
    database = Database(database_url)
    with database.engine.begin() as connection:
        connection.execute(text("create table job (id integer primary key, title varchar(9))"))
    with pytest.raises(DatabaseError):
        database.upgrade()
    with database.engine.connect() as connection:
        connection.execute(text("select title from job"))
    database.close()


def _upgrade_together(databases: Sequence[Database]) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(len(databases))

    def upgrade(database: Database) -> None:
        start.wait()
        try:
            database.upgrade()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=upgrade, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_threads_that_each_have_a_database_do_not_disturb_each_other(tmp_path: Path) -> None:
    databases = [Database(f"sqlite:///{tmp_path / f'{number}.db'}") for number in range(8)]
    _upgrade_together(databases)
    for database in databases:
        database.close()


@pytest.mark.parametrize("old", [False, True])
def test_processes_that_start_together_take_turns(database_url: str, old: bool) -> None:
    databases = [Database(database_url) for _ in range(4)]
    if old:
        databases[0].upgrade()
        with databases[0].engine.begin() as connection:
            connection.execute(text("alter table generation drop column let_go"))
    _upgrade_together(databases)
    with databases[0].engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    for database in databases:
        database.close()


def test_one_console_at_a_time_has_an_sqlite_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'console.db'}"
    first, second = Database(url), Database(url)
    first.lead()
    with pytest.raises(DatabaseError, match=golden("in-use-by-another-console")):
        second.lead()
    first.close()
    second.lead()
    second.close()

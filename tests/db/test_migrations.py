from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import inspect, text

from openrecycle.db.models import Base, IterationRow
from openrecycle.db.session import Database, DatabaseError
from tests.golden import golden


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


@pytest.mark.parametrize(
    "change",
    [
        "alter table generation add column newer text default ''",
        "alter table generation drop column lost",
        "drop table measured_iteration",
        "update alembic_version set version_num = '9999'",
    ],
)
def test_a_database_of_another_version_is_refused_as_it_is(database: Database, change: str) -> None:
    """Rows would lack what one of the two needs."""
    with database.engine.begin() as connection:
        connection.execute(text(change))
    before = tables(database)
    with pytest.raises(DatabaseError, match=golden("database-of-another-version")):
        database.upgrade()
    assert tables(database) == before


def test_a_column_that_was_never_empty_is_of_another_version(database: Database) -> None:
    with database.engine.begin() as connection:
        change = Operations(MigrationContext.configure(connection))
        with change.batch_alter_table("iteration", copy_from=IterationRow.__table__) as table:
            table.alter_column("loss", nullable=False)
    with pytest.raises(DatabaseError, match=golden("database-of-another-version")):
        database.upgrade()


def tables(database: Database) -> dict[str, set[str]]:
    """The columns of each table."""
    found = inspect(database.engine)
    return {name: {column["name"] for column in found.get_columns(name)} for name in found.get_table_names()}


def test_a_table_of_somebody_else_is_left_to_them(database_url: str) -> None:
    database = Database(database_url)
    with database.engine.begin() as connection:
        connection.execute(text("create table job (id integer primary key, title varchar(9))"))
    with pytest.raises(DatabaseError, match=golden("tables-of-no-version", "job")):
        database.upgrade()
    with database.engine.connect() as connection:
        connection.execute(text("select title from job"))
    database.close()


@pytest.mark.parametrize("change", ["drop table alembic_version", "delete from alembic_version"])
def test_a_copy_that_does_not_say_its_version_is_refused_as_it_is(database: Database, change: str) -> None:
    """It was refused with what the database says to a table that is there twice."""
    with database.engine.begin() as connection:
        connection.execute(text(change))
    before = tables(database)
    with pytest.raises(DatabaseError, match=golden("tables-of-no-version", ".*")):
        database.upgrade()
    assert tables(database) == before


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


def test_processes_that_start_together_take_turns(database_url: str) -> None:
    databases = [Database(database_url) for _ in range(4)]
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

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from openrecycle.db.models import Base
from openrecycle.db.session import Database, DatabaseError
from openrecycle.db.store import Store
from tests.db.test_job_index import generation
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


def test_a_table_of_somebody_else_is_left_to_them(database_url: str) -> None:
    database = Database(database_url)
    with database.engine.begin() as connection:
        connection.execute(text("create table job (id integer primary key, title varchar(9))"))
    with pytest.raises(DatabaseError):
        database.upgrade()
    with database.engine.connect() as connection:
        connection.execute(text("select title from job"))
    database.close()


def test_processes_that_start_together_take_turns(database_url: str) -> None:
    databases = [Database(database_url) for _ in range(4)]
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
    assert set(Base.metadata.tables) <= set(inspect(databases[0].engine).get_table_names())
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

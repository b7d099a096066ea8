from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from openrecycle.db.models import Base
from openrecycle.db.session import Database, DatabaseError, alembic_config
from openrecycle.db.store import JobUpdate, Store
from tests.db.test_store import generation, make_job
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


def test_every_migration_can_be_taken_back(database: Database) -> None:
    with database.write() as session:
        command.downgrade(alembic_config(session.connection()), "base")
    assert set(inspect(database.engine).get_table_names()) <= {"alembic_version"}
    database.upgrade()
    assert "job" in inspect(database.engine).get_table_names()


@pytest.mark.parametrize("revision", ["release_1", "release_2"])
def test_a_database_of_before_the_first_release_is_taken_over_with_its_jobs(revision: str, database: Database) -> None:
    store = Store(database)
    make_job(store)
    store.apply("job", JobUpdate(job={"choice_timeout": 7.5}, plan=("f", "{}", [], False), generation=generation(1)))
    with database.write() as session:
        session.execute(text("alter table job rename column choice_timeout to patience"))
        lacks = ["job.lead_term", "job.lead_node"]
        lacks += ["generation.partition", "generation.moved_at"] if revision == "release_1" else []
        for table, _, column in (name.partition(".") for name in lacks):
            session.execute(text(f"alter table {table} drop column {column}"))
        session.execute(text(f"update alembic_version set version_num = '{revision}'"))
    for _ in range(2):
        database.upgrade()
        job = store.job("job")
        assert job is not None and job["choice_timeout"] == 7.5
        assert [kept["living"] for kept in store.generations("job")] == [["W0_0", "W1_0"]]
    test_the_migrations_make_the_tables_of_the_models(database)


def test_one_console_at_a_time_has_an_sqlite_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'console.db'}"
    first, second = Database(url), Database(url)
    first.lead()
    with pytest.raises(DatabaseError, match=golden("in-use-by-another-console")):
        second.lead()
    first.close()
    second.lead()
    second.close()

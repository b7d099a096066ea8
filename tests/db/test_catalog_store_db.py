"""Catalogs in the database: what goes in comes out, on both kinds, and is looked up like one on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrecycle.db.store import Store
from openrecycle.planner.catalogs.catalog import CatalogInfo, MappedBlobs, StoredCatalog
from openrecycle.planner.catalogs.catalog_build import InlineEngine, build_catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.plans.packed import CatalogQuestion, Effort

QUESTION = CatalogQuestion(Job.uniform(3, 2, 3), Technique.STAGGERED, MemoryLimit("uniform"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> StoredCatalog:
    folder: Path = tmp_path_factory.mktemp("catalogs")
    return build_catalog(QUESTION, 2, folder, engine=InlineEngine(), effort=Effort(solver="list")).catalog


def rows(catalog: StoredCatalog) -> list[tuple[str, int, bytes]]:
    return [(name, catalog.header(name).failures, catalog.blobs.get(name) or b"") for name in catalog.blobs.names()]


def test_saved_listed_and_looked_up(store: Store, made: StoredCatalog) -> None:
    plans = rows(made)
    fingerprint, info = made.info.fingerprint, made.info.model_dump_json()
    store.save_catalog(fingerprint, info, plans)
    (listed,) = store.catalogs()
    assert (listed["fingerprint"], listed["plans"], listed["failures"]) == (fingerprint, len(plans), 2)
    assert listed["bytes"] == sum(len(data) for _, _, data in plans)
    text = store.catalog_info(fingerprint)
    assert text is not None
    stored = StoredCatalog(CatalogInfo.from_json(text), store.catalog_blobs(fingerprint))
    assert stored.info == made.info
    assert stored.info.fingerprint == fingerprint
    assert stored.blobs.names() == made.blobs.names()
    assert store.catalog_blobs(fingerprint).all() == {name: data for name, _, data in plans}
    assert store.catalog_blobs("nothing").all() == {}
    for failed in ([], [Worker(2, 1)], [Worker(0, 0), Worker(2, 1)]):
        found, expected = stored.find(failed), made.find(failed)
        assert found is not None
        assert found == expected
    assert stored.blobs.get("nothing") is None


def test_saving_again_replaces_and_adds(store: Store, made: StoredCatalog) -> None:
    fingerprint, info = made.info.fingerprint, made.info.model_dump_json()
    plans = rows(made)
    store.save_catalog(fingerprint, info, plans[:3])
    store.save_catalog(fingerprint, info, [(plans[0][0], plans[0][1], b"other"), *plans[3:]])
    blobs = store.catalog_blobs(fingerprint)
    assert blobs.names() == [name for name, _, _ in plans]
    assert blobs.get(plans[0][0]) == b"other"
    assert blobs.get(plans[1][0]) == plans[1][2]
    assert len(store.catalogs()) == 1


def test_a_failed_save_leaves_nothing(store: Store, made: StoredCatalog) -> None:
    def broken() -> object:
        yield rows(made)[0]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        store.save_catalog(made.info.fingerprint, "{}", broken())  # type: ignore[arg-type]
    assert store.catalogs() == []
    assert store.catalog_info(made.info.fingerprint) is None


def test_catalogs_are_kept_apart_and_deleted(store: Store, made: StoredCatalog) -> None:
    store.save_catalog("a", "{}", rows(made)[:2])
    store.save_catalog("b", "{}", [])
    store.delete_catalog("a")
    assert [(row["fingerprint"], row["plans"], row["bytes"]) for row in store.catalogs()] == [("b", 0, 0)]
    assert store.catalog_blobs("a").names() == []


def test_in_memory_blobs(made: StoredCatalog) -> None:
    held = StoredCatalog(made.info, MappedBlobs({name: data for name, _, data in rows(made)}))
    assert held.find([Worker(1, 0)]) == made.find([Worker(1, 0)])

"""The same catalog made on a Ray cluster: a local instance of two workers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openrecycle.planner.catalogs.catalog_build import build_catalog
from openrecycle.planner.catalogs.catalog_engines import InlineEngine, make_engine
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique
from openrecycle.planner.plans.packed import CatalogQuestion, Effort
from tests.golden import golden

pytestmark = pytest.mark.processes

QUESTION = CatalogQuestion(Job.uniform(3, 3, 4), Technique.STAGGERED, MemoryLimit("uniform"))
LIST = Effort(solver="list")


@pytest.fixture(scope="module")
def ray() -> Any:
    return pytest.importorskip("ray", reason="Ray is an optional extra")


@pytest.fixture
def address(ray: Any) -> Iterator[str]:
    """A cluster that is there already, as on several machines: a node of its own, on loopback."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.chaos
def test_an_instance_of_its_own_and_a_cluster_make_the_same_catalog(ray: Any, address: str, tmp_path: Path) -> None:
    here = build_catalog(QUESTION, 2, tmp_path / "here", engine=InlineEngine(), effort=LIST)
    seen: list[tuple[int, int]] = []
    there = build_catalog(
        QUESTION,
        2,
        tmp_path / "there",
        engine=make_engine("ray", jobs=None, address=address),
        effort=LIST,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert not ray.is_initialized()  # what was begun is ended
    assert there.finished
    assert (there.planned, seen[-1]) == (here.planned, (here.total, here.total))
    assert there.catalog.blobs.names() == here.catalog.blobs.names()
    for name in here.catalog.blobs.names():
        assert there.catalog.plan(name).fingerprint == here.catalog.plan(name).fingerprint


@pytest.mark.chaos
def test_without_an_address_two_workers_are_started_here(ray: Any, tmp_path: Path) -> None:
    report = build_catalog(
        QUESTION, 1, tmp_path, engine=make_engine("ray", jobs=2, address=None), effort=LIST, cancelled=lambda: False
    )
    assert report.finished
    assert len(report.catalog) == report.planned > 3
    assert not ray.is_initialized()


def test_an_address_where_no_cluster_is(ray: Any, tmp_path: Path) -> None:
    engine = make_engine("ray", jobs=2, address="nowhere")
    with pytest.raises(InputError, match=golden("address-got-nowhere-expected-the")):
        build_catalog(QUESTION, 1, tmp_path, engine=engine, effort=LIST)


def test_without_ray_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, package)

    monkeypatch.setattr("openrecycle.planner.catalogs.catalog_engines.import_module", missing)
    with pytest.raises(InputError, match=golden("engine-got-ray-expected-local")):
        make_engine("ray", jobs=None, address=None)

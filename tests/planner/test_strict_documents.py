"""Whatever a person, a file or another host gives as JSON or YAML: a key that is in one object twice is refused, since
two readers may take it for two documents. What is nested without an end, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from openrecycle.planner.catalogs.catalog import CatalogInfo
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique
from openrecycle.planner.plans.packed import CatalogQuestion
from openrecycle.planner.plans.plan import Plan, PlanError, job_doc
from openrecycle.planner.profiles import load, load_profile, shipped
from openrecycle.planner.simulation.traces import read_replay
from openrecycle.planner.solvers.portfolio import make_plan

Reader = Callable[[str, Path], object]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(Problem(Job.uniform(2, 2, 3)), solver="list")


def _file(text: str, folder: Path) -> Path:
    path = folder / "document.json"
    path.write_text(text)
    return path


def _cases(plan: Plan) -> dict[str, tuple[str, Reader]]:
    """By what it is: a document, and who reads it."""
    shipped_profile = load_profile(shipped()[0]).model_dump_json()
    info = CatalogInfo.of(CatalogQuestion(plan.job.job(), Technique.STAGGERED, MemoryLimit("uniform")))
    row = '[60000, "add", {"nodes": ["a"], "duration": 60000}]'
    return {
        "plan": (plan.to_json(), lambda text, folder: Plan.from_json(text)),
        "catalog folder": (info.model_dump_json(), lambda text, folder: CatalogInfo.from_json(text)),
        "profile": (shipped_profile, lambda text, folder: load(_file(text, folder))),
        "measured profile": (shipped_profile, lambda text, folder: load_profile(_file(text, folder))),
        "job": (job_doc(plan.job.job()).model_dump_json(), lambda text, folder: load(_file(text, folder))),
        "trace": (row, lambda text, folder: read_replay("trace", [(1, text)])),
    }


KINDS = ["plan", "catalog folder", "profile", "measured profile", "job", "trace"]


@pytest.mark.parametrize("sizes", [{"stages": 10**20}, {"pipelines": 0, "stages": 10**20}])
def test_a_small_document_of_a_huge_job_is_refused_before_memory_is_taken(sizes: dict[str, int], plan: Plan) -> None:
    # One number is the capacity of each stage, and no tuple has so many: it would raise an OverflowError.
    document = plan.job.model_copy(update={"capacity_bytes": 1, **sizes})
    with pytest.raises(InputError, match="pipelines"):
        document.job()
    if sizes.get("pipelines") == 0:  # then its ops are none, as far as their number goes
        with pytest.raises(PlanError, match="pipelines"):
            plan.model_copy(update={"job": document})


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_twice_is_refused(kind: str, plan: Plan, tmp_path: Path) -> None:
    text, read_it = _cases(plan)[kind]
    read_it(text, tmp_path)
    begin = text.index("{") + 1
    key = text[begin:].split(":")[0]
    twice = f"{text[:begin]}{key}:0,{text[begin:]}"
    assert json.loads(twice) == json.loads(text), "the last of two counts for most readers"
    with pytest.raises(PlannerError):
        read_it(twice, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_nested_without_an_end_is_refused_in_a_sentence(kind: str, plan: Plan, tmp_path: Path) -> None:
    _, read_it = _cases(plan)[kind]
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" * 5_000 + "]" * 5_000):
        with pytest.raises(PlannerError):
            read_it(text, tmp_path)


def test_whole_numbers_are_as_json_schema_has_them(plan: Plan, tmp_path: Path) -> None:
    """3.0 is one; text and truth are none."""
    document = json.loads(load_profile(shipped()[0]).model_dump_json())
    for value, taken in ((3.0, True), (3, True), (3.5, False), ("3", False), (True, False)):
        text = json.dumps({**document, "samples_per_micro_batch": value})
        if taken:
            assert load_profile(_file(text, tmp_path)).samples_per_micro_batch == 3
        else:
            with pytest.raises(PlannerError):
                load_profile(_file(text, tmp_path))


def test_whole_numbers_of_an_op_are_too(plan: Plan) -> None:
    document = json.loads(plan.to_json())
    op = next(ops[0] for ops in document["workers"].values() if ops[0]["stage"] == 1)
    assert (op["pipeline"], op["micro_batch"]) == (0, 0)
    for name, whole in (("stage", 1), ("pipeline", 0), ("micro_batch", 0)):
        for value, taken in ((float(whole), True), (whole + 0.5, False), (str(whole), False), (bool(whole), False)):
            op[name] = value
            if taken:
                assert Plan.from_json(json.dumps(document)) == plan
            else:
                with pytest.raises(PlannerError):
                    Plan.from_json(json.dumps(document))
        op[name] = whole


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("job", "trace")])
def test_a_version_is_a_number(kind: str, plan: Plan, tmp_path: Path) -> None:
    text, read_it = _cases(plan)[kind]
    document = json.loads(text)
    (version,) = {"schema_version", "profile_version", "format"} & set(document)
    assert document[version] == 1
    for wrong in (True, "1", 2, None):
        with pytest.raises(PlannerError):
            read_it(json.dumps({**document, version: wrong}), tmp_path)

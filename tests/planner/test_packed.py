"""Plans on their way between processes: in columns from some size on, and the same in all they say."""

from __future__ import annotations

import zlib

import pytest

from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.check import check, checked
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.packed import (
    SMALL_OPS,
    from_bytes,
    from_text,
    packed,
    schedule_from_text,
    storable,
    to_bytes,
    to_text,
    unpack,
)
from openrecycle.planner.plans.plan import Plan, PlanError
from openrecycle.planner.solvers.portfolio import best_solution, make_plan, plan_of
from tests.golden import golden

LARGE = Job.uniform(8, 8, 16, durations={"F": 40, "I": 41.5, "W": 39, "O": 3, "transfer": 0.5}, time_unit="ms")
FAILED = frozenset({Worker(3, 5), Worker(6, 2)})


def problem(technique: Technique = Technique.STAGGERED, failed: frozenset[Worker] = FAILED) -> Problem:
    return Problem(LARGE, failed, technique, MemoryLimit("uniform"))


@pytest.mark.parametrize(
    ("technique", "failed"),
    [(technique, FAILED) for technique in Technique if technique.reroutes] + [(Technique.FAULT_FREE, frozenset())],
)
def test_a_large_plan_is_the_same_as_its_document(technique: Technique, failed: frozenset[Worker]) -> None:
    solution = best_solution(problem(technique, failed), solver="list", look_ahead=False)
    made = checked(plan_of(solution, seconds=0.25))
    document = Plan.from_json(made.to_json())
    assert document.fingerprint == made.fingerprint == document.compute_fingerprint()
    assert document == made == plan_of(solution, seconds=0.25)
    assert from_bytes(to_bytes(document)).to_json() == made.to_json()
    assert from_text(to_text(document)) == made
    schedule = schedule_from_text(to_text(document))
    assert schedule.ops == made.schedule().ops and schedule.problem == made.schedule().problem
    assert check(document) == []


def test_a_plan_that_only_its_document_can_hold_is_sent_too() -> None:
    made = checked(make_plan(problem(), solver="list", look_ahead=False))
    odd = Plan.from_json(made.to_json().replace('"duration":40,', '"duration":40.0,', 1), source="a plan")
    assert from_text(to_text(odd)) == odd and schedule_from_text(to_text(odd)).ops == odd.schedule().ops


@pytest.mark.parametrize("text", ["", "é", "AAAA", "no base64"])
def test_what_is_no_text_of_a_plan_is_refused(text: str) -> None:
    for read in (from_text, schedule_from_text):
        with pytest.raises(PlanError):
            read(text)


def test_what_has_come_over_a_pipe_is_stored_as_it_is() -> None:
    made = checked(make_plan(problem(), solver="list", look_ahead=False))
    data = to_bytes(made)
    there = from_bytes(data)
    stored = packed(there)
    assert data.endswith(stored.columns + stored.document)
    assert to_bytes(there) == data
    assert unpack(stored.columns) == made
    assert zlib.decompress(stored.document).decode() == made.to_json()
    assert storable(there) == stored


def test_a_small_plan_is_stored_as_its_document() -> None:
    small = Problem(Job.uniform(2, 2, 3), frozenset(), Technique.STAGGERED, MemoryLimit("uniform"))
    made = checked(make_plan(small, solver="list", look_ahead=False))
    assert made.op_count < SMALL_OPS
    assert from_bytes(to_bytes(made)) == made
    assert storable(made) == made.to_json()


@pytest.mark.parametrize("data", [b"", b"C", b"C\x01\x00\x00\x00x", b"X{}", b"D{}"])
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match=golden("the-planning-process")):
        from_bytes(data, source="the planning process")


def test_pipelines_are_renamed_alike_in_what_was_made_and_in_what_was_read() -> None:
    made = checked(make_plan(problem(), solver="list", look_ahead=False))
    names = [(p + 3) % 8 for p in range(8)]
    renamed, expected = made.renamed(names), Plan.from_json(made.to_json()).renamed(names)
    assert renamed.fingerprint == expected.fingerprint
    assert renamed == expected
    assert made.renamed(range(8)) is made


def test_a_catalog_renames_the_pipelines_of_large_plans() -> None:
    made = checked(make_plan(problem(), solver="list", look_ahead=False))
    catalog = Catalog(LARGE, Technique.STAGGERED, MemoryLimit("uniform"))
    catalog.add(made)
    found = catalog.find({Worker(0, 5), Worker(1, 2)})
    assert found is not None
    assert check(found) == []

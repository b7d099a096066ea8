"""The stored form of a plan: everything comes back, and what is damaged is refused."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.packed import (
    CatalogQuestion,
    Effort,
    decode_header,
    pack,
    unpack,
)
from openrecycle.planner.plans.plan import Plan, PlanError
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.portfolio import best_solution, make_plan, plan_of
from tests.conftest import examples
from tests.golden import golden
from tests.planner.problems import problems

EFFORT = Effort(solver="list")
JOB = Job.uniform(4, 3, 5, durations={"F": 1, "I": 1.1, "W": 0.9, "O": 0.5, "transfer": 0.25})


def question(problem: Problem) -> CatalogQuestion:
    return CatalogQuestion(problem.job, problem.technique, problem.memory)


def planned(*names: str, technique: Technique = Technique.STAGGERED, memory: str = "uniform") -> Plan:
    failed = frozenset(map(Worker.parse, names))
    return make_plan(Problem(JOB, failed, technique, MemoryLimit(memory)), solver="list", look_ahead=False)


@examples(80)
@given(problems())
def test_every_plan_comes_back_exactly(problem: Problem) -> None:
    plan = make_plan(problem, solver="list", look_ahead=False)
    blob = pack(plan, EFFORT)
    header = decode_header(blob)
    assert header.form == "columns"
    assert header.workers == problem.failed
    again = unpack(blob, question(problem))
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.compute_fingerprint() == plan.fingerprint


@examples(40)
@given(problems())
def test_a_schedule_of_single_ops_is_stored_as_that_of_arrays(problem: Problem) -> None:
    solution = best_solution(problem, solver="list", look_ahead=False)
    by_op = replace(solution, schedule=Schedule(problem, dict(solution.schedule.ops)))
    stored = [pack(plan_of(s, seconds=1.5), EFFORT) for s in (solution, by_op)]
    assert stored[0] == stored[1]


def reference_plan() -> Plan:
    return make_plan(Problem(JOB, technique=Technique.FAULT_FREE, memory=MemoryLimit("1f1b")))


@pytest.mark.parametrize("plan", [reference_plan(), planned("W1_2", technique=Technique.ADAPTIVE)], ids=["1f1b", "B"])
def test_whole_backwards(plan: Plan) -> None:
    assert any(op.kind == "B" for ops in plan.workers.values() for op in ops)
    assert unpack(pack(plan, EFFORT), question(plan.problem())) == plan


def moved(ops: Sequence[object], at: int, **change: object) -> tuple[object, ...]:
    out = list(ops)
    out[at] = out[at].model_copy(update=change)  # type: ignore[attr-defined]
    return tuple(out)


@pytest.mark.parametrize("change", [{"duration": 7}, {"start": 99}, {"kind": "B"}, {"micro_batch": 4}])
def test_documents_that_are_no_schedule_are_kept_to_the_letter(change: dict[str, object]) -> None:
    plan = planned("W1_2")
    odd = plan.model_copy(update={"workers": {**plan.workers, "W0_0": moved(plan.workers["W0_0"], 3, **change)}})
    blob = pack(odd, EFFORT)
    assert unpack(blob, question(plan.problem())).to_json() == odd.to_json()


def test_alike_pipelines_share_a_row() -> None:
    healthy = decode_header(pack(planned(), EFFORT))
    assert healthy.rows == (0, 0, 0, 0)
    assert len(set(decode_header(pack(planned("W1_2"), EFFORT)).rows)) > 1


@examples(60)
@given(problems(speeds=False), st.randoms(use_true_random=False))
def test_a_renamed_plan_is_valid_and_keeps_its_numbers(problem: Problem, noise: random.Random) -> None:
    plan = make_plan(problem, solver="list", look_ahead=False)
    pipelines = problem.job.pipelines

    def shuffled() -> list[int]:
        return noise.sample(range(pipelines), pipelines)

    names, parts = shuffled(), [shuffled() for _ in range(problem.job.stages)]
    made = plan.renamed(names, parts)
    assert check(made) == []
    assert decode_header(pack(made, EFFORT)).form == "columns"
    assert plan.schedule().renamed(names, parts).ops == made.schedule().ops
    assert made.schedule().period == plan.schedule().period
    assert sorted(made.metrics.peak_activations.values()) == sorted(plan.metrics.peak_activations.values())


def test_damage_is_named() -> None:
    plan = planned("W1_2")
    blob = pack(plan, EFFORT)
    for at in range(0, len(blob), 7):
        damaged = blob[:at] + bytes([blob[at] ^ 0x40]) + blob[at + 1 :]
        with pytest.raises(PlanError, match="file\\.plan"):
            unpack(damaged, question(plan.problem()), source="file.plan")
    for length in (0, 3, 40, len(blob) - 1):
        with pytest.raises(PlanError, match="file\\.plan"):
            decode_header(blob[:length], source="file.plan")


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def test_a_blob_with_a_right_checksum_and_wrong_contents_is_refused() -> None:
    plan = planned("W1_2")
    blob = pack(plan, EFFORT)
    other = CatalogQuestion(Job.uniform(4, 3, 6), Technique.STAGGERED, MemoryLimit("uniform"))
    with pytest.raises(PlanError, match=golden("not-a-plan-of-this")):
        unpack(blob, other)
    for body in (b"ORP1", b"ORP1\xff\xff\xff\xff", b"ORP1\x04\0\0\0abcd", blob[:-40]):
        with pytest.raises(PlanError):
            unpack(sealed(body), question(plan.problem()))

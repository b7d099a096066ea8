from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given

from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.plan import Plan, PlanError
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.planner.problems import problems


@pytest.fixture(scope="module")
def plan() -> Plan:
    problem = Problem(Job.uniform(3, 4, 6), frozenset({Worker(1, 2)}), Technique.DECOUPLED, MemoryLimit("none"))
    return make_plan(problem, solver="list", look_ahead=False)


@examples(60)
@given(problems())
def test_json_round_trip_is_exact(problem: Problem) -> None:
    plan = make_plan(problem, solver="list", look_ahead=False)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.problem() == problem
    assert again.schedule().ops == ListScheduler().solve(problem).schedule.ops
    assert again.compute_fingerprint() == plan.fingerprint


@examples(30)
@given(problems())
def test_what_is_done_worker_by_worker_is_as_if_it_were_done_at_once(problem: Problem) -> None:
    plan = make_plan(problem, solver="list", look_ahead=False)
    document = plan.model_dump_json()
    assert plan.to_json() == document
    assert Plan.from_json(document, at_once=0) == Plan.from_json(document.encode(), at_once=0) == plan
    body = plan.model_dump(mode="json", include={"schema_version", "job", "failed", "technique", "memory", "workers"})
    whole = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert plan.compute_fingerprint() == hashlib.sha256(whole.encode()).hexdigest()[:32]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"kind":"F"', '"kind":"X"'),
        ('"W0_0":[', '"W0_0":[['),
        ('"W0_0":[', '"W0_0":{},"W0_0":['),
        ('"metrics":{', '"metrics":{"odd":1,'),
        ('"workers":{', '"workers":{},"workers":{'),
        ('"workers":{', '"workers": {'),
        ('"workers":{', '"jobs":{},"workers":{"Z":[],'),
        ('"stage":0', '"stage":"\\ud800"'),
        ('}],"W0_1"', '}] ,"W0_1"'),
        ('"schema_version":1', '"schema_version":2'),
    ],
)
def test_a_long_document_is_read_or_refused_as_a_short_one_is(plan: Plan, old: str, new: str) -> None:
    document = plan.to_json().replace(old, new, 1)

    def outcome(at_once: int) -> Plan | str:
        try:
            return Plan.from_json(document, at_once=at_once)
        except PlanError as error:
            return str(error)

    assert outcome(0) == outcome(len(document))


def test_the_fingerprint_is_of_the_ops_and_not_of_who_solved_them(plan: Plan) -> None:
    solver = plan.solver.model_copy(update={"name": "by hand", "seconds": 1e6})
    assert plan.model_copy(update={"solver": solver}).compute_fingerprint() == plan.fingerprint
    op = plan.workers["W0_0"][0].model_copy(update={"start": 1})
    workers = {**plan.workers, "W0_0": (op, *plan.workers["W0_0"][1:])}
    assert plan.model_copy(update={"workers": workers}).compute_fingerprint() != plan.fingerprint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"schema_version":1', '"schema_version":2', "schema_version"),
        ('"pipelines":3', '"pipelines":"3"', "job.pipelines"),
        ('"technique":"decoupled"', '"technique":"x"', "technique"),
        ('"kind":"F"', '"kind":"Z"', "workers.W0_0.0.kind"),
        ('"start":0', '"start":-1', "start"),
        ('"failed":["W1_2"]', '"failed":["nobody"]', "failed.0"),
        ('"fingerprint"', '"finger"', "fingerprint"),
    ],
)
def test_damage_is_named(plan: Plan, old: str, new: str, said: str) -> None:
    text = plan.to_json()
    assert old in text
    with pytest.raises(PlanError, match=said):
        Plan.from_json(text.replace(old, new, 1), source="plan.json")


def test_numbers_are_plain(plan: Plan) -> None:
    document = json.loads(plan.to_json())
    assert isinstance(document["metrics"]["period"], int)
    assert document["workers"]["W0_0"][-1]["micro_batch"] is None


@pytest.mark.processes
def test_planning_with_the_list_scheduler_loads_no_heavy_package() -> None:
    code = (
        "import sys\n"
        "from openrecycle.planner.jobs.job import Job, Problem\n"
        "from openrecycle.planner.solvers.portfolio import make_plan\n"
        "import openrecycle.planner.catalogs.catalog, openrecycle.planner.check\n"
        "make_plan(Problem(Job.uniform(2, 2, 2)), solver='list')\n"
        "print([m for m in ('torch', 'ortools', 'streamlit', 'sqlalchemy', 'fastapi', 'typer') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

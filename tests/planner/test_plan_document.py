from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given

from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.plan import Plan, PlanError
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.planner.plans import with_another
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
    assert Plan.from_json(document) == Plan.from_json(document.encode()) == plan
    body = plan.model_dump(mode="json", include={"schema_version", "job", "failed", "technique", "memory", "workers"})
    whole = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert plan.compute_fingerprint() == hashlib.sha256(whole.encode()).hexdigest()[:32]


def test_a_document_that_is_laid_out_otherwise_is_the_same_plan(plan: Plan) -> None:
    """Other spaces, fields and workers in another order, 1.0 for 1."""
    document = json.loads(plan.to_json())
    document["workers"] = dict(reversed(document["workers"].items()))
    text = json.dumps(document, indent=1, sort_keys=False).replace('"start": 0,', '"start": -0.0,')
    again = Plan.from_json(text.replace('"forward": 1,', '"forward": 1.0,').replace('"duration": 1', '"duration": 1.0'))
    assert "-0.0" in text and again == plan
    assert again.to_json() == plan.to_json() and again.compute_fingerprint() == plan.fingerprint
    assert Plan.from_json(json.dumps(document, sort_keys=True)) == plan


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        ("failed", ["W0_1", "W1_1", "W2_1"], "stage 1"),
        ("failed", ["W1_2", "W1_2"], "failed"),
        ("failed", ["W01_2"], "W1_2"),
        ("job.stages", 0, "stages"),
        ("memory", "much", "memory"),
        ("workers", [], "workers"),
        ("workers.W0_00", [], "W0_0"),
        ("workers.Z", [], "workers"),
        ("workers.W0_0", {}, r"workers\.W0_0"),
        ("workers.W0_0.0", 1, r"workers\.W0_0\.0"),
        ("workers.W0_0.0", {"kind": "F"}, r"workers\.W0_0\.0\.pipeline"),
        ("workers.W0_0.0.odd", 1, r"workers\.W0_0\.0\.odd"),
        ("workers.W0_0.3.stage", "\ud800", r"workers\.W0_0\.3\.stage"),
        ("workers.W0_0.3.stage", 1 << 63, r"workers\.W0_0\.3\.stage"),
        ("workers.W0_0.3.start", "0", r"workers\.W0_0\.3\.start"),
        ("workers.W0_0.3.start", -1, r"workers\.W0_0\.3\.start"),
        ("workers.W0_0.3.start", 0.5, r"workers\.W0_0\.3\.start"),
        ("workers.W0_0.3.duration", 1 << 53, r"workers\.W0_0\.3\.duration"),
        ("workers.W0_0.3.micro_batch", None, r"workers\.W0_0\.3\.micro_batch"),
        ("workers.W0_0.-1.micro_batch", 0, r"workers\.W0_0\.[0-9]+\.micro_batch"),
        ("metrics.odd", 1, r"metrics\.odd"),
        ("metrics.period", "3", r"metrics\.period: "),
        ("metrics.gap", math.nan, r"metrics\.gap"),
        ("metrics.slowdown_vs_best", -math.inf, r"metrics\.slowdown_vs_best"),
        ("solver.seconds", math.inf, r"solver\.seconds"),
        ("solver.name", "\ud800", "ud800"),
        ("job.speeds", {"W0_0": 0.5, "W0_00": 2.0}, "speeds"),
        ("job.pipelines", "3", r"job\.pipelines"),
        ("job.pipelines", 10**300, r"pipelines.{,1200}$"),
        ("job.pipelines", 4, "workers"),
        ("workers", {f"W{n}_0": [] for n in range(13)}, "workers"),
    ],
)
def test_what_is_no_plan_is_refused_by_its_field(plan: Plan, at: str, value: object, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan.from_json(with_another(plan, at, value))


def test_what_is_nested_as_deeply_as_python_reads_is_refused_in_a_sentence() -> None:
    # How deep that is depends on who calls, and it may be read and not written again.
    for depth in range(100, sys.getrecursionlimit()):
        with pytest.raises(PlanError):
            Plan.from_json(f'{{"job":{"[" * depth}{"]" * depth}}}')


def test_the_fingerprint_is_of_the_ops_and_not_of_who_solved_them(plan: Plan) -> None:
    solver = plan.solver.model_copy(update={"name": "by hand", "seconds": 1e6})
    assert plan.model_copy(update={"solver": solver}).compute_fingerprint() == plan.fingerprint
    other = Plan.from_json(with_another(plan, "workers.W0_0.0.start", 1))
    assert other.compute_fingerprint() != plan.fingerprint


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

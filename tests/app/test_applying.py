"""Putting a plan of one's own in force: what fits, what does not, and what the job makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere, JobHere, console_refuses
from ui_factory import plan

from openrecycle.agent.coordination.membership import Exited, PlanReady, UsePlan
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.service import above_limit, misfit, use_plan
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.server import create_routes
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Worker
from openrecycle.planner.solvers.portfolio import make_plan
from tests.agent.coordinator_run import Run
from tests.golden import golden

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleService]:
    here = ConsoleHere(tmp_path_factory.mktemp("applying"))
    yield here.console
    here.close()


# -- the coordinator ----------------------------------------------------------------------------


def test_the_same_members_go_on_under_the_new_plan() -> None:
    run = Run(2, 2).start()
    before = run.state
    run.send(UsePlan("mine", (), "ada"))
    generation = run.opened[-1]
    assert (generation.number, generation.plan_fingerprint, generation.joining, generation.moves) == (
        before.generation + 1,
        "mine",
        (),
        (),
    )
    assert generation.living == before.current.living  # type: ignore[union-attr]
    assert generation.reason == "ada put plan mine in force"
    assert "NeedPlan" not in [type(d).__name__ for d in run.send(UsePlan("mine", (), "ada")).decisions]
    run.resume()
    assert run.state.settled
    # The next failure brings the catalog's plan.
    run.exit("W1_0")
    assert run.opened[-1].plan_fingerprint != "mine"


def test_a_plan_for_others_or_at_the_wrong_moment_is_refused() -> None:
    run = Run(2, 2).start()
    for event, words in (
        (UsePlan("mine", ("W0_1",), "ada"), "got a plan without W0_1, expected none"),
        (UsePlan("mine", ("W0_1", "W1_1"), "ada"), "expected none"),
    ):
        refused = run.send(event).refusal
        assert refused is not None and words in refused.detail
    run.exit("W1_0")
    before = run.state
    refused = run.send(UsePlan("mine", ("W1_0",), "ada")).refusal
    assert refused is not None and refused.code == "recovering"
    assert run.state == before
    run.resume()
    assert run.send(UsePlan("mine", ("W1_0",), "ada")).refusal is None
    assert run.opened[-1].failed == ("W1_0",)
    # A death in the middle of it replaces it, as it would any generation.
    run.send(Exited("W0_1", "W0_1-1", "launcher", "ended"))
    assert run.opened[-1].failed == ("W0_1", "W1_0") and run.opened[-1].plan_fingerprint != "mine"
    assert PlanReady in {type(event) for event, _ in run.log} or run.plans


# -- the console --------------------------------------------------------------------------------


def test_a_plan_is_put_in_force_in_a_job_that_it_fits(console: ConsoleService) -> None:
    here = JobHere(console, "applied").register().commit(0, 3, 1)
    job = console.jobs.find(here.job_id)
    mine = plan(memory="4", technique="decoupled")
    assert misfit(job, mine) == ""
    reason = use_plan(console.jobs.find(here.job_id), mine, "ada")
    assert reason == f"ada put plan {mine.fingerprint[:8]} in force"
    view = console.queries.view(here.job_id)
    assert view.generation == 2 and view.plan == mine
    assert any(e.text == reason and e.kind == "operator" for e in view.events)
    row = console.security.audit.read(job_id=here.job_id)[-1]
    assert (row["actor"], row["action"], row["target"]) == ("ada", "use plan", mine.fingerprint)
    assert misfit(job, mine) == golden("it-is-in-force-already")
    here.resume(2)
    here.die("W1_2").resume(3)
    with console_refuses("misfit"):
        use_plan(console.jobs.find(here.job_id), mine, "ada")
    use_plan(console.jobs.find(here.job_id), plan(("W1_2",), memory="4", technique="adaptive"), "ada")
    assert console.queries.view(here.job_id).plan.technique == "adaptive"  # type: ignore[union-attr]


def test_what_does_not_fit_is_said(console: ConsoleService) -> None:
    starting = JobHere(console, "not yet")
    running = JobHere(console, "running").register()
    finished = JobHere(console, "finished", iterations=4).register().commit(0, 3, 1).finish()
    for job, wrong, words in (
        (starting, plan(), "its workers have not all registered"),
        (finished, plan(), "it has finished"),
        (running, plan(grid=(3, 4, 7)), "the plan is for a grid of 3 × 4 × 7, the job's is 3 × 4 × 6"),
        (running, plan(unit="slot"), "the plan was made for other op times"),
        (running, plan(("W1_2",)), "the plan is for a job without W1_2, and this one trains with all workers"),
        (running, plan(memory="none"), "activations, and the job's memory limit uniform allows 4"),
    ):
        assert words in misfit(console.jobs.find(job.job_id), wrong)
    with pytest.raises(ConsoleError) as error:
        use_plan(console.jobs.find(running.job_id), plan(("W1_2",)), "ada")
    assert error.value.status == 409
    assert console.queries.view(running.job_id).generation == 1


def test_what_fits_in_bytes_may_be_more_than_if_each_took_its_larger_part_all_along() -> None:
    profile = StageProfile(activation_bytes=3, weight_backward_bytes=1)
    job = Job(3, 4, 6, profiles=(profile,) * 4, capacity_bytes=(12,) * 4)
    problem = Problem(job, frozenset({Worker(1, 2)}), memory=MemoryLimit("bytes"))
    fitting = make_plan(problem, solver="list")
    assert max(fitting.metrics.peak_activations.values()) > 4 == problem.limits[0]
    assert above_limit(fitting, "bytes") == ""
    more = make_plan(replace(problem, memory=MemoryLimit("none")), solver="list")
    assert golden("would-hold-bytes-and-has") in above_limit(more, "bytes")


def test_over_http_a_saved_plan_is_put_in_force(console: ConsoleService) -> None:
    client = TestClient(Starlette(routes=create_routes(console)), raise_server_exceptions=False)
    here = JobHere(console, "by HTTP").register()
    mine = plan(memory="3")
    path = f"/api/v1/jobs/{here.job_id}/plan"
    refused = client.put(path, json={"fingerprint": mine.fingerprint})
    assert (refused.status_code, refused.json()["code"]) == (404, "unknown_plan")
    console.plans.library.save(mine, "mine")
    done = client.put(path, json={"fingerprint": mine.fingerprint}, headers={"X-Actor": "ada"})
    assert (done.status_code, done.json()["reason"]) == (200, f"ada put plan {mine.fingerprint[:8]} in force")
    again = client.put(path, json={"fingerprint": mine.fingerprint})
    assert (again.status_code, again.json()["code"]) == (409, "misfit")

"""A job is planned again on request: the better plan comes in force, and else it is said why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from ui_console import ConsoleHere, JobHere, console_refuses, until
from ui_factory import plan

from openrecycle.agent.messages.protocol import JobFinished
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.plans.service import Replan, compare_plans, use_plan
from openrecycle.app.plans.solving import PlanAsked, Solve
from openrecycle.app.plans.sources import OfJob
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.server import create_routes
from openrecycle.planner.jobs.job import MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan
from tests.golden import golden

pytestmark = pytest.mark.processes

LOST = ("W1_2",)


def ended(console: ConsoleService, job: JobHere) -> Replan:
    def over() -> bool:
        found = console.plans.replanning.status(job.job_id)
        return found is not None and found.outcome != "planning"

    until(over, "the new plan has been made and judged")
    found = console.plans.replanning.status(job.job_id)
    assert found is not None
    return found


def with_a_poor_plan(console: ConsoleService, name: str) -> tuple[JobHere, Plan]:
    """W1_2 is out, and by an operator's wish all go by a plan that does not decouple the backward."""
    job = JobHere(console, name).register().commit(0, 9, 1).die("W1_2")
    job.resume(2)
    live = console.jobs.find(job.job_id)
    problem = Problem(
        live.plans.job, frozenset({Worker.parse("W1_2")}), Technique.ADAPTIVE, MemoryLimit.parse("uniform")
    )
    poor = make_plan(problem, solver="list")
    use_plan(console.jobs.find(job.job_id), poor, "eve")
    job.resume(3)
    return job, poor


def texts(console: ConsoleService, job: JobHere) -> list[str]:
    return [e.text for e in console.queries.view(job.job_id).events]


def test_the_better_plan_comes_in_force_and_then_no_other(console: ConsoleService) -> None:
    job, poor = with_a_poor_plan(console, "again")
    console.plans.replanning.start(job.job_id, "list", 10.0, "ada")
    first = ended(console, job)
    assert (first.outcome, first.failed, first.actor) == ("adopted", LOST, "ada")
    in_force = console.queries.view(job.job_id).plan
    assert in_force is not None and in_force.metrics.period < poor.metrics.period
    assert any("ada planned again (list" in text and "it saves" in text for text in texts(console, job))
    job.resume(4)
    console.plans.replanning.start(job.job_id, "list", 10.0, "ada")
    second = ended(console, job)
    assert second.outcome == "kept" and golden("same-plan-again") in second.reason
    assert texts(console, job)[0].startswith(golden("the-plan-in-force-stays"))
    assert console.queries.view(job.job_id).generation == 4


def test_a_gain_below_the_cost_of_a_change_changes_nothing(console: ConsoleService) -> None:
    job, _ = with_a_poor_plan(console, "nearly done")
    job.commit(10, 38, 3)
    console.plans.replanning.start(job.job_id, "list", 10.0, "ada")
    found = ended(console, job)
    assert found.outcome == "kept" and golden("in-the-iteration-that-is") in found.reason
    assert console.queries.view(job.job_id).generation == 3
    # It is kept all the same, for the next time that these workers are out.
    kept = console.jobs.find(job.job_id).plans.catalog.find({Worker.parse("W1_2")})
    assert kept is not None and kept.technique is Technique.STAGGERED


def test_what_comes_too_late_says_so(console: ConsoleService) -> None:
    slow = {"F": 40.0, "I": 52.0, "W": 28.0}
    job = JobHere(console, "large", pipelines=6, stages=6, micro_batches=12, durations=slow, memory="7")
    job.register().commit(0, 3, 1).die("W0_1")
    job.resume(2)
    console.plans.replanning.start(job.job_id, "cp-sat", 300.0, "ada")
    with console_refuses("planning"):
        console.plans.replanning.start(job.job_id, "cp-sat", 300.0, "eve")

    def has_a_plan() -> bool:
        running = console.plans.replanning.status(job.job_id)
        return running is not None and running.best is not None

    until(has_a_plan, "it has a first plan")
    job.die("W1_4").resume(3)
    assert console.plans.replanning.stop(job.job_id) == golden("the-best-plan-so-far")
    found = ended(console, job)
    assert found.outcome == "kept" and golden("by-now-it-trains-without") in found.reason
    assert console.queries.view(job.job_id).generation == 3


def searched_for_long(console: ConsoleService, name: str, seconds: float) -> tuple[JobHere, Solve]:
    slow = {"F": 40.0, "I": 52.0, "W": 28.0}
    job = JobHere(console, name, pipelines=6, stages=6, micro_batches=12, durations=slow, memory="7")
    job.register().commit(0, 3, 1).die("W0_1")
    job.resume(2)
    console.plans.replanning.start(job.job_id, "cp-sat", seconds, "ada")
    return job, console.plans.solves.all()[-1]


def test_nobody_plans_on_for_a_job_that_is_over(console: ConsoleService) -> None:
    """Only two searches run at a time, and this one could have taken an hour."""
    job, solve = searched_for_long(console, "over", 3600.0)
    until(lambda: solve.points, "it has begun")
    console.reports.finish(job.job_id, JobFinished(state="stopped", reason="asked to"))
    until(lambda: solve.over, "the search ends")
    assert solve.stopped and ended(console, job).outcome == "kept"


def test_a_search_for_two_jobs_goes_on_when_one_is_over(console: ConsoleService) -> None:
    """Equal jobs share one."""
    (job, solve), (other, same) = (searched_for_long(console, name, 3599.0) for name in ("twin", "its twin"))
    assert same is solve
    job.finish()
    assert ended(console, job).outcome == "kept" and not solve.stopped
    found = console.plans.replanning.status(other.job_id)
    assert found is not None and found.outcome == "planning"
    console.plans.replanning.stop(other.job_id)
    ended(console, other)


@pytest.mark.parametrize("over", [False, True])
def test_a_search_that_is_not_noted_is_not_made(
    console: ConsoleService, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """Nobody would end it, for up to an hour."""
    job = JobHere(console, "not noted").register().commit(0, 3, 1)
    live, known = console.jobs.find(job.job_id), console.plans.solves.all()
    if over:  # while the question is checked
        monkeypatch.setattr(PlanAsked, "check", lambda asked: job.finish())
    else:

        def refuse(*_: object, **__: object) -> None:
            raise ConsoleError(503, "disk_full", "the disk is full")

        monkeypatch.setattr(live, "record", refuse)
    with pytest.raises(ConsoleError):
        console.plans.replanning.start(job.job_id, "cp-sat", 3598.0 + over, "ada")
    assert all(solve.stopped for solve in console.plans.solves.all() if solve not in known)
    assert console.plans.replanning.status(job.job_id) is None


def test_requests_that_make_no_sense_are_refused(console: ConsoleService) -> None:
    job = JobHere(console, "refused").register().commit(0, 3, 1)
    client = TestClient(Starlette(routes=create_routes(console)), base_url="http://127.0.0.1")
    path = f"/api/v1/jobs/{job.job_id}/replan"
    assert client.get(path).json() is None
    answer = client.post(path, json={"solver": "oracle"})
    assert answer.status_code == 422 and answer.json()["detail"].startswith("solver: got 'oracle'")
    assert client.post(path, json={"seconds": 0}).status_code == 422
    assert client.post(f"{path}/stop").json()["code"] == "not_planning"
    assert client.post("/api/v1/jobs/none/replan", json={}).status_code == 404
    console.operators.freeze(job.job_id, True, "eve")
    answer = client.post(path, json={})
    assert (answer.status_code, answer.json()["code"]) == (409, "frozen")
    console.operators.freeze(job.job_id, False, "eve")
    answer = client.post(path, json={"solver": "list", "seconds": 5}, headers={"X-Actor": "ada"})
    assert answer.status_code == 202 and golden("ada-asked-for-a-new") in answer.json()["reason"]
    ended(console, job)
    assert client.get(path).json()["outcome"] == "kept"
    job.die("W0_0")
    assert client.post(path, json={}).json()["code"] == "recovering"
    job.resume(2)
    job.finish()
    assert client.post(path, json={}).json()["code"] == "job_over"


def test_a_plan_is_worth_a_generation_if_it_saves_more_than_one_iteration() -> None:
    poor, good = plan(LOST, technique="adaptive"), plan(LOST)
    job = good.job.job()
    saved = 1 - good.metrics.period / poor.metrics.period
    assert compare_plans(poor, good, job, int(1 / saved) + 1).better
    assert not compare_plans(poor, good, job, int(1 / saved)).better
    assert (
        not compare_plans(good, poor, job, 10_000).better
        and "no shorter" in compare_plans(good, poor, job, 10_000).reason
    )
    assert golden("same-plan-again") in compare_plans(good, good, job, 10_000).reason


def test_with_other_speeds_the_orders_are_played_through() -> None:
    slow = replace(plan().job.job(), speeds=((Worker(1, 1), 0.5),))
    problem = Problem(slow, frozenset(), Technique.STAGGERED, MemoryLimit.parse("uniform"))
    found = compare_plans(plan(), make_plan(problem, solver="list"), slow, 1_000)
    assert found.better and golden("at-the-op-times-that") in found.reason


def test_a_damaged_plan_in_force_stops_nothing_else(here: ConsoleHere, console: ConsoleService) -> None:
    job, poor = with_a_poor_plan(console, "damaged")
    live = console.jobs.find(job.job_id)
    others = {plan.fingerprint for plan in console.sources.job_catalog(live).plans} - {poor.fingerprint}
    here.damage(poor.fingerprint)

    console.plans.replanning.start(job.job_id, "list", 10.0, "ada")
    assert ended(console, job).outcome == "kept"
    assert str(OfJob(job.job_id, poor.fingerprint)) in console.sources.candidates(job.job_id)
    with pytest.raises(ConsoleError) as error:
        console.sources.find(OfJob(job.job_id))
    assert (error.value.status, error.value.code) == (404, "unknown_plan")
    job.finish()
    until(lambda: not len(live.plans.catalog), "its plans are in the database alone")
    assert others <= {plan.fingerprint for plan in console.sources.job_catalog(live).plans}

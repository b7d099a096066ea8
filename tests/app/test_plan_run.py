"""What the console says that workers run, and whether they do: the plan while a newcomer takes its state, a pause that
has been asked for, an iteration with parts left out, and a job that has ended."""

from __future__ import annotations

import base64
from math import nan

import pytest
from streamlit.testing.v1 import AppTest
from ui_console import MAIN, ConsoleHere, JobHere, turn_to, until

from openrecycle.agent.messages.protocol import Acknowledgement, Heartbeat, InterimPlan, Iteration, Registration
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.states import Condition, RoleState
from openrecycle.app.plans.sources import OfJob, Source
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.ui import facts, tables
from openrecycle.app.ui.facts import Card
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.plans.packed import packed, to_text
from openrecycle.planner.plans.plan import Plan
from tests.golden import golden

pytestmark = pytest.mark.processes

BACK = "W1_2"


def card(console: ConsoleService, job: JobHere, label: str) -> Card:
    return next(c for c in facts.live_cards(console.queries.view(job.job_id)) if c.label.startswith(label))


def in_force(console: ConsoleService, job: JobHere) -> Source:
    found = console.sources.find(OfJob(job.job_id))
    assert isinstance(found, Source)
    return found


def acknowledge(job: JobHere, name: str, generation: int, *steps: str, process: str = "-a") -> None:
    for step in steps:
        ack = Acknowledgement(worker=name, incarnation=name + process, generation=generation, state=step)  # type: ignore[arg-type]
        job.console.reports.acknowledge(job.job_id, [ack])


def interim_plan(job: JobHere) -> Plan:
    """As the launcher makes it, which has no plans of the console's."""
    return catalog_of(job, job.spec.technique).plan_for([Worker.parse(BACK)])[0]


def catalog_of(job: JobHere, technique: str) -> Catalog:
    return Catalog(job.spec.job(), Technique(technique), MemoryLimit.parse(job.spec.memory, field="memory"))


def returning(here: ConsoleHere, name: str) -> JobHere:
    """W1_2 is back, and the generation in which it takes its state is open."""
    job = JobHere(here.console, name).register().die(BACK).heal(BACK, 2)
    here.console.reports.register(
        job.job_id, [Registration(worker=BACK, incarnation=f"{BACK}-b", host="node1", pid=500)]
    )
    until(lambda: here.console.queries.view(job.job_id).generation == 3, "the generation with it opens")
    return job


def test_while_a_newcomer_takes_its_state_the_plan_that_is_run_is_shown(
    here: ConsoleHere, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    console, job = here.console, returning(here, "returns")
    plan = interim_plan(job)
    console.reports.meanwhile(job.job_id, InterimPlan(generation=3, plan=to_text(plan)))
    full = console.jobs.find(job.job_id).state.current
    assert full is not None and not full.failed
    for name in job.living:
        acknowledge(job, name, 3, "adopted", "formed", "resumed")
    acknowledge(job, BACK, 3, "adopted", process="-b")
    view, shown = console.queries.view(job.job_id), in_force(console, job)
    assert view.plan is not None and view.plan.fingerprint == shown.plan.fingerprint == plan.fingerprint
    by_name = {w.name: w for w in view.workers}
    assert by_name[BACK].state is RoleState.JOINING
    assert sum(w.takes_rerouted for w in view.workers) == 6, "its peers run its micro-batches still"
    found = card(console, job, "Interim plan")
    assert found.label == "Interim plan · generation 3" and found.note.startswith(golden("until-w1-2-has-the"))
    assert shown.name == "returns interim: without W1_2 (joining)"
    assert next(iter(console.sources.names(job.job_id).values())) == "Interim, generation 3: without W1_2 (joining)"
    assert console.jobs.find(job.job_id).plan_run.fingerprint == plan.fingerprint  # type: ignore[union-attr]
    # A console that is started anew knows it too, and goes on from there.
    before = console.jobs.find(job.job_id).plan_run
    job.console = console = ConsoleService(here.store)
    request.addfinalizer(console.close)
    read = console.jobs.take_up(job.job_id)
    assert read is not None and read.plan_run == before
    # With its state, the plan of all is run.
    acknowledge(job, BACK, 3, "formed", process="-b")
    assert in_force(console, job).plan.fingerprint == full.plan_fingerprint
    assert card(console, job, golden("plan-in-force")).label == golden("plan-in-force-generation-3")
    assert console.sources.generations_by_plan(job.job_id)[plan.fingerprint][-1] == 3
    (told,) = [row for row in console.queries.generations(job.job_id) if row["generation"] == 3]
    assert (told["interim_plan"], told["interim_failed"]) == (plan.fingerprint, [BACK])
    # Of a large job a few generations are told at a time.
    monkeypatch.setattr("openrecycle.app.console.view.GENERATION_ROWS", 2 * len(full.living))
    told_at_once = [[row["generation"] for row in console.queries.generations(job.job_id, after)] for after in (0, 2)]
    assert told_at_once == [[1, 2], [3]]


def test_an_interim_plan_is_the_jobs_and_stays_when_nobody_keeps_it_any_more(here: ConsoleHere) -> None:
    console, job = here.console, returning(here, "kept elsewhere")
    plan = catalog_of(job, "decoupled").plan_for([Worker.parse(BACK)])[0]
    console.plans.library.save(plan, "of another job")
    assert plan.fingerprint not in {row["fingerprint"] for row in here.store.job_plans(job.job_id)}
    for _ in range(2):
        console.reports.meanwhile(job.job_id, InterimPlan(generation=3, plan=to_text(plan)))
        (link,) = [row for row in here.store.job_plans(job.job_id) if row["fingerprint"] == plan.fingerprint]
        assert link["failed"] == [BACK] and not link["ahead"]
    console.plans.library.forget(plan.fingerprint)
    assert here.store.plan(plan.fingerprint) is not None


def test_what_is_no_valid_plan_of_the_job_is_refused_and_an_old_generations_changes_nothing(here: ConsoleHere) -> None:
    console, job = here.console, returning(here, "wrong")
    plan = interim_plan(job)
    cut = {name: ops for name, ops in plan.workers.items() if name != "W0_0"}
    better = plan.metrics.model_copy(update={"period": plan.metrics.period / 2})
    larger = Catalog(Job.uniform(3, 4, 8), Technique.STAGGERED, MemoryLimit("uniform"))
    wrong = {
        "damaged": base64.b64encode(packed(plan)[:-1]).decode(),
        "of another grid": to_text(larger.plan_for(())[0]),
        "not all ops": to_text(plan.model_copy(update={"workers": cut}).hashed()),
        "shorter than it is": to_text(plan.model_copy(update={"metrics": better})),
        "another's fingerprint": to_text(plan.model_copy(update={"fingerprint": "0" * 32})),
    }
    for what, text in wrong.items():
        with pytest.raises(ConsoleError) as error:
            console.reports.meanwhile(job.job_id, InterimPlan(generation=3, plan=text))
        assert (error.value.status, error.value.code, error.value.field) == (422, "invalid", "plan"), what
    console.reports.meanwhile(job.job_id, InterimPlan(generation=2, plan=to_text(plan)))
    current = console.jobs.find(job.job_id).state.current
    assert current is not None and current.interim is None


def test_paused_is_said_once_the_workers_have_stopped(here: ConsoleHere) -> None:
    console, job = here.console, JobHere(here.console, "pauses").register().commit(0, 5, 1).beat(6, 1)
    console.operators.pause(job.job_id, "ada")

    def beat(names: list[str], phase: str, seq: int) -> None:
        for name in names:
            at = {"worker": name, "incarnation": f"{name}-a", "seq": seq, "generation": 1, "iteration": 7}
            console.reports.heartbeats(job.job_id, [Heartbeat(**at, phase=phase)])  # type: ignore[arg-type]

    def states() -> dict[str, RoleState]:
        return {w.name: w.state for w in console.queries.view(job.job_id).workers}

    view = console.queries.view(job.job_id)
    assert view.condition is Condition.PAUSING and RoleState.PAUSED not in states().values()
    assert view.sentence.startswith("Pausing: waiting for W0_0, ")
    assert card(console, job, "Throughput").value != "0", "it trains still"
    beat(job.names[:-1], "paused", 100)
    until(lambda: states()["W0_0"] is RoleState.PAUSED, "they are heard")
    view = console.queries.view(job.job_id)
    assert view.condition is Condition.PAUSING and states()["W2_3"] is RoleState.RUNNING
    assert "waiting for W2_3 to finish" in view.sentence
    assert console.operators.choice(job.job_id).stopped is False
    beat(["W2_3"], "paused", 100)
    until(lambda: console.queries.view(job.job_id).condition is Condition.PAUSED, "all have stopped")
    assert set(states().values()) == {RoleState.PAUSED} and card(console, job, "Throughput").value == "0"
    assert console.operators.choice(job.job_id).stopped is True
    # A second pause: what was said in the first one is old.
    console.operators.resume(job.job_id, "ada")
    assert console.queries.view(job.job_id).condition is Condition.RUNNING
    console.operators.pause(job.job_id, "ada")
    assert console.queries.view(job.job_id).condition is Condition.PAUSING


def test_what_an_iteration_left_out_is_stored_and_said_once(here: ConsoleHere) -> None:
    console, job = here.console, JobHere(here.console, "skips").register().commit(0, 3, 1)
    row = {"loss": 2.0, "loss_hex": (2.0).hex(), "seconds": 1.0, "generation": 1, "living": 12}
    for _ in range(2):  # reports are sent again
        console.reports.committed(job.job_id, [Iteration(iteration=4, skipped=(3, 13), **row)])  # type: ignore[arg-type]
    view = console.queries.view(job.job_id)
    assert [i.skipped for i in view.iterations] == [(), (), (), (), (3, 13)]
    said = [e.text for e in view.events if "left out" in e.text]
    assert said == [golden("iteration-4-micro-batches-0-3")]
    table = tables.iterations_table(view.iterations, [], job.spec.micro_batches)
    assert table["what changed"][0] == "micro-batches 0.3, 2.1 left out"
    assert console.queries.iterations(job.job_id, 3, 10)[0]["skipped"] == [3, 13]
    lost = Iteration(iteration=5, skipped=tuple(range(18)), **row | {"loss": nan, "loss_hex": "nan"})  # type: ignore[arg-type]
    console.reports.committed(job.job_id, [lost])
    view = console.queries.view(job.job_id)
    assert view.iterations[-1].loss is None and console.jobs.find(job.job_id).state.committed == 6
    assert [e.text for e in view.events if "left out" in e.text] == [golden("iteration-5-has-no-loss"), *said]


def test_a_job_that_has_ended_has_nothing_in_force_and_is_not_followed(
    here: ConsoleHere, console: ConsoleService
) -> None:
    job = JobHere(console, "ended").register().commit(0, 39, 1)

    def page() -> AppTest:
        test = AppTest.from_file(MAIN, default_timeout=60).run()
        test.query_params["job"] = job.job_id
        turn_to(test, "schedule").run()
        assert not test.exception, test.exception[0].message
        return test

    assert [toggle.label for toggle in page().toggle] == [golden("follow-the-job")]
    job.finish()
    assert card(console, job, "Last plan").label == golden("last-plan-in-force-generation")
    assert next(iter(console.sources.names(job.job_id).values())) == "Last in force, generation 1: fault-free"
    assert not page().toggle
    assert in_force(console, job).name == golden("ended-last-in-force-fault-free")

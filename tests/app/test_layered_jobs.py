"""A job with layers in a console: they move after a death, and back; an operator may be asked; a restart knows it."""

from __future__ import annotations

from typing import Any

import pytest
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.coordination.membership import Mode
from openrecycle.agent.messages.protocol import Relayout
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.store import Store
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.jobs.words import layers_moved
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.simulation.policy import REPARTITION

pytestmark = pytest.mark.processes

HOME = (6, 6)
LAYERED = job_doc(Job.uniform(3, 2, 4, durations={"F": 4.0, "I": 4.0, "W": 4.0}, time_unit="ms", layers=12))


class Layered(JobHere):
    def __init__(self, here: ConsoleHere, **changes: Any) -> None:
        values: dict[str, Any] = {"profile": LAYERED.model_dump(), "durations": {}, "relayout": "auto"}
        values |= {"pipelines": 3, "stages": 2, "micro_batches": 4}
        super().__init__(here.console, "layered", **(values | changes))

    @property
    def live(self) -> LiveJob:
        return self.console.jobs.find(self.job_id)

    def moved(self, iteration: int) -> None:
        """The launcher says that its workers have the layers of the newest generation."""
        current = self.live.state.current
        assert current is not None
        count = layers_moved(self.live.state.held, current.partition)
        report = Relayout(
            generation=current.number,
            iteration=iteration,
            partition=current.partition,
            moved_layers=count,
        )
        self.console.reports.rearranged(self.job_id, report)


def test_layers_move_after_a_death_and_back_after_the_return(here: ConsoleHere) -> None:
    job = Layered(here).register().commit(0, 9, 1)
    assert job.live.state.held == HOME
    job.die("W1_1")
    job.resume(2)
    current = job.live.state.current
    assert current is not None and current.partition == HOME, "first the work is re-routed, at once"
    job.commit(10, 11, 2)
    until(lambda: job.live.state.generation == 3, "the layers are to move")
    current = job.live.state.current
    assert current is not None and current.failed == ("W1_1",)
    assert sum(current.partition) == 12 and current.partition != HOME
    plan = here.console.plans.cache.plan(current.plan_fingerprint)
    assert plan.partition == current.partition
    assert job.live.state.moving and job.live.state.held == HOME
    job.resume(3)
    view = here.console.queries.view(job.job_id)
    assert (view.held, view.coming) == (HOME, current.partition)
    job.moved(13)
    job.moved(13)  # said twice, it is the same
    view = here.console.queries.view(job.job_id)
    assert (view.held, view.coming) == (current.partition, ())
    job.commit(12, 20, 3)

    job.back("W1_1")
    until(lambda: job.live.state.generation == 4, "it is let in")
    joined = job.live.state.current
    assert joined is not None and joined.partition == current.partition, "first it comes, then layers move"
    job.resume(4)
    until(lambda: job.live.state.generation == 5, "the layers are to go back")
    home = job.live.state.current
    assert home is not None and home.partition == HOME and home.failed == ()
    job.resume(5)
    job.moved(25)
    assert job.live.state.held == HOME and not job.live.state.moving
    job.commit(21, 30, 5)
    until(
        lambda: job.live.plans.ahead.made >= job.live.plans.ahead.wanted > 1,
        "plans are made ahead for the layers as they are",
    )
    assert job.live.state.generation == 5, "and now they stay"


def test_layers_that_nobody_could_take_stay(here: ConsoleHere) -> None:
    job = Layered(here).register().commit(0, 9, 1).die("W1_1")
    job.resume(2)
    until(lambda: job.live.state.generation == 3, "the layers are to move")
    report = Relayout(generation=3, iteration=12, partition=HOME, moved_layers=0, problem="W0_0 can't build layer 3")
    job.console.reports.rearranged(job.job_id, report)
    until(lambda: job.live.state.generation == 4, "all go on as they are")
    job.resume(4)
    current = job.live.state.current
    assert current is not None and (current.partition, job.live.state.held) == (HOME, HOME)
    plan = here.console.plans.cache.plan(current.plan_fingerprint)
    assert plan.partition == HOME and not job.live.state.moving
    told = [e for e in here.console.queries.events(job.job_id, 0, 1000) if "can't build layer 3" in e["text"]]
    assert [e["severity"] for e in told if e["kind"] == "recovery"] == ["warning"]


def test_who_fails_while_layers_move_is_planned_for_with_those_that_come(here: ConsoleHere) -> None:
    job = Layered(here).register().commit(0, 9, 1).die("W1_1")
    job.resume(2)
    until(lambda: job.live.state.generation == 3, "the layers are to move")
    moving = job.live.state.current
    assert moving is not None
    job.die("W0_0")
    job.resume(4)
    current = job.live.state.current
    assert current is not None and current.failed == ("W0_0", "W1_1") and current.partition == moving.partition
    assert here.console.plans.cache.plan(current.plan_fingerprint).partition == moving.partition


def test_in_manual_mode_an_operator_is_asked(here: ConsoleHere) -> None:
    job = Layered(here).register().commit(0, 9, 1)
    here.console.operators.set_mode(job.job_id, Mode.MANUAL, 600.0, "ada")
    job.die("W1_1")
    until(lambda: job.live.state.offer is not None, "the options are known")
    assert job.live.state.generation == 1, "nothing is done until somebody chooses"
    here.console.operators.choose(job.job_id, REPARTITION, ("W1_1",), "ada")
    until(lambda: job.live.state.generation == 2, "it goes on")
    current = job.live.state.current
    assert current is not None and current.partition != HOME


def test_layers_that_may_not_move_stay(here: ConsoleHere) -> None:
    job = Layered(here, relayout="never").register().commit(0, 9, 1).die("W1_1")
    job.resume(2)
    until(lambda: here.console.queries.view(job.job_id).advice is not None, "the advice comes")
    assert job.live.state.generation == 2 and job.live.state.held == HOME


def test_a_restart_knows_which_layers_the_workers_have(here: ConsoleHere) -> None:
    job = Layered(here).register().commit(0, 9, 1).die("W1_1")
    job.resume(2)
    until(lambda: job.live.state.generation == 3, "the layers are to move")
    job.resume(3)
    before = job.live.state
    assert before.current is not None
    row = Store(here.database).job(job.job_id)
    assert row is not None
    again = job.live
    again.restore(row)
    assert (again.state.held, again.state.moving) == (HOME, True), "as the database says"
    assert again.plans.job.partition == before.current.partition
    job.moved(15)
    again.restore(row)
    assert (again.state.held, again.state.moving) == (before.current.partition, False)


def test_a_report_of_other_layers_than_the_job_has_is_refused(here: ConsoleHere) -> None:
    job = Layered(here).register()
    report = Relayout(generation=1, iteration=0, partition=(1, 2), moved_layers=3)
    with pytest.raises(ConsoleError):
        here.console.reports.rearranged(job.job_id, report)


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": 0},
        {"generation": 3},
        {"partition": (5, 7)},
        {"partition": (7, 5)},
        {"iteration": 2**53},
        {"moved_layers": 13},
    ],
    ids=str,
)
def test_only_what_a_generation_is_planned_for_is_taken(here: ConsoleHere, wrong: dict[str, Any]) -> None:
    """Else an agent's word would have the pages say for good that layers are on their way."""
    job = Layered(here, relayout="never").register().commit(0, 9, 1)
    job.die("W1_1")
    job.resume(2)
    before = job.live.state.held, job.live.state.moved
    report = {"generation": 2, "iteration": 10, "partition": HOME, "moved_layers": 0} | wrong
    with pytest.raises(ConsoleError) as refused:
        job.console.reports.rearranged(job.job_id, Relayout(**report))
    assert refused.value.status in (409, 422)
    assert (job.live.state.held, job.live.state.moved) == before and not job.live.state.moving

"""Every accepted report is in the store, and a console that is started anew goes on: see history_machine.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from openrecycle.agent.coordination.membership import MOST_RETIRED, Candidate, Offer, Offered
from openrecycle.agent.messages.protocol import FailureReport, JobSpec, Registration
from openrecycle.app.jobs.live_job import KEPT, read_state
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.planner.jobs.words import MIGRATE
from tests.app.flaky_database import FlakyDatabase
from tests.app.history_machine import History, durable
from tests.app.job_world import World
from tests.databases import sqlite_in


@pytest.fixture(scope="module", autouse=True)
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlakyDatabase]:
    """One for all examples: each has a job of its own."""
    database = History.database = sqlite_in(tmp_path_factory.mktemp("history"), FlakyDatabase)
    yield database
    database.close()


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=3,
    stateful_step_count=40,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # `make chaos` looks for a smaller example
)


@pytest.fixture
def world(database: FlakyDatabase) -> World:
    database.heal()
    return World(database, JobSpec(name="job", pipelines=3, stages=2, micro_batches=2, iterations=9, migrate=True))


def test_an_operators_command_is_not_lost_with_its_answer(world: World) -> None:
    world.database.fault = "answer lost"
    with pytest.raises(ConsoleError) as refused:
        world.operators.pause(world.job_id, "ada")
    assert refused.value.status == 503
    world.database.heal()
    world.operators.resume(world.job_id, "ada")
    assert [(command.seq, command.kind) for command in world.job.commands.sent] == [(1, "pause"), (2, "resume")]


def test_a_broken_connection_outlives_the_console_that_was_told_of_it(world: World) -> None:
    """Its worker says so once, and waits for the next generation: forgotten, it would wait for ever."""
    world.begin().breaks(world.living[0])
    world.restart_console()
    world.tick(5, world.living)
    assert world.job.state.generation == 2 and not world.job.state.current.failed  # type: ignore[union-attr]


def test_moves_outlive_the_console_that_decided_on_them(world: World) -> None:
    """The process has its new place already, and the launcher learns of it with the generation that is still to
    open."""
    world.begin().die(world.processes["i0"])
    world.take_up()
    world.plans_take_time()
    candidate = Candidate(MIGRATE, ("W2_1",), (("W2_1", "W0_0"),))
    world.job.apply(Offered(("W0_0",), Offer(("W0_0",), (candidate,), MIGRATE)))
    assert world.wanted == [("W2_1",)] and world.job.state.generation == 2
    world.restart_console()
    world.plan_arrives(*world.wanted)
    deployment = world.poll()
    assert deployment is not None and deployment.incarnations["W0_0"] == "i5"
    assert world.at("W0_0") is world.processes["i5"]


def test_who_came_where_another_has_left_stands_there_after_a_restart(database: FlakyDatabase) -> None:
    """Both with one generation, which the launcher hears of from the next console."""
    database.heal()
    grid = {"pipelines": 3, "stages": 2, "micro_batches": 2, "iterations": 9}
    world = World(database, JobSpec(name="job", **grid, checkpoints=True))
    world.begin().plans_take_time()
    for incarnation in ("i1", "i3", "i5"):
        world.die(world.processes[incarnation])
    world.start("W0_1")
    world.plan_arrives(*world.wanted[-1:])
    world.die(world.processes["i0"])
    current = world.job.state.current
    assert current is not None and {current.incarnations["W0_1"], current.incarnations["W2_0"]} == {"i4", "i6"}
    world.restart_console()
    deployment = world.poll()
    assert deployment is not None and deployment.generation == current.number
    assert deployment.incarnations == current.incarnations


def test_a_worker_that_was_asked_to_leave_does_so_in_order_after_a_restart(world: World) -> None:
    world.begin()
    world.operators.drain(world.job_id, "W1_0", "ada")
    world.restart_console()
    leaver = world.processes["i2"]
    assert world.job.sender("W1_0", leaver.incarnation).leaving
    deployment = world.poll()
    assert deployment is not None and deployment.leaving == ("W1_0",) and leaver.alive


def test_of_a_worker_that_died_before_it_could_leave_its_launcher_hears_that_it_was_to(world: World) -> None:
    """Otherwise it would start another one in a place that a person has emptied."""
    world.begin()
    world.operators.drain(world.job_id, "W1_0", "ada")
    world.die(world.processes["i2"])
    world.restart_console()
    deployment = world.poll()
    assert deployment is not None and deployment.leaving == ("W1_0",)
    world.operators.restart(world.job_id, "W1_0", "ada")


def test_who_is_started_in_the_place_of_one_that_was_to_leave_stays(world: World) -> None:
    """The generation without that one is still planned when a person asks for a new process."""
    world.begin()
    world.plans_take_time()
    world.operators.drain(world.job_id, "W1_0", "ada")
    world.die(world.processes["i2"])
    assert world.wanted and world.job.state.generation == 1
    world.operators.restart(world.job_id, "W1_0", "ada")
    world.restart_console()
    world.plan_arrives(*world.wanted)
    deployment = world.poll()
    assert deployment is not None and deployment.failed == ("W1_0",) and not deployment.leaving


def test_a_registration_that_comes_late_does_not_put_a_process_in_two_places(world: World) -> None:
    world.begin().die(world.processes["i0"])
    world.take_up()
    candidate = Candidate(MIGRATE, ("W2_1",), (("W2_1", "W0_0"),))
    world.job.apply(Offered(("W0_0",), Offer(("W0_0",), (candidate,), MIGRATE)))
    before = world.job.state
    registration = next(r for r in world.taken if r.route == "register" and r.sender is world.processes["i5"])
    assert world.deliver(registration) and world.job.state is before
    world.poll()
    world.die(world.processes["i5"])
    before = world.job.state
    (refused,) = world.reports.register(world.job_id, [registration.message]).refused  # type: ignore[list-item]
    assert refused.code == "fenced" and world.job.state is before


def test_what_died_at_an_empty_place_before_it_registered_stays_out(world: World) -> None:
    world.begin().die(world.processes["i0"])
    world.take_up()
    candidate = Candidate(MIGRATE, ("W2_1",), (("W2_1", "W0_0"),))
    world.job.apply(Offered(("W0_0",), Offer(("W0_0",), (candidate,), MIGRATE)))
    world.take_up()
    ended = FailureReport(worker="W2_1", incarnation="new", cause="exit", reporter="launcher")
    world.reports.failures(world.job_id, [ended])
    late = Registration(worker="W2_1", incarnation="new", host="node1", pid=9)
    (refused,) = world.reports.register(world.job_id, [late]).refused
    assert refused.code == "fenced"


@pytest.mark.chaos
def test_a_place_that_is_filled_again_and_again_takes_no_more_room(world: World) -> None:
    world.begin()
    for _ in range(MOST_RETIRED + 3):
        world.die(world.at("W0_1"))  # type: ignore[arg-type]
        world.take_up()
        world.start("W0_1")
        world.take_up()
    kept = [process for process in world.job.processes.values() if process.slot == "W0_1"]
    assert len(kept) == KEPT and [process.ended for process in kept] == ["failed"] * (KEPT - 1) + [""]
    assert len(world.job.state.members["W0_1"].retired) == MOST_RETIRED
    before = world.job.processes
    world.restart_console()
    assert world.job.processes == before and len(world.job.state.members["W0_1"].retired) == MOST_RETIRED


def test_an_acknowledgement_after_the_end_is_not_stored(world: World) -> None:
    for name in world.job.state.members:
        world.start(name)
    world.finish()
    world.take_up()
    assert world.job.state.over
    assert durable(read_state(world.store, world.row, world.spec)) == durable(world.job.state)

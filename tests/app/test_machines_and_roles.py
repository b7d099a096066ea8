"""What each view says of every worker is what the processes are, whatever happens to a job.

Processes and their launcher are played (job_world.py); the console, its database and its views are real.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from openrecycle.agent.coordination.membership import ACK_ORDER, Candidate, Mode, Offer, Offered
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.catalogs.service import Catalogs
from openrecycle.app.charts.progress import LOOKS, worker_grid
from openrecycle.app.charts.theme import LIGHT
from openrecycle.app.console.view import JobView, Queries, RollOuts, WorkerDetail, summary
from openrecycle.app.jobs.states import OUT, Condition, RoleState, words_of
from openrecycle.app.observing.goodput import Accounts
from openrecycle.app.plans.library import Library, PlanCache
from openrecycle.app.plans.solving import Making
from openrecycle.app.plans.sources import PlanSources
from openrecycle.app.ui import facts
from openrecycle.app.ui.worker_dialog import facts_html
from openrecycle.planner.jobs.words import MIGRATE, REROUTE, STAND_BY
from tests.agent.coordinator_run import FAILURE_TIMEOUTS
from tests.app.flaky_database import FlakyDatabase
from tests.app.job_world import Process, World
from tests.conftest import examples
from tests.databases import sqlite_in
from tests.golden import golden

pytestmark = pytest.mark.processes

PIPELINES, STAGES = 3, 2
NAMES = [f"W{p}_{s}" for p in range(PIPELINES) for s in range(STAGES)]
SPEC = JobSpec(name="job", pipelines=PIPELINES, stages=STAGES, micro_batches=3, iterations=500, migrate=True, demo=True)
pick = st.integers(0, 30)


class Console(Queries):
    """What the pages and the API ask, of a played job."""

    def __init__(self, world: World) -> None:
        self._world, self.plans = world, PlanCache(world.store)
        accounts = Accounts(world.store)
        super().__init__(
            *(world.store, FAILURE_TIMEOUTS, lambda: world.now),
            find=lambda job_id: world.job,
            live=lambda: [world.job],
            past=dict,
            plans=self.plans,
            figures=accounts.of,
            waited=accounts.waiting.of,
            advice=lambda job: None,
        )

    @property
    def read(self) -> JobView:
        return self.view(self._world.job_id, 5, 200)

    def dialog(self, view: JobView, name: str) -> WorkerDetail:
        return self.worker_detail(view, name, time.time())

    @property
    def picker(self) -> str:
        """What the plan pickers call the plan that is run."""
        store = self._world.store
        plans, catalogs = PlanCache(store), Catalogs(store)
        sources = PlanSources(
            store,
            find=lambda job_id: self._world.job,
            plans=plans,
            library=Library(store, plans),
            making=Making(),
            catalogs=catalogs,
            measured=lambda *_, **__: None,
        )
        try:
            return next(iter(sources.names(self._world.job_id).values()))
        finally:
            catalogs.close()


def view_of(world: World) -> JobView:
    """What the pages and the API are given."""
    return Console(world).read


class Lives(RuleBasedStateMachine):
    """A life of a job in steps after each of which everybody has been told of what came before."""

    database: FlakyDatabase

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.database, SPEC).begin()
        self.drained: set[str] = set()  # incarnations that were asked to leave
        self.paused = False

    def settle(self) -> None:
        """The launcher and all processes hear of what was decided; nothing is on its way any more."""
        world = self.world
        for _ in range(6):
            world.take_up()
            world.obey(*world.living)
            while world.unsent:
                world.retry(world.unsent[0])
            world.beat(*world.living)
            world.tick(1, world.living)
        # Who was asked to leave has left.
        for process in world.living:
            if process.incarnation in self.drained:
                world.die(process, "ended with exit code 0")

    def someone(self, number: int) -> Process | None:
        living = self.world.living
        return living[number % len(living)] if living else None

    @rule(number=pick)
    def dies(self, number: int) -> None:
        if process := self.someone(number):
            self.world.die(process)
        self.settle()

    @rule(worker=st.sampled_from(NAMES))
    def is_started_again(self, worker: str) -> None:
        if self.world.at(worker) is None and not self.world.job.state.halted:
            self.world.start(worker)
        self.settle()

    @rule(worker=st.sampled_from(NAMES))
    def is_drained(self, worker: str) -> None:
        before, there = self.world.job.state.members[worker], self.world.at(worker)
        self.world.attempt(lambda: self.world.operators.drain(self.world.job_id, worker, "ada"))
        if self.world.job.state.members[worker].leaving and not before.leaving and there is not None:
            self.drained.add(there.incarnation)
        self.settle()

    @rule(source=st.sampled_from(NAMES), better=st.booleans())
    def moves(self, source: str, better: bool) -> None:
        """The advisor has another worker take an empty place, or says so while an operator is to choose."""
        state = self.world.job.state
        failed = (state.pending or state.current).failed if state.current else ()  # type: ignore[union-attr]
        if not failed or source in failed:
            return
        to = failed[0]
        after = tuple(name for name in NAMES if name in {*failed, source} - {to})
        ways = (Candidate(MIGRATE, after, ((source, to),)), Candidate(REROUTE, failed), Candidate(STAND_BY, failed))
        self.world.attempt(
            lambda: self.world.job.apply(Offered(failed, Offer(failed, ways, MIGRATE if better else "")))
        )
        self.settle()

    @rule(way=st.sampled_from([MIGRATE, REROUTE]))
    def an_operator_chooses(self, way: str) -> None:
        self.world.attempt(lambda: self.world.operators.choose(self.world.job_id, way, None, "ada"))
        self.settle()

    @rule(mode=st.sampled_from(Mode))
    def the_mode_is_set(self, mode: Mode) -> None:
        self.world.attempt(lambda: self.world.operators.set_mode(self.world.job_id, mode, 60.0, "ada"))
        self.settle()

    @rule()
    def nobody_chooses(self) -> None:
        if self.world.job.state.choosing:
            self.world.tick(70, self.world.living)
        self.settle()

    @rule(number=pick)
    def is_paused_or_resumed(self, number: int) -> None:
        act = self.world.operators.resume if self.paused else self.world.operators.pause
        act(self.world.job_id, "ada")
        self.paused = not self.paused
        # Some come to the end of their iteration first, and say so.
        self.world.obey(*self.world.living[: number % (len(self.world.living) + 1)])
        self.world.tick(1, self.world.living)
        self.every_view_says_what_the_processes_are()
        self.settle()

    @rule()
    def the_console_is_restarted(self) -> None:
        self.world.restart_console()
        self.settle()

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def every_view_says_what_the_processes_are(self) -> None:
        world, console = self.world, Console(self.world)
        view = console.read
        worker_states = world.job.worker_states()
        alive = {process.incarnation for process in world.living}
        holds = {process.incarnation: str(place) for place, process in self.places()}
        # Each process, by itself.
        for incarnation, process in worker_states.known.items():
            state = worker_states.of(process)
            assert (state not in (RoleState.FAILED, RoleState.DRAINED)) == (incarnation in alive), (incarnation, state)
            if incarnation not in alive:
                assert (state is RoleState.DRAINED) == (incarnation in self.drained), (incarnation, state)
        assert alive <= worker_states.known.keys()
        assert +worker_states.count() == Counter(role.state for role in worker_states.roles.values())
        for worker in view.workers:
            holder = next((i for i, place in holds.items() if place == worker.name), None)
            # The grid, and with it the heat map, its table and the API.
            assert (worker.state not in OUT) == (holder is not None), (worker, holder)
            if holder is not None:
                pid = int(holder[1:]) + 1
                assert (worker.pid, worker.host) == (pid, "node1"), "the dialog's process"
                assert world.job.processes[holder].slot == worker.slot
                if worker.state is not RoleState.JOINING:
                    stands = self.paused and holder in world.stopped
                    assert (worker.state is RoleState.PAUSED) == stands, worker
                    if not stands and worker.state is not RoleState.SUSPECT:
                        waits = world.job.state.choosing or world.job.state.halted
                        assert (worker.state is RoleState.WAITING) == bool(waits), "nothing trains meanwhile"
            elif worker.state is RoleState.MOVED:
                assert worker.moved_to in holds.values() and worker.pid == 0
                moved = world.job.worker_states().role(world.job.state.members[worker.name]).process
                assert moved is not None and holds[moved.incarnation] == worker.moved_to
            elif worker.state is not RoleState.EMPTY:
                ended = next(i for i in world.processes if int(i[1:]) + 1 == worker.pid)
                assert ended not in alive, "the process that it names is gone"
                assert (worker.state is RoleState.DRAINED) == (ended in self.drained)
            assert facts.tile_words(worker)
        looks = worker_grid(view, LIGHT).rows["look"]
        assert list(looks) == [w.state.value for w in view.workers]
        # The card and the sentence name the processes that are gone, and only those.
        card = next(c for c in facts.live_cards(view) if c.label == "Living workers")
        assert card.value == f"{len(holds):,}"
        assert len(view.missing) == len(NAMES) - len(holds)
        for process in view.missing:
            assert process.incarnation not in alive
            assert (process.ended == "drained") == (process.incarnation in self.drained)
            assert process.slot in card.note or len(view.missing) > 3
        for process in view.moved:
            assert process.incarnation in alive and holds[process.incarnation] == process.role != process.slot
        current = world.job.state.current
        trains = {worker.name for worker in view.workers if worker.state not in OUT}
        assert summary(world.job, "").living == len(trains & set(current.living if current else ())), "as the page"
        silent = {w.name for w in view.workers if w.state is RoleState.SUSPECT and current and w.name in current.living}
        if view.condition is Condition.SILENT:
            assert silent
        if view.condition in (Condition.RUNNING, Condition.DEGRADED):
            assert not silent
            assert (view.condition is Condition.RUNNING) == (len(holds) == len(NAMES))
            for process in view.missing:
                assert process.name in view.sentence
        assert (view.condition in (Condition.PAUSED, Condition.PAUSING)) <= self.paused
        if self.paused and not world.job.state.halted and not world.job.state.choosing:
            expected = Condition.PAUSED if holds.keys() <= world.stopped else Condition.PAUSING
            assert view.condition is expected
            assert view.sentence.startswith(expected.capitalize())
        self.dialogs_and_lists_say_the_same(console, view, holds)

    def dialogs_and_lists_say_the_same(self, console: Console, view: JobView, holds: dict[str, str]) -> None:
        """The dialog and its history, the feed, what an operator may choose from, and the names of plans."""
        world, now = self.world, {worker.name: worker for worker in view.workers}
        passing = {RoleState.REROUTED, RoleState.SLOW, RoleState.WAITING, RoleState.PAUSED}
        for worker in view.workers:
            shown = console.dialog(view, worker.name)
            assert f"<dd>{LOOKS[worker.state][0]}" in facts_html(shown)
            holder = next((i for i, place in holds.items() if place == worker.name), None)
            if holder is not None:
                assert f"{int(holder[1:]) + 1} on node1" in facts_html(shown)
                assert "has ended" not in facts_html(shown)
            # Its history is of changes; what passes without one is the state in which it came there.
            said = "running" if worker.state in passing else worker.state.value
            assert not shown.stays or shown.stays[-1].state == said, (worker, shown.stays)
        ended = {process.slot for process in world.job.processes.values() if process.ended}
        ended |= {process.role for process in world.job.processes.values() if process.ended}
        for event in view.events:
            if event.kind == "failure" and event.worker and " failed: " in event.text:
                assert event.worker in ended, (event.text, ended)
        choice = world.operators.choice(world.job_id)
        assert choice.paused == self.paused
        for name in choice.failed:
            assert name not in holds.values() or choice.waiting, (name, choice)
        if (run := world.job.plan_run) is not None:
            for name in run.failed[:4]:
                state, moved = now[name].state, now[name].moved_to
                expected = name if state is RoleState.FAILED else f"{name} ({words_of(state, moved)})"
                assert expected in console.picker, console.picker

    @invariant()
    def a_console_that_is_started_anew_says_the_same(self) -> None:
        before, job = view_of(self.world), self.world.job
        row = self.world.row
        fresh = self.world.new_live()
        fresh.read(row)
        fresh.measurements.contacts = dict(job.measurements.contacts)  # they are written behind
        # A choice that is pending is made anew when the console takes the job up.
        again = fresh.worker_states(), replace(job.worker_states(), waiting=False)
        of = [{name: states.of(process) for name, process in states.known.items()} for states in again]
        assert of[0] == of[1]
        assert {n: (r.state, r.process, r.moved_to) for n, r in again[0].roles.items()} == {
            n: (r.state, r.process, r.moved_to) for n, r in again[1].roles.items()
        }
        assert again[0].missing == before.missing

    def places(self) -> Iterator[tuple[object, Process]]:
        """Where the launcher has its processes."""
        for place, entry in self.world.pool.running.items():
            yield place, self.world.processes[entry.incarnation]


@pytest.fixture(scope="module", autouse=True)
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlakyDatabase]:
    """One for all examples: each has a job of its own."""
    made = Lives.database = sqlite_in(tmp_path_factory.mktemp("lives"), FlakyDatabase)
    yield made
    made.close()


TestLives = Lives.TestCase
TestLives.settings = examples(9, stateful_step_count=15, phases=(Phase.explicit, Phase.generate))


def test_who_moved_has_not_failed(database: FlakyDatabase) -> None:
    """W2_0 is killed and W0_1's process takes its place; W1_1 is drained and W0_0's takes that."""
    world = World(database, SPEC).begin()

    def offer(source: str, to: str) -> None:
        failed = world.job.state.current.failed  # type: ignore[union-attr]
        after = tuple(name for name in NAMES if name in {*failed, source} - {to})
        ways = (Candidate(MIGRATE, after, ((source, to),)), Candidate(REROUTE, failed))
        world.job.apply(Offered(failed, Offer(failed, ways, MIGRATE)))
        world.take_up()

    killed = world.at("W2_0")
    assert killed is not None
    world.die(killed)
    world.take_up()
    offer("W0_1", "W2_0")
    leaver = world.at("W1_1")
    assert leaver is not None
    world.operators.drain(world.job_id, "W1_1", "ada")
    world.take_up()
    world.die(leaver, "ended with exit code 0")
    offer("W0_0", "W1_1")
    view = view_of(world)
    by_name = {w.name: w for w in view.workers}
    assert (by_name["W0_1"].state, by_name["W0_1"].moved_to, by_name["W0_1"].pid) == (RoleState.MOVED, "W2_0", 0)
    assert (by_name["W0_0"].state, by_name["W0_0"].moved_to, by_name["W0_0"].pid) == (RoleState.MOVED, "W1_1", 0)
    assert (by_name["W2_0"].pid, by_name["W2_0"].slot) == (2, "W0_1")
    assert (by_name["W1_1"].pid, by_name["W1_1"].slot) == (1, "W0_0")
    assert not [w.name for w in view.workers if w.state is RoleState.FAILED]
    card = next(c for c in facts.live_cards(view) if c.label == "Living workers")
    gone = "failed: W2_0's former process; drained: W1_1's former process"
    assert (card.value, card.note) == ("4", f"{gone}; moved: W0_0 to W1_1 and W0_1 to W2_0")
    assert view.condition is Condition.DEGRADED
    assert golden("w2-0s-former-process-failed") in view.sentence
    assert golden("w0-0s-process-holds-w1") in view.sentence
    assert time.time() - world.job.processes["i1"].since < 3600
    said = [event.text for event in view.events if event.kind == "recovery"]
    assert golden("w0-1s-process-trains-as") in said and golden("w2-0-has-re-joined-the") not in said


def test_who_stands_by_is_not_called_drained(database: FlakyDatabase) -> None:
    """W2_0 is killed, and the rest of its pipeline stands by."""
    world = World(database, SPEC).begin()
    killed, leaver = world.at("W2_0"), world.at("W2_1")
    assert killed is not None and leaver is not None
    world.die(killed)
    world.take_up()
    after = ("W2_0", "W2_1")
    world.job.apply(
        Offered(("W2_0",), Offer(("W2_0",), (Candidate(STAND_BY, after), Candidate(REROUTE, ("W2_0",))), STAND_BY))
    )
    world.take_up()
    world.die(leaver, "ended with exit code 0")
    sentence = view_of(world).sentence
    assert "W2_0 failed" in sentence and "W2_1 stands by" in sentence and "drained" not in sentence


def test_the_job_is_not_called_running_while_nobody_hears_a_worker(database: FlakyDatabase) -> None:
    world = World(database, SPEC).begin()
    world.tick(2, world.living)
    assert view_of(world).condition is Condition.RUNNING
    for heard in (world.living[1:], []):  # one is silent, all are
        world.tick(8, heard)
        view = view_of(world)
        assert view.condition is Condition.SILENT
        world.tick(3, world.living)
        assert view_of(world).condition is Condition.RUNNING
    # Nor paused: nobody knows whether they still wait.
    world.operators.pause(world.job_id, "ada")
    world.obey(*world.living)
    world.tick(2, world.living)
    assert view_of(world).condition is Condition.PAUSED
    for heard, said in ((world.living[1:], world.living[0].name), ([], golden("waiting-for-all-workers"))):
        world.tick(8, heard)
        view = view_of(world)
        assert view.condition is Condition.SILENT and view.sentence.startswith(golden("paused-all-workers-wait"))
        assert said in view.sentence
        world.tick(3, world.living)
        assert view_of(world).condition is Condition.PAUSED
    world.operators.resume(world.job_id, "ada")
    world.obey(*world.living)
    world.tick(2, world.living)
    # Who is out is silent for good.
    world.die(world.living[0])
    world.take_up()
    world.tick(8, world.living)
    assert view_of(world).condition is Condition.DEGRADED


def test_a_roll_out_counts_each_worker_once_also_one_that_has_moved(database: FlakyDatabase) -> None:
    """It acknowledges under the name that it had: 10 of a headline were 9 in the list."""
    world = World(database, SPEC).begin()
    killed, mover = world.at("W2_0"), world.at("W0_1")
    assert killed is not None and mover is not None
    world.die(killed)
    world.take_up()
    ways = (Candidate(MIGRATE, ("W0_1",), (("W0_1", "W2_0"),)), Candidate(REROUTE, ("W2_0",)))
    world.job.apply(Offered(("W2_0",), Offer(("W2_0",), ways, MIGRATE)))
    generation = world.job.state.generation
    assert mover.name == "W0_1", "it has not heard of its new place"
    for process in world.living:
        world.acknowledge(process, "adopted", generation)
    found = RollOuts(world.store).of(world.job)
    assert found is not None and len(found.workers) == 5
    assert [found.now_at(step) for step in ACK_ORDER] == [0, 5, 0, 0]
    assert sum(taken.adopted is not None for taken in found.workers) == 5, "those that are listed"

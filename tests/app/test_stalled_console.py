"""A console that did not get to run holds nobody's silence of that time against the workers, wherever it stood."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import uvicorn
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from ui_console import JobHere, until

from openrecycle.agent.coordination.membership import Candidate, Mode, ModeSet, Note, Offer, Offered, TransferBroken
from openrecycle.agent.messages.protocol import JobSpec, WorkerState
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import AGAIN_SECONDS, TICK_SECONDS, LiveJob
from openrecycle.app.jobs.states import sentence
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.runner import EventLoopWatch
from openrecycle.app.server import create_routes
from openrecycle.db.store import JobUpdate, Store
from tests.agent.coordinator_run import FAILURE_TIMEOUTS
from tests.app.flaky_database import FlakyDatabase
from tests.app.job_world import World
from tests.databases import sqlite_in
from tests.golden import golden

pytestmark = pytest.mark.processes

STOOD_STILL = 3 * FAILURE_TIMEOUTS.dead
ASKED = Note("info", "operator", "asked")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    database = sqlite_in(tmp_path, FlakyDatabase)
    world = World(database, JobSpec(name="job", pipelines=2, stages=2, micro_batches=2, iterations=9)).begin()
    world.tick(2, world.living)
    yield world
    database.close()


def _states(world: World) -> set[WorkerState]:
    return {member.state for member in world.job.state.members.values()}


def _said(world: World) -> str:
    job = world.job
    return sentence(job.worker_states(), world.now, FAILURE_TIMEOUTS, stood_still=job.stood_still(world.now))


def test_nobody_is_lost_to_a_pause_between_two_ticks(world: World) -> None:
    world.now += STOOD_STILL
    world.job.tick()
    assert _states(world) == {WorkerState.RUNNING}
    texts = [row["text"] for row in world.store.events(world.job_id, after=0, limit=500)]
    assert any(
        text.startswith(golden("the-console-stood-still-for", f"{STOOD_STILL - TICK_SECONDS:.1f}")) for text in texts
    )


def test_nobody_is_lost_to_a_pause_in_the_middle_of_a_tick(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between taking what was heard and looking for what was not."""
    take = world.job.take_heartbeats

    def slowly() -> None:
        take()
        world.now += STOOD_STILL

    monkeypatch.setattr(world.job, "take_heartbeats", slowly)
    world.job.tick()
    assert _states(world) == {WorkerState.RUNNING}


def test_a_pause_that_could_not_be_stored_is_not_forgotten(world: World) -> None:
    world.now += STOOD_STILL
    world.database.fault = "refused"
    assert not world.attempt(world.job.tick)
    world.database.heal()
    world.now += TICK_SECONDS
    assert world.attempt(world.job.tick)
    assert _states(world) == {WorkerState.RUNNING}


def test_a_database_that_takes_nothing_is_no_pause_of_the_console(world: World) -> None:
    """Nobody could choose in that time, which is made up for once."""
    world.job.apply(ModeSet(Mode.MANUAL, 60.0, "ada"))
    world.die(world.living[-1])
    world.database.fault = "rolled back"
    assert not world.attempt(lambda: world.job.record(ASKED))
    world.tick(600, world.living)
    world.database.heal()
    world.tick(3, world.living)
    pending = world.job.state.pending
    assert pending is not None and pending.until is not None and world.now < pending.until <= world.now + 60
    texts = [row["text"] for row in world.store.events(world.job_id, after=0, limit=500)]
    assert not any(text.startswith(golden("the-console-stood-still")) for text in texts)


def test_a_choice_is_over_in_time_though_somebody_whose_own_change_can_not_be_stored_tries_it_again(
    world: World,
) -> None:
    world.job.apply(ModeSet(Mode.MANUAL, 60.0, "ada"))
    world.die(world.living[-1])
    for _ in range(7):
        world.database.fault = "rolled back"
        assert not world.attempt(lambda: world.job.record(ASKED))
        world.database.heal()
        world.tick(10, world.living)
    assert world.job.state.generation == 2


def test_the_options_are_still_known_when_a_job_was_read_back(world: World) -> None:
    """They were compared once, for the workers that are out."""
    world.job.apply(ModeSet(Mode.MANUAL, 60.0, "ada"))
    world.die(out := world.living[-1])
    offer = Offer((out.name,), (Candidate("re-route", (out.name,)),))
    world.job.apply(Offered((out.name,), offer))
    world.database.fault = "rolled back"
    assert not world.attempt(lambda: world.job.record(ASKED))
    world.database.heal()
    world.tick(1, world.living)
    assert world.job.state.offer == offer


def test_all_have_their_full_time_once_the_first_is_heard_again_though_that_is_not_stored(world: World) -> None:
    """As after a switch that failed: whoever connects a second later is no more dead than the first."""
    first = world.living[0]
    world.silence(STOOD_STILL)
    world.beat(first)
    world.database.fault = "rolled back"
    assert not world.attempt(world.job.tick)
    world.database.heal()
    world.now += AGAIN_SECONDS
    assert world.attempt(world.job.tick)
    assert _states(world) == {WorkerState.RUNNING, WorkerState.SUSPECT}
    world.tick(2, world.living)
    assert _states(world) == {WorkerState.RUNNING}


def test_all_have_their_full_time_once_a_new_process_came_though_its_answer_was_lost(world: World) -> None:
    dead = world.living[0]
    world.silence(STOOD_STILL)
    world.die(dead)
    world.take_up()
    world.database.fault = "answer lost"
    world.start(dead.name)
    world.database.heal()
    world.tick(3, [])
    assert WorkerState.FAILED not in _states(world)


def test_nobody_is_lost_while_the_console_is_deaf_and_changes_can_not_be_stored(world: World) -> None:
    """Each reads the job back, a little later than the one before."""
    world.database.fault = "rolled back"
    for _ in range(round(STOOD_STILL / TICK_SECONDS)):
        world.now += TICK_SECONDS
        assert not world.attempt(lambda: world.job.record(ASKED))
    world.database.heal()
    world.beat(world.living[0])
    world.job.tick()
    world.tick(2, world.living)
    assert _states(world) == {WorkerState.RUNNING}


def test_a_pause_is_spared_once_though_it_could_not_be_stored_at_first(world: World) -> None:
    silent, *others = world.living
    quiet = round(FAILURE_TIMEOUTS.dead) - 4
    world.tick(quiet, others)
    world.now += STOOD_STILL
    world.database.fault = "rolled back"
    assert not world.attempt(world.job.tick)
    world.database.heal()
    world.now += AGAIN_SECONDS
    assert world.attempt(world.job.tick)
    world.tick(6, others)
    assert world.job.state.members[silent.name].state is WorkerState.FAILED


def test_nobody_is_lost_to_a_pause_after_which_the_first_change_can_not_be_stored(world: World) -> None:
    """The next one reads the job back before any tick has looked for how long the console stood still."""
    world.now += STOOD_STILL
    world.database.fault = "rolled back"
    assert not world.attempt(lambda: world.job.record(ASKED))
    world.database.heal()
    world.job.record(ASKED)
    world.job.tick()
    assert _states(world) == {WorkerState.RUNNING}


def test_somebody_whose_own_change_can_not_be_stored_keeps_no_job_from_its_ticks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again, and what else is said of the job can be stored: a worker that is silent meanwhile is
    lost like any other."""
    apply, (silent, *others) = world.store.apply, world.living

    def refusing(job_id: str, change: JobUpdate) -> bool:
        if change.audit:
            raise OperationalError("insert", {}, Exception("database or disk is full"))
        return apply(job_id, change)

    monkeypatch.setattr(world.store, "apply", refusing)
    for _ in range(round((FAILURE_TIMEOUTS.dead + 2) / TICK_SECONDS)):
        world.now += TICK_SECONDS
        world.beat(*others)
        with pytest.raises(ConsoleError):
            world.job.record(ASKED, audit={"at": world.now})
        world.job.tick()
        assert not world.job.measurements.fresh
    members = world.job.state.members
    assert members[silent.name].state is WorkerState.FAILED
    assert {members[process.name].state for process in others} == {WorkerState.RUNNING}


def test_workers_that_are_not_listened_to_are_not_said_to_be_silent(world: World) -> None:
    """While the console stands still, and a page is shown all the same: an operator would look at the launcher."""
    before = _said(world)
    world.now += FAILURE_TIMEOUTS.suspect + 0.4
    assert golden("the-console-has-been-stuck", f"{FAILURE_TIMEOUTS.suspect:.0f}") in _said(world)
    world.job.tick()
    assert _said(world) == before
    world.now += FAILURE_TIMEOUTS.suspect - 0.2
    assert _said(world) == before, "nor a little earlier"
    world.job.tick()
    world.tick(round(FAILURE_TIMEOUTS.suspect) + 2, [])
    assert golden("waiting-for-all-workers") in _said(world)


def test_silence_while_the_console_runs_still_counts(world: World) -> None:
    world.now += STOOD_STILL
    silent, *others = world.living
    world.tick(round(FAILURE_TIMEOUTS.dead) + 2, others)
    assert world.job.state.members[silent.name].state is WorkerState.FAILED
    assert {world.job.state.members[p.name].state for p in others} == {WorkerState.RUNNING}


def test_a_broken_transfer_waits_for_its_explanation_beyond_a_pause(world: World) -> None:
    reporter, worker = world.living[0], world.living[2]
    world.job.apply(TransferBroken(reporter.name, reporter.incarnation, worker.name, 1, ""))
    world.now += STOOD_STILL
    world.job.tick()
    assert world.job.state.generation == 1
    world.tick(round(FAILURE_TIMEOUTS.transfer_grace) + 1, world.living)
    assert world.job.state.generation == 2


class DeafConsole:
    """A console on a server of its own, whose loop `hold` keeps from running; its time goes on when a test says so."""

    def __init__(self, folder: Path) -> None:
        self.now = 1_000.0
        self.database = sqlite_in(folder)
        loop_watch = EventLoopWatch(0.01, lambda: self.now)
        self.console = ConsoleService(
            Store(self.database),
            failure_timeouts=FAILURE_TIMEOUTS,
            tolerance=0,
            loop_watch=loop_watch,
            clock=lambda: self.now,
        )
        self.console.start()
        self.held, self._let_go = threading.Event(), threading.Event()

        async def hold(request: Request) -> Response:
            self.held.set()
            assert self._let_go.wait(60)
            return Response()

        @asynccontextmanager
        async def lifespan(app: object) -> AsyncIterator[None]:
            loop_watch.start()
            yield

        app = Starlette(routes=[Route("/hold", hold), *create_routes(self.console)], lifespan=lifespan)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()
        self.root = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def let_go(self) -> None:
        self._let_go.set()

    def go_on(self, job: LiveJob, seconds: float) -> None:
        """That time, looked at as often as the console does; it is to be able to hear."""
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            until(lambda: self.console.loop_watch.overdue <= 0, "the loop to run")
            self.console.tick(job)

    def close(self) -> None:
        self.let_go()
        self.console.stop_waiting()
        self._server.should_exit = True
        self._thread.join(30)
        self.console.close()
        self.database.close()


def test_nobody_is_lost_while_the_event_loop_stands_still(tmp_path: Path) -> None:
    """Twelve agents beat, and a handler keeps the loop for three times as long as a worker may be silent, while all
    other threads of the console run."""
    deaf = DeafConsole(tmp_path)
    try:
        here = JobHere(deaf.console, "job").register()
        job = deaf.console.jobs.find(here.job_id)
        seq = iter(range(1, 10_000))

        def beat(name: str) -> int:
            body = {"worker": name, "incarnation": f"{name}-a", "seq": next(seq), "generation": 1}
            body |= {"iteration": 0, "phase": "training"}
            return requests.post(
                f"{deaf.root}/api/v1/jobs/{here.job_id}/heartbeats", json={"heartbeats": [body]}, timeout=60
            ).status_code

        with ThreadPoolExecutor(13) as agents:
            assert set(agents.map(beat, here.names)) == {200}
            holding = agents.submit(requests.get, f"{deaf.root}/hold", timeout=60)
            assert deaf.held.wait(30)
            beats = [agents.submit(beat, name) for name in here.names]
            for _ in range(round(STOOD_STILL / TICK_SECONDS)):
                deaf.now += TICK_SECONDS
                deaf.console.tick(job)
            assert not any(done.done() for done in beats)
            deaf.let_go()
            assert holding.result(30).status_code == 200
            assert {done.result(30) for done in beats} == {200}
        deaf.go_on(job, 2 * TICK_SECONDS)
        assert {member.state for member in job.state.members.values()} == {WorkerState.RUNNING}
        assert job.state.generation == 1
        texts = [row["text"] for row in deaf.console.queries.events(here.job_id, 0, 500)]
        assert any(golden("that-time-is-not-held") in text for text in texts)

        # It hears again, and who is silent now is lost.
        silent, *others = here.names
        for _ in range(round(FAILURE_TIMEOUTS.dead / 4) + 1):
            deaf.go_on(job, 4.0)
            assert {beat(name) for name in others} == {200}
        states: dict[str, Any] = {name: member.state for name, member in job.state.members.items()}
        assert states.pop(silent) is WorkerState.FAILED
        assert set(states.values()) == {WorkerState.RUNNING}
    finally:
        deaf.close()


def test_a_loop_stands_still_from_when_it_is_expected_until_it_ends() -> None:
    now = [0.0]
    loop_watch = EventLoopWatch(0.01, lambda: now[0])
    now[0] += 7
    assert loop_watch.overdue == 0
    loop_watch.expect()  # a console that takes up its jobs before it takes requests
    now[0] += 3
    assert loop_watch.overdue == pytest.approx(2.99)

    async def live() -> None:
        loop_watch.start()
        now[0] += 5
        assert loop_watch.overdue == pytest.approx(4.99)
        await asyncio.sleep(0.05)
        assert loop_watch.overdue == 0

    asyncio.run(live())
    now[0] += 99
    assert loop_watch.overdue == 0

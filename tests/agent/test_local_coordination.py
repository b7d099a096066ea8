"""Generations without a console: a state machine without a clock."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from openrecycle.agent.coordination.launcher import Deploy, Failure, Halt, LauncherWarning
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.coordination.membership import CHECKPOINT, back_to
from openrecycle.agent.messages.protocol import Deployment
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import InfeasibleError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.layers.room import LayerRoom
from openrecycle.planner.plans.plan import Plan
from tests.agent.pretended import WrongPlans
from tests.conftest import examples
from tests.golden import golden


def _started(
    pipelines: int = 2, stages: int = 2, *, kind: type[Catalog] = Catalog, **options: Any
) -> LocalCoordination:
    catalog = kind(Job(pipelines, stages, 2), Technique.STAGGERED, MemoryLimit("uniform"))
    coordination = LocalCoordination(catalog, back_to=CHECKPOINT if "checkpoint" in options else "", **options)
    for p in range(pipelines):
        for s in range(stages):
            assert not coordination.poll(0.0)
            coordination.ready(Worker(p, s), str(Worker(p, s)))
    return coordination


def _at_once(find: Callable[[], str | Halt]) -> Future[str | Halt]:
    found = Future[str | Halt]()
    found.set_result(find())
    return found


def _only(events: list[object]) -> Deploy:
    (event,) = (e for e in events if not isinstance(e, LauncherWarning))
    assert isinstance(event, Deploy)
    assert check(event.plan) == []
    assert event.deployment.plan_fingerprint == event.plan.fingerprint
    return event


def _moved(deploy: Deploy) -> list[tuple[Worker, Worker]]:
    """Returns (from, to) of the processes that are no longer where `_started` has put them."""
    return [(Worker.parse(process), to) for process, to in deploy.places.items() if process != str(to)]


def _all_form(coordination: LocalCoordination, deployment: Deployment, **processes: str) -> None:
    """processes: of workers whose process is not the one that they began with."""
    for name in deployment.living:
        coordination.acknowledged("formed", Worker.parse(name), processes.get(name, name), deployment.generation)


def test_the_first_generation_opens_when_all_are_ready() -> None:
    deployment = _only(_started().poll(0.0)).deployment
    assert deployment.generation == 1 and len(deployment.living) == 4 and deployment.failed == ()


def test_a_death_opens_a_generation_without_the_dead_and_a_return_one_with_it() -> None:
    coordination = _started()
    coordination.poll(0.0)
    coordination.failed(Failure("exit", Worker(1, 0), "W1_0", detail="was killed by SIGKILL"))
    deploy = _only(coordination.poll(1.0))
    assert deploy.deployment.generation == 2 and deploy.deployment.failed == ("W1_0",)
    assert "W1_0" not in deploy.plan.workers
    coordination.failed(Failure("exit", Worker(1, 0), "W1_0", detail="again"))
    assert coordination.poll(1.0) == []
    coordination.ready(Worker(1, 0), "b")
    assert coordination.poll(1.5) == [], "a newcomer waits until the others are through with generation 2"
    _all_form(coordination, deploy.deployment)
    deployment = _only(coordination.poll(2.0)).deployment
    assert deployment.generation == 3 and deployment.joining == ("W1_0",) and deployment.failed == ()


def test_workers_found_dead_in_one_turn_are_gone_in_one_generation() -> None:
    """As those of a node that is lost."""
    coordination = _started(4, 2)
    coordination.poll(0.0)
    for cell in (Worker(1, 0), Worker(1, 1), Worker(2, 0)):
        coordination.failed(Failure("exit", cell, str(cell), detail="died"))
    deployment = _only(coordination.poll(1.0)).deployment
    assert (deployment.generation, deployment.failed) == (2, ("W1_0", "W1_1", "W2_0"))


def test_what_is_told_of_the_next_death_is_ready_before_it() -> None:
    class Noted(Catalog):
        def make_ready(self, failed: Collection[Worker]) -> None:
            super().make_ready(failed)
            asked.put(set(failed))

    asked = queue.SimpleQueue[set[Worker]]()
    coordination = _started(kind=Noted)
    _all_form(coordination, _only(coordination.poll(0.0)).deployment)
    assert asked.get(timeout=20) == set()
    coordination.failed(Failure("exit", Worker(1, 0), "W1_0", detail="was killed by SIGKILL"))
    _all_form(coordination, _only(coordination.poll(1.0)).deployment)
    assert asked.get(timeout=20) == {Worker(1, 0)} and asked.empty(), "once a generation"


def test_whatever_a_worker_says_at_its_end_its_peers_can_read_the_next_deployment() -> None:
    coordination = _started()
    coordination.poll(0.0)
    coordination.failed(
        Failure("exit", Worker(1, 0), "W1_0", detail="ended with exit code 1 (ValueError: bad caf\udce9.txt)")
    )
    deployment = _only(coordination.poll(1.0)).deployment
    told = Deployment.model_validate(json.loads(json.dumps(deployment.model_dump())))
    assert told.failed == ("W1_0",) and "bad caf?.txt" in told.reason


def _layers_move(
    room: LayerRoom | None, host: str = "", takes_over: bool = False, **options: Any
) -> tuple[list[tuple[int, ...]], list[str]]:
    """What layers per stage are, generation by generation, and what people are told, when two workers die in turn.
    takes_over: another launcher goes on once all have begun. options: of LocalCoordination."""
    job = Job.uniform(3, 2, 4, durations={"F": 4.0, "I": 4.0, "W": 4.0}, time_unit="ms", layers=8)
    catalog = Catalog(job, Technique.STAGGERED, MemoryLimit("none"))
    coordination = LocalCoordination(catalog, **{"relayout": "auto", "room": room} | options)
    for worker in job.workers():
        coordination.ready(worker, str(worker), host)
    partitions, told = list[tuple[int, ...]](), list[str]()
    for dead in ("", "W1_1", "W0_1"):
        if dead:
            coordination.failed(Failure("exit", Worker.parse(dead), dead, detail="died"))
        looks = True
        while looks:
            orders = coordination.poll(1.0)
            told += [order.text for order in orders if isinstance(order, LauncherWarning)]
            for order in orders:
                if isinstance(order, Deploy):
                    partitions.append(order.plan.partition)
                    _all_form(coordination, order.deployment)
            looks = bool(orders) or coordination.looks
            time.sleep(0.001)
        if takes_over and not dead:
            saved = json.loads(json.dumps(coordination.saved()))
            coordination.close(lambda: True)
            coordination = LocalCoordination(catalog, relayout="auto", room=room)
            coordination.restore(saved)
    coordination.close(lambda: True)
    return partitions, told


def test_where_memory_is_short_layers_stay_and_that_is_said_once() -> None:
    """With the third worker lost, too: nobody who lives is to be ended for want of memory."""
    moved, told = _layers_move(None)
    assert moved[:3] == [(4, 4), (4, 4), (5, 3)] and not told
    one, has = 1_000_000_000, 6 * 4 * 1_000_000_000
    full = LayerRoom((0, 0), ((one, one),) * 8, (0,) * 8, (0, 0), ((has, (3, 3), ""),))
    stayed, told = _layers_move(full)
    assert set(stayed) == {(4, 4)} and len(told) == len(set(told)) == 2
    assert told[0] == golden("layers-cant-become-5-3")
    assert _layers_move(replace(full, places=((has + 3 * one, (3, 3), ""),)))[0][:3] == moved[:3]


def test_layers_stay_where_too_little_is_left_of_the_job() -> None:
    """They move where that saves more than it costs; where they are to move in any case, if anything is left."""
    assert (5, 3) in _layers_move(None, iterations=100)[0]
    assert set(_layers_move(None, iterations=2)[0]) == {(4, 4)}
    assert (5, 3) in _layers_move(None, iterations=2, relayout="always")[0]
    assert set(_layers_move(None, iterations=1, relayout="always")[0]) == {(4, 4)}


@pytest.mark.parametrize("takes_over", [False, True])
def test_workers_take_memory_on_the_node_that_they_are_on(takes_over: bool) -> None:
    """All begin on a node that has enough, and were started on another one since."""
    one = 1_000_000_000
    places = ((100 * one, (3, 3), "large"), (6 * 4 * one, (0, 0), "small"))
    room = LayerRoom((0, 0), ((one, one),) * 8, (0,) * 8, (0, 0), places)
    assert (5, 3) in _layers_move(room, "large", takes_over)[0]
    stayed, told = _layers_move(room, "small", takes_over)
    assert set(stayed) == {(4, 4)} and told


def test_a_plan_made_while_survivors_wait_is_checked_once_they_form() -> None:
    coordination = _started(kind=WrongPlans)
    _all_form(coordination, _only(coordination.poll(0.0)).deployment)
    coordination.failed(Failure("exit", Worker(1, 0), "W1_0", detail="died"))
    (deploy,) = coordination.poll(1.0)
    assert isinstance(deploy, Deploy), "nobody waits for the check"
    assert coordination.poll(1.0) == []
    _all_form(coordination, deploy.deployment)
    while not (orders := coordination.poll(2.0)):
        time.sleep(0.001)
    (halt,) = orders
    assert isinstance(halt, Halt) and golden("the-plan-of-list-is") in halt.reason
    assert coordination.poll(3.0) == [], "said once"


class _MadeAhead(WrongPlans):
    """Has all plans of another partition, by its own word."""

    def at(self, partition: tuple[int, ...]) -> Catalog:
        job = super().at(partition).job
        return super().at(partition) if job == self.job else _MadeAhead(job, self.technique, self.memory)

    def has(self, failed: Iterable[Worker]) -> bool:
        return self.job.partition != (6, 6)

    def plan_for(self, failed: Iterable[Worker]) -> tuple[Plan, str]:
        return super().plan_for(failed) if self.has(()) else Catalog.plan_for(self, failed)


def test_a_plan_that_was_made_ahead_is_not_checked_again_when_layers_move() -> None:
    """It was when it was made. This one would not pass."""
    coordination = LocalCoordination(
        _MadeAhead(Job.uniform(3, 2, 4, layers=12), Technique.STAGGERED, MemoryLimit("uniform")), relayout="always"
    )
    for p, s in product(range(3), range(2)):
        coordination.ready(Worker(p, s), str(Worker(p, s)))
    _all_form(coordination, _only(coordination.poll(0.0)).deployment)
    coordination.failed(Failure("exit", Worker(1, 0), "W1_0", detail="died"))
    _all_form(coordination, _only(coordination.poll(1.0)).deployment)
    while not (orders := coordination.poll(2.0)):
        time.sleep(0.001)
    (deploy,) = orders
    assert isinstance(deploy, Deploy) and check(deploy.plan) != []


def test_a_newcomer_that_waits_enters_with_the_next_death() -> None:
    coordination = _started(3)
    _only(coordination.poll(0.0))
    coordination.failed(Failure("exit", Worker(1, 0), "W1_0", detail="died"))
    _only(coordination.poll(1.0))
    coordination.ready(Worker(1, 0), "b")
    coordination.failed(Failure("exit", Worker(2, 1), "W2_1", detail="died"))
    deployment = _only(coordination.poll(2.0)).deployment
    assert deployment.joining == ("W1_0",) and deployment.failed == ("W2_1",)


def test_a_newcomer_that_dies_while_it_waits_changes_nothing() -> None:
    coordination = _started()
    coordination.poll(0.0)
    coordination.failed(Failure("exit", Worker(1, 0), "W1_0", detail="died"))
    deploy = _only(coordination.poll(1.0))
    coordination.ready(Worker(1, 0), "b")
    coordination.failed(Failure("exit", Worker(1, 0), "b", detail="died"))
    _all_form(coordination, deploy.deployment)
    assert coordination.poll(2.0) == []


def test_a_stage_without_a_living_peer_halts_the_job() -> None:
    coordination = _started()
    coordination.poll(0.0)
    coordination.failed(Failure("exit", Worker(0, 1), "W0_1", detail="died"))
    coordination.failed(Failure("exit", Worker(1, 1), "W1_1", detail="died"))
    (halt,) = coordination.poll(0.0)
    assert isinstance(halt, Halt)
    assert golden("stage-1-has-no-living") in halt.reason and "--checkpoint" in halt.reason
    assert not coordination.stands


def test_a_broken_transfer_waits_for_its_explanation() -> None:
    coordination = _started()
    coordination.poll(0.0)
    coordination.failed(Failure("transfer", Worker(0, 0), "W0_0", 1, now=10.0))
    coordination.failed(Failure("transfer", Worker(0, 1), "W0_1", 1, now=10.1))
    assert coordination.poll(11.9) == []
    coordination.failed(Failure("exit", Worker(1, 0), "W1_0", detail="died"))
    assert _only(coordination.poll(12.1)).deployment.generation == 2
    # A report about a generation that is over changes nothing.
    coordination.failed(Failure("transfer", Worker(0, 0), "W0_0", 1, now=12.2))
    assert coordination.poll(20.0) == []
    # Without an explanation the same members form anew.
    coordination.failed(Failure("transfer", Worker(0, 0), "W0_0", 2, now=30.0))
    deployment = _only(coordination.poll(32.0)).deployment
    assert deployment.generation == 3 and len(deployment.living) == 3


def test_an_empty_stage_is_re_staffed_from_the_checkpoint() -> None:
    coordination = _started(2, 2, checkpoint=lambda: "point-7", beside=_at_once)
    coordination.poll(0.0)
    coordination.failed(Failure("exit", Worker(0, 1), "W0_1", detail="died"))
    _only(coordination.poll(0.0))
    coordination.failed(Failure("exit", Worker(1, 1), "W1_1", detail="died"))
    deploy = _only(coordination.poll(0.0))
    ((source, to),) = _moved(deploy)
    assert source.stage == 0 and to.stage == 1 and deploy.restore == "point-7"
    assert set(deploy.deployment.living) == {str(to), str(Worker(1 - source.pipeline, 0))}
    assert deploy.deployment.joining == (str(to),)
    # Superseded before all were back on the checkpoint: the next generation goes back to it too.
    coordination.failed(Failure("transfer", to, str(source), 3, now=1.0))
    again = _only(coordination.poll(9.0))
    assert again.restore == "point-7" and _moved(again) == _moved(deploy), (
        "a launcher knows the newest generation alone"
    )
    _all_form(coordination, again.deployment, **{str(to): str(source)})
    coordination.failed(Failure("transfer", to, str(source), 4, now=10.0))
    assert _only(coordination.poll(19.0)).restore is None
    # The process that moved is known by its incarnation, not by the place that it began at.
    coordination.failed(Failure("exit", source, str(source), detail="died"))
    assert coordination.poll(20.0) == [] and str(to) in coordination.stands


def test_whoever_leads_next_ends_a_job_that_can_not_go_on() -> None:
    """The launcher that decided it was lost before it could end the job."""
    coordination = _started(2, 2)
    coordination.poll(0.0)
    for pipeline in range(2):
        coordination.failed(Failure("exit", Worker(pipeline, 1), f"W{pipeline}_1", detail="died"))
    then = LocalCoordination(Catalog(Job(2, 2, 2), Technique.STAGGERED, MemoryLimit("uniform")))
    then.restore(json.loads(json.dumps(coordination.saved())))
    then.lead_changed({}, "node 0 was lost", 1.0)
    (halt,) = then.poll(1.0)
    assert isinstance(halt, Halt)


def test_a_halt_that_ends_with_a_return_says_so() -> None:
    coordination = _started(1, 2, checkpoint=lambda: "point-7", beside=_at_once)
    coordination.poll(0.0)
    coordination.failed(Failure("exit", Worker(0, 1), "W0_1", detail="died"))
    assert not coordination.poll(0.0) and coordination.stands
    coordination.failed(Failure("exit", Worker(0, 0), "W0_0", detail="died"))
    assert golden("go-on-from-the-newest-checkpoint") in coordination.stands
    coordination.ready(Worker(0, 0), "a")
    assert not coordination.poll(0.0) and coordination.stands, "one is not enough"
    coordination.ready(Worker(0, 1), "b")
    assert not coordination.stands
    deploy = _only(coordination.poll(0.0))
    assert deploy.restore == "point-7" and deploy.deployment.living == ("W0_0", "W0_1")


def test_a_halt_for_want_of_a_plan_ends_with_a_return_too() -> None:
    """Whoever is left has the state of every stage."""

    class Narrow(Catalog):
        def plan_for(self, failed: Iterable[Worker]) -> tuple[Plan, str]:
            if frozenset(failed):
                raise InfeasibleError("too little memory", "more of it")
            return super().plan_for(failed)

    coordination = _started(kind=Narrow)
    coordination.poll(0.0)
    coordination.failed(Failure("exit", Worker(0, 1), "W0_1", detail="died"))
    assert not coordination.poll(0.0) and coordination.stands
    again = _started(kind=Narrow)
    again.restore(coordination.saved())
    assert again.stands == coordination.stands, "whoever leads next knows it"
    coordination.ready(Worker(0, 1), "b")
    assert _only(coordination.poll(0.0)).deployment.joining == ("W0_1",)


def test_the_launcher_goes_on_while_the_newest_checkpoint_is_read() -> None:
    read, asked = threading.Event(), list[int]()

    def newest() -> str:
        asked.append(len(asked))
        if len(asked) == 1:
            raise OSError("stale file handle")
        assert read.wait(60)
        return "point-7"

    coordination = _started(3, 2, checkpoint=newest)
    coordination.poll(0.0)
    for pipeline in range(3):
        coordination.failed(Failure("exit", Worker(pipeline, 1), f"W{pipeline}_1", detail="died"))
    assert coordination.poll(0.1) == []
    # Another one dies meanwhile: all go back to the same checkpoint without it, whichever place it was to have.
    moved = {str(Worker(2, 0)): "W2_0", str(Worker(1, 0)): "W1_0"}
    coordination.failed(Failure("exit", Worker(1, 0), moved["W1_0"], detail="died"))
    assert coordination.poll(0.2) == []
    read.set()
    while not (events := coordination.poll(0.3)):
        time.sleep(0.001)
    deploy = _only(events)
    assert deploy.restore == "point-7" and len(asked) == 2 and deploy.deployment.generation == 3
    ((source, to),) = _moved(deploy)
    assert {str(w) for w in (source, to)} < {"W2_0", *deploy.deployment.living} and to.stage == 1


def test_a_checkpoint_that_can_not_be_had_is_a_sentence() -> None:
    def broken() -> str:
        raise RuntimeError("not a checkpoint")

    coordination = _started(checkpoint=broken, beside=_at_once)
    coordination.poll(0.0)
    coordination.failed(Failure("exit", Worker(0, 1), "W0_1", detail="died"))
    coordination.failed(Failure("exit", Worker(1, 1), "W1_1", detail="died"))
    (halt,) = [event for event in coordination.poll(0.0) if isinstance(event, Halt)]
    assert "not a checkpoint" in halt.reason and not coordination.stands


def test_a_planned_move_shortens_the_plan_and_leaves_no_stage_to_a_newcomer() -> None:
    coordination = _started(3, 2, migrate=True)
    coordination.poll(0.0)
    coordination.failed(Failure("exit", Worker(0, 0), "W0_0", detail="died"))
    first = _only(coordination.poll(0.0))
    assert _moved(first) == [], "one failure costs as much wherever it is"
    _all_form(coordination, first.deployment)
    coordination.failed(Failure("exit", Worker(1, 0), "W1_0", detail="died"))
    second = _only(coordination.poll(0.0))
    ((source, to),) = _moved(second)
    assert source.stage == 1 and to.stage == 0 and second.restore is None
    stay, _ = Catalog(Job(3, 2, 2), Technique.STAGGERED, MemoryLimit("uniform")).plan_for([Worker(0, 0), Worker(1, 0)])
    assert second.plan.metrics.period < stay.metrics.period


class Play(RuleBasedStateMachine):
    """A launcher's life: processes begin, die, form, and break off with each other. It does what it is told."""

    pipelines, stages = 3, 2

    @initialize(migrate=st.booleans(), checkpoints=st.booleans())
    def begin(self, migrate: bool, checkpoints: bool) -> None:
        job = Job(self.pipelines, self.stages, 2)
        catalog = Catalog(job, Technique.STAGGERED, MemoryLimit("uniform"))
        back = {"back_to": back_to(checkpoints, 0), "checkpoint": lambda: "point"}
        self.decides = LocalCoordination(catalog, grace=1.0, migrate=migrate, beside=_at_once, **back)
        self.now, self.count, self.halted = 0.0, 0, False
        self.processes: dict[Worker, str] = {}
        self.newest: Deployment | None = None
        for worker in job.workers():
            self.start(worker)
        self.poll()

    def start(self, worker: Worker) -> None:
        self.count += 1
        self.processes[worker] = f"i{self.count}"
        self.decides.ready(worker, f"i{self.count}")

    def poll(self) -> None:
        for event in self.decides.poll(self.now):
            if isinstance(event, Halt):
                self.halted = True
            elif isinstance(event, Deploy) and not self.halted:
                self.obey(event)
        self.halted = self.halted or bool(self.decides.stands)

    def obey(self, deploy: Deploy) -> None:
        newest = deploy.deployment
        assert newest.generation == (self.newest.generation if self.newest else 0) + 1
        assert newest.plan_fingerprint == deploy.plan.fingerprint and newest.failed == deploy.plan.failed
        stood = {process: worker for worker, process in self.processes.items()}
        moves = {stood[process]: to for process, to in deploy.places.items() if process in stood}
        assert all(to not in self.processes or to in moves for source, to in moves.items() if source != to)
        self.processes = {moves.get(worker, worker): process for worker, process in self.processes.items()}
        living = set(map(Worker.parse, newest.living))
        assert living <= set(self.processes), "nobody trains whose process has ended"
        assert {w.stage for w in living} == set(range(self.stages))
        holding = {Worker.parse(name).stage for name in set(newest.living) - set(newest.joining)}
        assert deploy.restore or holding == set(range(self.stages)), "each stage has somebody to take its state from"
        self.newest = newest
        for worker in set(self.processes) - living:
            self.exit(worker)  # fenced

    def exit(self, worker: Worker) -> None:
        self.decides.failed(Failure("exit", worker, self.processes.pop(worker), detail="died"))

    @precondition(lambda self: not self.halted)
    @rule(place=st.integers(0, 5), poll=st.booleans())
    def dies(self, place: int, poll: bool) -> None:
        if worker := self._pick(place):
            self.exit(worker)
        if poll:
            self.poll()

    @precondition(lambda self: not self.halted)
    @rule(place=st.integers(0, 5))
    def comes_back(self, place: int) -> None:
        worker = Worker(*divmod(place, self.stages))
        if worker not in self.processes:
            self.start(worker)
            self.poll()

    @precondition(lambda self: not self.halted)
    @rule(some=st.sets(st.integers(0, 5)), all_of_them=st.booleans())
    def form(self, some: set[int], all_of_them: bool) -> None:
        self.poll()
        for name in self.newest.living if self.newest and not self.halted else ():
            worker = Worker.parse(name)
            process = self.processes.get(worker)
            if process and (all_of_them or worker.pipeline * self.stages + worker.stage in some):
                self.decides.acknowledged("adopted", worker, process, self.newest.generation)
                self.decides.acknowledged("formed", worker, process, self.newest.generation)

    @precondition(lambda self: not self.halted)
    @rule(one=st.integers(0, 5), other=st.integers(0, 5), seconds=st.sampled_from([0.1, 5.0]))
    def link_breaks(self, one: int, other: int, seconds: float) -> None:
        worker, peer = self._pick(one), self._pick(other)
        if worker and peer and self.newest:
            self.decides.failed(
                Failure(
                    "transfer", worker, self.processes[worker], self.newest.generation, peer=str(peer), now=self.now
                )
            )
        self.now += seconds
        self.poll()

    @precondition(lambda self: self.halted)
    @rule()
    def it_is_over(self) -> None:
        """Nothing else can happen."""

    @invariant()
    def who_died_is_gone_from_the_next(self) -> None:
        if self.newest is None or self.halted:
            return
        self.poll()
        if not self.halted:
            assert set(map(Worker.parse, self.newest.living)) <= set(self.processes)

    def _pick(self, place: int) -> Worker | None:
        worker = Worker(*divmod(place, self.stages))
        return worker if worker in self.processes else None


TestPlay = Play.TestCase
TestPlay.settings = examples(15, stateful_step_count=15)

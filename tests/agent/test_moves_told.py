"""Who moves where, as the machine decides it and as a launcher does it, who is told of the newest generation alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.coordination.launcher import Coordination, Deploy, Event, Failure, Halt
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.coordination.membership import PRESENT
from openrecycle.agent.launcher.launch import JobFailed
from openrecycle.agent.launcher.processes import ProcessPool, WorkerProcess
from openrecycle.agent.messages.protocol import Deployment
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from tests.agent.coordinator_run import Run
from tests.agent.pretended import PretendedWorker, PretendedWorkers, launcher, run
from tests.conftest import examples

T = TypeVar("T")


class _Process:
    """As much of a WorkerProcess as a place needs."""

    def __init__(self, worker: Worker, incarnation: str, *, member: bool) -> None:
        self.worker, self.incarnation, self.came_from, self.since = worker, incarnation, cast("Worker | None", None), 0
        self.member = member


@examples(300)
@given(st.data())
def test_a_launcher_that_is_told_ends_with_the_same_places(data: st.DataObject) -> None:
    run = Run(3, 3, checkpoints=True).start()
    pool = ProcessPool.__new__(ProcessPool)
    pool.running = {}
    for name, member in run.state.members.items():
        cell = Worker.parse(name)
        pool.running[cell] = cast(WorkerProcess, _Process(cell, member.incarnation or "", member=True))
    told, cells = run.state.generation, [*pool.running]

    def tell() -> None:
        nonlocal told
        current = run.state.current
        assert current is not None
        if current.number == told:
            return
        told = current.number
        _, displaced = pool.place({i: Worker.parse(name) for name, i in current.incarnations.items()}, told)
        assert not displaced
        for worker, process in [*pool.running.items()]:
            if process.member and current.incarnations.get(str(worker)) != process.incarnation:
                assert process.incarnation not in {m.incarnation for m in run.state.members.values()}, "it still counts"
                del pool.running[worker]
        here = {str(worker): process.incarnation for worker, process in pool.running.items()}
        assert {name: here.get(name) for name in current.living} == {
            name: run.member(name).incarnation for name in current.living
        }
        for name in current.living:
            pool.running[Worker.parse(name)].member = True

    def present() -> list[str]:
        return [m.name for m in run.state.members.values() if m.state in PRESENT]

    for _ in range(data.draw(st.integers(1, 16))):
        empty = [worker for worker in cells if worker not in pool.running]
        what = data.draw(st.sampled_from(["exit", "exit", "exit", "back", "resume", "some", "tell"]))
        if what == "exit" and len(present()) > 3:
            name = data.draw(st.sampled_from(present()))
            gone = run.member(name).incarnation
            pool.running = {worker: e for worker, e in pool.running.items() if e.incarnation != gone}
            run.exit(name)
        elif what == "back" and empty:  # for the launcher: another process may have been given that place since
            cell, before = data.draw(st.sampled_from(empty)), len(present())
            run.back(str(cell))
            incarnation = f"{cell}-again{run.count}"
            assert len(present()) == before + 1 and incarnation in {m.incarnation for m in run.state.members.values()}
            pool.running[cell] = cast(WorkerProcess, _Process(cell, incarnation, member=False))
        elif what in ("resume", "some"):
            tell()
            living = run.state.current.living if run.state.current else ()
            run.resume(*([data.draw(st.sampled_from(living))] if what == "some" else ()))
        elif what == "tell":
            tell()


@pytest.mark.parametrize("seed", range(12))
def test_who_moved_and_moves_again_is_moved_from_where_it_stands(seed: int) -> None:
    """As a launcher without a console has it, whose planner chooses who goes where: after hours of training it knows
    of all moves but the newest."""
    draw = random.Random(seed)
    catalog = Catalog(Job(4, 3, 2), Technique.STAGGERED, MemoryLimit("uniform"))
    coordination = LocalCoordination(catalog, grace=1.0, migrate=True, beside=_at_once)
    pool = ProcessPool.__new__(ProcessPool)
    pool.running = {}
    for worker in catalog.job.workers():
        pool.running[worker] = cast(WorkerProcess, _Process(worker, f"i{worker}", member=True))
        coordination.ready(worker, f"i{worker}")
    now, moves, generation = 0.0, 0, 0
    while True:
        deployed = [event for event in coordination.poll(now) if isinstance(event, Deploy)]
        for event in deployed:
            moved, displaced = pool.place(event.places, event.deployment.generation)
            moves += len(moved)
            assert not displaced
            assert set(map(Worker.parse, event.deployment.living)) == set(pool.running)
            for process in pool.running.values():
                process.member = True
        generation = deployed[-1].deployment.generation if deployed else generation
        for state in ("formed", "resumed"):
            for worker, process in pool.running.items():
                coordination.acknowledged(state, worker, process.incarnation, generation)
        if len(pool.running) <= 3:
            break
        dead = draw.choice(sorted(pool.running))
        now += 5.0
        coordination.failed(Failure("exit", dead, pool.running.pop(dead).incarnation, now=now, detail="killed"))
    assert moves


def _at_once(find: Callable[[], T]) -> Future[T]:
    found: Future[T] = Future()
    found.set_result(find())
    return found


class _Misplaces(Coordination):
    """Counts the process of W0_0 at W1_1, where it is not."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.failures: list[Failure] = []
        self._left: list[tuple[str, ...]] = [("W0_0", "W1_0", "W0_1"), ("W1_0", "W0_1", "W1_1")]

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)

    def poll(self, now: float) -> list[Event]:
        if not self._left:
            return [Halt("enough")]
        living, number = self._left.pop(0), 3 - len(self._left) - 1
        plan, _ = self._catalog.plan_for(set(Job(2, 2, 2).workers()) - set(map(Worker.parse, living)))
        about = {"plan_fingerprint": plan.fingerprint, "failed": (), "joining": ()}
        return [Deploy(Deployment(generation=number, living=living, **about), plan)]


def test_the_end_of_a_process_that_is_counted_elsewhere_is_said() -> None:
    """Nobody else would: it is at no place that the generation has, and the others would wait for it there."""
    pool = PretendedWorkers(PretendedWorker.ready)
    decides: list[_Misplaces] = []

    def coordination(catalog: Catalog) -> _Misplaces:
        decides.append(_Misplaces(catalog))
        return decides[0]

    one = launcher(Job.uniform(2, 2, 2), pool, lambda line: None, coordination)
    with pytest.raises(JobFailed, match="enough"):
        run(one)
    assert [(f.cause, str(f.worker), f.incarnation) for f in decides[0].failures] == [("exit", "W0_0", "W0_0-1")]

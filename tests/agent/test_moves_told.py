"""Who moves where, as the machine decides it and as a launcher does it, who is told of the newest generation alone."""

from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.coordination.membership import PRESENT
from openrecycle.agent.launcher.processes import ProcessPool, WorkerProcess
from openrecycle.agent.messages.protocol import WorkerState
from openrecycle.planner.jobs.job import Worker
from tests.agent.coordinator_run import Run
from tests.conftest import examples


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
    told = run.state.generation

    def tell() -> None:
        nonlocal told
        current = run.state.current
        assert current is not None
        if current.number == told:
            return
        told = current.number
        for source, to in current.moves:
            pool.move(Worker.parse(source), Worker.parse(to), told)
        here = {str(worker): process.incarnation for worker, process in pool.running.items()}
        assert {name: here.get(name) for name in current.living} == {
            name: run.member(name).incarnation for name in current.living
        }
        for name in current.living:
            pool.running[Worker.parse(name)].member = True

    for _ in range(data.draw(st.integers(1, 16))):
        present = [m.name for m in run.state.members.values() if m.state in PRESENT]
        out = [m.name for m in run.state.members.values() if m.state is WorkerState.FAILED]
        what = data.draw(st.sampled_from(["exit", "exit", "exit", "back", "resume", "some", "tell"]))
        if what == "exit" and len(present) > 3:
            name = data.draw(st.sampled_from(present))
            gone = run.member(name).incarnation
            pool.running = {worker: e for worker, e in pool.running.items() if e.incarnation != gone}
            run.exit(name)
        elif what == "back" and out:
            name = data.draw(st.sampled_from(out))
            if (cell := Worker.parse(name)) not in pool.running:
                run.back(name)
                incarnation = run.member(name).incarnation or ""
                pool.running[cell] = cast(WorkerProcess, _Process(cell, incarnation, member=False))
        elif what in ("resume", "some"):
            tell()
            living = run.state.current.living if run.state.current else ()
            run.resume(*([data.draw(st.sampled_from(living))] if what == "some" else ()))
        elif what == "tell":
            tell()

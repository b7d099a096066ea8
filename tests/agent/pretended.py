"""A launcher's workers that are no processes: a test says what they say, and when they end."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from openrecycle.agent.config.options import Faults, TrainingOptions
from openrecycle.agent.coordination.launcher import Coordination
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.launcher.launch import Launcher, Takeover
from openrecycle.agent.launcher.processes import ProcessPool, SpareRanks, Spares, WorkerProcess
from openrecycle.agent.messages import channel
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.nodes.pool import RemoteProcess
from openrecycle.agent.workers.spec import RunSpec
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import OpsByWorker, Schedule

GIVEN_UP_SECONDS = 60.0


@dataclass
class PretendedWorker(WorkerProcess):
    """name: of its place. number: it is the one of that number there, from 1. left: its ranks that are spare once it
    has ended."""

    name: str = ""
    number: int = 1
    left: tuple[int, ...] = ()
    theirs: Any = field(default=None, kw_only=True)

    def say(self, kind: str, **about: Any) -> None:
        channel.send(self.theirs, kind=kind, **about)

    def ready(self) -> None:
        self.say("ready", host="here", pids=[1 + slot for slot in self.slots])

    def die(self, *left: int) -> None:
        """left: as above."""
        self.left = left
        self.process.ended(1)  # type: ignore[attr-defined]

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        return self.left

    def end(self) -> None:
        """One that leaves spare ranks also has one that hangs, which is killed later."""
        self.asked = True
        if self.left:
            threading.Timer(0.5, self.kill).start()
        else:
            self.kill()

    def kill(self) -> None:
        self.process.kill()


class PretendedWorkers(ProcessPool):
    """on_start: called with each that is started; OSError: it can't be. on_message: with each that is told something,
    and what."""

    def __init__(
        self,
        on_start: Callable[[PretendedWorker], object],
        on_message: Callable[[PretendedWorker, dict[str, Any]], object] = lambda entry, message: None,
    ) -> None:
        self.running, self._aside, self.spares = {}, [], SpareRanks()
        self.started: list[str] = []
        self._on_start, self._on_message = on_start, on_message

    def start(
        self, worker: Worker, make_spec: Any = None, now: float = 0.0, spares: Spares | None = None, *_: Any
    ) -> PretendedWorker:
        ours, theirs = multiprocessing.Pipe()
        process = RemoteProcess(lambda: process.ended(-9))
        number = self.started.count(str(worker)) + 1
        about = {"name": str(worker), "number": number, "theirs": theirs}
        entry = PretendedWorker(worker, f"{worker}-{number}", process, ours, time.monotonic(), **about)
        entry.made_of = spares.ranks if spares is not None else ()
        entry.slots = tuple(range(make_spec(entry.incarnation).ranks if make_spec else 1))
        entry.send = lambda message: self._on_message(entry, message)
        self.started.append(str(worker))
        self._on_start(entry)
        self.running[worker] = entry
        return entry


class WrongPlans(Catalog):
    """What is planned for a loss breaks a rule: an op begins too late for those that wait for it."""

    def plan_for(self, failed: Iterable[Worker]) -> tuple[Plan, str]:
        plan, origin = super().plan_for(failed := frozenset(failed))
        schedule = plan.schedule()
        start = schedule.arrays.start.copy()
        start[0] += 1 if failed else 0
        late = Schedule(schedule.problem, OpsByWorker(schedule.ops, lambda: replace(schedule.arrays, start=start)))
        return Plan.of(late, metrics=plan.metrics, solver=plan.solver), origin


def launcher(
    job: Job,
    pool: PretendedWorkers,
    on_line: Callable[[dict[str, Any]], object],
    decides: Callable[[Catalog], Coordination] = LocalCoordination,
    faults: Faults | None = None,
    heartbeat_seconds: float | None = None,
    takeover: Takeover | None = None,
    kind: type[Catalog] = Catalog,
    **options: Any,
) -> Launcher:
    """options: more of the job's."""
    catalog = kind(job, Technique.STAGGERED, MemoryLimit("uniform"))
    options = {"job": job, "iterations": 10, "faults": faults or Faults(), **options}
    workload = NamedWorkload("openrecycle.agent.examples.gpt:Gpt")
    spec = RunSpec(TrainingOptions(**options), workload, job.partition, heartbeat_seconds=heartbeat_seconds)
    return Launcher(spec, decides(catalog), on_line, catalog, pool, takeover)


def run(one: Launcher) -> None:
    """Raises Stopped of one that waits for ever, too."""
    stop = threading.Timer(GIVEN_UP_SECONDS, one.stop, (15,))
    stop.start()
    try:
        one.run()
    finally:
        stop.cancel()

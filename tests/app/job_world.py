"""One job with everybody who takes part in it: worker processes and their launcher, operators, the planner, and a
console over a real database that fails, and is killed, whenever a test says so.

The processes are played: they keep to what real ones do. A report that was not taken is kept and tried again; a
worker whose transfer broke says so once and waits for a newer generation; a fenced process ends.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openrecycle.agent.coordination.launcher import Deploy
from openrecycle.agent.coordination.membership import PRESENT
from openrecycle.agent.launcher.processes import ProcessPool, WorkerProcess
from openrecycle.agent.messages.protocol import (
    Acknowledgement,
    Deployment,
    FailureReport,
    Heartbeat,
    Iteration,
    IterationReport,
    JobFinished,
    JobSpec,
    Message,
    Recovery,
    Registration,
    Relayout,
)
from openrecycle.app.console.operators import Operators
from openrecycle.app.console.service import Reports
from openrecycle.app.jobs.job_plans import INLINE_OPS
from openrecycle.app.jobs.live_job import TICK_SECONDS, LiveJob
from openrecycle.app.observing.goodput import WaitingTimes
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.store import Record, Store
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import layers_moved
from tests.agent.coordinator_run import FAILURE_TIMEOUTS
from tests.app.flaky_database import FlakyDatabase

STEPS = ("adopted", "formed", "resumed")


@dataclass(eq=False)
class Process:
    """One incarnation. generation: the newest one that it was told of; broken: the one that a transfer of its broke
    in."""

    incarnation: str
    name: str
    generation: int = 0
    broken: int = 0
    alive: bool = True


@dataclass
class Report:
    """route: the method of app.console.service.Reports that takes it. Exits are the launcher's."""

    route: str
    message: Message
    sender: Process | None = None


@dataclass
class World:
    """wanted: plans that are to be made elsewhere. taken: reports that the console accepted, and that count; unsent:
    those that it has to be sent again. told: the newest generation that the launcher knows. in_doubt: the database has
    failed since the console last read or wrote it. held: layers per stage
    as the workers have them. stopped: incarnations that wait, since an operator has paused the job. inline_ops: a plan
    of more is made elsewhere."""

    database: FlakyDatabase
    spec: JobSpec
    now: float = 100.0
    wanted: list[tuple[str, ...]] = field(default_factory=list)
    taken: list[Report] = field(default_factory=list)
    unsent: list[Report] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)
    told: int = 0
    held: tuple[int, ...] = ()
    in_doubt: bool = False
    stopped: set[str] = field(default_factory=set)
    inline_ops: int = INLINE_OPS

    def __post_init__(self) -> None:
        self.store = Store(self.database)
        self.job_id = secrets.token_hex(6)
        self.job = self.new_live()
        self.held = self.job.plans.nominal.home
        members = [{"name": m.name, "state": m.state.value} for m in self.job.state.members.values()]
        self.store.create_job(
            self.job_id,
            name=self.spec.name,
            spec=self.spec.model_dump_json(),
            state="starting",
            created_at=time.time(),
            workers=members,
        )
        waited = WaitingTimes(self.store).of
        self.reports = Reports(self.store, lambda job_id: self.job, lambda job: None, lambda job: None, waited)
        self.operators = Operators(lambda job_id: self.job, self.store)
        # The launcher's own book of places, without its processes.
        self.pool = ProcessPool.__new__(ProcessPool)
        self.pool.running = {}

    def new_live(self) -> LiveJob:
        job = LiveJob(
            self.job_id,
            self.spec,
            0.0,
            store=self.store,
            failure_timeouts=FAILURE_TIMEOUTS,
            want_plan=lambda job, failed: self.wanted.append(failed),
            on_generation=lambda job: None,
            clock=lambda: self.now,
        )
        job.plans.inline_ops = self.inline_ops
        return job

    def plans_take_time(self) -> None:
        """From now on they are made elsewhere."""
        self.inline_ops = self.job.plans.inline_ops = 0

    # -- the console ------------------------------------------------------------------------

    def attempt(self, call: Callable[[], Any]) -> bool:
        """False when the database failed, and it is to be tried again. Refusals are answers."""
        try:
            call()
        except ConsoleError as error:
            if error.status == 503:
                self.in_doubt = True
                return False
            return True
        if not self.job.state.over:  # a report on a job that is over may be answered without a look at the database
            self.in_doubt = False
        return True

    def restart_console(self) -> None:
        """It was killed, and started again on what the database has."""
        self.database.heal()
        self.wanted.clear()
        self.job = self.new_live()
        self.job.restore(self.row)
        self.in_doubt = False

    @property
    def row(self) -> Record:
        return next(row for row in self.store.jobs() if row["id"] == self.job_id)

    def plan_arrives(self, failed: tuple[str, ...], refused: bool = False) -> None:
        plan, why_not = None, "no schedule exists"
        if not refused:
            try:
                plan, why_not = self.job.plans.catalog.plan_for(frozenset(map(Worker.parse, failed)))[0], ""
            except PlannerError as error:  # as in a stage that nobody could be moved to
                why_not = str(error)
        self.attempt(lambda: self.job.plans.plan_made(failed, plan, why_not))

    # -- reports ----------------------------------------------------------------------------

    def send(self, report: Report) -> None:
        """A sender's reports are taken in order: behind one that waits, the next one waits too."""
        if any(waiting.sender is report.sender for waiting in self.unsent) or not self.deliver(report):
            self.unsent.append(report)

    def deliver(self, report: Report) -> bool:
        route = getattr(self.reports, report.route)

        def call() -> None:
            message = report.message
            if isinstance(message, Registration | Acknowledgement | FailureReport):
                taken = not route(self.job_id, [message]).refused
            else:
                route(self.job_id, message.iterations if isinstance(message, IterationReport) else message)
                taken = True
            # An acknowledgement that comes after the job's end is answered, and counts no more.
            if taken and (report.route != "acknowledge" or not self.job.state.over):
                self.taken.append(report)

        return self.attempt(call)

    def retry(self, report: Report) -> None:
        """The sender of `report` tries its oldest one again."""
        oldest = next(waiting for waiting in self.unsent if waiting.sender is report.sender)
        if self.deliver(oldest):
            self.unsent.remove(oldest)

    # -- the launcher and its processes -----------------------------------------------------

    def start(self, name: str) -> None:
        """A new process for a place; elsewhere, if another has moved in."""
        cells = [Worker.parse(n) for n in self.job.state.members]
        cell = Worker.parse(name)
        place = self.pool.vacancy(cell, cells) if cell in self.pool.running else cell
        if place is None:
            return
        process = Process(f"i{len(self.processes)}", str(place))
        self.processes[process.incarnation] = process
        self.pool.running[place] = WorkerProcess(place, process.incarnation, None, None, 0.0)  # type: ignore[arg-type]
        body = Registration(worker=process.name, incarnation=process.incarnation, host="node1", pid=len(self.processes))
        self.send(Report("register", body, process))

    def at(self, name: str) -> Process | None:
        entry = self.pool.running.get(Worker.parse(name))
        return self.processes[entry.incarnation] if entry is not None else None

    def die(self, process: Process, detail: str = "was killed by SIGKILL") -> None:
        process.alive = False
        self.unsent = [report for report in self.unsent if report.sender is not process]
        place = next((w for w, e in self.pool.running.items() if e.incarnation == process.incarnation), None)
        if place is None:
            return  # fenced by the launcher, which has said so
        del self.pool.running[place]
        body = FailureReport(
            worker=str(place), incarnation=process.incarnation, cause="exit", reporter="launcher", detail=detail
        )
        self.send(Report("failures", body))

    def acknowledge(self, process: Process, step: str, generation: int) -> None:
        body = Acknowledgement(worker=process.name, incarnation=process.incarnation, generation=generation, state=step)  # type: ignore[arg-type]
        self.send(Report("acknowledge", body, process))

    def breaks(self, process: Process) -> None:
        """A transfer broke, and nobody died."""
        process.broken = process.generation
        body = FailureReport(
            worker=process.name,
            incarnation=process.incarnation,
            cause="transfer",
            reporter=process.name,
            generation=process.generation,
        )
        self.send(Report("failures", body, process))

    def commit(self, first: int, count: int) -> None:
        rows = tuple(
            Iteration(iteration=i, loss=2.0, loss_hex=(2.0).hex(), seconds=0.1, generation=1, living=1)
            for i in range(first, min(first + count, self.spec.iterations))
        )
        if rows:
            self.send(Report("committed", IterationReport(iterations=rows)))

    def recovered(self, name: str, generation: int) -> None:
        times = dict.fromkeys(("detected_ms", "unblocked_ms", "reformed_ms", "resumed_ms"), 1.0)
        self.send(Report("recovered", Recovery(worker=name, generation=generation, **times)))

    def layers_move(self) -> None:
        """All workers take the layers into use that the plan of the newest generation is for."""
        current = self.job.state.current
        if current is None or current.number != self.told or not self.held:
            return
        if current.partition != self.held:  # which is that of the plan
            moved = layers_moved(self.held, current.partition)
            self.held = current.partition
            about = Relayout(generation=self.told, iteration=0, partition=self.held, moved_layers=moved)
            self.send(Report("rearranged", about))

    def finish(self) -> None:
        self.send(Report("finish", JobFinished(state="stopped", reason="the launcher stopped")))

    def obey(self, *processes: Process) -> None:
        """They hear of it where an operator has paused the job, or has had it go on."""
        held = [command.kind for command in self.job.commands.sent if command.kind in ("pause", "resume")]
        for process in processes:
            (self.stopped.add if held and held[-1] == "pause" else self.stopped.discard)(process.incarnation)

    def beat(self, *processes: Process) -> None:
        """Each says that it lives; one that is told that it is fenced ends."""
        for process in processes:
            body = Heartbeat(
                worker=process.name,
                incarnation=process.incarnation,
                seq=int(self.now * 1000),
                generation=process.generation,
                iteration=0,
                phase="paused" if process.incarnation in self.stopped else "training",
            )
            try:
                self.job.heard(body)
            except ConsoleError as error:
                registered = all(waiting.sender is not process for waiting in self.unsent)
                if error.code == "fenced" and registered:
                    self.die(process, "ended with exit code 3")

    def poll(self) -> Deployment | None:
        """The launcher takes up the newest generation."""
        if (said := self.reports.deployment(self.job_id, self.told)) is None:
            return None
        found = Deployment.model_validate_json(said)
        self.told = found.generation
        deploy = Deploy(found, self.job.plans.nominal)
        _, displaced = self.pool.place(deploy.places, found.generation)
        assert not displaced, "nobody who lives loses its place to another"
        for place, entry in list(self.pool.running.items()):
            process = self.processes[entry.incarnation]
            if deploy.has(place, process.incarnation):
                process.name, process.generation, entry.member = str(place), found.generation, True
            elif entry.member:
                present = {m.incarnation for m in self.job.state.members.values() if m.state in PRESENT}
                assert entry.incarnation not in present, "who is in the job is not ended"
                del self.pool.running[place]
                process.alive = False
                body = FailureReport(
                    worker=str(place), incarnation=process.incarnation, cause="exit", reporter="launcher", detail="out"
                )
                self.send(Report("failures", body))
        return found

    def take_up(self) -> None:
        """The launcher and all processes take up the newest generation; those that wait for another one do not."""
        self.poll()
        for process in self.living:
            if process.generation and process.broken < process.generation:
                for step in STEPS:
                    self.acknowledge(process, step, process.generation)

    def begin(self) -> World:
        """All train."""
        for name in self.job.state.members:
            self.start(name)
        self.take_up()
        return self

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes.values() if process.alive]

    def silence(self, seconds: float) -> None:
        """Nobody is heard, while the console looks as ever."""
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            self.job.tick()

    def tick(self, seconds: int, heard: list[Process]) -> None:
        """Time goes by; `heard` go on sending heartbeats."""
        for _ in range(seconds):
            self.now += 1
            self.beat(*[process for process in heard if process.alive])
            self.attempt(self.job.tick)

"""The launcher of one node: starts the workers, sees their ends first, keeps the run's record.

One loop over the workers' pipes, their process sentinels and the coordination's wake-up. The
launcher owns the store through which groups are formed, so that no worker's death takes it along.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

import torch.distributed

from agent import channel, worker
from agent.coordination import Coordination, Deploy, Halt
from agent.faults import Kill, Rejoin
from agent.loop import LoopOptions
from agent.processes import ProcessPool, WorkerProcess
from agent.protocol import Command, Deployment, Iteration
from agent.recipe import Recipe
from agent.record import DivergedError, Recorded, RunRecord
from agent.workload import WorkloadSource
from planner.job import Job, Worker
from planner.plan import Plan

dist: Any = torch.distributed

HANG_SECONDS = 20.0
"""A worker process that says nothing for this long is killed (it says something every second)."""
START_SECONDS = 120.0


class JobFailed(Exception):
    """The job can't reach its end; the sentence says why."""


class Stopped(Exception):
    """Somebody ended the job on purpose."""

    def __init__(self, number: int, committed: int) -> None:
        self.signal = number
        super().__init__(f"stopped by {signal.Signals(number).name} after {committed} iterations")


@dataclass(frozen=True)
class LaunchOptions:
    """What to run on this node."""

    job: Job
    iterations: int
    seed: int
    workload: WorkloadSource
    pace: Mapping[str, float]
    kills: tuple[Kill, ...] = ()
    rejoins: tuple[Rejoin, ...] = ()
    console: worker.ConsoleLink | None = None
    recipe: Recipe = field(default_factory=Recipe)


class Launcher:
    """Runs one job. listener: called with every line of the record as a dict, in order."""

    def __init__(
        self, options: LaunchOptions, coordination: Coordination, listener: Callable[[dict[str, Any]], None]
    ) -> None:
        self._options, self._coordination, self._listener = options, coordination, listener
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pool = ProcessPool(worker.main, ["agent.worker", *options.workload.modules])
        self._record = RunRecord(options.job.stages, time.monotonic_ns())
        self._deployed: tuple[Deployment, Plan] | None = None
        self._rejoins = list(options.rejoins)
        self._plans_sent: set[tuple[str, str]] = set()
        self._stop = 0

    def stop(self, number: int) -> None:
        """Ends the run soon; from the handler of signal `number`."""
        self._stop = self._stop or number

    def run(self) -> None:
        """Returns when all iterations are committed. Raises JobFailed or Stopped; no process is
        left behind."""
        state, reason = "stopped", "the launcher failed"
        try:
            for cell in self._options.job.workers():
                self._start(cell, joins=False)
            while not self._record.finished(self._options.iterations):
                if self._stop:
                    raise Stopped(self._stop, self._record.committed)
                self._turn(0.25)
            self._listener({"final": self._record.final()})
            state, reason = "finished", f"all {self._options.iterations} iterations are committed"
            self._end_workers()
        except Stopped as stop:
            reason = str(stop)
            raise
        except (JobFailed, DivergedError) as error:
            reason = str(error)
            raise JobFailed(reason) from None
        finally:
            self._pool.kill_all()
            self._coordination.finished(state, reason)
            self._coordination.close()

    # -- one turn of the loop -----------------------------------------------------------------

    def _turn(self, timeout: float) -> None:
        running = list(self._pool.running.values())
        pipes = {entry.pipe: entry for entry in running}
        sentinels = {entry.process.sentinel: entry for entry in running}
        wake = getattr(self._coordination, "wake_fd", None)
        ready = wait([*pipes, *sentinels, *([wake] if wake is not None else [])], timeout)
        for item in ready:
            if item in pipes:
                self._read(pipes[item])  # type: ignore[index]
        for item in ready:
            if item in sentinels:
                self._ended(sentinels[item])  # type: ignore[index]
        for event in self._coordination.poll(time.monotonic()):
            if isinstance(event, Deploy):
                self._deploy(event.deployment, event.plan)
            elif isinstance(event, Halt):
                raise JobFailed(event.reason)
            else:
                self._obey(event)
        self._kill_the_silent()

    def _read(self, entry: WorkerProcess) -> None:
        """Takes every message that is there."""
        try:
            while entry.pipe.poll():
                self._hear(entry, channel.receive(entry.pipe))
        except (EOFError, OSError):
            pass  # its sentinel tells the rest

    def _hear(self, entry: WorkerProcess, message: channel.Message) -> None:
        entry.heard_at = time.monotonic()
        cell, at = entry.worker, message["at"]
        match message["kind"]:
            case "ready":
                self._coordination.ready(cell, entry.incarnation)
            case "dying":
                self._record.dying(cell, at)
            case "left":
                self._record.left(cell, at)
            case "formed":
                self._certain(self._record.formed(cell, message["epoch"], message["iteration"], at))
            case "committed":
                self._certain(self._record.committed_by(cell, message["iteration"], message["loss"], at))
            case "done":
                self._record.done(cell, message["sha256"])
            case "broken":
                self._coordination.broken(cell, message["epoch"], time.monotonic())
            case "error":
                entry.error = message["text"]
            case "fatal":
                raise JobFailed(f"{cell}: {message['text']}")

    def _ended(self, entry: WorkerProcess) -> None:
        detected = time.monotonic_ns()
        self._read(entry)
        entry.process.join()
        self._pool.forget(entry)
        self._record.died(entry.worker, detected)
        self._coordination.exited(entry.worker, entry.incarnation, entry.ending)
        if not self._pool.running:
            # Whatever the coordination decides: all weights went with them.
            raise JobFailed(f"no worker process is left; the last one, {entry.worker}, {entry.ending}")

    def _certain(self, recorded: Recorded) -> None:
        for iteration in recorded.iterations:
            self._listener(iteration_line(iteration))
        for recovery in recorded.recoveries:
            self._listener({"failure": recovery.model_dump()})
            self._coordination.recovered(recovery)
        self._coordination.committed(recorded.iterations)
        if recorded.iterations:
            due = [r for r in self._rejoins if r.iteration < self._record.committed]
            for rejoin in due:
                if rejoin.worker not in self._pool.running:
                    self._rejoins.remove(rejoin)
                    self._start(rejoin.worker, joins=True)

    def _deploy(self, deployment: Deployment, plan: Plan) -> None:
        self._deployed = deployment, plan
        living = {Worker.parse(name) for name in deployment.living}
        self._certain(self._record.epoch_opened(deployment.epoch, living, time.monotonic_ns()))
        for cell, entry in list(self._pool.running.items()):
            if cell in living:
                self._send_deployment(entry)
            elif entry.member:
                # Held for dead, and still a process: it hangs, and must do no harm when it wakes up.
                entry.error = "put out of the job"
                entry.kill()

    def _send_deployment(self, entry: WorkerProcess) -> None:
        assert self._deployed is not None
        deployment, plan = self._deployed
        known = (entry.incarnation, plan.fingerprint)
        text = None if known in self._plans_sent else plan.to_json()
        self._plans_sent.add(known)
        entry.member = True
        entry.post("deployment", deployment=deployment.model_dump(), plan=text)

    def _obey(self, command: Command) -> None:
        cell = Worker.parse(command.worker)
        entry = self._pool.running.get(cell)
        if command.kind == "kill" and entry is not None:
            self._record.dying(cell, time.monotonic_ns())
            entry.kill()
        elif command.kind == "restart" and entry is None:
            self._start(cell, joins=self._deployed is not None)

    def _kill_the_silent(self) -> None:
        now = time.monotonic()
        for entry in list(self._pool.running.values()):
            patience = HANG_SECONDS if self._deployed else START_SECONDS
            if now - entry.heard_at > patience:
                entry.error = f"silent for {now - entry.heard_at:.0f} s"
                entry.kill()

    def _start(self, cell: Worker, *, joins: bool) -> None:
        options = self._options
        loop = LoopOptions(
            options.job, options.iterations, options.seed, options.pace, options.kills, recipe=options.recipe
        )
        if joins:
            # A worker that comes back is not killed a second time by the same wish.
            loop = replace(loop, kills=(), joins=True)

        def spec(incarnation: str) -> worker.WorkerSpec:
            return worker.WorkerSpec(
                cell,
                incarnation,
                loop,
                options.workload,
                ("127.0.0.1", self._store.port),
                options.console,
            )

        self._pool.start(cell, spec, time.monotonic())

    def _end_workers(self) -> None:
        for entry in list(self._pool.running.values()):
            entry.post("over")
        deadline = time.monotonic() + 5.0
        for entry in list(self._pool.running.values()):
            entry.process.join(max(0.0, deadline - time.monotonic()))


def iteration_line(iteration: Iteration) -> dict[str, Any]:
    """A committed iteration as the record has it; loss is a hexadecimal float."""
    return {
        "iteration": iteration.iteration,
        "loss": iteration.loss_hex,
        "seconds": round(iteration.seconds, 6),
        "epoch": iteration.epoch,
        "living": iteration.living,
    }

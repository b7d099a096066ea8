"""The launcher of one node: starts the workers, sees their ends first, keeps the run's record.

One loop over the workers' pipes, their process sentinels and the coordination's wake-up. The
store through which groups are formed is a process of its own; one that dies is replaced.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from agent import channel, worker
from agent.boundaries import Boundaries
from agent.checkpoints.checkpointing import CheckpointOptions
from agent.coordination import Coordination, Deploy, Halt
from agent.devices import Platform
from agent.faults import Kill, Rejoin, Slow
from agent.holding import Hold
from agent.loop import LoopOptions
from agent.processes import ProcessPool, WorkerProcess, preload
from agent.protocol import Command, Iteration, VerdictReport
from agent.recipe import Recipe
from agent.record import DivergedError, Recorded, RunRecord
from agent.store import RendezvousStore, StoreError
from agent.timeouts import HANG_SECONDS, Timeouts
from agent.workload import WorkloadSource
from planner.job import Job, Worker

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
    """What to run on this node. pace, paced_by_profile, slow: see agent.loop.LoopOptions. hang_seconds: a worker
    process that says nothing for this long is put out of the job (it says something every second)."""

    job: Job
    iterations: int
    seed: int
    workload: WorkloadSource
    pace: Mapping[str, float]
    kills: tuple[Kill, ...] = ()
    rejoins: tuple[Rejoin, ...] = ()
    console: worker.ConsoleLink | None = None
    recipe: Recipe = field(default_factory=Recipe)
    boundaries: Boundaries | None = None
    weights: str | None = None
    checkpoints: CheckpointOptions | None = None
    hang_seconds: float = HANG_SECONDS
    timeouts: Timeouts = field(default_factory=Timeouts)
    platform: Platform = field(default_factory=Platform)
    paced_by_profile: bool = False
    slow: tuple[Slow, ...] = ()
    compare_every: int = 100


class Launcher:
    """Runs one job. listener: called with every line of the record as a dict, in order, in the thread of
    `run`: it must return at once, and raise nothing (see agent.delivery).

    pool: where worker processes are started; on this node only, unless given (see agent.nodes.pool).
    """

    def __init__(
        self,
        options: LaunchOptions,
        coordination: Coordination,
        listener: Callable[[dict[str, Any]], None],
        pool: ProcessPool | None = None,
    ) -> None:
        self._options, self._coordination, self._listener = options, coordination, listener
        self._pool = pool or ProcessPool(worker.main, preload(options.workload))
        self._store = RendezvousStore(self._pool.context, self._pool.host)
        begin = options.checkpoints.resumed_at if options.checkpoints else 0
        self._record = RunRecord(options.job.stages, time.monotonic_ns(), committed=begin)
        self._deployed: Deploy | None = None
        self._after: int | None = None
        self._hold = Hold()
        self._rejoins = list(options.rejoins)
        self._plans_sent: set[tuple[str, str]] = set()
        self._verdicts: set[int] = set()
        self._stop = 0
        self._iterations = options.iterations
        self._end_asked = False

    def end_soon(self) -> None:
        """Ends the run in order, from any thread: all workers stop after the same iteration, one of those under
        way, and what follows the last iteration of any job follows (checkpoint, weights, final hash)."""
        self._end_asked = True

    def stop(self, number: int) -> None:
        """Ends the run soon; from the handler of signal `number`."""
        self._stop = self._stop or number

    @property
    def pids(self) -> dict[str, int]:
        """Of the store (`store`) and of every worker process that counts, by its name."""
        processes = {"store": self._store.process} | {str(w): e.process for w, e in self._pool.running.items()}
        return {name: process.pid for name, process in processes.items() if process.pid}

    def run(self) -> None:
        """Returns when all iterations are committed. Raises JobFailed or Stopped; no process is
        left behind."""
        state, reason = "stopped", "the launcher failed"
        try:
            for cell in self._options.job.workers():
                self._start(cell, joins=False)
            while not self._record.finished(self._iterations):
                if self._stop:
                    raise Stopped(self._stop, self._record.committed)
                self._turn(0.25)
                if self._end_asked:
                    self._end_early()
            self._listener({"final": self._record.final()})
            state, reason = "finished", f"all {self._options.iterations} iterations are committed"
            if self._iterations < self._options.iterations:
                reason = f"ended as asked after {self._iterations} of {self._options.iterations} iterations"
            self._end_workers()
        except Stopped as stop:
            reason = str(stop)
            raise
        except (JobFailed, DivergedError, StoreError) as error:
            reason = str(error)
            raise JobFailed(reason) from None
        finally:
            self._pool.kill_all()
            self._store.kill()
            self._coordination.finished(state, reason)
            # Who has it stopped waits for it; otherwise it matters more that the console learns why it is over.
            self._coordination.close(lambda: bool(self._stop))

    # -- one turn of the loop -----------------------------------------------------------------

    def _turn(self, timeout: float) -> None:
        entries = self._pool.entries
        pipes = {entry.pipe: entry for entry in entries}
        sentinels = {entry.process.sentinel: entry for entry in entries}
        wake = getattr(self._coordination, "wake_fd", None)
        store = self._store.process.sentinel
        ready = wait([*pipes, *sentinels, store, *([wake] if wake is not None else [])], timeout)
        if store in ready:
            # Who is forming groups right now fails and says so; who trains does not notice.
            self._store.kill()
            self._store = RendezvousStore(self._pool.context, self._pool.host)
        for item in ready:
            if item in pipes:
                self._read(pipes[item])  # type: ignore[index]
        for item in ready:
            if item in sentinels:
                self._ended(sentinels[item])  # type: ignore[index]
        for event in self._coordination.poll(time.monotonic()):
            if isinstance(event, Deploy):
                self._deploy(event)
            elif isinstance(event, Halt):
                raise JobFailed(event.reason)
            else:
                self._obey(event)
        self._put_out_the_silent()

    def _read(self, entry: WorkerProcess) -> None:
        """Takes every message that is there."""
        while True:
            try:
                if not entry.pipe.poll():
                    return
                message = channel.receive(entry.pipe)
            except (EOFError, OSError):
                return  # its sentinel tells the rest
            self._hear(entry, message)

    def _hear(self, entry: WorkerProcess, message: channel.Message) -> None:
        if entry.put_out:
            return
        entry.heard_at = time.monotonic()
        if message.get("epoch", entry.since) < entry.since:
            return
        cell, at = entry.worker, message["at"]
        match message["kind"]:
            case "ready":
                self._coordination.ready(cell, entry.incarnation)
            case "dying":
                self._record.dying(cell, at)
            case "left":
                self._record.left(cell, at)
            case "adopted" if self._deployed is not None:
                entry.took_up(message["epoch"], self._deployed.deployment.epoch, time.monotonic())
            case "stuck":
                self._listener({"warning": f"{cell}: {message['text']}"})
            case "held":
                self._hold.heard(message["iteration"], self._pool.running.values(), entry.incarnation)
            case "formed":
                self._certain(self._record.formed(cell, message["epoch"], message["iteration"], at))
                self._coordination.formed(cell, message["epoch"])
                if self._record.formed_by_all:
                    self._release_the_leaving()
            case "committed":
                self._certain(
                    self._record.committed_by(cell, message["iteration"], message["loss"], at, message["skipped"])
                )
            case "parameters":
                self._record.compared(
                    cell, message["epoch"], message["iteration"], message["settled"], message["sha256"]
                )
            case "done":
                self._record.done(cell, message["sha256"])
            case "broken":
                self._coordination.broken(cell, message["epoch"], time.monotonic())
                if self._after is not None and self._deployed and message["epoch"] < self._deployed.deployment.epoch:
                    self._send_deployments(after=None)  # the boundary is out of reach: all leave now
            case "verdict":
                if message["iteration"] not in self._verdicts:
                    self._verdicts.add(message["iteration"])
                    verdict = {k: message[k] for k in ("iteration", "coefficient", "redone")}
                    self._listener({"verdict": verdict})
                    self._coordination.verdict(VerdictReport.model_validate(verdict))
            case "warning":
                self._listener({"warning": message["text"]})
            case "checkpoint":
                self._listener({"checkpoint": {"iteration": message["at_iteration"], "problem": message["problem"]}})
            case "error":
                entry.error = message["text"]
            case "fatal":
                raise JobFailed(f"{cell}: {message['text']}")

    def _ended(self, entry: WorkerProcess) -> None:
        detected = time.monotonic_ns()
        self._read(entry)
        entry.process.join()
        self._pool.forget(entry)
        if entry.put_out:
            return
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
                place = self._pool.vacancy(rejoin.worker, self._options.job.workers())
                if place is not None:
                    self._rejoins.remove(rejoin)
                    self._start(place, joins=True)

    def _deploy(self, event: Deploy) -> None:
        deployment = event.deployment
        living = {Worker.parse(name) for name in deployment.living}
        after = self._boundary(event)
        self._deployed = event
        now = time.monotonic_ns()
        for source, to in event.moves:
            if self._pool.move(source, to, deployment.epoch):
                why = {"worker": str(source), "to": str(to), "epoch": deployment.epoch, "reason": deployment.reason}
                self._listener({"move": why})
            self._record.moved(source, to)
        joining = {Worker.parse(name) for name in deployment.joining}
        self._certain(self._record.epoch_opened(deployment.epoch, living, now, after, joining))
        leaving = {Worker.parse(name) for name in deployment.leaving}
        for cell, entry in list(self._pool.running.items()):
            if cell in leaving:
                self._record.released(cell)
                self._listener({"left": {"worker": str(cell), "epoch": deployment.epoch, "reason": deployment.reason}})
            elif entry.member and cell not in living:
                self._pool.put_out(entry, "put out of the job")
                self._record.died(cell, now)
        self._send_deployments(after)

    def _boundary(self, event: Deploy) -> int | None:
        """For an epoch in which workers come, change their place or leave, and none was lost: the iteration
        that all finish first.

        One more than the foremost is known to be in, so that the news is there before it ends; in a paused
        job the one that they stop after.
        """
        deployment = event.deployment
        if self._deployed is None or event.restore or not self._record.formed_by_all:
            return None
        going = {*(str(source) for source, _ in event.moves), *deployment.leaving}
        stay = set(self._deployed.deployment.living) - going
        if set(deployment.living) - set(deployment.joining) != stay or not (deployment.joining or going):
            return None
        newest, held = self._record.newest, self._hold.after
        return held if held is not None and held >= newest - 1 else newest + 1

    def _release_the_leaving(self) -> None:
        """Those that were asked to go have finished their iteration, and nobody needs them any more."""
        assert self._deployed is not None
        for name in self._deployed.deployment.leaving:
            entry = self._pool.running.get(Worker.parse(name))
            if entry is not None and entry.member:
                self._pool.put_out(entry, "left as asked")
                self._coordination.exited(entry.worker, entry.incarnation, "left as asked")

    def _send_deployments(self, after: int | None) -> None:
        """Tells every member of the newest epoch. after: see agent.channel.Orders."""
        assert self._deployed is not None
        deployment, plan = self._deployed.deployment, self._deployed.plan
        self._after = after
        if after is None:
            self._release_the_leaving()
        for name in (*deployment.living, *deployment.leaving):
            entry = self._pool.running.get(Worker.parse(name))
            if entry is None:
                continue
            known = (entry.incarnation, plan.fingerprint)
            text = None if known in self._plans_sent else plan.to_json()
            self._plans_sent.add(known)
            entry.member = True
            if after is None and name not in deployment.leaving:
                entry.told(deployment.epoch, time.monotonic())
            self._hold.tell(entry)
            entry.post(
                "deployment",
                deployment=deployment.model_dump(),
                plan=text,
                cell=str(entry.worker),
                store=self._store.address,
                after=after,
                restore=self._deployed.restore,
            )

    def _obey(self, command: Command) -> None:
        if command.kind == "pause":
            self._hold.begin(self._pool.running.values())
        elif command.kind == "resume":
            self._hold.end(self._pool.running.values())
        if command.worker is None:
            return
        cell = Worker.parse(command.worker)
        entry = self._pool.running.get(cell)
        if command.kind == "kill" and entry is not None:
            self._record.dying(cell, time.monotonic_ns())
            entry.kill()
        elif command.kind == "restart" and (place := self._pool.vacancy(cell, self._options.job.workers())) is not None:
            self._start(place, joins=self._deployed is not None)

    def _end_early(self) -> None:
        """Holds all workers before the same iteration, and once they stand there, that is the end."""
        if self._deployed is None or self._hold.last is not None:
            return
        entries = self._pool.running.values()
        self._hold.begin(entries)
        # Not behind what is recorded, where a checkpoint has led back there.
        self._hold.heard(self._record.committed - 1, entries)
        common = self._record.common
        if common is None or not self._record.formed_by_all or not self._hold.settled(entries):
            return
        if self._hold.after is not None and common > self._hold.after:
            self._iterations = common
            self._hold.end_at(common, entries)

    def _put_out_the_silent(self) -> None:
        """Those that hang, too: an epoch forms with all of its members or not at all."""
        now = time.monotonic()
        for entry in list(self._pool.running.values()):
            silent = now - entry.heard_at
            owes = 0.0 if entry.owes_since is None else now - entry.owes_since
            if silent > (self._options.hang_seconds if self._deployed else START_SECONDS):
                why = f"was silent for {silent:.0f} s"
            elif owes > self._options.timeouts.transfer:
                why = f"hangs: it did not take up an epoch for {owes:.0f} s"
            else:
                continue
            self._pool.put_out(entry, why)
            self._record.died(entry.worker, time.monotonic_ns())
            self._coordination.exited(entry.worker, entry.incarnation, why)

    def _start(self, cell: Worker, *, joins: bool) -> None:
        options = self._options
        loop = LoopOptions(
            options.job,
            self._iterations,
            options.seed,
            options.pace,
            options.kills,
            recipe=options.recipe,
            boundaries=options.boundaries,
            weights=options.weights,
            checkpoints=options.checkpoints,
            platform=options.platform,
            paced_by_profile=options.paced_by_profile,
            slow=options.slow,
            timeouts=options.timeouts,
            compare_every=options.compare_every,
        )
        if joins:
            # A worker that comes back is not killed, or slow, a second time by the same wish.
            loop = replace(loop, kills=(), slow=(), joins=True)

        def spec(incarnation: str) -> worker.WorkerSpec:
            return worker.WorkerSpec(cell, incarnation, loop, options.workload, options.console)

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
        **({"skipped": list(iteration.skipped)} if iteration.skipped else {}),
    }

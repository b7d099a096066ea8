"""The launcher: starts the workers of a job, watches their processes, and keeps the run's record.

One loop in one thread waits for the workers' pipes, their process sentinels, and the coordination's wake-up. It judges
which workers live only after it has read all messages that waited (see agent.monitoring.liveness).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from pydantic import TypeAdapter, ValidationError

from openrecycle.agent.checkpoints import Claim, is_there
from openrecycle.agent.config.faults import Kill, Rejoin, not_done
from openrecycle.agent.config.options import TIMES_LONGEST
from openrecycle.agent.coordination.launcher import (
    FROM_START,
    Coordination,
    Deploy,
    Failure,
    Halt,
    LauncherWarning,
    Measure,
    ProcessFenced,
)
from openrecycle.agent.coordination.membership import back_to
from openrecycle.agent.launcher import bad_samples, restarts
from openrecycle.agent.launcher.processes import LOOK_SECONDS, ProcessPool, Spares, WorkerProcess, preload
from openrecycle.agent.launcher.record import (
    DataWait,
    DivergedError,
    RecordedProgress,
    RunRecord,
    iteration_line,
)
from openrecycle.agent.messages import channel
from openrecycle.agent.messages.protocol import (
    Command,
    Deployment,
    Doing,
    NamedWorker,
    Relayout,
    Restart,
    ValidationReport,
)
from openrecycle.agent.monitoring.liveness import LoopLag, Silences, boot_clock
from openrecycle.agent.transport.communicator import RendezvousStore
from openrecycle.agent.workers import worker
from openrecycle.agent.workers.spec import RunSpec, WorkerSpec
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.check import checked
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import count, layers_moved, names
from openrecycle.planner.plans.packed import to_text
from openrecycle.planner.plans.plan import Plan

# -- pausing -----------------------------------------------------------------------------------------

# When an operator pauses a job, every worker stops before the same iteration, with nothing in flight.
#
# Nobody knows beforehand which iteration that is: workers are in different ones, and none can finish an iteration
# before which another worker has stopped. So each worker stops after the iteration that it is in, and says which one
# that was. All then go on to the last of these. A job that is asked to end early is paused first, so that all have
# committed the same iteration and none has begun another. A job that can never commit some iteration ends before it.


@dataclass
class PauseRequest:
    """The launcher's side of a pause.

    after: the last iteration that all workers finish; None: the job is not paused. last: the number of iterations after
    which the job ends early; None: it does not. asked: the incarnations that have not said yet after which iteration
    they stop. number: of the newest pause; an answer to an earlier one says nothing of where a worker stops now.
    """

    after: int | None = None
    last: int | None = None
    asked: set[str] = field(default_factory=set)
    number: int = 0

    def begin(self, entries: Iterable[WorkerProcess]) -> None:
        """Asks all workers to stop after the iteration that they are in."""
        if self.after is None and self.last is None:
            self.after = -1
            self.number += 1
            for entry in entries:
                self.asked.add(entry.incarnation)
                entry.post("hold", after=None, pause=self.number)

    def heard(self, iteration: int, entries: Iterable[WorkerProcess], by: str = "", pause: int = 0) -> None:
        """Takes the answer of the incarnation `by` to pause number `pause`: it stops after `iteration`. If that is
        later than what is known, all workers are told to go on to it."""
        if pause == self.number:
            self.asked.discard(by)
        if self.after is not None and iteration > self.after:
            self.after = iteration
            for entry in entries:
                entry.post("hold", after=iteration)

    def tell(self, entry: WorkerProcess) -> None:
        """Tells one worker whether it is to pause, end early or go on. It may not have been there when the others were
        told, or the leader before may not have told it to go on. "go" changes nothing for a worker that is not paused.
        """
        if self.last is not None:
            entry.post("last", iterations=self.last)
        elif self.after is not None:
            entry.post("hold", after=self.after)
        else:
            entry.post("go")

    def settled(self, entries: Iterable[WorkerProcess]) -> bool:
        """Whether the job is paused, and all workers have said after which iteration they stop."""
        return self.after is not None and self.asked.isdisjoint(entry.incarnation for entry in entries)

    def end_at(self, iterations: int, entries: Iterable[WorkerProcess]) -> None:
        """Ends the job after so many iterations: all workers are paused there, or the next one can't be committed."""
        self.after, self.last = None, iterations
        for entry in entries:
            self.tell(entry)

    def end(self, entries: Iterable[WorkerProcess]) -> None:
        """Ends the pause."""
        self.after = None
        self.asked.clear()
        for entry in entries:
            entry.post("go")


# -- the launcher ------------------------------------------------------------------------------------

TURN_SECONDS = 0.25
_REMEMBERED_VALIDATIONS = 1000
_FORMS: dict[str, TypeAdapter[Any]] = {
    "_found": TypeAdapter(dict[str, Any]),
    "_shared": TypeAdapter(set[NamedWorker]),
    "_move_waits": TypeAdapter(bool),
    "_hold": TypeAdapter(PauseRequest),
    "_held": TypeAdapter(tuple[int, ...]),
    "_relayout": TypeAdapter(dict[str, Any] | None),
    "_stalls": TypeAdapter(dict[str, float]),
    "_bad_samples": TypeAdapter(bad_samples.BadSamples),
    "_kills": TypeAdapter(list[Kill]),
    "_rejoins": TypeAdapter(list[Rejoin]),
    "_left_by": TypeAdapter(dict[str, bool]),
    "_restarts": TypeAdapter(restarts.Restarts),
    "_why_halted": TypeAdapter(str),
    "_stands": TypeAdapter(str),
}
"""The attributes of a Launcher from which another launcher goes on, and how each is written as JSON."""


class JobFailed(Exception):
    """The job can't reach its end; the message says why."""


class Stopped(Exception):
    """Somebody ended the job on purpose."""

    def __init__(self, number: int, committed: int) -> None:
        self.signal = number
        super().__init__(f"stopped by {signal.Signals(number).name} after {committed} iterations")


@dataclass(frozen=True)
class Takeover:
    """What a new leader's launcher goes on from when the launcher before is gone (agent.nodes.server). Its pool already
    has the workers that live.

    document: what the launcher before had `saved`. Its times are of a clock that is `ahead` of this one by so many
    nanoseconds. plan: the plan in force. recorded: the newest iterations of the record, and their losses. lost: the
    workers that ended with the launcher before; lost_at: when, in nanoseconds. unheard: what workers of this node have
    said since, in order. others_tell: waits a moment, and says whether other nodes have still to tell what their
    workers have said. text: what has happened, for people.
    """

    document: Mapping[str, Any]
    ahead: int
    plan: Plan
    recorded: Iterable[tuple[int, str]]
    lost: Mapping[Worker, str]
    lost_at: int
    unheard: Iterable[tuple[WorkerProcess, channel.Message]]
    others_tell: Callable[[], bool]
    text: str


class Launcher:
    """Runs one job. All methods but `end_soon` and `stop` belong to the thread of `run`.

    listener: called with every line of the record as a dict, in order, in the thread of `run`. It must return at once
    and raise nothing (see agent.messages.client). catalog: has the plans that are run while workers take their state
    from a peer. pool: starts the worker processes; without it, on this node only (see agent.nodes.pool). takeover: set
    when the launcher goes on with a job that another one has led. claim: the claim on the folder of checkpoints, which
    is given up at the end.
    """

    def __init__(
        self,
        spec: RunSpec,
        coordination: Coordination,
        listener: Callable[[dict[str, Any]], None],
        catalog: Catalog,
        pool: ProcessPool | None = None,
        takeover: Takeover | None = None,
        claim: Claim | None = None,
    ) -> None:
        options = spec.options
        self._spec, self._options, self._coordination = spec, options, coordination
        self._catalog, self._takeover, self._claim = catalog, takeover, claim
        self._pool = pool or ProcessPool(worker.main, preload(spec.workload))
        recorded = self._pool.recorded

        def listen(line: dict[str, Any]) -> None:
            warning = recorded(line)
            listener(line)
            if warning:
                listen({"warning": warning})

        self._listener = listen
        self._store = RendezvousStore(self._pool.host)
        self._first = begin = spec.origin.resumed_at if spec.origin else 0
        exact = options.optimization.mode == "deterministic"
        self._record = RunRecord(options.job.stages, time.monotonic_ns(), committed=begin, exact=exact)
        self._deployed: Deploy | None = None
        self._after: int | None = None
        self._shared: set[Worker] = set()
        """Workers of the newest generation in whose stage each part of a sharded optimizer has all its owners."""
        self._move_waits = False
        """Whether layers should move in the newest generation, but wait until workers have taken their state."""
        self._hold = PauseRequest()
        self._kills, self._rejoins = list(options.kills), list(options.rejoins)
        """The kills and rejoins on purpose that are still to be done."""
        self._left_by = dict[str, bool]()
        """For each place whose first process is gone: whether it is known if a kill on purpose ended it. A process
        whose last message did not arrive may have been killed on purpose, unless its ending says otherwise."""
        self._restarts = restarts.Restarts()
        self._restart_policy = restarts.RestartPolicy(options.faults.max_restarts, options.faults.restart_delay)
        self._interim: Plan | None = None
        self._unchecked: Plan | None = None
        """The interim plan, if it was made when it was needed, and until its check begins."""
        self._bad_plan = ""
        """Why an interim plan is not valid. Another thread sets it."""
        self._held = spec.partition
        """Layers per stage that the workers have, as far as is known; (): the model's stages can't be cut."""
        self._relayout: dict[str, Any] | None = None
        """The record's line on the newest move of layers, while workers may still say how long it took them."""
        self._stalls = dict[str, float]()
        """How many milliseconds that move took, by incarnation."""
        self._unmovable: tuple[int, ...] = ()
        """The newest partition that workers could not take, of which there has been a warning."""
        self._plans: dict[str, str] = {}
        """Plans as text for workers and other nodes, by fingerprint."""
        self._data_wait = DataWait()
        self._validations: set[int] = set()
        self._changed_settings = set[str]()
        """Settings of torch that a worker's code changes, of which there has been a warning."""
        self._turns = LoopLag(boot_clock)
        self._silences = Silences(options.faults.timeouts.pause, time.monotonic())
        self._committed_in = 0, -1
        """The newest generation in which an iteration was committed, and the newest such iteration."""
        self._nobody_due = 0.0
        """Seconds of silence of all workers after which there is the next warning of it."""
        self._stop = 0
        self._bad_samples = bad_samples.BadSamples()
        self._found: dict[str, Any] = {}
        """What members of the newest generation are told of micro-batches that raise
        (agent.messages.channel.GenerationSpec)."""
        self._why_halted, self._halt_by = "", 0.0
        """Why the job can't go on ("": it can), and the time by which it must have come to its end in order."""
        self._stands = ""
        """How the last worker process ended, while none is left and a new one is on the way."""
        self._lacks = dict[Worker, str]()
        """Workers that ended before training began, and how. The job can't begin without them."""
        self._waited_for = ""
        """The newest warning of why the job stands still."""
        self._end_asked = False

    @property
    def _iterations(self) -> int:
        """The number of iterations of the job, which is less than the options say where it ends early."""
        return self._options.iterations if self._hold.last is None else self._hold.last

    def end_soon(self) -> None:
        """Ends the run in order. All workers stop after the same iteration, one that is under way now. Then comes what
        follows the last iteration of any job (checkpoint, weights, final hash). May be called from any thread."""
        self._end_asked = True

    def stop(self, number: int) -> None:
        """Makes `run` raise Stopped soon. May be called from the handler of signal `number`."""
        self._stop = self._stop or number

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the workers that count, by name."""
        return {str(w): e.process.pid for w, e in self._pool.running.items() if e.process.pid}

    @property
    def deployed(self) -> Deploy | None:
        """The newest generation, as its members were told of it; None: there is none yet."""
        return self._deployed

    @property
    def record(self) -> RunRecord:
        """How far the job is. Callers only read it."""
        return self._record

    def run(self) -> None:
        """Runs the job, and returns when all iterations are committed. Raises JobFailed or Stopped. Leaves no process
        behind in any case."""
        state, reason = "stopped", "the launcher failed"
        try:
            if self._takeover is not None:
                self._go_on(self._takeover)
            else:
                for cell in self._options.job.workers():
                    self._start(cell, joins=False, first=True)
            self._hand_out()
            while not self._record.finished(self._iterations):
                if self._why_halted and time.monotonic() > self._halt_by:
                    break
                if self._stop:
                    raise Stopped(self._stop, self._record.committed)
                self.turn(TURN_SECONDS)
            if self._why_halted:
                raise JobFailed(self._why_halted)
            self._record_relayout()
            for cell in self._record.unsaid:
                self._listener({"warning": f"{cell} died on purpose, when all iterations were committed"})
            wishes: list[Kill | Rejoin] = [*self._kills, *self._rejoins]
            for wish in wishes:
                known = self._left_by.get(str(wish.worker), True)
                self._listener({"warning": not_done(wish, self._first, self._iterations, known=known)})
            # Comes before the record's last line: if this node is lost here, the next leader writes that line.
            self._hand_out(last=True)
            self._listener({"final": self._record.final()})
            state, reason = "finished", f"all {self._options.iterations} iterations are committed"
            if self._iterations < self._options.iterations:
                reason = f"ended as asked after {self._iterations} of {self._options.iterations} iterations"
            self._end_workers()
        except Stopped as stop:
            reason = str(stop)
            raise
        except KeyboardInterrupt:
            self._stop = self._stop or signal.SIGINT
            reason = str(Stopped(self._stop, self._record.committed))
            raise
        except (JobFailed, DivergedError) as error:
            if self._stop and isinstance(error, JobFailed):
                # The signal may have reached the workers too, as when it goes to a whole cgroup. That they end is then
                # no failure.
                stopped = Stopped(self._stop, self._record.committed)
                reason = str(stopped)
                raise stopped from None
            reason = str(error)
            raise JobFailed(reason) from None
        finally:
            with contextlib.ExitStack() as ending:  # runs from the last callback to the first, even if one fails
                if self._claim is not None:
                    ending.callback(self._claim.close)
                # Somebody who stops the job waits for its end, so that is short. Otherwise it matters more that the
                # console learns why the job is over.
                ending.callback(self._coordination.close, lambda: bool(self._stop))
                ending.callback(self._coordination.finished, state, reason)
                ending.callback(self._store.close)
                ending.callback(self._pool.kill_all, "" if state == "finished" else reason)
                # How the job ended counts only if no other node leads by now.
                ending.callback(self._pool.hand_out, self._spec, self._saved, last=True)

    # -- several nodes ------------------------------------------------------------------------

    def _hand_out(self, *, last: bool = False) -> None:
        """Sends the other nodes what they need to go on without this one, and then what was decided in this turn."""
        if why := self._pool.hand_out(self._spec, self._saved, last=last):
            raise JobFailed(why)

    def _saved(self) -> dict[str, Any] | None:
        """Returns what another launcher needs, beside the workers, to go on in this one's place, as JSON; None: there
        is no generation yet to go on from."""
        deployed = self._deployed
        if deployed is None:
            return None
        return {
            "decides": self._coordination.saved(),
            "record": self._record.saved(),
            "deployed": {"deployment": deployed.deployment.model_dump(mode="json"), "restore": deployed.restore},
            "plan": self._packed(deployed.plan),
            "validations": sorted(self._validations)[-_REMEMBERED_VALIDATIONS:],
            **{name: form.dump_python(getattr(self, name), mode="json") for name, form in _FORMS.items()},
        }

    def _go_on(self, takeover: Takeover) -> None:
        """Goes on with the job that another launcher has led."""
        saved, deployed = takeover.document, takeover.document["deployed"]
        self._record = RunRecord.restored(self._options.job.stages, saved["record"], takeover.recorded, takeover.ahead)
        deployment = Deployment.model_validate(deployed["deployment"])
        self._deployed = Deploy(deployment, takeover.plan, deployed["restore"])
        for name, form in _FORMS.items():
            setattr(self, name, form.validate_python(saved[name]))
        self._restarts = self._restarts.earlier(takeover.ahead / 1e9)
        self._validations = set(saved["validations"])
        self._halt_by = time.monotonic() + self._options.faults.timeouts.transfer
        self._listener({"warning": takeover.text})
        for entry, message in takeover.unheard:
            self._hear(entry, message)
        while takeover.others_tell():
            for entry in self._pool.entries:
                self._read(entry)
        if self._record.finished(self._iterations):
            return
        for cell in takeover.lost:
            self._died(cell, takeover.lost_at, known=False)
        self._coordination.lead_changed(takeover.lost, takeover.text, time.monotonic())
        spares = [spare.rank for _, spare in self._pool.spares.all()]
        for cell, incarnation in takeover.lost.items():  # some have ended here, while no launcher led
            if left := tuple(rank for whose, rank in spares if whose == incarnation):
                self._coordination.failed(Failure("exit", cell, incarnation, detail=takeover.text, spare=left))
        for about in saved["workers"]:
            if Worker.parse(about["worker"]) in takeover.lost:
                gone = (about["worker"], about["incarnation"], about["node"])
                self._replace(*gone, f"was lost with node {about['node']}", spoke=about["spoke"])
        if not takeover.lost:
            self._send_deployments(after=None)  # the leader before may not have told all of its newest decision
            # And it may not have passed on what workers have said since.
            self._form_anew(takeover.text)

    # -- one turn of the loop -----------------------------------------------------------------

    def turn(self, seconds: float) -> None:
        """Waits up to `seconds` for what workers and the coordination say, and does what follows from it."""
        self._take_news(seconds)
        if self._bad_plan:
            raise JobFailed(self._bad_plan)
        if self._end_asked:
            self._end_early()
        self._use_spares()
        self._start_due()
        self._stand_still()
        self._hand_out()

    def _take_news(self, timeout: float) -> None:
        entries = self._pool.entries
        if any(entry.looked_for for entry in entries):
            timeout = min(timeout, LOOK_SECONDS)
        pipes = {entry.pipe: entry for entry in entries if not entry.hung_up}
        sentinels = [sentinel for entry in entries for sentinel in entry.sentinels]
        wake = self._coordination.wake_fd
        ready = wait([*pipes, *sentinels, *([wake] if wake is not None else [])], timeout)
        for item in ready:
            if item in pipes:
                self._read(pipes[item])  # type: ignore[index]
        for one in entries:
            one.tell_ranks()
            if one.has_ended(ready):
                self._ended(one)
        for event in self._coordination.poll(time.monotonic()):
            if isinstance(event, Deploy):
                self._deploy(self._kept(event))
            elif isinstance(event, Halt):
                if event.lacks is None:
                    raise JobFailed(event.reason)
                self._lacks[event.lacks] = event.reason  # each turn looks whether a process comes in its place
            elif isinstance(event, LauncherWarning):
                self._listener({"warning": event.text})
                entry = self._pool.running.get(event.refused) if event.refused else None
                if entry is not None and not entry.member:
                    self._pool.fence(entry, event.text)
                    self._gone(entry, "may not join")
            elif isinstance(event, Measure):
                for entry in self._pool.running.values():
                    entry.post("measure", iteration=event.iteration)
            elif isinstance(event, ProcessFenced):
                for entry in self._pool.entries:
                    if entry.incarnation == event.incarnation:
                        entry.post("fenced")
            else:
                self.obey(event)
        self._judge(timeout)

    def _read(self, entry: WorkerProcess) -> None:
        """Handles every message that waits in a worker's pipe."""
        for message in entry.messages():
            if entry.elsewhere and (why := channel.misformed(message, self._options.iterations)):
                self._refuse(entry, why)
                return
            entry.heard = message.pop("number", entry.heard)
            try:
                self._hear(entry, message)
            except (KeyError, TypeError, AttributeError, ValidationError) as error:
                if not entry.elsewhere:
                    raise  # a process of this node runs our own code, and its faults must be seen
                self._refuse(entry, type(error).__name__)
                return

    def _refuse(self, entry: WorkerProcess, why: str) -> None:
        self._listener({"warning": f"{entry.worker} said what can't be understood ({why}): its process is ended"})
        entry.kill()

    def _hear(self, entry: WorkerProcess, message: channel.Message) -> None:
        if entry.fenced:
            return
        if message["kind"] == "computes":  # the launcher of its node says so, since the worker can't speak itself
            entry.lived_at = time.monotonic()
            return
        entry.heard_at, entry.spoke = time.monotonic(), True
        if message.get("generation", entry.since) < entry.since:
            return
        cell, at = entry.worker, message["at"]
        match message["kind"]:
            case "ready":
                entry.waits, self._stands = True, ""
                host = self._pool.host_of(entry, message["host"])
                self._coordination.ready(cell, entry.incarnation, host, message["pids"], entry.made_of)
            case "resumed":
                self._acknowledged(entry, message)
            case "log" | "measured":
                self._coordination.said(cell, entry.incarnation, message, entry.clock)
            case "dying":
                self._kills = [kill for kill in self._kills if str(kill) != message["kill"]]
                self._record.dying(cell, at)
            case "left":
                self._record.left(cell, at)
            case "alive":
                entry.op_limit = message["op_limit"]
                self._heard_of(entry, message["current"])
                if "beat" in message:
                    self._coordination.said(cell, entry.incarnation, message, entry.clock)
            case "adopted" if self._deployed is not None:
                if str(cell) in self._deployed.deployment.living:
                    self._acknowledged(entry, message)
            case "stuck":
                self._listener({"warning": f"{cell}: {message['text']}"})
            case "held":
                stops_after, pause = message["iteration"], message["pause"]
                self._hold.heard(stops_after, self._pool.running.values(), entry.incarnation, pause)
            case "hand_over":
                self._listener({"hand_over": {"worker": str(cell), "text": message["text"]}})
            case "formed":
                entry.whole = True
                self._restarts = restarts.trains(self._restarts, entry.incarnation, time.monotonic())
                self._certain(self._record.formed(cell, message["generation"], message["iteration"], at))
                self._acknowledged(entry, message)
                self._check_beside()
                if self._record.formed_by_all:
                    self._release_the_leaving()
                    self._let_go()
                    self._go_on_moving()
            case "rearranged":
                self._rearranged(entry, message)
            case "unmoved":
                self._unmoved(message)
            case "committed":
                self._all_live(message["generation"], message["iteration"])
                iteration, loss, skipped = message["iteration"], message["loss"], message["skipped"]
                about = {name: message[name] for name in ("learning_rate", "data_seconds")}
                self._certain(self._record.committed_by(cell, iteration, loss, at, skipped, **about))
            case "evaluated":
                self._certain(self._record.evaluated(message["iteration"], message["values"]))
            case "gradient_norm":
                self._certain(self._record.normed(message["iteration"], message["norm"]))
            case "parameters":
                self._record.compared(
                    cell, message["generation"], message["iteration"], message["settled"], message["sha256"]
                )
            case "done":
                self._record.done(cell, message["sha256"], message["generation"])
            case "broken":
                about = {"peer": message.get("peer", ""), "detail": message.get("detail", "")}
                generation, now = message["generation"], time.monotonic()
                self._coordination.failed(Failure("transfer", cell, entry.incarnation, generation, **about, now=now))
                self._leave_now(generation)
            case "raised":
                self._raised(entry, message)
            case "shared":
                if self._in_force(message["generation"]):
                    self._shared.add(cell)
                    self._let_go()
            case "state_lost":
                self._listener({"warning": f"{cell}: {message['text']}"})
                self._coordination.failed(
                    Failure("state-lost", cell, entry.incarnation, message["generation"], message["text"])
                )
            case "validation":
                if message["iteration"] not in self._validations:
                    self._validations.add(message["iteration"])
                    validation = {k: message[k] for k in ("iteration", "coefficient", "redone")}
                    self._listener({"validation": validation})
                    self._coordination.report(ValidationReport.model_validate(validation))
            case "warning":
                self._listener({"warning": message["text"]})
            case "changed":
                if message["setting"] not in self._changed_settings:  # other workers that run the same code say it too
                    self._changed_settings.add(message["setting"])
                    self._listener({"warning": f"{cell}: {message['text']}"})
            case "checkpoint":
                options, heard = self._options.checkpoints, (message["at_iteration"], message["problem"])
                there = partial(is_there, options.folder)
                for iteration, problem in self._record.checkpoint(*heard, options.every, there):
                    self._listener({"checkpoint": {"iteration": iteration, "problem": problem}})
            case "error":
                entry.error = message["text"]
            case "fatal":
                raise JobFailed(f"{cell}: {message['text']}")

    def _acknowledged(self, entry: WorkerProcess, message: channel.Message) -> None:
        about = message["kind"], entry.worker, entry.incarnation, message["generation"], message["iteration"]
        self._coordination.acknowledged(*about)

    def _raised(self, entry: WorkerProcess, message: channel.Message) -> None:
        """Decides what follows when an op of a micro-batch raised. Its worker lives and waits for the next
        generation."""
        cell, faults = entry.worker, self._options.faults
        said = bad_samples.FailedOp(
            *(str(cell), entry.incarnation, cell.stage, message["iteration"], message["op"], message["micro_batch"]),
            *(message["error"], tuple(message["samples"]), message["ends"]),
        )
        skip, limit = faults.on_bad_sample == "skip", faults.bad_sample_limit
        found = bad_samples.raised(self._bad_samples, said, self._incarnations(cell.stage), skip=skip, limit=limit)
        self._bad_samples = found.bad
        about = {k: message[k] for k in ("iteration", "op", "micro_batch", "error", "samples", "traceback")}
        self._listener({"raised": {"worker": str(cell), **about, "text": found.text}})
        if found.left_out is not None:
            iteration, micro_batch = found.left_out
            self._record.left_out(iteration, micro_batch)
        if found.halt:
            if not self._why_halted:
                self._why_halted, self._halt_by = found.halt, time.monotonic() + self._options.faults.timeouts.transfer
                self.end_at(said.iteration)
            elif said.iteration < self._iterations:
                raise JobFailed(found.halt)  # not even the iterations before the planned end can be committed
        text = found.halt or found.text
        self._coordination.failed(Failure("exception", cell, entry.incarnation, message["generation"], text))
        self._leave_now(message["generation"])

    def _leave_now(self, broken: int) -> None:
        """Has all workers leave a generation that broke: it can't finish the iteration up to which it was to go."""
        if self._after is not None and self._deployed and broken < self._deployed.deployment.generation:
            self._send_deployments(after=None)

    def _in_force(self, generation: int) -> Deploy | None:
        """Returns what was deployed with this generation; None: it is not the newest one."""
        deployed = self._deployed
        return deployed if deployed and deployed.deployment.generation == generation else None

    def _rearranged(self, entry: WorkerProcess, message: channel.Message) -> None:
        """Handles that a worker uses the layers of the newest generation's plan. All workers change over before the
        same iteration."""
        deployed = self._in_force(message["generation"])
        if deployed is None:
            return
        if self._rearranges(deployed):
            about = {key: message[key] for key in ("iteration", "generation")}
            about |= {"partition": deployed.partition, "moved_layers": layers_moved(self._held, deployed.partition)}
            self._held = deployed.partition
            self._coordination.report(Relayout(**about))
            self._relayout, self._stalls = about | {"reason": deployed.deployment.reason}, {}
        self._stalls[entry.incarnation] = message["stall_ms"]
        if len(self._stalls) == len(deployed.deployment.living):
            self._record_relayout()

    def _unmoved(self, message: channel.Message) -> None:
        """Handles that a worker can't build the layers that were to come to it: all workers keep what they have."""
        deployed = self._in_force(message["generation"])
        if deployed is None or not self._rearranges(deployed):
            return
        if self._unmovable != deployed.partition:
            self._unmovable = deployed.partition
            self._listener({"warning": f"layers stay where they are: {message['text']}"})
        about = {"generation": message["generation"], "iteration": message["iteration"], "problem": message["text"]}
        self._coordination.report(Relayout(**about, partition=self._held, moved_layers=0))

    def _record_relayout(self) -> None:
        """Writes the record's line on a move of layers: once all have changed over, or some have died meanwhile, or the
        job ends."""
        about, self._relayout = self._relayout, None
        if about is not None:
            reason = about.pop("reason")
            about |= {"partition": list(about["partition"]), "stall_ms": max(self._stalls.values()), "reason": reason}
            self._listener({"relayout": about})

    def _incarnations(self, stage: int | None = None) -> dict[str, str]:
        """Returns the incarnations of the job's members, or of those of one stage, by name."""
        members = ((w, e) for w, e in self._pool.running.items() if e.member and stage in (None, w.stage))
        return {str(w): e.incarnation for w, e in members}

    def _fence_the_blamed(self) -> None:
        """Fences the workers whose fault it was that an op raised, since others could run it (see bad_samples)."""
        self._bad_samples, blamed = bad_samples.committed(
            self._bad_samples, self._record.committed, self._incarnations()
        )
        if blamed and self._deployed is not None and self._found["runs"] and not self._bad_samples.suspects:
            self._form_anew("it is decided whose fault it was: all do what is planned")
        for one in blamed:
            self._listener({"warning": one.text})
            entry = self._pool.running.get(Worker.parse(one.worker))
            if one.out and entry is not None:
                self._pool.fence(entry, one.text)
                self._lost(entry, time.monotonic_ns(), f"was taken out: {one.text}", said=True)

    def _ended(self, entry: WorkerProcess) -> None:
        assert entry.ended_at is not None
        detected = round(1e9 * entry.ended_at)
        self._read(entry)
        self._pool.forget(entry)
        spare = entry.spare_ranks
        if not entry.fenced:
            self._lost(entry, detected, entry.ending, spare)
        elif spare:
            # The end of the worker is known already, but not which of its ranks are spare.
            self._coordination.failed(Failure("exit", entry.worker, entry.incarnation, detail=entry.error, spare=spare))
        self._pool.spare(entry)
        if not (self._pool.running or entry.fenced):
            # All weights are lost with the last process, whatever the coordination decides.
            why = f"no worker process is left; the last one, {entry.worker}, {entry.ending}"
            if not (self._on_the_way and self._goes_back):
                raise JobFailed(why)
            self._stands = why

    def _lost(self, entry: WorkerProcess, at: int, why: str, spare: Sequence[int] = (), *, said: bool = False) -> None:
        """Handles that a process has ended or was fenced. The warning comes at once, since the job may end before it
        can report the recovery."""
        on_purpose = self._died(entry.worker, at, known=entry.not_as_wished)
        self._coordination.failed(Failure("exit", entry.worker, entry.incarnation, detail=why, spare=spare))
        if str(entry.worker) in self._leaving:
            # The coordination takes it for a worker that has left, and would not have the others form anew.
            self._form_anew(f"{entry.worker}, which was to leave, {why}")
        said = self._gone(entry, why) or said or on_purpose
        if not said and self._deployed is not None:
            self._listener({"warning": f"{entry.worker} {why}"})
        elif not said and self._waits_for_a_person:
            waits = "training does not begin before it is restarted on the console"
            self._listener({"warning": f"{entry.worker} {why}; {waits}"})

    def _died(self, worker: Worker, at: int, *, known: bool) -> bool:
        """Records a death, and returns whether it was on purpose (see RunRecord.died). known: it is known, without a
        last message from the worker, that no kill on purpose ended it."""
        on_purpose = self._record.died(worker, at)
        self._left_by.setdefault(str(worker), on_purpose or known)
        return on_purpose

    @property
    def _waits_for_a_person(self) -> bool:
        """Whether the job, before training, waits for a person to restart a worker: it has a console, and other workers
        wait. Otherwise it ends."""
        others_live = any(entry.process.is_alive() for entry in self._pool.running.values())
        return self._spec.heartbeat_seconds is not None and others_live and not self._stop

    def _gone(self, entry: WorkerProcess, why: str) -> bool:
        """Handles that a worker's place is empty. Returns whether that was reported, with when it is started again."""
        return self._replace(str(entry.worker), entry.incarnation, self._pool.node_of(entry), why, spoke=entry.spoke)

    # -- starting again -----------------------------------------------------------------------

    def _stand_still(self) -> None:
        """Ends a job that can't begin or go on, unless a worker is on the way that may change that."""
        if self._deployed is None and (self._lacks or self._ends):
            coming = self._to_be_started
            empty = [cell for cell in self._options.job.workers() if cell not in self._pool.running]
            if lost := [cell for cell in empty if str(cell) not in coming]:
                raise JobFailed(self._lacks.get(lost[0], f"{lost[0]} ended before training began"))
        why = self._coordination.stands or self._stands
        coming = self._on_the_way if why else []
        if why and not coming:
            raise JobFailed(why)
        if why and why != self._waited_for:
            self._listener({"warning": f"{why.rstrip('.')}; waiting for {names(coming)}"})
        self._waited_for = why

    @property
    def _on_the_way(self) -> list[str]:
        """Workers that are to be started again or made of spare ranks, or are about to ask for their place. Those that
        have asked and got none do not count."""
        place = self._place_of_spares
        made = [] if place is None or not self._pool.promises_spares(self._ranks) else [str(place)]
        asking = [str(worker) for worker, entry in self._pool.running.items() if not (entry.member or entry.waits)]
        return list(dict.fromkeys((*self._to_be_started, *made, *asking)))

    @property
    def _to_be_started(self) -> list[str]:
        return [one.worker for one in self._awaited]

    @property
    def _awaited(self) -> tuple[restarts.DueRestart, ...]:
        waiting = self._restarts.waiting
        return restarts.needed(self._restarts, self._lacking, self._is_empty) if self._ends else waiting

    def _is_empty(self, worker: str) -> bool | None:
        """Says whether a place is empty; None: the process there has said nothing yet."""
        entry = self._pool.running.get(Worker.parse(worker))
        return True if entry is None else False if entry.spoke else None

    @property
    def _lacking(self) -> int:
        """How many more workers a job that trains needs to come to the end that it was asked for: with fewer workers
        than stages it can't go on, whatever all go back to."""
        if self._deployed is None or self._why_halted or self._record.committed >= self._iterations:
            return 0
        return max(0, self._options.job.stages - len(self._pool.running))

    def _replace(self, worker: str, incarnation: str, node: int, why: str, *, spoke: bool) -> bool:
        """Has a process that is gone replaced, if it may be (agent.launcher.restarts). spoke: it has said something.
        Returns whether that was reported."""
        asked = self._ends and not self._lacking
        asked = asked or (self._deployed is not None and worker in self._deployed.deployment.leaving)
        gone = restarts.Gone(worker, incarnation, node, self._record.committed, asked, spoke)
        now, there = time.monotonic(), self._pool.has_node
        self._restarts, found = restarts.ended(self._restarts, gone, self._restart_policy, now, there)
        if found is not None:
            self._say_restart(worker, incarnation, found, why)
        return found is not None

    def _say_restart(self, worker: str, incarnation: str, restart: Restart, why: str) -> None:
        self._listener({"restart": {"worker": worker, "reason": why, **restart.model_dump()}})
        self._coordination.restarts(Worker.parse(worker), incarnation, restart)

    @property
    def _ends(self) -> bool:
        """Whether the job is at its end, or about to end."""
        asked = self._end_asked or self._hold.last is not None
        return asked or bool(self._why_halted) or self._record.committed >= self._iterations

    def _start_due(self) -> None:
        """Starts the workers whose restart is due."""
        if not self._awaited:
            return
        now, policy = time.monotonic(), self._restart_policy
        found = restarts.due(self._restarts, now, self._pool.has_node, self._is_empty)
        self._restarts = found.restarts
        for one in found.held:
            self._say_restart(one.worker, one.incarnation, restarts.told(one, policy, now), "is gone")
        awaited = self._awaited
        for one in (one for one in found.start if one in awaited):
            entry = self._start(Worker.parse(one.worker), joins=self._deployed is not None, node=one.node)
            if entry is not None:
                self._restarts = restarts.started(self._restarts, one, entry.incarnation)
                continue
            self._restarts, next_one = restarts.not_started(self._restarts, one, policy, now)
            self._say_restart(one.worker, one.incarnation, next_one, "could not be started")

    def _start_again(self, worker: Worker) -> bool:
        """Starts a worker again as a person, or an experiment's options, asked. Returns whether it has a free place."""
        place = self._pool.vacancy(worker, self._options.job.workers())
        if place is not None:
            self._start(place, joins=self._deployed is not None)
        return place is not None

    def _form_anew(self, why: str) -> None:
        """Asks for a generation with the same members."""
        assert self._deployed is not None
        deployment = self._deployed.deployment
        staying = (self._pool.running.get(Worker.parse(w)) for w in deployment.living if w not in deployment.leaving)
        one = next((entry for entry in staying if entry is not None), None)
        if one is not None:
            self._coordination.failed(Failure("exception", one.worker, one.incarnation, deployment.generation, why))

    @property
    def _ranks(self) -> int:
        return self._options.platform.ranks_per_worker

    @property
    def _place_of_spares(self) -> Worker | None:
        """The place of the next worker that is made of spare ranks, which is in the stage that has the fewest workers.
        None: none is needed."""
        if self._ranks == 1 or self._deployed is None or (self._ends and not self._lacking):
            return None
        living = Counter(w.stage for w in self._pool.running)
        free = (w for w in self._options.job.workers() if w not in self._pool.running)
        return min(free, key=lambda w: (living[w.stage], w), default=None)

    def _use_spares(self) -> None:
        """Makes workers out of spare ranks, where a node has enough of them. Each turn looks: ranks may have become
        spare before this launcher led, and what kept them from being used may be over."""
        while (place := self._place_of_spares) is not None:
            if (spares := self._pool.take_spares(self._ranks)) is None:
                return
            self._listener({"warning": f"{self._ranks} spare ranks become a worker again, {place}"})
            self._start(place, joins=True, spares=spares)

    def _certain(self, recorded: RecordedProgress) -> None:
        """Reports what the record has found to be certain by now."""
        if recorded.unknown:
            numbers = names([str(iteration.iteration) for iteration in recorded.unknown])
            missing = f"{count(len(recorded.unknown), 'iteration')} missing here ({numbers})"
            self._listener({"warning": f"{missing}: who computed the losses was lost before they could be told"})
        for iteration in recorded.iterations:
            self._listener(iteration_line(iteration))
            if text := self._data_wait.after(iteration):
                self._listener({"warning": text})
        for number, norm in recorded.gradient_norms:
            self._listener({"gradient_norm": {"iteration": number, "norm": norm}})
        for evaluation in recorded.evaluations:
            self._listener({"evaluation": evaluation.line})
        for recovery in recorded.recoveries:
            self._listener({"failure": recovery.model_dump()})
            self._coordination.report(recovery)
        done = sorted((*recorded.iterations, *recorded.unknown), key=lambda iteration: iteration.iteration)
        self._coordination.committed(done)
        if done:
            self._fence_the_blamed()
            committed = self._record.committed
            self._rejoins = [r for r in self._rejoins if r.iteration >= committed or not self._start_again(r.worker)]

    def _deploy(self, event: Deploy) -> None:
        """Puts a new generation in force: moves and fences processes, and tells all members."""
        deployment = event.deployment
        living = {Worker.parse(name) for name in deployment.living}
        after = self._last_iteration(event)
        before, self._deployed, self._stands = self._deployed, event, ""
        if event.restore == FROM_START:
            anew = "there is no whole checkpoint yet, so all begin again at iteration 0"
            self._listener({"warning": f"{deployment.reason}; {anew}"})
        self._shared = set()
        self._record_relayout()
        now = time.monotonic_ns()
        why = {"generation": deployment.generation, "reason": deployment.reason}
        came, displaced = self._pool.place(event.places, deployment.generation)
        for entry in displaced:
            self._remove(entry, now)
        moves = {to: source for to, source in came.items() if self._pool.running[to].member}
        for to, source in moves.items():
            self._pool.running[to].whole = False
            self._listener({"move": {"worker": str(source), "to": str(to), **why}})
            self._left_by.setdefault(str(source), True)
        self._record.moved(moves)
        self._restarts = restarts.moved(self._restarts, {str(to): str(source) for to, source in came.items()})
        self._restarts = restarts.without(self._restarts, deployment.leaving)
        joining = {Worker.parse(name) for name in deployment.joining}
        self._certain(self._record.generation_opened(deployment.generation, living, now, after, joining))
        leaving = {Worker.parse(name) for name in deployment.leaving} - living
        for cell in leaving & {*self._pool.running}:
            self._record.released(cell)
            self._listener({"left": {"worker": str(cell), **why}})
        for entry in [entry for entry in self._pool.running.values() if entry.member]:
            if not event.has(entry.worker, entry.incarnation):
                self._remove(entry, now)
        schedule = event.plan.schedule() if self._bad_samples.suspects else None

        def owner(micro_batch: int, stage: int) -> str:
            assert schedule is not None
            key = divmod(micro_batch, self._options.job.micro_batches)
            runs = (w for w in schedule.ops if w.stage == stage)
            return str(next(w for w in runs if any((o.pipeline, o.micro_batch) == key for o in schedule.ops[w])))

        planned = living - {Worker.parse(name) for name in deployment.leaving}
        in_force = {str(w): self._pool.running[w].incarnation for w in planned if w in self._pool.running}
        self._bad_samples, runs = bad_samples.assign(self._bad_samples, owner, in_force)
        # This stays the same for the whole generation: all its members must leave out the same micro-batches.
        self._found = {"left_out": list(self._bad_samples.left_out), "runs": list(runs)}
        # The workers that are to try a bad sample were chosen by the plan of all, so no other plan may be run.
        self._unchecked = None
        self._interim = None if runs else self._plan_meanwhile(event, before)
        if self._interim is not None:
            self._coordination.meanwhile(deployment.generation, self._interim)
        whole = all(entry.whole for cell, entry in self._pool.running.items() if cell in living)
        self._move_waits = self._rearranges(event) and not whole
        members = (self._pool.running[w] for w in living if w in self._pool.running)
        self._coordination.opened(deployment.generation, [e.incarnation for e in members if e.whole])
        self._send_deployments(after)

    def _remove(self, entry: WorkerProcess, now: int) -> None:
        """Ends a member that the newest generation has no place for."""
        gone = "was removed from the job"
        self._pool.fence(entry, "removed from the job", silent=self._silent(entry, time.monotonic()))
        self._died(entry.worker, now, known=False)
        # The coordination may count it at a place that this launcher has not been told of.
        self._coordination.failed(Failure("exit", entry.worker, entry.incarnation, detail=gone))
        self._gone(entry, gone)

    def _plan_meanwhile(self, event: Deploy, before: Deploy | None) -> Plan | None:
        """Returns the plan that is run until newcomers have taken their state from a peer; None: none is needed, or
        there is none. That is the plan of the generation before, if it does without the same workers. Otherwise it is
        looked up, or made now, which takes seconds for thousands of workers."""
        if event.restore is not None:
            for entry in self._pool.running.values():
                entry.whole = True
        living = set(event.deployment.living)
        lacking = {w for w, entry in self._pool.running.items() if str(w) in living and not entry.whole}
        if not lacking and not self._rearranges(event):
            return None
        without = {*map(Worker.parse, event.deployment.failed), *lacking}
        if before and before.plan.partition == self._held and {*map(Worker.parse, before.plan.failed)} == without:
            return before.plan
        try:
            catalog = self._catalog.at(self._held)
            made_now = not catalog.has(without)
            plan, _ = catalog.plan_for(without)
        except PlannerError:
            return None
        self._unchecked = plan if made_now else None
        return plan

    def _check_beside(self) -> None:
        """Starts the check of the interim plan, in a thread. The workers that run it have formed by now, and recovery
        does not wait: for 2,048 workers a check takes tenths of a second."""
        plan, self._unchecked = self._unchecked, None
        if plan is not None:
            threading.Thread(target=self._check, args=(plan,), name="check", daemon=True).start()

    def _check(self, plan: Plan) -> None:
        try:
            checked(plan)
        except PlannerError as error:  # a fault of the planner, and what is trained by it may be wrong
            self._bad_plan = str(error)

    def _rearranges(self, event: Deploy) -> bool:
        """Says whether layers move to other stages with this generation."""
        return bool(event.partition) and event.partition != self._held

    def _kept(self, event: Deploy) -> Deploy:
        """Returns the deployment with some workers still in it that are asked to leave, where the optimizer's state is
        sharded. What such a worker holds of that state first goes to others (agent.stages.shards). Once all members of
        a generation have said that others have it, the next generation is without the worker."""
        deployment, deployed = event.deployment, self._deployed
        if self._options.optimization.sharding == "none" or deployed is None or event.restore is not None:
            return event
        here = {str(w) for w, entry in self._pool.running.items() if entry.member} & {*deployed.deployment.living}
        kept = (here & {*deployment.leaving}) - (self._leaving if self._all_shared else set())
        if not kept:
            return event
        told = {
            "living": tuple(sorted({*deployment.living, *kept}, key=Worker.parse)),
            "failed": tuple(name for name in deployment.failed if name not in kept),
        }
        return replace(event, deployment=deployment.model_copy(update=told))

    @property
    def _leaving(self) -> set[str]:
        """Members of the newest generation that are to leave."""
        return {*self._deployed.deployment.leaving} & {*self._deployed.deployment.living} if self._deployed else set()

    @property
    def _all_shared(self) -> bool:
        assert self._deployed is not None
        return {Worker.parse(name) for name in self._deployed.deployment.living} <= self._shared

    def _let_go(self) -> None:
        """Lets workers leave that were asked to, once others have their parts of the optimizer's state. Before all
        train in the generation there is no iteration after which they could leave."""
        if self._leaving and self._all_shared and self._record.formed_by_all:
            self._form_anew(
                f"{names(sorted(self._leaving))} can leave: others have their parts of the optimizer's state"
            )

    def _go_on_moving(self) -> None:
        """Opens the generation in which layers move. They could not move in the one before, in which workers took their
        state."""
        if self._move_waits and all(entry.whole for entry in self._pool.running.values() if entry.member):
            self._move_waits = False
            self._form_anew("all have their state, and layers go on to move")

    def _last_iteration(self, event: Deploy) -> int | None:
        """Returns the iteration that all finish before they take up a generation in which workers come, move or leave,
        and none was lost. None: all take it up at once.

        It is one later than the newest that any worker is known to be in, so that the news arrives before that ends. In
        a paused job it is the one after which all stop.
        """
        deployment = event.deployment
        if self._deployed is None or event.restore is not None or not self._record.formed_by_all:
            return None
        before = self._deployed.deployment
        here = {str(worker) for worker, entry in self._pool.running.items() if entry.member}
        running = self._pool.running.items()
        going = {str(worker) for worker, e in running if event.places.get(e.incarnation, worker) != worker}
        going = (going | {*deployment.leaving} - {*deployment.living}) & here
        if set(deployment.living) - set(deployment.joining) != set(before.living) - going:
            return None
        asked = {*deployment.leaving} - {*before.leaving}
        if not (deployment.joining or going or asked or self._rearranges(event)):
            return None
        newest, held = self._record.newest, self._hold.after
        return held if held is not None and held >= newest - 1 else newest + 1

    def _release_the_leaving(self) -> None:
        """Ends the workers that were asked to leave: they have finished their iteration, and nobody needs them now."""
        assert self._deployed is not None
        for name in {*self._deployed.deployment.leaving} - self._leaving:
            entry = self._pool.running.get(Worker.parse(name))
            if entry is not None and entry.member:
                self._pool.fence(entry, "left as asked")
                self._coordination.failed(Failure("exit", entry.worker, entry.incarnation, detail="left as asked"))

    def _send_deployments(self, after: int | None) -> None:
        """Tells every member of the newest generation of it. after: see agent.messages.channel.GenerationSpec."""
        assert self._deployed is not None
        deployment, plan = self._deployed.deployment, self._deployed.plan
        self._after = after
        if after is None:
            self._release_the_leaving()
        for name in dict.fromkeys((*deployment.living, *deployment.leaving)):
            entry = self._pool.running.get(Worker.parse(name))
            if entry is None or not self._deployed.has(entry.worker, entry.incarnation):
                continue
            entry.member, entry.waits = True, False
            self._hold.tell(entry)
            entry.post(
                "deployment",
                deployment=deployment.model_dump(exclude={"incarnations"}),
                plans={p.fingerprint: self._packed(p) for p in entry.lacks(p for p in (plan, self._interim) if p)},
                interim=self._interim.fingerprint if self._interim else None,
                cell=str(entry.worker),
                store=self._store.address_of(self._deployed.deployment.generation),
                after=after,
                restore=self._deployed.restore,
                partition=self._deployed.partition,
                held=self._held,
                **self._found,
            )

    def _packed(self, plan: Plan) -> str:
        """Returns a plan as text. Each is made once: that takes long, and all workers would wait for each other's."""
        text = self._plans.get(plan.fingerprint) or to_text(plan)
        channel.keep_newest(self._plans, plan.fingerprint, text)
        return text

    def obey(self, command: Command) -> None:
        """Does what a person asks for."""
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
        elif command.kind == "restart":
            self._start_again(cell)

    def _end_early(self) -> None:
        """Ends the job early: pauses all workers before the same iteration, and once they stand there, ends them."""
        if self._deployed is None or self._hold.last is not None:
            return
        entries = self._pool.running.values()
        self._hold.begin(entries)
        # A checkpoint may have led the workers back behind what is recorded. The end must not lie before that.
        self._hold.heard(self._record.committed - 1, entries)
        common = self._record.common
        if common is None or not self._record.formed_by_all or not self._hold.settled(entries):
            return
        if self._hold.after is not None and common > self._hold.after:
            self.end_at(common)

    def end_at(self, iterations: int) -> None:
        """Ends the job after so many iterations. No worker can have committed the next one."""
        self._hold.end_at(iterations, self._pool.running.values())

    def _heard_of(self, entry: WorkerProcess, told: dict[str, Any]) -> None:
        """Takes what a worker says it is doing, and warns once where that is overdue."""
        where = told.pop("where", "")
        current = Doing.model_validate(told)
        known, entry.current = entry.current, current
        if current.overdue and (known is None or not known.overdue):
            self._listener({"warning": f"{entry.worker} is at {current} for {current.seconds:.0f} s; {where}"})

    def _all_live(self, generation: int, iteration: int) -> None:
        """Takes all members for alive once a worker has committed a second iteration of a generation, which needs all
        of them. A member may be silent because the launcher of its node stands still."""
        if self._in_force(generation) is None:
            return
        before, self._committed_in = self._committed_in, max(self._committed_in, (generation, iteration))
        if before[0] == generation and before[1] < iteration:
            now = time.monotonic()
            for entry in self._pool.running.values():
                if entry.member:
                    if now - entry.heard_at > self._silences.pause:
                        self._coordination.lives(entry.worker, entry.incarnation)
                    entry.heard_at = now

    def _judge(self, asked: float) -> None:
        """Fences workers that are gone or hang: a generation forms with all of its members or not at all.

        asked: seconds that this turn was to wait at most.
        """
        now = time.monotonic()
        entries = list(self._pool.running.values())
        fair = self._silences.turn(now, self._turns.late(asked), (e.heard_at for e in entries if e.member))
        self._say_nobody_is_heard()
        if not fair:
            return
        for entry in entries:
            if entry.ended_at is not None:
                continue  # it is taken out as soon as its other ranks have ended, too
            if self._silent(entry, now):
                entry.look(now)
                if now - entry.lived_at <= self._silences.pause:
                    self._coordination.lives(entry.worker, entry.incarnation)
            if self._why_fenced(entry, now) is None:
                continue
            self._read(entry)  # a message may have come since this turn began
            why = self._why_fenced(entry, now)
            if why is None or entry.fenced:
                continue
            self._pool.fence(entry, why, silent=self._silent(entry, now))
            self._lost(entry, time.monotonic_ns(), why)

    def _silent(self, entry: WorkerProcess, now: float) -> bool:
        return self._silences.of(entry.heard_at, now) > self._silences.pause

    def _why_fenced(self, entry: WorkerProcess, now: float) -> str | None:
        """Says why a worker is to be fenced; None: it is not."""
        limits = self._options.faults.timeouts
        silent = self._silences.of(entry.heard_at, now)
        if silent > (borne := limits.silence if entry.spoke else limits.start):
            # While a library computes without releasing the interpreter's lock, no thread of the worker can speak.
            computes = now - entry.lived_at <= self._silences.pause
            if computes and silent <= borne + (limits.first_op if entry.op_limit is None else entry.op_limit):
                return None
            if self._only_stopped(entry, now) and silent <= max(borne, limits.first_op):
                if now >= entry.stop_borne_until:
                    text = f"{entry.worker} is stopped by a signal, as all of its stage, without which nobody can go on"
                    self._listener({"warning": f"{text}; waiting for SIGCONT"})
                entry.stop_borne_until = now + borne
            if now < entry.stop_borne_until:
                return None
            return f"was silent for {silent:.0f} s" + (", stopped by a signal" if entry.stopped else "")
        current = entry.current
        if current is None or current.limit is None or not current.overdue:
            return None
        peers = self._peers(entry)
        # If all workers of a stage take long for something, a disk or the data is slow. To fence them would leave
        # nobody.
        alone = all(e.current is not None and e.current.lags for e in peers)
        limit = max(current.limit, limits.first_op) if alone else current.limit
        if alone:
            entry.excused_until = now + current.limit
        if current.seconds <= limit or (not alone and now < entry.excused_until):
            return None
        known = limit == limits.first_op or limit == limits.op
        why = "" if known else f", {TIMES_LONGEST:g} times its longest so far"
        return f"hangs: it is at {current} for {current.seconds:.0f} s (limit {limit:.0f} s{why})"

    def _peers(self, entry: WorkerProcess) -> list[WorkerProcess]:
        """Returns the workers of its stage that have not ended, with itself."""
        members = (e for e in self._pool.running.values() if e.member and e.ended_at is None)
        return [e for e in members if e.worker.stage == entry.worker.stage]

    def _only_stopped(self, entry: WorkerProcess, now: float) -> bool:
        """Says whether a worker is only stopped by a signal, with its whole stage, and the job could not go on without
        that stage. It is not known of workers on other nodes."""
        if self._coordination.judges_silence:
            return False
        peers = self._peers(entry)
        return not self._goes_back and entry.member and all(e.stopped and self._silent(e, now) for e in peers)

    @property
    def _goes_back(self) -> bool:
        """Whether the job goes on when a stage's weights are lost."""
        options = self._options
        return bool(back_to(options.checkpoints.folder is not None, options.faults.max_restarts))

    def _say_nobody_is_heard(self) -> None:
        nobody = self._silences.nobody_heard
        if nobody < self._options.faults.timeouts.silence:
            self._nobody_due = self._options.faults.timeouts.silence
        elif nobody >= self._nobody_due:
            self._nobody_due = 2 * nobody
            text = f"none of the workers has been heard for {nobody:.0f} s: they are suspended, or cut off; waiting"
            self._listener({"warning": text})

    def _start(
        self,
        cell: Worker,
        *,
        joins: bool,
        spares: Spares | None = None,
        node: int | None = None,
        first: bool = False,
    ) -> WorkerProcess | None:
        """Starts a worker's process. Returns None, after a warning, if that failed.

        joins: it takes state from peers. spares, node: as in ProcessPool.start. first: it starts with the job.
        """

        def spec(incarnation: str) -> WorkerSpec:
            return WorkerSpec(cell, incarnation, self._spec, joins)

        try:
            entry = self._pool.start(cell, spec, time.monotonic(), spares, node)
        except (OSError, EOFError) as error:
            if first:
                raise JobFailed(f"a process for {cell} can't be started ({error})") from None
            if spares is not None:
                self._pool.spares.put_back(spares, time.monotonic())
            self._listener({"warning": f"a process for {cell} can't be started ({error}); the others go on"})
            return None
        entry.whole = not joins
        if not joins:
            self._left_by.pop(str(cell), None)
        return entry

    def _end_workers(self) -> None:
        for entry in list(self._pool.running.values()):
            entry.post("over")
        deadline = time.monotonic() + 5.0
        for entry in list(self._pool.running.values()):
            entry.process.join(max(0.0, deadline - time.monotonic()))

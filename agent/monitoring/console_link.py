"""The launcher's link to a console: reports go out, generations and commands come in. Nothing here blocks the launcher.

There are four threads, each with its own HTTP session. One delivers the launcher's reports in order (`ReportSender`),
one those of its workers (agent.monitoring.heartbeat); one long-polls for generations, and one for operators' commands.
A console that is down is tried again with back-off. Meanwhile reports wait in bounded memory, where iterations share a
report, and so do failures: the console opens one generation for all of them. Beyond the bound, reports of validations
are dropped first, and then the oldest iterations.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from openrecycle.agent.coordination.launcher import (
    CHECKPOINT_SECONDS,
    Coordination,
    Deploy,
    Event,
    Failure,
    Halt,
    LauncherWarning,
    Measure,
    ProcessFenced,
    Step,
    restore_point,
)
from openrecycle.agent.messages.channel import keep_newest
from openrecycle.agent.messages.client import (
    Backoff,
    ConsoleClient,
    ConsoleRefused,
    ConsoleUnavailable,
    ConsoleWaits,
    Offset,
    Outbox,
    Say,
)
from openrecycle.agent.messages.protocol import (
    BATCH,
    DEPOSED,
    LONGEST_MS,
    UNKNOWN_PLAN,
    Acknowledgement,
    BatchReply,
    Command,
    Commands,
    Deployment,
    FailureReport,
    Failures,
    InterimPlan,
    Iteration,
    IterationReport,
    JobCreated,
    JobFinished,
    JobSpec,
    JobState,
    JobStatus,
    Message,
    Recovery,
    Registration,
    Relayout,
    Restart,
    ValidationReport,
    clock_name,
)
from openrecycle.agent.monitoring.heartbeat import WorkerReports, with_op_times
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.jobs.words import encodable, names
from openrecycle.planner.plans.packed import to_text
from openrecycle.planner.plans.plan import Plan

LONG_POLL_SECONDS = 20.0
# A job that halts gets no new generation: so much later may the launcher ask why the job stands still, and say so.
SAY_WHY_NOT_SECONDS = 5.0
MAX_REPORTS = 200
"""At most so many reports wait. Each may hold REPORTED_ITERATIONS, so a console may be away for hours."""
REPORTED_ITERATIONS = 1000
LAST_TRIES_SECONDS = 0.2
PHASE_SECONDS = 1.0
"""How long an acknowledgement waits for workers that have not taken that step."""
WORKERS_TIMEOUT_SECONDS = 2.0
"""How long the last reports of the workers may take, at the end of the job."""
# For a console that is away when the job ends. After a stop there is a person who waits for the launcher to end.
STOPPED_TIMEOUT_SECONDS, ENDED_TIMEOUT_SECONDS = 3.0, 60.0
AWAY_SECONDS = 5.0
"""A console must not answer for so long before that is said."""
TRY_AGAIN_SECONDS = 1.0
"""The longest pause between two tries. A console that is back must get a report of a death before its transfer_grace
ends; otherwise it has all workers connect anew, with the dead one among them. And living workers wait for its
decision."""


FAILURES_BYTES = 3 * 2**20
"""A batch of failures has at most so many bytes: a console takes one of 4 MiB."""
SEQ_AHEAD = 1_000_000
"""A leader's number of heartbeats is copied now and then. It may have sent up to so many since the last copy."""
_REPORTS: dict[str, type[Message]] = {
    "/failures": Failures,
    "/interim": InterimPlan,
    "/relayouts": Relayout,
    "/iterations": IterationReport,
    "/recoveries": Recovery,
    "/validations": ValidationReport,
    "/finish": JobFinished,
}
_PATHS = {kind: path for path, kind in _REPORTS.items()}
# The codes of refusals that are no news: the launcher hears of each in another way, too.
_NO_NEWS = ("fenced", "job_over", "unknown_job", DEPOSED)


class QueuedReport(NamedTuple):
    """A report on its way. path: below the job's path. at: when the reported thing happened, in monotonic seconds."""

    path: str
    message: Message
    at: float

    @property
    def body(self) -> Message:
        """The message as it is sent now, with its present age."""
        age = max(0.0, time.monotonic() - self.at)
        if isinstance(self.message, IterationReport):
            return self.message.model_copy(update={"age": age})
        if isinstance(self.message, Failures):
            return Failures.model_construct(failures=tuple(_older(one, age) for one in self.message.failures))
        return self.message


def _older(report: FailureReport, seconds: float) -> FailureReport:
    return report.model_copy(update={"age_milliseconds": min(report.age_milliseconds + 1000 * seconds, LONGEST_MS)})


def create_job(
    client: ConsoleClient, spec: JobSpec, say: Say, *, timeout: float = 30.0, quiet: float = 4.0
) -> JobCreated:
    """Registers the job. Waits up to `timeout` seconds for the console to answer. Says so only after `quiet` seconds:
    a console that is started together with the job answers by then.

    Raises ConsoleUnavailable or ConsoleRefused.
    """
    key, backoff, waited, said = uuid.uuid4().hex, Backoff(0.2, 2.0), 0.0, False
    while True:
        try:
            created = client.post("/jobs", spec, JobCreated, key=key)
            assert created is not None
            return created
        except ConsoleUnavailable as away:
            if waited >= timeout:
                raise
            if waited >= quiet and not said:
                said = True
                say(f"warning: {away}; the job begins once the console answers: waiting for up to {timeout:.0f} s")
            wait = backoff.seconds()
            threading.Event().wait(wait)
            waited += wait


def next_deployment(
    client: ConsoleClient, job_path: str, after: int, plans: dict[str, Plan], wait: float
) -> tuple[Deployment, Plan] | None:
    """Returns the newest deployment with a generation above `after`, and its plan, as soon as there is one; None if
    there is none in `wait` seconds. plans: the newest known plans, by fingerprint; the plan is added to them.

    Raises ConsoleUnavailable or ConsoleRefused.
    """
    deployment = client.get(f"{job_path}/deployment", Deployment, wait=wait, after=after)
    if deployment is None or deployment.generation <= after:
        return None
    name = deployment.plan_fingerprint
    plan = plans.get(name) or client.plan(job_path, name)
    keep_newest(plans, name, plan)
    return deployment, plan


def failure_report(failure: Failure) -> FailureReport:
    """Makes the report to a console of what a launcher, or a loop of its own, has seen."""
    cause, worker, incarnation, generation, detail, peer, spare, _ = failure
    return FailureReport(
        worker=peer or str(worker),
        incarnation=incarnation,
        cause=cause,
        reporter=str(worker) if cause == "transfer" else "launcher",
        detail=encodable(detail[:2000]),
        generation=generation,
        spare=tuple(spare),
    )


def merge_reports(older: QueuedReport, newer: QueuedReport) -> QueuedReport | None:
    """Merges two reports of iterations, or of failures, into one; None if they are others, or it would be too long."""
    first, second = older.message, newer.message
    if isinstance(first, IterationReport) and isinstance(second, IterationReport):
        both = first.iterations + second.iterations
        if len(both) <= REPORTED_ITERATIONS:
            return newer._replace(message=IterationReport.model_construct(iterations=both, age=0.0))
    elif isinstance(first, Failures) and isinstance(second, Failures):
        since = max(0.0, newer.at - older.at)
        batch, *more = failure_batches([*(_older(one, since) for one in first.failures), *second.failures])
        if not more:
            return newer._replace(message=batch)
    return None


def failure_batches(reports: Iterable[FailureReport]) -> Iterator[Failures]:
    """Yields reports in batches that a console takes: nearly always it is one."""
    batch, size = list[FailureReport](), 0
    for report in reports:
        more = len(report.model_dump_json().encode())
        if batch and (len(batch) == BATCH or size + more > FAILURES_BYTES):
            yield Failures(failures=tuple(batch))
            batch, size = [], 0
        batch.append(report)
        size += more
    if batch:
        yield Failures(failures=tuple(batch))


def outbox() -> Outbox[QueuedReport]:
    """Makes the outbox of a launcher's reports. Ends of processes, and of the job, are never dropped for others;
    iterations only when no ValidationReport is left. These come again and again, so they have the least weight."""

    weights: dict[type[Message], int] = {ValidationReport: 0, IterationReport: 1}
    return Outbox(MAX_REPORTS, merge=merge_reports, weight=lambda report: weights.get(type(report.message), 2))


def _saved(report: QueuedReport) -> tuple[str, dict[str, Any]]:
    """Returns a report as it is copied to other launchers. A console that is away leaves very many iterations: so only
    their numbers are copied, and the record has the rest."""
    if isinstance(report.message, IterationReport):
        iterations = report.message.iterations
        return report.path, {"first": iterations[0].iteration, "last": iterations[-1].iteration}
    return report.path, report.body.model_dump(mode="json")


def _restored(
    saved: Sequence[tuple[str, Mapping[str, Any]]], recorded: Callable[[int, int], Iterable[Iteration]]
) -> Iterable[Message]:
    spans = [(about["first"], about["last"]) for path, about in saved if _REPORTS[path] is IterationReport]
    known = {i.iteration: i for i in recorded(spans[0][0], spans[-1][1])} if spans else {}
    for path, about in saved:
        if _REPORTS[path] is IterationReport:
            numbers = range(about["first"], about["last"] + 1)
            yield IterationReport(iterations=tuple(known[number] for number in numbers if number in known))
        else:
            yield _REPORTS[path].model_validate(about)


class ReportSender(threading.Thread):
    """Delivers reports to the console, oldest first, until `stop`. `put` may be called in any thread, and returns at
    once: this thread sends.

    path: returns the job's path. ready: is it time to deliver? Call `wake` when that has become true. pause: seconds to
    wait after each delivery, so that what comes meanwhile can be sent together. refused: called when the console
    refuses a report, which is not sent again.
    """

    def __init__(
        self,
        connect: Callable[[], ConsoleClient],
        path: Callable[[], str],
        reports: Outbox[QueuedReport],
        *,
        ready: Callable[[], bool] = lambda: True,
        pause: Callable[[], float] = lambda: 0.0,
        refused: Callable[[ConsoleRefused], None] = lambda _refusal: None,
    ) -> None:
        super().__init__(name="reports", daemon=True)
        self._connect, self._path, self._reports = connect, path, reports
        self._ready, self._pause, self._refused = ready, pause, refused
        self._there, self._stopping, self._last_tries = threading.Event(), threading.Event(), True
        self.refusing: tuple[float, str] | None = None
        """Since when the console has taken no report, and its error; None: it takes them, or there are none."""
        self.start()

    @property
    def waiting(self) -> list[QueuedReport]:
        return self._reports.all

    def put(self, report: QueuedReport) -> None:
        self._reports.put(report)
        self.wake()

    def wake(self) -> None:
        self._there.set()

    def stop(self, *, tries: bool = True) -> None:
        """Ends the thread when all is delivered. tries: keep trying if the console is away; otherwise the thread ends
        then, too."""
        self._last_tries = tries
        self._stopping.set()
        self.wake()

    def run(self) -> None:
        client, backoff = self._connect(), Backoff(longest=TRY_AGAIN_SECONDS)
        while True:
            report = self._reports.take() if self._ready() else None
            if report is None:
                if self._stopping.is_set():
                    return
                self._there.wait()
                self._there.clear()
                continue
            try:
                client.post(f"{self._path()}{report.path}", report.body)
            except ConsoleUnavailable as error:
                self.refusing = (self.refusing or (time.monotonic(), ""))[0], str(error)
                self._reports.unsent()
                if not self._stopping.is_set():
                    self._stopping.wait(backoff.seconds())
                elif self._last_tries:
                    time.sleep(LAST_TRIES_SECONDS)
                else:
                    return
                continue
            except ConsoleRefused as refusal:
                self._refused(refusal)  # it would be refused again: its worker is fenced, or the job is over
            self.refusing = None
            backoff.reset()
            self._reports.sent()
            self._stopping.wait(self._pause())


class Phases:
    """Gathers the acknowledgements of all workers for the same step of a generation, to post them together. It has no
    clock of its own.

    timeout: seconds after which the acknowledgements that have come are posted without the others.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._generation = 0
        self._expected: frozenset[str] = frozenset()
        self._known: dict[tuple[int, str], set[str]] = {}
        self._waiting: dict[tuple[int, str], tuple[float, list[Acknowledgement]]] = {}

    def expect(self, generation: int, incarnations: Iterable[str]) -> None:
        """Says that `generation` is the newest, and that these processes will take each of its steps at about the same
        time."""
        self._generation, self._expected = generation, frozenset(incarnations)
        self._known = {}

    def add(self, acknowledgement: Acknowledgement, now: float) -> None:
        key = acknowledgement.generation, acknowledgement.state
        self._known.setdefault(key, set()).add(acknowledgement.incarnation)
        self._waiting.setdefault(key, (now, []))[1].append(acknowledgement)

    def due(self, now: float) -> list[list[Acknowledgement]]:
        """Returns the groups to be posted now, oldest first: complete ones, those of older generations, and those that
        have waited for too long."""
        out = []
        for key, (since, waiting) in list(self._waiting.items()):
            complete = key[0] != self._generation or self._expected <= self._known.get(key, set())
            if complete or now - since >= self._timeout:
                out.append(waiting)
                del self._waiting[key]
        return out


class Absence:
    """Decides when the launcher says that the console is away, or takes no reports: once when this has lasted for
    AWAY_SECONDS, once more when the job stands still for that reason, and once when it is over. If what was said is no
    longer so, and this has lasted as long, it is said anew. It has no clock of its own.

    Workers train on without a console. But if one of them is lost, all others stop until the console has decided who
    goes on. begun: has the console ever decided that? paused: has an operator paused the job? Set by the owner.
    """

    def __init__(self, *, begun: bool, paused: bool = False) -> None:
        self.paused = paused
        self._lost = frozenset[str]()
        self._undecided = not begun
        """Can workers not go on with each other, although none of them is known to be lost?"""
        self._told: tuple[str, bool] | None = None
        """What the console did not do, and whether the job stood still, when that was last said; None: all is well
        since."""
        self._found: tuple[str, bool] | None = None
        """The same as the last turn found it."""
        self._changed = 0.0
        """When that became so."""

    def lost(self, worker: str) -> None:
        self._lost |= {worker}

    def broken(self) -> None:
        self._undecided = True

    def trains(self) -> None:
        """Workers train in the generation in force, so nothing is broken, or they only had to connect anew."""
        self._undecided = False

    def decided(self, members: Collection[str]) -> None:
        """There is a new generation. A lost worker that is a member of it was lost after the decision."""
        self._lost &= frozenset(members)
        self._undecided = False

    def turn(
        self, now: float, away: tuple[float, str] | None, clock: float, refusing: tuple[float, str] | None = None
    ) -> str:
        """Returns what is to be said now; "": nothing. away: since when the console has not answered, and its error;
        None: it answers. clock: the time of day. refusing: since when it answers, but takes no reports, as when its
        disk is full."""
        missing = away or refusing
        if missing is None:
            told, self._told, self._found = self._told, None, None
            return f"the console {told[0]} again" if told else ""
        since, how = missing
        what, stands = "answers" if away else "takes reports", bool(self._lost) or self._undecided
        if (what, stands) != self._found:
            self._found, self._changed = (what, stands), now
        news = self._told is None or (stands and not self._told[1])
        # A console that is back takes its reports a moment later, and what was on its way when links broke still comes.
        changed = self._told != self._found and now - self._changed >= AWAY_SECONDS
        if now - since < AWAY_SECONDS or not (news or changed):
            return ""
        self._told = self._found
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(clock - (now - since)))
        says = f"the console has {'not answered' if away else 'taken no reports'} since {at} ({how})"
        if not stands:
            if self.paused:
                return f"{says}; the job is paused, and nobody can resume it until the console is back"
            return f"{says}; training goes on, but if a worker is lost, all wait until the console is back"
        lost = f"{names(sorted(self._lost), last=' and ')} lost: " if self._lost else ""
        again = ". Start the console again with the same database" if away else ""
        return f"{lost}the job stands still until the console {what} again; {says}{again}"


class ConsoleCoordination(Coordination):
    """The coordination of a launcher for which a console decides.

    say: called in another thread with the console's sentence when the job does not train. checkpoint: returns the
    checkpoint to go back to when the console says so; it is asked again for `retry_seconds` while it raises OSError.
    interval: seconds between two posts of the workers' heartbeats. decide: given an action, does it as soon as this
    launcher may (agent.launcher.processes); of several nodes another one may lead by then. saved: what another launcher
    has `saved`, to go on from; recorded: returns that job's iterations from one number to another.
    """

    judges_silence = True

    def __init__(
        self,
        connect: Callable[[], ConsoleClient],
        job_id: str,
        say: Say,
        *,
        checkpoint: Callable[[], str | None] = lambda: None,
        retry_seconds: float = CHECKPOINT_SECONDS,
        interval: float = 1.0,
        decide: Callable[[Callable[[], None]], None] = lambda send: send(),
        saved: Mapping[str, Any] | None = None,
        recorded: Callable[[int, int], Iterable[Iteration]] = lambda _first, _last: (),
    ) -> None:
        self._connect, self._path, self._say = connect, f"/jobs/{job_id}", say
        self._job_id, self._decide = job_id, decide
        self._decided: deque[QueuedReport] = deque()
        """Reports that are with `decide`."""
        self._failures: list[tuple[FailureReport, float]] = []
        """Those of this turn, each with when it was made, in monotonic seconds. The console is told of them together:
        it would open a generation for each of the workers that a lost node had."""
        newest: tuple[int, int] = (0, 0) if saved is None else (saved["generation"], saved["command"])
        self._generation, self._command = newest
        """The newest generation and command that the launcher was told."""
        self._checkpoint, self._retry_seconds = checkpoint, retry_seconds
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closing = threading.Event()
        # Sockets, not a pipe: a thread that outlives `close` then writes to a closed socket, and not to a file that has
        # got its number since.
        self._woken, self._waking = socket.socketpair()
        self._using = threading.Lock()  # held while another thread writes, so that its end is not closed meanwhile
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        self.wake_fd = self._woken.fileno()
        self._refused = set[str]()
        """The console's reasons to refuse single reports, which have been said."""
        self._sender = ReportSender(connect, lambda: self._path, outbox(), refused=self._say_refused)
        self._absence = Absence(begun=newest[0] > 0, paused=saved is not None and saved["paused"])
        self._away: tuple[float, str] | None = None
        """Since when the console has not answered, and its error. Set by the thread that asks for generations."""
        self._there = False
        """While it is away: does it answer that it can do nothing?"""
        self._living: frozenset[str] | None = None
        """Members of the newest generation; None: not known, since another launcher was told of it."""
        self._refusal = ""
        """The console's reason to take no registration at all, which has been said."""
        self._said: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._beats: dict[str, Mapping[str, Any]] = {}
        """The newest heartbeat of each incarnation."""
        self._phases = Phases(min(interval, PHASE_SECONDS))
        client = connect()
        self._token = client.token
        self._workers = WorkerReports(
            client,
            job_id,
            interval=interval,
            fenced=lambda incarnation: self._put(ProcessFenced(incarnation)),
            measure=lambda iteration: self._put(Measure(iteration)),
            registered=self._say_who_is_refused,
            may_register=self._may_register,
        )
        if saved is not None:
            for about in saved["workers"]:
                registration = Registration.model_validate(about["registration"])
                self._workers.add(registration, seq=about["seq"] + SEQ_AHEAD)
            for report in _restored(saved["reports"], recorded):
                self._report(report)
        self._workers.start()
        for target in (self._follow_generations, self._follow_commands):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    # -- Coordination -------------------------------------------------------------------------

    def ready(
        self,
        worker: Worker,
        incarnation: str,
        host: str,
        pids: Sequence[int],
        made_of: Sequence[tuple[str, int]] = (),
    ) -> None:
        ranks = tuple(pids) if len(pids) > 1 else ()
        registration = Registration(
            worker=str(worker), incarnation=incarnation, host=host, pid=pids[0], ranks=ranks, made_of=tuple(made_of)
        )
        self._workers.add(registration)

    def lives(self, worker: Worker, incarnation: str) -> None:
        # Sends its newest heartbeat again: the console judges by heartbeats alone, and would fence it otherwise.
        if incarnation in self._beats:
            self._said.setdefault(incarnation, (str(worker), self._beats[incarnation]))

    def said(self, worker: Worker, incarnation: str, message: Mapping[str, Any], clock: Offset) -> None:
        match message["kind"]:
            case "alive":
                beat = self._beats[incarnation] = message["beat"]
                if incarnation in self._said:
                    beat = with_op_times(self._said[incarnation][1], beat)
                self._said[incarnation] = str(worker), beat
            case "log":
                self._workers.wrote(incarnation, message["lines"], message["skipped"])
            case "measured":
                fields = message["ops"] | {"worker": str(worker), "incarnation": incarnation}
                same = fields["clock"] == clock_name()
                self._workers.measured(fields, Offset(0, 0) if same else clock)

    def failed(self, failure: Failure) -> None:
        cause, worker, incarnation, generation, *_ = failure
        if cause != "exit":
            if generation >= self._generation:  # an earlier generation is over, and nothing waits for it
                self._absence.broken()
        elif self._living is None or str(worker) in self._living:
            self._absence.lost(str(worker))
        if cause == "exit":
            self._workers.remove(incarnation)
            self._beats.pop(incarnation, None)
        self._collect(failure_report(failure))

    def restarts(self, worker: Worker, incarnation: str, restart: Restart) -> None:
        about = {"worker": str(worker), "incarnation": incarnation, "cause": "exit", "reporter": "launcher"}
        self._collect(FailureReport.model_validate(about | {"restart": restart}))

    def opened(self, generation: int, incarnations: Iterable[str]) -> None:
        self._phases.expect(generation, incarnations)

    def acknowledged(
        self,
        state: Step,
        worker: Worker,
        incarnation: str,
        generation: int,
        iteration: int = 0,
    ) -> None:
        made = Acknowledgement(
            worker=str(worker), incarnation=incarnation, generation=generation, state=state, iteration=iteration
        )
        self._phases.add(made, time.monotonic())

    def meanwhile(self, generation: int, plan: Plan) -> None:
        self._report(InterimPlan(generation=generation, plan=to_text(plan)))

    def committed(self, iterations: Iterable[Iteration]) -> None:
        batch = tuple(iterations)
        if batch and batch[-1].generation == self._generation:
            self._absence.trains()
        if batch:
            self._report(IterationReport(iterations=batch))

    def report(self, message: Relayout | Recovery | ValidationReport) -> None:
        self._report(message)

    def finished(self, state: str, reason: str) -> None:
        self._tell(float("inf"))
        self._workers.stop()
        self._workers.join(WORKERS_TIMEOUT_SECONDS)
        self._report(JobFinished(state=state, reason=encodable(reason[:2000])))  # type: ignore[arg-type]

    def saved(self) -> dict[str, Any]:
        reports = [*self._sender.waiting, *self._decided, *self._collected()]
        return {
            "job": self._job_id,
            "token": self._token,
            "generation": self._generation,
            "command": self._command,
            "paused": self._absence.paused,
            "workers": self._workers.saved(),
            "reports": [_saved(report) for report in reports],
        }

    def lead_changed(self, lost: Mapping[Worker, str], detail: str, now: float) -> None:
        for worker, incarnation in lost.items():
            self.failed(Failure("exit", worker, incarnation, detail=f"ended: {detail}"))

    def poll(self, now: float) -> list[Event]:
        self._tell(now)
        # First of all: an event that comes from here on is either taken below, or wakes the launcher again.
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        out = []
        while not self._events.empty():
            out.append(event := self._events.get())
            if isinstance(event, Deploy):
                self._generation = event.deployment.generation
                self._living = frozenset(event.deployment.living)
                self._absence.decided(self._living - {*event.deployment.joining})
            elif isinstance(event, Command):
                self._command = event.seq
                if event.kind in ("pause", "resume"):
                    self._absence.paused = event.kind == "pause"
        away, refusing = self._away, self._sender.refusing
        if self._there:
            away, refusing = None, away or refusing
        if text := self._absence.turn(now, away, time.time(), refusing):
            out.append(LauncherWarning(text))
        return out

    def close(self, hurried: Callable[[], bool]) -> None:
        """Delivers what is queued. Says so if this takes long, and if it fails.

        hurried: while it returns True, STOPPED_TIMEOUT_SECONDS are enough; otherwise it is ENDED_TIMEOUT_SECONDS.
        """
        begin = time.monotonic()
        self._closing.set()
        self._pass_failures()
        self._sender.stop()
        self._sender.join(STOPPED_TIMEOUT_SECONDS)
        if self._sender.is_alive() and not hurried():
            self._say(
                "warning: the console does not answer; trying to tell it how the job ended, "
                f"for up to {ENDED_TIMEOUT_SECONDS:g} s"
            )
        while self._sender.is_alive() and not hurried() and time.monotonic() - begin < ENDED_TIMEOUT_SECONDS:
            self._sender.join(LAST_TRIES_SECONDS)
        if self._sender.is_alive():
            self._say(f"warning: the console was not told how the job ended; reports lost: {len(self._sender.waiting)}")
        with self._using:
            self._woken.close()
            self._waking.close()

    def _tell(self, now: float) -> None:
        """Passes on, together, all that workers have said in one turn of the launcher, and which of them failed. So a
        launcher that stood still has heard all its workers before it tells the console of any of them."""
        self._pass_failures()
        said, self._said = self._said, {}
        if said:
            self._workers.heard(said)
        for acknowledgements in self._phases.due(now):
            self._workers.acknowledge(acknowledgements)

    def _collect(self, report: FailureReport) -> None:
        """Has the next `poll` report it. That is at once: a report may also be made in a turn after its `poll`."""
        self._failures.append((report, time.monotonic()))
        self._wake()

    def _collected(self) -> list[QueuedReport]:
        """Returns the batches of the failures that have been collected."""
        now = time.monotonic()
        reports = (_older(report, now - at) for report, at in self._failures)
        return [QueuedReport(_PATHS[Failures], batch, now) for batch in failure_batches(reports)]

    def _pass_failures(self) -> None:
        for batch in self._collected():
            self._queue(batch)
        self._failures.clear()  # afterwards, so that they are always somewhere

    def _report(self, message: Message) -> None:
        self._pass_failures()  # they were first
        self._queue(QueuedReport(_PATHS[type(message)], message, time.monotonic()))

    # -- threads ------------------------------------------------------------------------------

    def _queue(self, report: QueuedReport) -> None:
        self._decided.append(report)
        self._decide(self._pass_on)

    def _pass_on(self) -> None:
        self._sender.put(self._decided[0])
        self._decided.popleft()  # afterwards, so that it is always somewhere

    def _put(self, event: Event) -> None:
        self._events.put(event)
        self._wake()

    def _wake(self) -> None:
        with self._using, contextlib.suppress(OSError):  # full, and so readable already; or closed
            self._waking.send(b"!")

    def _follow_generations(self) -> None:
        client, backoff, generation = self._connect(), Backoff(longest=TRY_AGAIN_SECONDS), self._generation
        plans: dict[str, Plan] = {}
        said = ""
        while not self._closing.is_set():
            try:
                # A console that was away is asked without a wait, to find out at once that it answers again.
                away = self._away is not None
                found = next_deployment(client, self._path, generation, plans, 0.0 if away else SAY_WHY_NOT_SECONDS)
                backoff.reset()
                self._away = None
                if found is None:
                    said = said if away else self._say_why_not(client, generation, said)
                    continue
                generation = found[0].generation
                self._put(self._event(*found))
            except ConsoleUnavailable as error:
                self._there = isinstance(error, ConsoleWaits)
                self._away = (self._away or (time.monotonic(), ""))[0], str(error)
                self._closing.wait(backoff.seconds())
            except ConsoleRefused as refusal:
                if refusal.problem.code != UNKNOWN_PLAN:
                    self._put(Halt(f"the console refused: {refusal}"))
                    return
                # What it has stored of the plan is damaged. A person can give the job another one, and until then its
                # workers train on, as far as they can.
                self._away = None
                if str(refusal) != said:
                    said = str(refusal)
                    self._say(f"warning: the newest generation can't begin: {said}; give the job another plan")
                self._closing.wait(backoff.seconds())
            except Exception as error:  # with this thread gone, the launcher would never hear of a generation again
                traceback.print_exc()
                self._put(Halt(f"generations can't be followed any more: {type(error).__name__}: {error}"))
                return

    def _event(self, deployment: Deployment, plan: Plan) -> Event:
        if not deployment.restore:
            return Deploy(deployment, plan)
        restore = restore_point(self._checkpoint, deployment.reason, self._closing.wait, self._retry_seconds)
        if isinstance(restore, Halt):
            return restore
        return Deploy(deployment, plan, restore)

    def _may_register(self, registration: Registration) -> bool:
        """Says whether the console has been told of the end of the process before in that place. If it heard of the
        next one first, as when it is back after both, it would never learn why that one ended."""
        collected = [report for report, _ in self._failures.copy()]  # copies, since another thread changes them
        queued = [report.message for report in (*self._decided.copy(), *self._sender.waiting)]
        batches = [message.failures for message in queued if isinstance(message, Failures)]
        return all(report.worker != registration.worker for report in itertools.chain(collected, *batches))

    def _say_who_is_refused(self, answer: BatchReply | ConsoleRefused) -> None:
        """Says that the console refuses all workers, as one of another version does: the job would never begin. A
        refusal of a single worker is not said: the launcher handles it."""
        if isinstance(answer, ConsoleRefused) and str(answer) != self._refusal:
            self._refusal = str(answer)
            self._say(f"warning: the console takes no new workers: {self._refusal}")

    def _say_refused(self, refusal: ConsoleRefused) -> None:
        """Says that the console refused a report, which is not sent again; for each reason once."""
        if refusal.problem.code not in _NO_NEWS and (text := str(refusal)) not in self._refused:
            self._refused.add(text)
            self._say(f"warning: the console refused a report, and does without it: {text}")

    def _say_why_not(self, client: ConsoleClient, generation: int, said: str) -> str:
        """Says once why the job stands still, and returns what was said. generation: the newest that is known."""
        try:
            status = client.get(self._path, JobStatus)
        except ConsoleRefused:  # the sentence is only for people, so this is no reason to end the job
            return said
        if status is None or status.state in (JobState.RUNNING, JobState.FINISHED, JobState.STOPPED):
            return ""
        if status.generation > generation:  # a newer generation has opened meanwhile, which nobody has taken up yet
            return said
        if status.sentence != said:
            self._say(f"{'warning: ' if status.state is JobState.HALTED else ''}{status.sentence}")
        return status.sentence

    def _follow_commands(self) -> None:
        client, backoff, seq = self._connect(), Backoff(longest=TRY_AGAIN_SECONDS), self._command
        while not self._closing.is_set():
            try:
                answer = client.get(f"{self._path}/commands", Commands, wait=LONG_POLL_SECONDS, after=seq)
                backoff.reset()
                for command in answer.commands if answer else ():
                    seq = max(seq, command.seq)
                    self._put(command)
            except (ConsoleUnavailable, ConsoleRefused):
                self._closing.wait(backoff.seconds())

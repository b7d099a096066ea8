"""The launcher's link to a console: reports go out, generations and commands come in, nothing blocks.

Four threads, each with its own HTTP session: one delivers the launcher's reports in order, one those of its workers
(agent.monitoring.heartbeat), one long-polls for generations, one for the operator's commands. A console that is down is
tried again with back-off; reports wait in bounded memory, where iterations share a report. Beyond its bound steps that
were put right would be the first to go, and then the oldest iterations.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    INTERIM_DOCUMENT,
    LONGEST_MS,
    Acknowledgement,
    BatchReply,
    Command,
    Commands,
    Deployment,
    FailureReport,
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
from openrecycle.planner.plans.plan import Plan

LONG_POLL_SECONDS = 20.0
# A job that halts gets no new generation: so late may the launcher say why it stands still.
SAY_WHY_NOT_SECONDS = 5.0
# A larger plan would take longer to send than it is run for.
INTERIM_OPS = 20_000
MAX_REPORTS = 200
"""Waiting at most; each may hold REPORTED_ITERATIONS, so that a console may be away for hours."""
REPORTED_ITERATIONS = 1000
LAST_TRIES_SECONDS = 0.2
PHASE_SECONDS = 1.0
"""So long an acknowledgement waits for workers that have not taken that step."""
WORKERS_TIMEOUT_SECONDS = 2.0
"""For the last words of the workers, at the end of the job."""
# For a console that is away at the end of a job: where it was stopped, somebody waits for the launcher to end.
STOPPED_TIMEOUT_SECONDS, ENDED_TIMEOUT_SECONDS = 3.0, 60.0
AWAY_SECONDS = 5.0
"""So long a console does not answer before anybody is told."""
AWAY_AGAIN_SECONDS = 60.0, 3600.0
"""Between two times that it is said that the job stands still: at first, and at most; twice as long each time."""
TRY_AGAIN_SECONDS = 1.0
"""Between two tries, at most. A console that is back knows of a death by this report before it gives up waiting for
it (its transfer_grace) and has all connect anew, with the dead among them; and who trains waits for its decision."""


SEQ_AHEAD = 1_000_000
"""Heartbeats that the lead before may have sent since it has said of which it was."""
_REPORTS: dict[str, type[Message]] = {
    "/failures": FailureReport,
    "/interim": InterimPlan,
    "/relayouts": Relayout,
    "/iterations": IterationReport,
    "/recoveries": Recovery,
    "/validations": ValidationReport,
    "/finish": JobFinished,
}
_PATHS = {kind: path for path, kind in _REPORTS.items()}


class QueuedReport(NamedTuple):
    """path: below the job's. at: when what it says happened, monotonic seconds."""

    path: str
    message: Message
    at: float

    @property
    def body(self) -> Message:
        """As it is sent now."""
        age = max(0.0, time.monotonic() - self.at)
        if isinstance(self.message, IterationReport):
            return self.message.model_copy(update={"age": age})
        if isinstance(self.message, FailureReport):
            return self.message.model_copy(update={"age_milliseconds": min(1000 * age, LONGEST_MS)})
        return self.message


def create_job(
    client: ConsoleClient, spec: JobSpec, say: Say, *, timeout: float = 30.0, quiet: float = 4.0
) -> JobCreated:
    """Registers the job; waits up to `timeout` seconds for the console to answer, and says so after `quiet` seconds:
    one that is started together with the job is there by then.

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
    """The newest deployment with a generation above `after`, and its plan, as soon as there is one; None
    when there is none in `wait` seconds. plans: the newest that are known, by fingerprint; this one is added.

    Raises ConsoleUnavailable or ConsoleRefused.
    """
    deployment = client.get(f"{job_path}/deployment", Deployment, wait=wait, after=after)
    if deployment is None or deployment.generation <= after:
        return None
    name = deployment.plan_fingerprint
    plan = plans.get(name) or client.get(f"{job_path}/plans/{name}", Plan)
    assert plan is not None
    keep_newest(plans, name, plan)
    return deployment, plan


def merge_iterations(older: QueuedReport, newer: QueuedReport) -> QueuedReport | None:
    """Two reports of iterations as one, where it would not be too long."""
    first, second = older.message, newer.message
    if not isinstance(first, IterationReport) or not isinstance(second, IterationReport):
        return None
    both = first.iterations + second.iterations
    if len(both) > REPORTED_ITERATIONS:
        return None
    return newer._replace(message=IterationReport.model_construct(iterations=both, age=0.0))


def outbox() -> Outbox[QueuedReport]:
    """Ends of processes, and of the job, are not forgotten; iterations only where nothing is left of how their steps
    were put right, which must not keep them apart either: they come again and again."""

    weights: dict[type[Message], int] = {ValidationReport: 0, IterationReport: 1}
    return Outbox(MAX_REPORTS, merge=merge_iterations, weight=lambda report: weights.get(type(report.message), 2))


def _saved(report: QueuedReport) -> tuple[str, dict[str, Any]]:
    """As another launcher is told it, in each copy: of iterations, of which a console that is away leaves very many,
    which they are. The record has them."""
    if isinstance(report.message, IterationReport):
        iterations = report.message.iterations
        return report.path, {"first": iterations[0].iteration, "last": iterations[-1].iteration}
    return report.path, report.message.model_dump(mode="json")


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
    """Delivers what it is given to the console, oldest first, until `stop`. `put` may be called from any thread, and
    returns at once.

    path: the job's. ready: is it time to deliver? `wake` when it has become so. pause: seconds after each that the
    console has taken: what comes meanwhile goes together. refused: called with what the console says against one, which
    is not sent again.
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
        """Since when the console has taken none, and what it said; None: it takes them, or there are none."""
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
        """Ends the thread once all is delivered. tries: of a console that is away; otherwise that ends it, too."""
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
                if not self._stopping.is_set():
                    self._stopping.wait(backoff.seconds())
                elif self._last_tries:
                    time.sleep(LAST_TRIES_SECONDS)
                else:
                    return
                continue
            except ConsoleRefused as refusal:
                self._refused(refusal)  # the console knows better (fenced, finished): the same again would be refused
            self.refusing = None
            backoff.reset()
            self._reports.sent()
            self._stopping.wait(self._pause())


class Phases:
    """Makes one acknowledgement of a generation's step out of those of all workers. No clock.

    timeout: seconds after which those that have taken a step are acknowledged without the others.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._generation = 0
        self._expected: frozenset[str] = frozenset()
        self._known: dict[tuple[int, str], set[str]] = {}
        self._waiting: dict[tuple[int, str], tuple[float, list[Acknowledgement]]] = {}

    def expect(self, generation: int, incarnations: Iterable[str]) -> None:
        """`generation` is the newest, and those are to take each step of it at about the same time."""
        self._generation, self._expected = generation, frozenset(incarnations)
        self._known = {}

    def add(self, acknowledgement: Acknowledgement, now: float) -> None:
        key = acknowledgement.generation, acknowledgement.state
        self._known.setdefault(key, set()).add(acknowledgement.incarnation)
        self._waiting.setdefault(key, (now, []))[1].append(acknowledgement)

    def due(self, now: float) -> list[list[Acknowledgement]]:
        """Those to be posted now, the oldest first: complete, of an older generation, or waiting for too long."""
        out = []
        for key, (since, waiting) in list(self._waiting.items()):
            complete = key[0] != self._generation or self._expected <= self._known.get(key, set())
            if complete or now - since >= self._timeout:
                out.append(waiting)
                del self._waiting[key]
        return out


class Absence:
    """When it is to be said that the console is away, and that the job stands still for it. No clock.

    Workers train on without a console. Where one of them is lost all others stop, until the console has decided who
    goes on. begun: has it decided that ever?
    """

    def __init__(self, *, begun: bool) -> None:
        self._lost = dict[str, str]()
        """By worker, how it ended."""
        self._broken_at: float | None = None
        """Since when workers, none of which is known to be lost, can't go on with each other."""
        self._broken, self._begun = False, begun
        self._told: str | None = None
        """For what it was last said to stand still; "": it was said that the console is away, no more."""
        self._answered = False
        """Did it answer, when that was said?"""
        self._due = self._wait = 0.0

    def lost(self, worker: str, how: str) -> None:
        self._lost[worker] = how

    def broken(self) -> None:
        self._broken = True

    def trains(self) -> None:
        """The generation in force does: what was said to be broken was not, as where all were only to form anew."""
        self._broken = False

    def decided(self, members: Collection[str]) -> None:
        """There is a new generation; those of `members` whose process is lost were lost after that."""
        self._lost = {worker: how for worker, how in self._lost.items() if worker in members}
        self._broken, self._begun = False, True

    def turn(
        self, now: float, away: tuple[float, str] | None, clock: float, refusing: tuple[float, str] | None = None
    ) -> str:
        """What is to be said now; "": nothing. away: since when the console is, and how that shows; None: it is not.
        clock: the time of day. refusing: since when it answers, and takes no reports: its disk is full, say."""
        why, since_and_how = self._why(now), away or refusing
        if since_and_how is None:
            back, self._told = self._told is not None, None
            return f"the console {'takes reports' if self._answered else 'answers'} again" if back else ""
        since, how = since_and_how
        news = self._told is None or (why and why != self._told)
        if now - since < AWAY_SECONDS or not (news or (why and now >= self._due)):
            return ""
        self._told, self._answered = why, away is None
        shortest, longest = AWAY_AGAIN_SECONDS
        self._wait = shortest if news else min(2 * self._wait, longest)
        self._due = now + self._wait
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(clock - (now - since)))
        missing = f"has {'not answered' if away else 'taken no reports'} since {at} ({_ago(now - since)} ago: {how})"
        if not why:
            return (
                f"the console {missing}; training goes on, but if a worker is lost, all wait until the console is back"
            )
        waits = "The job stands still" if self._begun or self._lost else "It waits"
        if not away:
            return f"{why}. {waits} until the console takes reports again, which {missing}; the job goes on by itself"
        return (
            f"{why}. {waits} until the console is back, which {missing}. Start the console again with the same "
            "database; the job goes on by itself"
        )

    def _why(self, now: float) -> str:
        """The job can't go on without the console; "": it can."""
        # Whose loss it was that broke a connection is known a moment later.
        self._broken_at = None if not self._broken else now if self._broken_at is None else self._broken_at
        if len(self._lost) > 1:
            return f"{names(sorted(self._lost), last=' and ')} are gone"
        if self._lost:
            ((worker, how),) = self._lost.items()
            return f"{worker} is gone" + (f" ({how})" if how else "")
        if not self._begun:
            return "the job has not begun"
        late = self._broken_at is not None and now - self._broken_at >= AWAY_SECONDS
        return "connections between workers broke, or a stage's state was lost" if late else ""


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class ConsoleCoordination(Coordination):
    """One whose decisions are the console's.

    say: called, from a thread, with the console's sentence when the job does not train and nothing is announced.
    checkpoint: asked for the checkpoint to go back to when the console says so, for `patience` seconds where it raises
    OSError. interval: seconds between two posts of the workers' heartbeats. decide: given
    what is to be done once this launcher may (agent.launcher.processes): on several nodes another may lead by then.
    saved: what another launcher has `saved`, which this one goes on from; recorded: of that job, the iterations from
    one to another.
    """

    judges_silence = True

    def __init__(
        self,
        connect: Callable[[], ConsoleClient],
        job_id: str,
        say: Say,
        *,
        checkpoint: Callable[[], str | None] = lambda: None,
        patience: float = CHECKPOINT_SECONDS,
        interval: float = 1.0,
        decide: Callable[[Callable[[], None]], None] = lambda send: send(),
        saved: Mapping[str, Any] | None = None,
        recorded: Callable[[int, int], Iterable[Iteration]] = lambda _first, _last: (),
    ) -> None:
        self._connect, self._path, self._say = connect, f"/jobs/{job_id}", say
        self._job_id, self._decide = job_id, decide
        self._decided: deque[QueuedReport] = deque()
        """Reports that `decide` has."""
        newest: tuple[int, int] = (0, 0) if saved is None else (saved["generation"], saved["command"])
        self._generation, self._command = newest
        """That the launcher was told."""
        self._checkpoint, self._patience = checkpoint, patience
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._closing = threading.Event()
        # Sockets, not a pipe: threads that outlive `close` write to one that is closed, not to a file of somebody else.
        self._woken, self._waking = socket.socketpair()
        self._using = threading.Lock()  # of the end that other threads write to: it is not closed meanwhile
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        self.wake_fd = self._woken.fileno()
        self._sender = ReportSender(connect, lambda: self._path, outbox())
        self._absence = Absence(begun=newest[0] > 0)
        self._away: tuple[float, str] | None = None
        """Since when the console has not answered, and how; as the thread sees it that asks for generations."""
        self._there = False
        """Does one that is away answer, and say that it can do nothing?"""
        self._living: frozenset[str] | None = None
        """Members of the newest generation; None: nobody knows, of one that another launcher was told."""
        self._refusal = ""
        """Why the console took no registration at all, as it was said."""
        self._said: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._beats: dict[str, Mapping[str, Any]] = {}
        """By incarnation, the newest."""
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
        )
        if saved is not None:
            for about in saved["workers"]:
                registration = Registration.model_validate(about["registration"])
                self._workers.add(registration, seq=about["seq"] + SEQ_AHEAD, worker=about["worker"])
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
        # Its newest heartbeat once more: the console judges by those alone, and would fence it.
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
        cause, worker, incarnation, generation, detail, peer, spare, _ = failure
        if cause != "exit":
            if generation >= self._generation:  # of an earlier one it is over, and all go on
                self._absence.broken()
        elif self._living is None or str(worker) in self._living:
            self._absence.lost(str(worker), detail)
        if cause == "transfer":
            self._workers.broken(str(worker), incarnation, generation, detail, peer)
            return
        if cause == "exit":
            self._workers.remove(incarnation)
            self._beats.pop(incarnation, None)
        report = FailureReport(
            worker=str(worker),
            incarnation=incarnation,
            cause=cause,
            reporter="launcher",
            detail=encodable(detail[:2000]),
            generation=generation,
            spare=tuple(spare),
        )
        self._report(report)

    def restarts(self, worker: Worker, incarnation: str, restart: Restart) -> None:
        about = {"worker": str(worker), "incarnation": incarnation, "cause": "exit", "reporter": "launcher"}
        self._report(FailureReport.model_validate(about | {"restart": restart}))

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
        text = plan.to_json() if plan.op_count <= INTERIM_OPS else ""
        document = text if len(text) <= INTERIM_DOCUMENT else ""
        report = InterimPlan(
            generation=generation, plan_fingerprint=plan.fingerprint, failed=plan.failed, document=document
        )
        self._report(report)

    def committed(self, iterations: Iterable[Iteration]) -> None:
        batch = tuple(iterations)
        if batch:
            if batch[-1].generation == self._generation:
                self._absence.trains()
            self._report(IterationReport(iterations=batch))

    def report(self, message: Relayout | Recovery | ValidationReport) -> None:
        self._report(message)

    def finished(self, state: str, reason: str) -> None:
        self._tell(float("inf"))
        self._workers.stop()
        self._workers.join(WORKERS_TIMEOUT_SECONDS)
        self._report(JobFinished(state=state, reason=encodable(reason[:2000])))  # type: ignore[arg-type]

    def saved(self) -> dict[str, Any]:
        reports = [*self._sender.waiting, *self._decided]
        return {
            "job": self._job_id,
            "token": self._token,
            "generation": self._generation,
            "command": self._command,
            "workers": self._workers.saved(),
            "reports": [_saved(report) for report in reports],
        }

    def lead_changed(self, lost: Mapping[Worker, str], detail: str, now: float) -> None:
        for worker, incarnation in lost.items():
            self.failed(Failure("exit", worker, incarnation, detail=detail))

    def poll(self, now: float) -> list[Event]:
        self._tell(now)
        # First: an event that comes meanwhile is either taken now, or wakes again.
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
        away, refusing = self._away, self._sender.refusing
        if self._there:
            away, refusing = None, away or refusing
        if text := self._absence.turn(now, away, time.time(), refusing):
            out.append(LauncherWarning(text))
        return out

    def close(self, hurried: Callable[[], bool]) -> None:
        """Delivers what is queued, and says so where that takes long and where it is in vain.

        hurried: while it holds, STOPPED_TIMEOUT_SECONDS are enough, otherwise it is ENDED_TIMEOUT_SECONDS.
        """
        begin = time.monotonic()
        self._closing.set()
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
        """What all workers have said in a turn of the launcher is passed on together: a launcher that stood still has
        heard all of them when it tells the console of any."""
        said, self._said = self._said, {}
        if said:
            self._workers.heard(said)
        for acknowledgements in self._phases.due(now):
            self._workers.acknowledge(acknowledgements)

    # -- threads ------------------------------------------------------------------------------

    def _report(self, message: Message) -> None:
        self._decided.append(QueuedReport(_PATHS[type(message)], message, time.monotonic()))
        self._decide(self._pass_on)

    def _pass_on(self) -> None:
        self._sender.put(self._decided.popleft())

    def _put(self, event: Event) -> None:
        self._events.put(event)
        with self._using, contextlib.suppress(OSError):  # full, so readable already; or closed
            self._waking.send(b"!")

    def _follow_generations(self) -> None:
        client, backoff, generation = self._connect(), Backoff(longest=TRY_AGAIN_SECONDS), self._generation
        plans: dict[str, Plan] = {}
        said = ""
        while not self._closing.is_set():
            try:
                # One that was away is asked without a wait: that it answers again is to be known at once.
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
                self._put(Halt(f"the console refused: {refusal}"))
                return
            except Exception as error:  # nobody would ever hear of a generation again
                traceback.print_exc()
                self._put(Halt(f"generations can't be followed any more: {type(error).__name__}: {error}"))
                return

    def _event(self, deployment: Deployment, plan: Plan) -> Event:
        if not deployment.restore:
            return Deploy(deployment, plan)
        restore = restore_point(self._checkpoint, deployment.reason, self._closing.wait, self._patience)
        if isinstance(restore, Halt):
            return restore
        return Deploy(deployment, plan, restore)

    def _say_who_is_refused(self, answer: BatchReply | ConsoleRefused) -> None:
        """A console of another version takes no worker, and nothing would ever begin. What it has against one of them
        alone is the launcher's to know, not people's."""
        if isinstance(answer, ConsoleRefused) and str(answer) != self._refusal:
            self._refusal = str(answer)
            self._say(f"warning: the console takes no new workers: {self._refusal}")

    def _say_why_not(self, client: ConsoleClient, generation: int, said: str) -> str:
        """Passes on, once, why the job stands still; returns what was said. generation: the newest that is known."""
        try:
            status = client.get(self._path, JobStatus)
        except ConsoleRefused:  # it is for people to read: no reason to end the job
            return said
        if status is None or status.state in (JobState.RUNNING, JobState.FINISHED, JobState.STOPPED):
            return ""
        if status.generation > generation:  # it has opened since, and nobody can have taken it up
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

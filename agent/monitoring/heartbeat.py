"""What a console is told of worker processes: registrations, heartbeats, acknowledgements, logs, measured ops.

One thread, `WorkerReports`, reports all workers of a launcher, or the one worker of a Reporter. It never delays the
training: whoever reports only leaves a message, in bounded memory. What could not be delivered while the console was
down is sent when it is back, oldest first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from openrecycle.agent.messages.client import (
    Backoff,
    ConsoleClient,
    ConsoleRefused,
    ConsoleUnavailable,
    LogTail,
    Offset,
    Outbox,
    offset_to_console,
)
from openrecycle.agent.messages.protocol import (
    BATCH,
    MEASURED_OPS,
    Acknowledgement,
    Acknowledgements,
    BatchReply,
    FailureReport,
    Failures,
    Heartbeat,
    Heartbeats,
    LogLines,
    MeasuredOps,
    Message,
    Registration,
    Registrations,
    clock_name,
    resident_bytes,
)
from openrecycle.agent.monitoring.liveness import AT_REST, IterationTimeline, OpProgress, OpSeconds, Timeline

M = TypeVar("M", bound=Message)

QUEUE = 1000
STALE_SECONDS = 2.0
"""After so long, or after two intervals if these are longer, what a worker has said is no longer a sign of life."""
ENDED = 100
"""How many ended processes have their last lines kept for a console that is away."""
LAST = "draining"
"""The phase of a worker that has finished. It is sent again at the end, so that silence is not taken for a death."""


@dataclass
class Status:
    """The contents of heartbeats. The training thread writes them, and the reporting thread reads them.

    times: of the ops that run here. timeline: of one iteration's ops, if somebody records them. progress: what the
    training thread is doing."""

    generation: int = 0
    iteration: int = 0
    phase: str = "starting"
    times: OpSeconds = field(default_factory=OpSeconds)
    timeline: Timeline = field(default_factory=Timeline)
    progress: OpProgress = field(default_factory=OpProgress)

    def take(self) -> dict[str, Any]:
        """Returns the fields of the next Heartbeat, in JSON form. The op times start anew."""
        doing = self.progress.current()
        return {
            "generation": self.generation,
            "iteration": self.iteration,
            "phase": self.phase,
            "op_milliseconds": self.times.take(),
            "resident_bytes": resident_bytes(),
            "doing": None if doing.kind == AT_REST else doing.model_dump(),
        }


@dataclass
class _ReportedProcess:
    """A process that is reported. registration: with its present place. said: the fields of its next Heartbeat, None
    once that is posted. said_at: when the process said this."""

    registration: Registration
    log: LogTail = field(default_factory=LogTail)
    registered: bool = False
    seq: int = 0
    said: Mapping[str, Any] | None = None
    said_at: float = 0.0

    @property
    def worker(self) -> str:
        return self.registration.worker


class WorkerReports(threading.Thread):
    """Reports worker processes to the console until `stop`. All methods but `run` may be called in any thread, and
    return at once: this thread sends.

    fenced: called with an incarnation when the console says that it no longer counts. measure: called with an iteration
    whose ops are to be recorded, again and again until they are. gather: called before each batch of heartbeats.
    registered: called with the console's answer to registrations. Refused registrations are tried again. may_register:
    asked about each before it is sent; one that may not be is asked about again in the next turn.
    """

    def __init__(
        self,
        client: ConsoleClient,
        job_id: str,
        *,
        interval: float,
        fenced: Callable[[str], None],
        measure: Callable[[int], None] = lambda _iteration: None,
        gather: Callable[[], None] = lambda: None,
        registered: Callable[[BatchReply | ConsoleRefused], None] = lambda _answer: None,
        may_register: Callable[[Registration], bool] = lambda _registration: True,
    ) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self._client, self._path, self._interval = client, f"/jobs/{job_id}", interval
        self._fenced, self._measure, self._gather, self._registered = fenced, measure, gather, registered
        self._may_register = may_register
        self._processes: dict[str, _ReportedProcess] = {}
        self._ended: deque[_ReportedProcess] = deque(maxlen=ENDED)
        """Ended processes whose last lines wait to be posted."""
        self._logs_from = ""
        """The incarnation of the process whose lines are posted next."""
        self._lock = threading.Lock()
        self._outbox: Outbox[Acknowledgements | Failures] = Outbox(QUEUE)
        self._measured: Outbox[tuple[dict[str, Any], Offset]] = Outbox(QUEUE)
        self._wake, self._stop_asked = threading.Event(), threading.Event()
        self._last: FailureReport | None = None

    # -- what is reported -----------------------------------------------------------------------

    def add(self, registration: Registration, *, seq: int = 0) -> None:
        """Reports a process from now on. seq: the number of its newest heartbeat."""
        with self._lock:
            self._processes[registration.incarnation] = _ReportedProcess(registration, seq=seq)
        self._wake.set()

    def saved(self) -> list[dict[str, Any]]:
        """Returns what another launcher that takes over must call `add` with."""
        with self._lock:
            return [
                {"registration": p.registration.model_dump(mode="json"), "seq": p.seq} for p in self._processes.values()
            ]

    def remove(self, incarnation: str) -> None:
        """Ends the reports of a process that has ended. Its last lines, which often say why, are still posted."""
        with self._lock:
            if (process := self._processes.pop(incarnation, None)) is not None:
                self._ended.append(process)

    def heard(self, said: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
        """Takes what processes have said since the last call: for each incarnation, its place and the fields of a
        Heartbeat. What comes in one call is posted together."""
        now = time.monotonic()
        with self._lock:
            for incarnation, (worker, fields) in said.items():
                if (process := self._processes.get(incarnation)) is not None:
                    if process.worker != worker:  # one that has not registered yet must not ask for its former place
                        process.registration = process.registration.model_copy(update={"worker": worker})
                    process.said_at = now
                    process.said = fields if process.said is None else with_op_times(process.said, fields)
                    process.seq += 1

    def acknowledge(self, acknowledgements: Sequence[Acknowledgement]) -> None:
        """Queues acknowledgements, all of the same step."""
        for at in range(0, len(acknowledgements), BATCH):
            self._put(Acknowledgements(acknowledgements=tuple(acknowledgements[at : at + BATCH])))

    def failed(self, report: FailureReport) -> None:
        """Queues a report of a failure."""
        self._put(Failures(failures=(report,)))

    def wrote(self, incarnation: str, lines: Iterable[tuple[float, str]], skipped: int) -> None:
        """Takes lines that a process has written, each with its POSIX time in seconds. skipped: how many lines before
        them were dropped."""
        with self._lock:
            process = self._processes.get(incarnation)
        if process is not None:
            process.log.extend(lines, skipped)

    def measured(self, fields: dict[str, Any], clock: Offset) -> None:
        """Takes the fields of a MeasuredOps. clock: the offset from its process's clock to this one's."""
        self._measured.put((fields, clock))

    def stop(self, last: FailureReport | None = None) -> None:
        """Ends the thread after it has tried once to send what is queued. last: that a process leaves, after which the
        console takes nothing else of it but lines."""
        self._last = last
        self._stop_asked.set()
        self._wake.set()

    # -- the thread -----------------------------------------------------------------------------

    def run(self) -> None:
        # No longer than the heartbeat interval: to a console that is back, silence would look like a death.
        backoff = Backoff(min(0.2, self._interval), min(5.0, self._interval))
        due = 0.0
        while True:
            try:
                self._register()
                # Heartbeats come first. Other posts may hang in the console's database, and would look like silence.
                beats = (now := time.monotonic()) >= due and not self._stop_asked.is_set()
                if beats:
                    self._gather()
                    self._beat(lambda process: True)
                    due = now + self._interval
                self._deliver(due)
                if self._stop_asked.is_set():
                    self._gather()
                    self._beat(lambda process: process.said is not None and process.said["phase"] == LAST)
                    if self._last is not None and self._is_registered(self._last.incarnation):
                        self.failed(self._last)
                    self._deliver(due)  # also what was queued since it was called above
                    self._post_logs(due)
                    return
                if beats:
                    self._post_measured(due)
                    self._post_logs(due)
                backoff.reset()
                wait = max(0.0, due - time.monotonic())
            except ConsoleUnavailable:
                if self._stop_asked.is_set():
                    return
                wait = backoff.seconds()
            except ConsoleRefused:
                if self._stop_asked.is_set():
                    return
                # All of it was refused, as for an unknown job, and would be again at once.
                wait = backoff.seconds()
            self.pause(wait)

    def pause(self, seconds: float) -> None:
        """Waits between two turns of `run`, until there is something to send, or for so many seconds."""
        self._wake.wait(seconds)
        self._wake.clear()

    def _put(self, message: Acknowledgements | Failures) -> None:
        self._outbox.put(message)
        self._wake.set()

    def _all(self) -> list[_ReportedProcess]:
        with self._lock:
            return list(self._processes.values())

    def _is_registered(self, incarnation: str) -> bool:
        with self._lock:
            return (process := self._processes.get(incarnation)) is not None and process.registered

    def _register(self) -> None:
        new = [p for p in self._all() if not p.registered and self._may_register(p.registration)]
        for at in range(0, len(new), BATCH):
            part = new[at : at + BATCH]
            message = Registrations(registrations=tuple(process.registration for process in part))
            try:
                reply = self._client.post(f"{self._path}/workers", message, BatchReply)
            except ConsoleRefused as refusal:  # not raised: the heartbeats of other workers must not wait for this
                self._registered(refusal)
                return
            assert reply is not None
            refused = {report.index for report in reply.refused}
            for index, process in enumerate(part):
                process.registered = index not in refused
            self._look_at(reply, [process.registration.incarnation for process in part])
            self._registered(reply)

    def _of_one(self, incarnation: str, route: str, message: Any) -> None:
        """Posts a message of one process. Raises ConsoleUnavailable."""
        try:
            self._client.post(f"{self._path}/{route}", message)
        except ConsoleRefused as refusal:
            self._refused(incarnation, refusal)  # this message is out of date; the next one may not be

    def _refused(self, incarnation: str, refusal: ConsoleRefused) -> None:
        if refusal.problem.code == "fenced":
            self._fence(incarnation)

    def _fence(self, incarnation: str) -> None:
        with self._lock:
            known = self._processes.pop(incarnation, None)
        if known is not None:
            self._fenced(incarnation)

    def _beat(self, which: Callable[[_ReportedProcess], bool]) -> None:
        old = time.monotonic() - max(STALE_SECONDS, 2 * self._interval)
        with self._lock:
            heard = [
                (p, p.said, {"worker": p.worker, "incarnation": p.registration.incarnation, "seq": p.seq})
                for p in self._processes.values()
                if p.registered and p.said is not None and p.said_at >= old and which(p)
            ]
        made = [(process, said, _read(Heartbeat, {**said, **own})) for process, said, own in heard]
        for process, said, beat in made:
            if beat is None and process.said is said:
                process.said = None  # it is invalid, and must not be merged into the next one
        speak = [(process, said) for process, said, beat in made if beat is not None]
        beats = [beat for _, _, beat in made if beat is not None]
        for at in range(0, len(beats), BATCH):
            part = beats[at : at + BATCH]
            reply = self._client.post(f"{self._path}/heartbeats", Heartbeats(heartbeats=tuple(part)), BatchReply)
            with self._lock:
                for process, said in speak[at : at + BATCH]:
                    if process.said is said:
                        process.said = None
            self._look_at(reply, [beat.incarnation for beat in part])
            if reply is not None and reply.measure is not None:
                self._measure(reply.measure)

    def _look_at(self, reply: BatchReply | None, incarnations: Sequence[str]) -> None:
        for refused in reply.refused if reply is not None else ():
            if refused.code == "fenced" and refused.index < len(incarnations):
                self._fence(incarnations[refused.index])

    def _deliver(self, due: float) -> None:
        """Sends queued reports, oldest first, for as long as there is time until the next heartbeats."""
        while (message := self._outbox.take()) is not None:
            reports: Sequence[Acknowledgement | FailureReport]
            if isinstance(message, Failures):
                route, reports = "failures", message.failures
            else:
                route, reports = "acknowledgements", message.acknowledgements
            with suppress(ConsoleRefused):  # they are out of date
                reply = self._client.post(f"{self._path}/{route}", message, BatchReply)
                self._look_at(reply, [report.incarnation for report in reports])
            self._outbox.sent()
            if self._is_late(due):
                return

    def _is_late(self, due: float) -> bool:
        """Is it time for heartbeats? Then the rest waits for the next turn."""
        return time.monotonic() >= due and not self._stop_asked.is_set()

    def _post_measured(self, due: float) -> None:
        """Posts the ops that the console has asked for, for as long as there is time, as `_deliver` does."""
        offset: Offset | None = None
        while (taken := self._measured.take()) is not None:
            fields, clock = taken
            offset = offset or offset_to_console(self._client)
            microseconds = clock.microseconds + offset.microseconds
            uncertainty = clock.uncertainty + offset.uncertainty
            message = _read(MeasuredOps, {**fields, "offset_us": microseconds, "uncertainty_us": uncertainty})
            if message is not None:
                self._of_one(message.incarnation, "measured", message)
            self._measured.sent()
            if self._is_late(due):
                return

    def _post_logs(self, due: float) -> None:
        """Posts the lines of each process that has written some, for as long as there is time. It begins where the last
        turn stopped."""
        with self._lock:
            living = list(self._processes.values())
            first = next((at for at, p in enumerate(living) if p.registration.incarnation == self._logs_from), 0)
            processes = [*self._ended, *living[first:], *living[:first]]
            self._ended.clear()
        posted = False
        for at, process in enumerate(processes):
            if posted and self._is_late(due):
                self._put_off(processes[at:])
                return
            lines, skipped = process.log.take()
            if not lines:
                continue
            incarnation = process.registration.incarnation
            message = LogLines(worker=process.worker, incarnation=incarnation, lines=lines, skipped=skipped)
            try:
                self._of_one(incarnation, "logs", message)
            except ConsoleUnavailable:
                process.log.put_back(lines, skipped)
                self._put_off(processes[at:])
                raise
            posted = True

    def _put_off(self, rest: Sequence[_ReportedProcess]) -> None:
        with self._lock:
            self._ended.extendleft(p for p in reversed(rest) if p.registration.incarnation not in self._processes)
            living = (p.registration.incarnation for p in rest if p.registration.incarnation in self._processes)
            self._logs_from = next(living, "")


def with_op_times(older: Mapping[str, Any], newer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds to a heartbeat the op times of the one before, which was not posted: each heartbeat has only the op times
    since the one before."""
    before, since = older.get("op_milliseconds"), newer.get("op_milliseconds")
    if not isinstance(before, dict) or not isinstance(since, dict):
        return newer  # invalid, and refused later
    return {**newer, "op_milliseconds": {**before, **since}}


def _read(kind: type[M], fields: Mapping[str, Any]) -> M | None:
    """Returns a message; None if it is invalid. A wrong message of one process must not silence the others."""
    try:
        return kind.model_validate(fields)
    except ValidationError:
        return None


def measured_ops(recorded: IterationTimeline, worker: str, incarnation: str) -> MeasuredOps | None:
    """Returns the message about a recorded iteration, without a clock offset; None if it has too many ops, or lasted
    too long."""
    if len(recorded.ops) > MEASURED_OPS:
        return None
    begin = [end - seconds for end, seconds in zip(recorded.ends, recorded.seconds, strict=True)]
    first = min(begin)
    # Start and end are rounded, not the duration: else an op could end a microsecond after the next one begins.
    starts, ends = ([round((at - first) * 1e6) for at in times] for times in (begin, recorded.ends))
    fields = {
        "worker": worker,
        "incarnation": incarnation,
        "generation": recorded.generation,
        "iteration": recorded.iteration,
        "clock": clock_name(),
        "started_us": round(first * 1e6),
        "offset_us": 0,
        "uncertainty_us": 0,
        "kinds": "".join(op.kind for op in recorded.ops),
        "pipelines": tuple(op.pipeline for op in recorded.ops),
        "micro_batches": tuple(op.micro_batch for op in recorded.ops),
        "starts_us": tuple(starts),
        "durations_us": tuple(end - start for start, end in zip(starts, ends, strict=True)),
    }
    return _read(MeasuredOps, fields)

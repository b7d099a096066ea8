"""What a console is told of worker processes: registrations, heartbeats, acknowledgements, logs, measured ops.

One thread for all workers of a launcher, or for the one of a Reporter. It never holds up training: whoever reports only
leaves a message, in bounded memory. A console that is down costs nothing; what was not delivered is sent when it is
back, oldest first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
    Heartbeat,
    Heartbeats,
    LogLines,
    MeasuredOps,
    Message,
    Registration,
    Registrations,
    clock_name,
)
from openrecycle.agent.monitoring.liveness import AT_REST, IterationTimeline, OpProgress, OpSeconds, Timeline
from openrecycle.planner.jobs.words import encodable

M = TypeVar("M", bound=Message)

QUEUE = 1000
STALE_SECONDS = 2.0
"""What a worker has said of itself is no sign of life after so long, or after two heartbeats."""
ENDED = 100
"""Processes that have ended whose last lines are kept for a console that is away."""
LAST = "draining"
"""The phase of a worker that is through: said once more at the end, so that what follows is not taken for a death."""


@dataclass
class Status:
    """What a heartbeat says; written by the training thread, read by the reporting one.

    times: of the ops that run here; timeline: of one iteration's, where somebody records them. progress: what the
    training thread is at."""

    generation: int = 0
    iteration: int = 0
    phase: str = "starting"
    times: OpSeconds = field(default_factory=OpSeconds)
    timeline: Timeline = field(default_factory=Timeline)
    progress: OpProgress = field(default_factory=OpProgress)

    def take(self) -> dict[str, Any]:
        """Fields of the next Heartbeat, as JSON has them; op times start anew."""
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
    """One worker process. said: fields of its newest Heartbeat, None once that is posted; said_at: when it said so."""

    registration: Registration
    log: LogTail = field(default_factory=LogTail)
    registered: bool = False
    worker: str = ""
    seq: int = 0
    said: Mapping[str, Any] | None = None
    said_at: float = 0.0


class WorkerReports(threading.Thread):
    """Reports worker processes to the console until `stop`. Everything but `run` may be called from any thread, and
    returns at once.

    fenced: called with an incarnation when the console says that it no longer counts. measure: called with an
    iteration whose ops are to be recorded, again until they are. gather: called before each batch of heartbeats.
    registered: called with what the console answers to registrations; those that it refuses are tried again.
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
    ) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self._client, self._path, self._interval = client, f"/jobs/{job_id}", interval
        self._fenced, self._measure, self._gather, self._registered = fenced, measure, gather, registered
        self._processes: dict[str, _ReportedProcess] = {}
        self._ended: deque[_ReportedProcess] = deque(maxlen=ENDED)
        """Those whose last lines wait to be posted."""
        self._logs_from = ""
        """The process whose lines are posted next."""
        self._lock = threading.Lock()
        self._outbox: Outbox[Acknowledgements | FailureReport] = Outbox(QUEUE)
        self._measured: Outbox[tuple[dict[str, Any], Offset]] = Outbox(QUEUE)
        self._wake, self._stop_asked = threading.Event(), threading.Event()

    # -- what is reported -----------------------------------------------------------------------

    def add(self, registration: Registration, *, seq: int = 0, worker: str = "") -> None:
        """Of a process, from now on. seq: of its newest heartbeat. worker: its place, if it has another by now."""
        with self._lock:
            place = worker or registration.worker
            self._processes[registration.incarnation] = _ReportedProcess(registration, worker=place, seq=seq)
        self._wake.set()

    def saved(self) -> list[dict[str, Any]]:
        """What `add` is given where another launcher goes on."""
        with self._lock:
            return [
                {"registration": p.registration.model_dump(mode="json"), "seq": p.seq, "worker": p.worker}
                for p in self._processes.values()
            ]

    def remove(self, incarnation: str) -> None:
        """It has ended. What it wrote last often says why, and is still posted."""
        with self._lock:
            if (process := self._processes.pop(incarnation, None)) is not None:
                self._ended.append(process)

    def heard(self, said: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
        """What processes have said of themselves since the last call: by incarnation, their place and the fields of a
        Heartbeat. What is given together is posted together."""
        now = time.monotonic()
        with self._lock:
            for incarnation, (worker, fields) in said.items():
                if (process := self._processes.get(incarnation)) is not None:
                    process.worker, process.said_at = worker, now
                    process.said = fields if process.said is None else with_op_times(process.said, fields)
                    process.seq += 1

    def acknowledge(self, acknowledgements: Sequence[Acknowledgement]) -> None:
        """All of the same step."""
        for at in range(0, len(acknowledgements), BATCH):
            self._put(Acknowledgements(acknowledgements=tuple(acknowledgements[at : at + BATCH])))

    def broken(self, worker: str, incarnation: str, generation: int, detail: str, peer: str = "") -> None:
        """A transfer of `worker` with `peer` ("": not known) broke in `generation`."""
        self._put(
            FailureReport(
                worker=peer or worker,
                incarnation=incarnation,
                cause="transfer",
                reporter=worker,
                detail=encodable(detail[:2000]),
                generation=generation,
            )
        )

    def wrote(self, incarnation: str, lines: Iterable[tuple[float, str]], skipped: int) -> None:
        """Lines with their POSIX seconds, and how many were dropped before them."""
        with self._lock:
            process = self._processes.get(incarnation)
        if process is not None:
            process.log.extend(lines, skipped)

    def measured(self, fields: dict[str, Any], clock: Offset) -> None:
        """Of a MeasuredOps. clock: from its process's to this one's."""
        self._measured.put((fields, clock))

    def stop(self) -> None:
        """Ends the thread after what is queued has been tried once."""
        self._stop_asked.set()
        self._wake.set()

    # -- the thread -----------------------------------------------------------------------------

    def run(self) -> None:
        # Never longer than between heartbeats: to a console that is back, silence would look like a death.
        backoff = Backoff(min(0.2, self._interval), min(5.0, self._interval))
        due = 0.0
        while True:
            try:
                self._register()
                # Before what may take the console long: a report that hangs in its database is no silence.
                beats = (now := time.monotonic()) >= due and not self._stop_asked.is_set()
                if beats:
                    self._gather()
                    self._beat(lambda process: True)
                    due = now + self._interval
                self._deliver(due)
                if self._stop_asked.is_set():
                    self._gather()
                    self._beat(lambda process: process.said is not None and process.said["phase"] == LAST)
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
                # The whole of it (an unknown job, say): the same again would be, too.
                wait = backoff.seconds()
            self.pause(wait)

    def pause(self, seconds: float) -> None:
        """Between two turns of `run`: until there is something to say, or so long."""
        self._wake.wait(seconds)
        self._wake.clear()

    def _put(self, message: Acknowledgements | FailureReport) -> None:
        self._outbox.put(message)
        self._wake.set()

    def _all(self) -> list[_ReportedProcess]:
        with self._lock:
            return list(self._processes.values())

    def _register(self) -> None:
        new = [process for process in self._all() if not process.registered]
        for at in range(0, len(new), BATCH):
            part = new[at : at + BATCH]
            message = Registrations(registrations=tuple(process.registration for process in part))
            try:
                reply = self._client.post(f"{self._path}/workers", message, BatchReply)
            except ConsoleRefused as refusal:  # the heartbeats of others wait for none of it
                self._registered(refusal)
                return
            assert reply is not None
            refused = {report.index for report in reply.refused}
            for index, process in enumerate(part):
                process.registered = index not in refused
            self._look_at(reply, [process.registration.incarnation for process in part])
            self._registered(reply)

    def _of_one(self, incarnation: str, route: str, message: Any) -> None:
        """Posts what one process has to say. Raises ConsoleUnavailable."""
        try:
            self._client.post(f"{self._path}/{route}", message)
        except ConsoleRefused as refusal:
            self._refused(incarnation, refusal)  # out of date by now; the next message may not be

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
                process.said = None  # it must not spoil the next one
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
        """Reports that wait, oldest first; of many no more than there is time for until the next heartbeats."""
        while (message := self._outbox.take()) is not None:
            if isinstance(message, FailureReport):
                self._of_one(message.incarnation, "failures", message)
            else:
                try:
                    reply = self._client.post(f"{self._path}/acknowledgements", message, BatchReply)
                    self._look_at(reply, [a.incarnation for a in message.acknowledgements])
                except ConsoleRefused:
                    pass  # out of date by now
            self._outbox.sent()
            if self._is_late(due):
                return

    def _is_late(self, due: float) -> bool:
        """Is it time for heartbeats? What is left waits for the next turn."""
        return time.monotonic() >= due and not self._stop_asked.is_set()

    def _post_measured(self, due: float) -> None:
        """What the console has asked to be measured, if it is there; as `_deliver`."""
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
        """A post for each process that has written something; as `_deliver`, and from there on where the last turn
        stopped."""
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
    """What a process says of itself, with the op times of what it said before, which is not posted: they start anew
    each time that it says something."""
    before, since = older.get("op_milliseconds"), newer.get("op_milliseconds")
    if not isinstance(before, dict) or not isinstance(since, dict):
        return newer  # no console takes it
    return {**newer, "op_milliseconds": {**before, **since}}


def _read(kind: type[M], fields: Mapping[str, Any]) -> M | None:
    """None: no console takes that. What one process says wrongly must not silence the others of its launcher."""
    try:
        return kind.model_validate(fields)
    except ValidationError:
        return None


def measured_ops(recorded: IterationTimeline, worker: str, incarnation: str) -> MeasuredOps | None:
    """What is posted of a recorded iteration, with no offset yet; None: it is too long, in ops or in days."""
    if len(recorded.ops) > MEASURED_OPS:
        return None
    begin = [end - seconds for end, seconds in zip(recorded.ends, recorded.seconds, strict=True)]
    first = min(begin)
    # Rounded apart from its start, a duration may reach a microsecond into the op that follows at once.
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


def resident_bytes() -> int:
    """Memory this process holds, in bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0

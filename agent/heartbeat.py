"""The reporting thread: registers a worker with the console, sends heartbeats and acknowledgements.

It never holds up training: the training thread only puts messages into a bounded queue. A console
that is down costs nothing; what was not delivered is sent when it is back, oldest first.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from openrecycle.agent.client import Backoff, ConsoleClient, ConsoleRefused, ConsoleUnavailable
from openrecycle.agent.clock import Offset, offset_to_console
from openrecycle.agent.liveness import AT_REST, Progress
from openrecycle.agent.log_tail import LogTail
from openrecycle.agent.outbox import Outbox
from openrecycle.agent.protocol import (
    MEASURED_OPS,
    Acknowledgement,
    Doing,
    FailureReport,
    Heartbeat,
    HeartbeatReply,
    LogLines,
    MeasuredOps,
    Registered,
    Registration,
    clock_name,
)
from openrecycle.agent.timeline import Recorded, Timeline

QUEUE = 1000


@dataclass
class Status:
    """What a heartbeat says; written by the training thread, read by the reporting one.

    timeline: of the ops that run here, where somebody records them. progress: what the training thread is at."""

    generation: int = 0
    iteration: int = 0
    phase: str = "starting"
    take_op_milliseconds: Callable[[], dict[str, float]] = field(default=dict)
    timeline: Timeline = field(default_factory=Timeline)
    progress: Progress = field(default_factory=Progress)


class HeartbeatThread(threading.Thread):
    """Reports one worker process to the console until `stop`.

    fenced: called once when the console says that this incarnation no longer counts. log: what the
    process writes; how it takes up generations is added here.
    """

    def __init__(
        self,
        client: ConsoleClient,
        job_id: str,
        worker: str,
        incarnation: str,
        status: Status,
        *,
        interval: float,
        fenced: Callable[[], None],
        log: LogTail | None = None,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._client, self._path = client, f"/jobs/{job_id}"
        self._worker, self._incarnation = worker, incarnation
        self._status, self._interval, self._fenced = status, interval, fenced
        self._log = log or LogTail()
        self._outbox: Outbox[Acknowledgement | FailureReport] = Outbox(QUEUE)
        self._wake, self._stop_asked = threading.Event(), threading.Event()
        self._seq = 0

    def moved(self, worker: str) -> None:
        """This process holds another place of the grid from now on."""
        self._worker = worker

    def acknowledge(self, generation: int, state: str, iteration: int) -> None:
        """Queues an Acknowledgement; never blocks."""
        self._log.add(f"generation {generation}: {state}, iteration {iteration}")
        self._put(
            Acknowledgement(
                worker=self._worker,
                incarnation=self._incarnation,
                generation=generation,
                state=state,  # type: ignore[arg-type]
                iteration=iteration,
            )
        )

    def report_broken(self, generation: int, detail: str, peer: str = "") -> None:
        """Queues a FailureReport of a transfer with `peer` ("": not known) that broke in `generation`; never blocks."""
        self._log.add(f"generation {generation}: {detail}")
        self._put(
            FailureReport(
                worker=peer or self._worker,
                incarnation=self._incarnation,
                cause="transfer",
                reporter=self._worker,
                detail=detail,
                generation=generation,
            )
        )

    def stop(self) -> None:
        """Ends the thread after what is queued has been tried once."""
        self._stop_asked.set()
        self._wake.set()

    def run(self) -> None:
        # Never longer than between heartbeats: to a console that is back, silence would look like a death.
        backoff, registered = Backoff(min(0.2, self._interval), min(5.0, self._interval)), False
        due = 0.0
        while True:
            try:
                if not registered:
                    self._register()
                    registered = True
                # Before what may take the console long: a report that hangs in its database is no silence. And not
                # after each report: when a generation opens, thousands of workers have three within a second or two.
                beats = (now := time.monotonic()) >= due and not self._stop_asked.is_set()
                if beats:
                    self._beat()
                    due = now + self._interval
                self._deliver()
                if self._stop_asked.is_set():
                    if self._status.phase == "draining":
                        self._beat()  # so that what follows is not taken for a death
                    return
                if beats:
                    self._post_measured()
                    self._post_log()
                backoff.reset()
                wait = max(0.0, due - time.monotonic())
            except ConsoleUnavailable:
                if self._stop_asked.is_set():
                    return
                wait = backoff.seconds()
            except ConsoleRefused as refusal:
                if refusal.problem.code == "fenced":
                    self._fenced()
                    return
                if self._stop_asked.is_set():
                    return
                # Refused for another reason (an unknown job, say): the same again would be, too.
                wait = backoff.seconds()
            self._wake.wait(wait)
            self._wake.clear()

    def _put(self, message: Acknowledgement | FailureReport) -> None:
        self._outbox.put(message)
        self._wake.set()

    def _register(self) -> None:
        registration = Registration(
            worker=self._worker, incarnation=self._incarnation, host=socket.gethostname(), pid=os.getpid()
        )
        self._client.post(f"{self._path}/workers", registration, Registered)

    def _deliver(self) -> None:
        while (message := self._outbox.take()) is not None:
            route = "acknowledgements" if isinstance(message, Acknowledgement) else "failures"
            try:
                self._client.post(f"{self._path}/{route}", message)
            except ConsoleRefused as refusal:
                if refusal.problem.code == "fenced":
                    raise
                # Out of date by now; the next message may not be.
            self._outbox.sent()

    def _beat(self) -> None:
        self._seq += 1
        status = self._status
        reply = self._client.post(
            f"{self._path}/heartbeats",
            Heartbeat(
                worker=self._worker,
                incarnation=self._incarnation,
                seq=self._seq,
                generation=status.generation,
                iteration=status.iteration,
                phase=status.phase,  # type: ignore[arg-type]
                op_milliseconds=status.take_op_milliseconds(),  # type: ignore[arg-type]
                resident_bytes=resident_bytes(),
                doing=doing(status.progress),
            ),
            HeartbeatReply,
        )
        if reply is not None and reply.measure is not None:
            status.timeline.want(reply.measure)

    def _post_measured(self) -> None:
        """What the console has asked to be measured, if it is there."""
        recorded = self._status.timeline.take()
        if recorded is not None and len(recorded.ops) <= MEASURED_OPS:
            offset = offset_to_console(self._client)
            message = measured_ops(recorded, self._worker, self._incarnation, offset)
            self._client.post(f"{self._path}/measured", message)

    def _post_log(self) -> None:
        lines, skipped = self._log.take()
        if lines:
            message = LogLines(worker=self._worker, incarnation=self._incarnation, lines=lines, skipped=skipped)
            self._client.post(f"{self._path}/logs", message)


def doing(progress: Progress) -> Doing | None:
    """What is posted of it; None: nothing in hand."""
    current = progress.current()
    if current.kind == AT_REST:
        return None
    pipeline, micro_batch = current.index or (None, None)
    return Doing(
        kind=current.kind,
        pipeline=pipeline,
        micro_batch=micro_batch,
        seconds=current.seconds,
        limit=current.limit,
    )


def measured_ops(recorded: Recorded, worker: str, incarnation: str, offset: Offset) -> MeasuredOps:
    """What is posted of a recorded iteration."""
    begin = [end - seconds for end, seconds in zip(recorded.ends, recorded.seconds, strict=True)]
    first = min(begin)
    # Rounded apart from its start, a duration may reach a microsecond into the op that follows at once.
    starts, ends = ([round((at - first) * 1e6) for at in times] for times in (begin, recorded.ends))
    return MeasuredOps(
        worker=worker,
        incarnation=incarnation,
        generation=recorded.generation,
        iteration=recorded.iteration,
        clock=clock_name(),
        started_us=round(first * 1e6),
        offset_us=offset.microseconds,
        uncertainty_us=offset.uncertainty,
        kinds="".join(op.kind for op in recorded.ops),
        pipelines=tuple(op.pipeline for op in recorded.ops),
        micro_batches=tuple(op.micro_batch for op in recorded.ops),
        starts_us=tuple(starts),
        durations_us=tuple(end - start for start, end in zip(starts, ends, strict=True)),
    )


def resident_bytes() -> int:
    """Memory this process holds, in bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0

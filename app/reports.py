"""What agents and launchers say and ask, of every job. A part of app.console.Console.

Every report goes through the coordinator of its job and into the database before it is answered;
heartbeats alone are kept in memory and written behind.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from agent.protocol import (
    Acknowledgement,
    Command,
    Deployment,
    FailureReport,
    Heartbeat,
    Iteration,
    JobFinished,
    JobState,
    Recovery,
    Registered,
    Registration,
)
from app.coordination import events as happening
from app.coordination.membership import Epoch
from app.coordination.together import Report
from app.errors import ConsoleError, storing
from app.live import LiveJob
from app.observing.goodput import Accounts
from db.store import Store
from planner.words import milliseconds


class Reports(ABC):
    """Thread-safe. Every method raises ConsoleError: for an unknown job or worker, a process that does
    not count, or a database that does not answer."""

    _store: Store
    accounts: Accounts

    @abstractmethod
    def job(self, job_id: str) -> LiveJob:
        """Raises ConsoleError (404)."""

    @abstractmethod
    def job_ended(self, job: LiveJob) -> None:
        """Nothing more is to be done for `job`."""

    def register(self, job_id: str, message: Registration) -> Registered:
        job, report = self.registration(job_id, message)
        job.apply(report.event, beside=[report])
        return Registered(worker=message.worker, epoch=job.state.epoch)

    def registration(self, job_id: str, message: Registration) -> tuple[LiveJob, Report]:
        """For whoever takes many together."""
        process = plain(message.host), message.pid
        return self.job(job_id), Report(happening.Registered(message.worker, message.incarnation), process)

    def heartbeat(self, job_id: str, message: Heartbeat) -> int:
        """Touches no database and waits for nothing: may be called from the event loop."""
        return self.job(job_id).heard(message)

    def failure(self, job_id: str, message: FailureReport) -> str:
        """Returns what the coordinator makes of it."""
        job = self.job(job_id)
        if message.cause == "exit":
            late = message.age_milliseconds / 1000
            seen = f" (seen {late:.1f} s before the report came)" if late >= 1 else ""
            return job.apply(
                happening.Exited(message.worker, message.incarnation, message.reporter, plain(message.detail) + seen)
            )
        if message.cause == "exception":
            return job.apply(
                happening.Raised(message.worker, message.incarnation, message.epoch, plain(message.detail))
            )
        return job.apply(
            happening.TransferBroken(
                message.reporter, message.incarnation, message.worker, message.epoch, plain(message.detail)
            )
        )

    def acknowledge(self, job_id: str, message: Acknowledgement) -> str:
        job, report = self.acknowledgement(job_id, message)
        return job.apply(report.event, beside=[report])

    def acknowledgement(self, job_id: str, message: Acknowledgement) -> tuple[LiveJob, Report]:
        """For whoever takes many together."""
        event = happening.Acknowledged(message.worker, message.incarnation, message.epoch, message.state)
        return self.job(job_id), Report(event, acknowledgement={**message.model_dump(), "at": time.time()})

    def committed(self, job_id: str, iterations: Sequence[Iteration]) -> None:
        job = self.job(job_id)
        for report in iterations:
            if report.iteration >= job.spec.iterations:
                raise ConsoleError(
                    422,
                    "invalid",
                    f"iterations.iteration: got {report.iteration}, expected below {job.spec.iterations}, "
                    "the number that the job runs",
                )
        now = time.time()
        with storing():
            self._store.add_iterations(
                job_id, [{**i.model_dump(exclude={"skipped"}), "committed_at": now} for i in iterations]
            )
            count = self._store.committed_iterations(job_id)
        job.stored()
        job.apply(happening.IterationsCommitted(count))

    def recovered(self, job_id: str, message: Recovery) -> None:
        job = self.job(job_id)
        if message.worker not in job.state.members:
            raise ConsoleError(404, "unknown_worker", f"worker: got {message.worker!r}, expected one of the job's grid")
        took, at = milliseconds(message.resumed_ms), time.time()
        text = f"epoch {message.epoch}: training resumed {took} after {message.worker} died"
        with storing():
            people = sum(self.accounts.waiting.of(job).in_recovery({**message.model_dump(), "at": at}))
        if people:
            text += f", of it {milliseconds(1000 * people)} waiting for a person"
        with job.writing():
            events = job.note([happening.Note("info", "recovery", text, message.worker)])
            if self._store.add_recovery(job_id, {**message.model_dump(), "at": at}, events):
                job.stored(len(events))
        job.topic.publish()

    def finish(self, job_id: str, message: JobFinished) -> None:
        job = self.job(job_id)
        job.apply(happening.Finished(JobState(message.state), plain(message.reason)))
        self.job_ended(job)

    def deployment(self, job_id: str, after: int) -> Deployment | None:
        """The newest deployment, if its epoch is above `after`. Does not block."""
        job = self.job(job_id)
        state = job.state
        epoch = state.current
        if epoch is None or epoch.number <= after:
            return None
        leaving = tuple(name for name in epoch.failed if state.members[name].leaving)
        key = (epoch.number, leaving)
        if job.deployment is None or job.deployment[0] != key:
            job.deployment = key, _deployment(epoch, leaving)
        return job.deployment[1]

    def commands(self, job_id: str, after: int) -> list[Command]:
        """The commands with seq > after. Does not block."""
        return [c for c in self.job(job_id).commands if c.seq > after]


def plain(text: str) -> str:
    """Without NUL, which PostgreSQL does not take: a report is not refused for its wording."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _deployment(epoch: Epoch, leaving: tuple[str, ...]) -> Deployment:
    # What it is made of has been checked, and there may be thousands of names.
    return Deployment.model_construct(
        epoch=epoch.number,
        plan_fingerprint=epoch.plan_fingerprint,
        living=epoch.living,
        failed=epoch.failed,
        joining=epoch.joining,
        moves=epoch.moves,
        restore=epoch.restore,
        leaving=leaving,
        reason=epoch.reason[:2000],
    )

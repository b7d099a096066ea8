"""Which jobs a console has: those that run, in memory, and those that are over, of which a line is enough until
somebody asks.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection
from typing import Protocol

import orjson
import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.membership import FailureTimeouts, Note
from openrecycle.agent.messages.protocol import JobCreated, JobSpec, JobState
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.states import Condition, JobSummary, over_sentence
from openrecycle.app.runtime.errors import ConsoleError, storing, unknown_job
from openrecycle.app.runtime.runner import in_thread
from openrecycle.db.job_rows import OVER, JobIndex
from openrecycle.db.store import Record, Store
from openrecycle.planner.jobs.errors import PlannerError

log = structlog.get_logger()

MAX_WORKERS = 16_384
# Of all jobs that have not ended: the time that the console takes to start, and its memory, go by them.
MAX_LIVE_WORKERS = 16 * MAX_WORKERS


class JobLife(Protocol):
    """What else a console does when a job of its begins, is read, or ends."""

    def new_job(self, job_id: str, spec: JobSpec, created_at: float) -> LiveJob:
        """Raises PlannerError for one that can't be planned."""

    def job_begins(self, job: LiveJob) -> None:
        """It is new, or was taken up, and runs."""

    def job_read(self, job: LiveJob) -> None:
        """It was read from the database."""

    def job_ended(self, job: LiveJob) -> None:
        """Nothing more is to be done for it."""


class JobRegistry:
    """Thread-safe."""

    def __init__(self, store: Store, failure_timeouts: FailureTimeouts, life: JobLife) -> None:
        self._store, self.failure_timeouts, self._life = store, failure_timeouts, life
        self._jobs: dict[str, LiveJob] = {}
        self._index = JobIndex(store.database)
        self.past = PastJobs(self._index)
        self._unreadable: set[str] = set()
        self._lock = threading.RLock()

    def create(self, spec: JobSpec, idempotency_key: str | None = None) -> tuple[JobCreated, bool]:
        """Also says whether the job is new: with a key seen before, the earlier job is returned.

        Raises ConsoleError for a job that can't be planned, or a key that was used for another one.
        """
        if spec.pipelines * spec.stages > MAX_WORKERS:
            raise ConsoleError(
                422,
                "invalid",
                f"pipelines x stages: got {spec.pipelines * spec.stages}, expected at most {MAX_WORKERS} workers",
            )
        with storing():
            earlier = self._store.job_of_key(idempotency_key) if idempotency_key is not None else None
        if earlier is not None:
            return self._created_before(earlier, spec, idempotency_key), False
        live = sum(len(job.state.members) for job in self.live() if not job.state.over)
        if live + spec.pipelines * spec.stages > MAX_LIVE_WORKERS:
            detail = (
                f"this console looks after {live:,} workers of jobs that have not ended, at most {MAX_LIVE_WORKERS:,}"
            )
            raise ConsoleError(409, "full", f"{detail}; end or delete some of them first")
        job_id, created_at = secrets.token_hex(6), time.time()
        try:
            self.failure_timeouts.check_above(spec.transfer_timeout, spec.group_timeout)
            job = self._life.new_job(job_id, spec, created_at)
        except PlannerError as error:
            raise ConsoleError(422, "invalid", str(error)) from None
        members = [{"name": member.name, "state": member.state.value} for member in job.state.members.values()]
        text = spec.model_dump_json()
        # Under the lock, so that whoever is given an earlier job's id finds that job.
        with self._lock, storing():
            row = self._store.create_job(
                job_id,
                name=spec.name,
                spec=text,
                state=JobState.STARTING.value,
                created_at=created_at,
                workers=members,
                idempotency_key=idempotency_key,
            )
            new = row["id"] == job_id
            if new:
                self._jobs[job_id] = job
        if not new:
            return self._created_before(row, spec, idempotency_key), False
        self._life.job_begins(job)
        log.info("job created", job=job_id, name=spec.name, workers=len(members))
        return self._created(row, spec, idempotency_key), True

    def _created_before(self, row: Record, spec: JobSpec, idempotency_key: str | None) -> JobCreated:
        """As `_created`, of a job that is stored: also one of which the database's answer never came, so that it is
        not here yet."""
        created = self._created(row, spec, idempotency_key)
        job: LiveJob | None = None
        with self._lock, storing():  # who creates it in this moment has it here when that is done
            if row["id"] not in self._jobs and row["id"] not in self.past.lines():
                job = self.take_up(row["id"])
        if job is not None and not job.state.over:
            self._life.job_begins(job)
        return created

    def _created(self, row: Record, spec: JobSpec, idempotency_key: str | None) -> JobCreated:
        """What is said of a stored job to who asked for one of this spec."""
        if JobSpec.model_validate_json(row["spec"]) != spec:
            raise ConsoleError(
                409, "idempotency_conflict", f"Idempotency-Key: {idempotency_key!r} was used for another job"
            )
        failure_timeouts = self.failure_timeouts
        return JobCreated(
            job_id=row["id"],
            heartbeat_seconds=failure_timeouts.heartbeat,
            suspect_seconds=failure_timeouts.suspect,
            dead_seconds=failure_timeouts.dead,
        )

    def find(self, job_id: str) -> LiveJob:
        """Raises ConsoleError (404)."""
        job = self._jobs.get(job_id)
        if job is None and job_id in self.past.lines():
            with storing():
                job = self.take_up(job_id)
        if job is None:
            raise unknown_job(job_id)
        return job

    async def find_beside(self, job_id: str) -> LiveJob:
        """As `find`, for an event loop: a job that is a line by now is read in a thread. Raises ConsoleError."""
        job = self._jobs.get(job_id)
        return await in_thread(self.find, job_id) if job is None else job

    def live(self) -> list[LiveJob]:
        return list(self._jobs.values())

    def ids(self) -> list[str]:
        return [*self.past.lines(), *self._jobs]

    def follow(self) -> None:
        """Notes jobs that are over and have come into the database beside us; lets go of those that were deleted.
        Raises SQLAlchemyError."""
        known = dict.fromkeys(self.past.lines(), True)
        known |= {job_id: bool(job.state.over) for job_id, job in list(self._jobs.items())}
        states = self._index.states()
        new = [j for j, state in states.items() if state in OVER and j not in known and j not in self._unreadable]
        if new:
            self.past.read(new)
        for job_id, over in known.items():
            if over and job_id not in states:
                self.let_go(job_id)

    def take_up(self, job_id: str) -> LiveJob | None:
        """Reads a stored job, unless it is here already; None: it can't be read. Raises SQLAlchemyError."""
        if job_id not in self._jobs and job_id not in self._unreadable and (row := self._store.job(job_id)) is not None:
            try:
                job = self._life.new_job(job_id, JobSpec.model_validate_json(row["spec"]), row["created_at"])
                job.restore(row)
                self._life.job_read(job)
                with self._lock:
                    self._jobs.setdefault(job_id, job)
            except (SQLAlchemyError, ConsoleError):  # it may be read when the database answers again
                raise
            except Exception:  # whatever one job's rows are, they keep no console from starting
                log.exception("a stored job can't be read; it is left out", job=job_id)
                self._unreadable.add(job_id)
        self.past.drop(job_id)
        return self._jobs.get(job_id)

    def rest(self, job: LiveJob) -> bool:
        """Of one that has been over for long its line is enough again; False: somebody follows it. Raises
        SQLAlchemyError."""
        if job.topic.followed or job.generation_topic.followed:
            return False
        self.past.read([job.job_id])
        with self._lock:
            if self._jobs.get(job.job_id) is job:
                del self._jobs[job.job_id]
        return True

    def let_go(self, job_id: str) -> None:
        """Of a job that is deleted: whoever asks for it from now on learns that there is none."""
        with self._lock:
            job = self._jobs.pop(job_id, None)
        self.past.drop(job_id)
        if job is not None:
            self._life.job_ended(job)
            job.topic.close()
            job.generation_topic.close()

    def take_up_all(self, over: int) -> None:
        """Every job of the database that is not over, and the newest so many others; the rest, of which there may be
        thousands, one by one when somebody asks for them. Raises SQLAlchemyError."""
        self.past.read()
        states = self._index.states()
        for job_id in [*list(self.past.lines())[-over:], *(j for j in states if states[j] not in OVER)]:
            job = self.take_up(job_id)
            if job is not None and not job.state.over:
                self._check_ladder(job)
                self._life.job_begins(job)

    def _check_ladder(self, job: LiveJob) -> None:
        """Of a job that another console took: it runs, so it is not refused."""
        try:
            self.failure_timeouts.check_above(job.spec.transfer_timeout, job.spec.group_timeout)
        except PlannerError as error:
            job.record(Note("warning", "console", f"this console's time-outs do not suit the job's agents: {error}"))


class PastJobs:
    """Those that no LiveJob stands for. Thread-safe."""

    def __init__(self, index: JobIndex) -> None:
        self._index = index
        self._lines: dict[str, JobSummary] = {}  # replaced as a whole: readers need no lock
        self._lock = threading.Lock()

    def read(self, job_ids: Collection[str] | None = None) -> None:
        """Notes all that there are, or these. Raises SQLAlchemyError."""
        found = [line for row in self._index.over(job_ids) if (line := _line(row)) is not None]
        with self._lock:
            self._lines = {**self._lines, **{line.job_id: line for line in found}}

    def lines(self) -> dict[str, JobSummary]:
        """By the job's id, oldest first among those that were noted together."""
        return self._lines

    def states(self) -> list[JobState]:
        return [line.state for line in self._lines.values()]

    def drop(self, job_id: str) -> None:
        if job_id in self._lines:
            with self._lock:
                self._lines = {known: line for known, line in self._lines.items() if known != job_id}


def _line(row: Record) -> JobSummary | None:
    try:
        spec = orjson.loads(row["spec"])
        workers = int(spec["pipelines"]) * int(spec["stages"])
    except (ValueError, KeyError, TypeError):
        log.error("a stored job can't be read; it is left out", job=row["id"])
        return None
    state = JobState(row["state"])
    return JobSummary(
        job_id=row["id"],
        name=row["name"],
        state=state,
        sentence=over_sentence(state, row["reason"]),
        created_at=row["created_at"],
        generation=row["generation"],
        living=row["living"],
        workers=workers,
        condition=Condition(state.value),
    )

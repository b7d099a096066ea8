"""The console as a service: what the REST API and the pages call. Thread-safe.

It puts the features together: which jobs there are (those that run, in memory, and those that are over, of which a line
is enough until somebody asks), what agents and launchers say of every job, and what people see (app.console.view)
and ask (app.console.operators). The first two are in this file.

Every report goes through the coordinator of its job and into the database before it is answered;
heartbeats alone are kept in memory and written behind.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from weakref import WeakKeyDictionary

import orjson
import structlog
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination import membership
from openrecycle.agent.coordination.generations import deployment_of
from openrecycle.agent.coordination.membership import FailureTimeouts, Interim, LeadTerm, Note
from openrecycle.agent.messages.protocol import (
    Acknowledgement,
    BatchReply,
    FailureReport,
    Heartbeat,
    InterimPlan,
    Iteration,
    JobCreated,
    JobFinished,
    JobSpec,
    JobState,
    LeadAnswer,
    LeadClaim,
    LogLines,
    Recovery,
    RefusedReport,
    Registration,
    Relayout,
    ValidationReport,
)
from openrecycle.app.advice.service import Advising
from openrecycle.app.catalogs.contents import MAX_WORKERS
from openrecycle.app.catalogs.service import Catalogs
from openrecycle.app.console.operators import Operators
from openrecycle.app.console.view import Queries, RollOuts
from openrecycle.app.jobs.live_job import TICK_SECONDS, IncomingReport, LiveJob
from openrecycle.app.jobs.states import Arrival, Condition, JobSummary, PlannedRestart, over_sentence
from openrecycle.app.jobs.throughput import Waited
from openrecycle.app.observing.goodput import Accounts
from openrecycle.app.observing.history import Histories
from openrecycle.app.observing.measured_iterations import Measuring
from openrecycle.app.observing.metrics import OVER_SHOWN, JobMetrics, Metrics
from openrecycle.app.observing.recorder import Recorder
from openrecycle.app.plans.service import PlansService
from openrecycle.app.plans.sources import PlanSources
from openrecycle.app.runtime.errors import (
    ConsoleError,
    passing,
    plain,
    storing,
    unavailable,
    unknown_job,
    unknown_worker,
)
from openrecycle.app.runtime.patches import begin_without_pages
from openrecycle.app.runtime.processes import Seldom
from openrecycle.app.runtime.runner import STUCK_SECONDS, EventLoopWatch, in_thread
from openrecycle.app.runtime.settings import RetentionLimits
from openrecycle.app.security.access import Security
from openrecycle.db.job_rows import OVER
from openrecycle.db.session import Database
from openrecycle.db.store import Record, Store
from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.words import layers_move, micro_batch_names, milliseconds
from openrecycle.planner.plans.plan import Plan, first_problem

# -- which jobs a console has -------------------------------------------------------------------

log = structlog.get_logger()

# Of all jobs that have not ended: the time that the console takes to start, and its memory, go by them.
MAX_LIVE_WORKERS = 16 * MAX_WORKERS


class JobRegistry:
    """Thread-safe. console: does what else there is to do when a job of its begins, is read, or ends."""

    def __init__(self, store: Store, failure_timeouts: FailureTimeouts, console: ConsoleService) -> None:
        self._store, self.failure_timeouts, self._console = store, failure_timeouts, console
        self._jobs: dict[str, LiveJob] = {}
        self.past = PastJobs(store)
        self._left_out: dict[str, str] = {}  # names of jobs that can't be read, by their id; replaced, never changed
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
            job = self._console.new_job(job_id, spec, created_at)
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
        self._console.job_begins(job)
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
        if row["id"] in self._left_out:
            raise _unreadable(row["id"], idempotency_key)
        if job is not None and not job.state.over:
            self._console.job_begins(job)
        return created

    def _created(self, row: Record, spec: JobSpec, idempotency_key: str | None) -> JobCreated:
        """What is said of a stored job to who asked for one of this spec."""
        try:
            same = JobSpec.model_validate_json(row["spec"]) == spec
        except ValueError:
            raise _unreadable(row["id"], idempotency_key) from None
        if not same:
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
        known |= {job_id: bool(job.state.over) for job_id, job in self._jobs.copy().items()}
        states = self._store.job_states()
        self._left_out = {job_id: name for job_id, name in self._left_out.items() if job_id in states}
        new = [j for j, state in states.items() if state in OVER and j not in known and j not in self._left_out]
        if new:
            self._left_out = self._left_out | self.past.read(new)
        for job_id, over in known.items():
            if over and job_id not in states:
                self.let_go(job_id)

    def take_up(self, job_id: str) -> LiveJob | None:
        """Reads a stored job, unless it is here already; None: it can't be read. Raises SQLAlchemyError."""
        if job_id not in self._jobs and job_id not in self._left_out and (row := self._store.job(job_id)) is not None:
            try:
                job = self._console.new_job(job_id, JobSpec.model_validate_json(row["spec"]), row["created_at"])
                job.restore(row)
                self._console.job_read(job)
                with self._lock:
                    self._jobs.setdefault(job_id, job)
            except (SQLAlchemyError, ConsoleError):  # it may be read when the database answers again
                raise
            except Exception as error:  # whatever one job's rows are, they keep no console from starting
                self._left_out = self._left_out | _leave_out(row, error)
        self.past.drop(job_id)
        return self._jobs.get(job_id)

    def left_out(self, job_id: str) -> str | None:
        """The name of a job whose rows can't be read; None: it is none that is known to be so."""
        return self._left_out.get(job_id)

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
            self._left_out = {other: name for other, name in self._left_out.items() if other != job_id}
        self.past.drop(job_id)
        if job is not None:
            self._console.job_ended(job)
            job.topic.close()
            job.generation_topic.close()

    def take_up_all(self, over: int) -> None:
        """Every job of the database that is not over, and the newest so many others; the rest, of which there may be
        thousands, one by one when somebody asks for them. Raises SQLAlchemyError."""
        self._left_out = self._left_out | self.past.read()
        states = self._store.job_states()
        for job_id in [*list(self.past.lines())[-over:], *(j for j in states if states[j] not in OVER)]:
            job = self.take_up(job_id)
            if job is not None and not job.state.over:
                self._check_failure_timeouts(job)
                self._console.job_begins(job)

    def _check_failure_timeouts(self, job: LiveJob) -> None:
        """Of a job that another console took: it runs, so it is not refused."""
        try:
            self.failure_timeouts.check_above(job.spec.transfer_timeout, job.spec.group_timeout)
        except PlannerError as error:
            job.record(Note("warning", "console", f"this console's time-outs do not suit the job's agents: {error}"))


def _unreadable(job_id: str, idempotency_key: str | None) -> ConsoleError:
    detail = f"Idempotency-Key: {idempotency_key!r} was used for job {job_id}, which can't be read; use another key"
    return ConsoleError(409, "idempotency_conflict", detail)


class PastJobs:
    """Those that no LiveJob stands for. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lines: dict[str, JobSummary] = {}  # replaced as a whole: readers need no lock
        self._lock = threading.Lock()

    def read(self, job_ids: Collection[str] | None = None) -> dict[str, str]:
        """Notes all that there are, or these; returns the names of those that can't be read, by their id. Raises
        SQLAlchemyError."""
        found, left_out = dict[str, JobSummary](), dict[str, str]()
        for row in self._store.jobs_over(job_ids):
            try:
                found[row["id"]] = _line(row)
            except Exception as error:
                left_out |= _leave_out(row, error)
        with self._lock:
            self._lines = {**self._lines, **found}
        return left_out

    def lines(self) -> dict[str, JobSummary]:
        """By the job's id, oldest first among those that were noted together."""
        return self._lines

    def states(self) -> list[JobState]:
        return [line.state for line in self._lines.values()]

    def drop(self, job_id: str) -> None:
        if job_id in self._lines:
            with self._lock:
                self._lines = {known: line for known, line in self._lines.items() if known != job_id}


def _leave_out(row: Record, error: Exception) -> dict[str, str]:
    """Of a stored job that can't be read: says so in the log, once. Its name, by its id."""
    job = {"job": row["id"], "name": row["name"]}
    if isinstance(error, ValueError | TypeError | LookupError):
        why = first_problem(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        log.error("a stored job is left out: its rows are of another version, or damaged", **job, reason=why)
    else:  # ours
        log.error("a stored job is left out: it can't be read", **job, exc_info=error)
    return {row["id"]: row["name"]}


def _line(row: Record) -> JobSummary:
    spec = orjson.loads(row["spec"])
    workers = int(spec["pipelines"]) * int(spec["stages"])
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


# -- what agents and launchers say and ask, of every job ----------------------------------------

# A report that was sent twice stands among so many of the newest events.
LOOK_BACK = 200


def skipped_note(report: Iteration, micro_batches: int) -> membership.Note:
    """What an iteration left out, as a line of the feed. micro_batches: of a pipeline."""
    numbers = micro_batch_names(report.skipped, micro_batches)
    text = f"iteration {report.iteration}: {numbers} left out; the loss is the mean of the others"
    return membership.Note("warning", "step", text)


def validation_note(report: ValidationReport) -> membership.Note:
    """What came of checking an iteration's gradients, as a line of the feed."""
    if report.coefficient is None:
        undone = "; its step had been taken already and was rolled back" if report.redone else ""
        text = (
            f"iteration {report.iteration} is skipped: a gradient was NaN, infinite or out of range, so no "
            f"parameter has changed{undone}"
        )
        return membership.Note("warning", "step", text)
    if report.coefficient < 1:
        text = (
            f"iteration {report.iteration}: gradients were too large and clipped to {report.coefficient:.3g} of "
            "their length; the step taken before that was known was rolled back and taken again"
        )
    else:
        text = (
            f"iteration {report.iteration}: the step was rolled back and taken again without the clipping that "
            "had been expected"
        )
    return membership.Note("info", "step", text)


class Reports:
    """Thread-safe. Every method raises ConsoleError: for an unknown job or worker, a process that does
    not count, or a database that does not answer. sender: of a job on several nodes, who said that it leads; what a
    launcher says that leads no more changes nothing.

    ended: called with a job for which nothing more is to be done. measure: which iteration the workers of a job are to
    record. waited: for a person, by a job.
    """

    def __init__(
        self,
        store: Store,
        find: Callable[[str], LiveJob],
        ended: Callable[[LiveJob], None],
        measure: Callable[[LiveJob], int | None],
        waited: Callable[[LiveJob], Waited],
    ) -> None:
        self._store, self._find, self._ended = store, find, ended
        self._measure, self._waited = measure, waited
        # The newest of each job, as JSON, and of what it was made: many ask for it.
        self._deployments: WeakKeyDictionary[LiveJob, tuple[object, bytes]] = WeakKeyDictionary()

    def register(self, job_id: str, said: Sequence[Registration], sender: LeadTerm | None = None) -> BatchReply:
        """Each is taken or refused by itself."""
        job, reports = self._find(job_id), list[IncomingReport]()
        for one in said:
            process = Arrival(plain(one.host), one.pid, one.ranks, one.made_of)
            reports.append(IncomingReport(membership.WorkerRegistered(one.worker, one.incarnation), process))
        reply = self._reply(job, said, job.apply_all(reports, sender))
        refused, members = {report.index for report in reply.refused}, job.state.members
        before = dict[str, int]()
        for index, one in enumerate(said):
            if one.own_loop and index not in refused:
                member = members[one.worker]
                mine = member.generation if member.incarnation == one.incarnation else 0
                before[one.worker] = mine - 1 if mine > 0 else reply.generation
        return reply.model_copy(update={"before": before}) if before else reply

    def heartbeats(self, job_id: str, beats: Sequence[Heartbeat]) -> BatchReply:
        """Each is taken or refused by itself. Touches no database and waits for nothing."""
        job, answers = self._find(job_id), list[int | ConsoleError]()
        for beat in beats:
            try:
                answers.append(job.heard(beat))
            except ConsoleError as error:
                answers.append(error)
        return self._reply(job, beats, answers)

    def _reply(
        self,
        job: LiveJob,
        reports: Sequence[Registration | Heartbeat | Acknowledgement],
        answers: Sequence[object],
    ) -> BatchReply:
        """answers: for each report what came of it; a ConsoleError: it was refused."""
        refused = tuple(
            RefusedReport(index=index, worker=report.worker, code=answer.code, detail=answer.detail)
            for index, (report, answer) in enumerate(zip(reports, answers, strict=True))
            if isinstance(answer, ConsoleError)
        )
        taken = len(reports) - len(refused)
        return BatchReply(generation=job.state.generation, measure=self._measure(job), taken=taken, refused=refused)

    def failure(self, job_id: str, message: FailureReport, sender: LeadTerm | None = None) -> str:
        """Returns what the coordinator makes of it."""
        job = self._find(job_id)
        if message.cause == "exit":
            late = message.age_milliseconds / 1000
            seen = f" (seen {late:.1f} s before the report came)" if late >= 1 else ""
            detail = plain(message.detail) + seen
            event = membership.Exited(message.worker, message.incarnation, message.reporter, detail)
            restart = PlannedRestart.of(message.restart, time.time() - late) if message.restart else None
            known = bool(message.spare or restart)
            beside = [IncomingReport(event, spare=message.spare, restart=restart)] if known else ()
            return job.apply(event, beside=beside, sender=sender)
        if message.cause in ("exception", "state-lost"):
            what = membership.OpRaised if message.cause == "exception" else membership.StateLost
            raised = what(message.worker, message.incarnation, message.generation, plain(message.detail))
            return job.apply(raised, sender=sender)
        return job.apply(
            membership.TransferBroken(
                message.reporter, message.incarnation, message.worker, message.generation, plain(message.detail)
            ),
            sender=sender,
        )

    def acknowledge(self, job_id: str, said: Sequence[Acknowledgement], sender: LeadTerm | None = None) -> BatchReply:
        """Each is taken or refused by itself."""
        job, reports = self._find(job_id), list[IncomingReport]()
        for one in said:
            event = membership.GenerationAcknowledged(one.worker, one.incarnation, one.generation, one.state)
            reports.append(IncomingReport(event, acknowledgement={**one.model_dump(), "at": time.time()}))
        return self._reply(job, said, job.apply_all(reports, sender))

    def meanwhile(self, job_id: str, message: InterimPlan, sender: LeadTerm | None = None) -> str:
        """What a generation runs until newcomers have their state."""
        job, failed, plan = self._find(job_id), message.failed, None
        if len(set(failed)) < len(failed) or any(name not in job.state.members for name in failed):
            raise ConsoleError(422, "invalid", "failed: expected workers of the job's grid, each once")
        if message.document:
            try:
                plan = Plan.from_json(message.document, source="document")
            except PlannerError as error:
                raise ConsoleError(422, "invalid", str(error)) from None
            grid = (plan.job.pipelines, plan.job.stages, plan.job.micro_batches)
            of_job = (job.spec.pipelines, job.spec.stages, job.spec.micro_batches)
            same = message.plan_fingerprint == plan.fingerprint == plan.compute_fingerprint()
            if grid != of_job or not same or sorted(plan.failed) != sorted(failed) or check(plan):
                raise ConsoleError(422, "invalid", "document: expected a valid plan of the job, as the report names it")
        with storing():
            known = plan is not None or self._store.has_plan(message.plan_fingerprint)
        interim = Interim(message.plan_fingerprint if known else "", failed)
        reason = job.apply(membership.InterimPlanUsed(message.generation, interim), plan=plan, sender=sender)
        if known and plan is None:  # one that came with the report is the job's by that
            with storing():
                self._store.link_plan(job_id, message.plan_fingerprint, failed)
        return reason

    def committed(
        self, job_id: str, iterations: Sequence[Iteration], age: float = 0.0, sender: LeadTerm | None = None
    ) -> None:
        """age: seconds since the newest was committed."""
        job = self._find(job_id)
        for report in iterations:
            if report.iteration >= job.spec.iterations:
                raise ConsoleError(
                    422,
                    "invalid",
                    f"iterations.iteration: got {report.iteration}, expected below {job.spec.iterations}, "
                    "the number that the job runs",
                )
        rows, at = list[dict[str, object]](), time.time() - age
        for report in reversed(iterations):
            rows.append({**report.model_dump(), "skipped": report.skipped, "committed_at": max(0.0, at)})
            at -= report.seconds  # of a batch that has waited each is as old as those after it took
        with nullcontext() if sender is None else job.taking(sender), storing():
            self._store.add_iterations(job_id, rows[::-1])
            count = self._store.committed_iterations(job_id)
        job.stored()
        left_out = [i for i in iterations if i.skipped and i.iteration >= job.state.committed]
        if left_out:
            job.record(*(skipped_note(i, job.spec.micro_batches) for i in left_out))
        job.apply(membership.IterationsCommitted(count), sender=sender)

    def recovered(self, job_id: str, message: Recovery, sender: LeadTerm | None = None) -> None:
        job = self._find(job_id)
        if message.worker not in job.state.members:
            raise unknown_worker(message.worker)
        took, at = milliseconds(message.resumed_ms), time.time()
        text = f"generation {message.generation}: training resumed {took} after {message.worker} died"
        with storing():
            people = sum(self._waited(job).in_recovery({**message.model_dump(), "at": at}))
        if people:
            text += f", of it {milliseconds(1000 * people)} waiting for a person"
        with job.taking(sender):
            events = job.feed.rows([membership.Note("info", "recovery", text, message.worker)])
            if self._store.add_recovery(job_id, {**message.model_dump(), "at": at}, events):
                job.stored(len(events))
        job.topic.publish()

    def rearranged(self, job_id: str, message: Relayout, sender: LeadTerm | None = None) -> None:
        job = self._find(job_id)
        try:
            partition = job.plans.nominal.check_partition(message.partition)
        except PlannerError as error:
            raise ConsoleError(409, "misfit", str(error)) from None
        count = message.moved_layers
        if count > sum(partition):
            raise ConsoleError(409, "misfit", f"moved_layers: got {count}, expected at most {sum(partition)}")
        with storing():
            opened = self._store.generation(job_id, message.generation)
        fits = opened is not None and tuple(opened["partition"]) == partition
        if not fits and not message.problem:
            detail = f"partition: got {list(partition)}, which is not that of generation {message.generation}"
            raise ConsoleError(409, "misfit", detail)
        text = "" if message.problem else layers_move(count, done=True)
        moved = membership.LayersMoved(message.generation, message.iteration, partition, text, message.problem)
        job.apply(moved, sender=sender)

    def validated(self, job_id: str, report: ValidationReport) -> None:
        """What came of checking an iteration's gradients. A report that is known already changes nothing."""
        job, note = self._find(job_id), validation_note(report)
        with storing(), job.lock:
            newest = self._store.events(job_id, limit=LOOK_BACK, newest=True)
            if not any(row["kind"] == note.kind and row["text"] == note.text for row in newest):
                job.record(note)

    def printed(self, job_id: str, message: LogLines) -> None:
        """What a worker's process has written."""
        job = self._find(job_id)
        job.measurements.logs.take(job.writer(message.worker, message.incarnation).name, message)

    def claim_lead(self, job_id: str, message: LeadClaim) -> LeadAnswer:
        wanted = LeadTerm(message.term, message.node)
        granted, reason = self._find(job_id).claim_lead(wanted, message.after, ask=message.ask)
        return LeadAnswer(granted=granted, reason=reason)

    def finish(self, job_id: str, message: JobFinished, sender: LeadTerm | None = None) -> None:
        job = self._find(job_id)
        job.apply(membership.Finished(JobState(message.state), plain(message.reason)), sender=sender)
        self._ended(job)

    def deployment(self, job_id: str, after: int) -> bytes | None:
        """The newest deployment as JSON, if its generation is above `after`. Does not block."""
        job = self._find(job_id)
        state = job.state
        generation = state.current
        if generation is None or generation.number <= after:
            return None
        leaving = tuple(name for name in generation.failed if state.members[name].leaving)
        key = (generation.number, leaving)
        known = self._deployments.get(job)
        if known is None or known[0] != key:
            known = self._deployments[job] = key, deployment_of(generation, leaving).model_dump_json().encode()
        return known[1]


# What a console that is killed forgets of its workers' newest heartbeats; each sends another within a second.
FLUSH_SECONDS = 5.0
# Jobs that are over stay in memory for as long, with what their workers wrote; the newest stay for good.
OVER_SECONDS = 86_400.0
# Between two looks whether the database can be written.
PROBE_SECONDS = 1.0
# Of one job in one turn: more would keep the event loop waiting for tens of milliseconds.
FLUSH_AT_ONCE = 512


# -- the console as a service -------------------------------------------------------------------


class ConsoleService:
    """One per process and database. `start` before use, `close` at the end.

    tolerance: plans are made ahead for up to this many failures. keep: how much of its history. loop_watch: of the
    event loop that hears the workers; while that stands still, no silence counts.

    jobs: those that there are; reports: what their workers and launchers say; queries: what people read of them;
    operators: what people ask of them.
    """

    def __init__(
        self,
        store: Store,
        *,
        failure_timeouts: FailureTimeouts | None = None,
        tolerance: int = 2,
        keep: RetentionLimits | None = None,
        loop_watch: EventLoopWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._clock = store, clock
        self.failure_timeouts = failure_timeouts = failure_timeouts or FailureTimeouts()
        self.jobs = JobRegistry(store, failure_timeouts, self)
        self.loop_watch, self.tolerance = loop_watch or EventLoopWatch(clock=clock), tolerance
        self.metrics, heartbeat = Metrics(), failure_timeouts.heartbeat
        self.security = Security(store.database)
        self.operators = Operators(self.jobs.find, store)
        self.catalogs = Catalogs(store)
        self.plans = PlansService(
            *(store, self.catalogs),
            tolerance=tolerance,
            heartbeat=heartbeat,
            find=self.jobs.find,
            jobs=self.jobs.live,
            on_made=self.metrics.plan_made,
        )
        cache = self.plans.cache
        self.measuring = Measuring(store, cache.plan, heartbeat)
        self.accounts = Accounts(store, cache.get)
        self.roll_outs = RollOuts(store)
        self.recorder = Recorder(store.database, self.jobs.live, keep or RetentionLimits(), self.jobs.ids)
        self.sources = PlanSources(
            store,
            find=self.jobs.find,
            plans=cache,
            library=self.plans.library,
            making=self.plans.making,
            catalogs=self.catalogs,
            measured=self.measuring.iteration,
        )
        waited = self.accounts.waiting.of
        self._advising = Advising(store, waited)
        self._job_metrics = JobMetrics(
            self.jobs.live, store, cache.get, self.accounts.of, self.jobs.past.states, waited
        )
        self.metrics.registry.register(self._job_metrics)
        self._unwatch = self.metrics.watch(store.database.engine)
        self.reports = Reports(store, self.jobs.find, self.job_ended, self.measuring.wanted, waited)
        self.queries = Queries(
            *(store, failure_timeouts, clock),
            find=self.jobs.find,
            live=self.jobs.live,
            past=self.jobs.past.lines,
            plans=cache,
            figures=self.accounts.of,
            waited=waited,
            advice=self._advising.advice,
        )
        self.histories = Histories(self.jobs, store.database)
        self._stop = threading.Event()
        self._seldom = Seldom()
        self._got_on = self._clock()
        self._probing, self._stored_at = threading.Lock(), -math.inf
        self._ticker = threading.Thread(target=self._keep_time, name="console-ticks", daemon=True)

    # -- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Takes up every job of the database that is not over; the others, of which there may be thousands, one by one
        when somebody asks for them."""
        begin_without_pages()
        self.plans.start()
        self._advising.start()
        self.jobs.take_up_all(over=OVER_SHOWN)
        self._got_on = self._clock()
        self._ticker.start()
        self.recorder.start()
        self.histories.start()

    def stop_waiting(self) -> None:
        """Sends every long-poll home, so that the server can end."""
        for job in self.jobs.live():
            job.topic.close()
            job.generation_topic.close()
        self.plans.stop_waiting()

    def close(self) -> None:
        """Writes what is not yet written, ends the child processes."""
        self.stop_waiting()
        self._stop.set()
        if self._ticker.is_alive():
            self._ticker.join(2)
        self.security.close()
        self.catalogs.close()
        self.plans.close()
        self._advising.close()
        for job in self.jobs.live():
            with suppress(ConsoleError):
                job.take_heartbeats()
        self.histories.close()
        self.recorder.close()
        self._flush()
        self._unwatch()

    def new_job(self, job_id: str, spec: JobSpec, created_at: float) -> LiveJob:
        """Raises PlannerError for one that can't be planned."""
        return LiveJob(
            job_id,
            spec,
            created_at,
            store=self._store,
            failure_timeouts=self.failure_timeouts,
            want_plan=self.plans.ahead.make_now,
            on_generation=self.plans.ahead.make_next,
            look_up=self.catalogs.find,
            clock=self._clock,
        )

    def job_begins(self, job: LiveJob) -> None:
        """It is new, or was taken up, and runs."""
        self.plans.ahead.make_ahead(job)

    def job_read(self, job: LiveJob) -> None:
        """It was read from the database."""
        self._job_metrics.begin(job)

    def job_ended(self, job: LiveJob) -> None:
        """Nothing more is to be done for it."""
        self.plans.ahead.cancel(job)
        self._advising.cancel(job)
        self.security.tokens.end_job(job.job_id)

    def stuck(self) -> str:
        """Which threads of the console have not got on for longer than anything takes; empty: none."""
        if not self._ticker.ident or self._stop.is_set():
            return ""
        still = not self._ticker.is_alive() or self._clock() - self._got_on > STUCK_SECONDS
        return self._ticker.name if still else ""

    def ready(self) -> None:
        """Raises ConsoleError when the database does not answer, or can't store anything, which is asked for once a
        second at most."""
        with self._probing, storing():
            if self._clock() - self._stored_at >= PROBE_SECONDS:
                self._store.try_to_write()
                self._stored_at = self._clock()
            else:
                self._store.ping()

    @property
    def database(self) -> Database:
        return self._store.database

    def _keep_time(self) -> None:
        last_flush, turns = time.monotonic(), 0
        resting: dict[str, float] = {}  # jobs that are over, of which nothing is left to be done; and since when
        while not self._stop.wait(TICK_SECONDS):
            self._got_on = self._clock()
            for job in self.jobs.live():
                self._got_on = self._clock()
                if job.job_id in resting and job.quiet:
                    continue
                try:
                    self.tick(job)
                    if (missing := job.plan_missing()) is not None:  # (): the plan for all workers
                        job.ask_for(missing)
                    self.plans.consider(job)
                    self._advising.consider(job)
                    self.measuring.consider(job)
                    self.operators.consider(job)
                    self.accounts.consider(job)
                    if job.state.over:
                        job.plans.let_go()
                        resting.setdefault(job.job_id, time.monotonic())
                except Exception as error:  # four times a second, and of every job
                    if refused := passing(error):
                        text = "a tick could not be stored; it is tried again"
                        self._seldom.warn(text, reason=refused.detail, job=job.job_id)
                    else:
                        self._seldom.failed("a tick failed", error, job=job.job_id)
            if time.monotonic() - last_flush >= FLUSH_SECONDS:
                last_flush = time.monotonic()
                self._rest(resting)
                self.plans.simulations.end_unwatched()
                turns = max((len(job.state.members) for job in self.jobs.live()), default=0)
                turns = max(1, -(-turns // FLUSH_AT_ONCE))
            if turns:
                turns -= 1
                self._flush(FLUSH_AT_ONCE)

    def _rest(self, resting: dict[str, float]) -> None:
        """Keeps a line alone of jobs that have been at rest for long. Lets go of those that are none any more."""
        live = {job.job_id: job for job in self.jobs.live()}
        for job_id in resting.keys() - live.keys():
            del resting[job_id]
        newest_last = sorted((live[job_id] for job_id in resting), key=lambda job: job.created_at)
        for job in newest_last[:-OVER_SHOWN]:
            if time.monotonic() - resting[job.job_id] < OVER_SECONDS:
                continue
            try:
                if self.jobs.rest(job):
                    del resting[job.job_id]
            except SQLAlchemyError as error:
                log.warning("jobs that are over stay in memory for now", reason=type(error).__name__)
                return

    def tick(self, job: LiveJob) -> None:
        """Looks for workers that have fallen silent, unless it is this process that can't hear them: then the next
        tick takes all of that time for a pause of the console's own."""
        if self.loop_watch.overdue <= self.failure_timeouts.heartbeat:
            job.tick()

    def _flush(self, most: int = MAX_WORKERS) -> None:
        """most: workers of each job."""
        beats = {job: rows for job in self.jobs.live() if (rows := job.measurements.unsaved(most))}
        if not beats and not any(job.measurements.refused for job in self.jobs.live()):
            return
        refused = ""
        try:
            if beats:
                self._store.heartbeats({job.job_id: rows for job, rows in beats.items()})
            else:  # whoever sent them may have ended meanwhile
                self._store.try_to_write()
        except SQLAlchemyError as error:
            # Only the latest heartbeat counts, and another one is on its way.
            unstored = unavailable(error)
            refused = unstored.detail if unstored.status == 503 else ""
            self._seldom.warn("heartbeats could not be stored", reason=unstored.detail)
        # Once they can be stored again, so can those of jobs from which no more come.
        for job in beats if refused else self.jobs.live():
            job.measurements.refused = refused


_console: ConsoleService | None = None


def get_console() -> ConsoleService:
    """The console of this process. Raises RuntimeError before `set_console`."""
    if _console is None:
        raise RuntimeError("no console runs in this process")
    return _console


def set_console(console: ConsoleService | None) -> None:
    global _console
    _console = console

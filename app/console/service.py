"""The console as a service, which the REST API and the pages call. Thread-safe.

`ConsoleService` puts the features together. `JobRegistry` has the jobs: those that run are in memory, and of those that
are over one line is enough until somebody asks for more. `Reports` takes what workers and launchers report. Both are in
this file; what people see is in app.console.view, and what they ask for in app.console.operators.

Every report goes through the coordinator of its job and into the database before it is answered. Only heartbeats are
kept in memory, and written later.
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
    invalid,
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
from openrecycle.app.security.access import AGENTS, Security
from openrecycle.db.job_rows import OVER
from openrecycle.db.session import Database
from openrecycle.db.store import Record, Store
from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.words import layers_move, micro_batch_names, milliseconds
from openrecycle.planner.plans.packed import from_text
from openrecycle.planner.plans.plan import first_problem

# -- which jobs a console has -------------------------------------------------------------------

log = structlog.get_logger()

# Limits for the workers of one job, and of all jobs that have not ended: the console's memory, and its time to start,
# grow with them.
MAX_WORKERS = 16_384
MAX_LIVE_WORKERS = 16 * MAX_WORKERS


class JobRegistry:
    """The jobs of a console. Thread-safe.

    Jobs that run, and jobs that are over and were asked for lately, are LiveJobs; all others are lines in `past`.
    console: does everything else that is to be done when a job begins, is read from the database, or ends.
    """

    def __init__(self, store: Store, failure_timeouts: FailureTimeouts, console: ConsoleService) -> None:
        self._store, self.failure_timeouts, self._console = store, failure_timeouts, console
        self._jobs: dict[str, LiveJob] = {}
        self.past = PastJobs(store)
        self._left_out: dict[str, str] = {}  # names of jobs that can't be read, by their id; replaced, never changed
        self._lock = threading.RLock()

    def create(self, spec: JobSpec, idempotency_key: str | None = None) -> tuple[JobCreated, bool]:
        """Creates a job. Returns it, and whether it is new: for a key that was seen before, the earlier job is
        returned.

        Raises ConsoleError for a job that can't be planned, or a key that was used for another job.
        """
        if spec.pipelines * spec.stages > MAX_WORKERS:
            raise ConsoleError(
                422,
                "invalid",
                f"got {spec.pipelines * spec.stages}, expected at most {MAX_WORKERS} workers",
                field="pipelines x stages",
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
            raise invalid(error) from None
        members = [{"name": member.name, "state": member.state.value} for member in job.state.members.values()]
        text = spec.model_dump_json()
        # Under the lock, so that a caller that is given an earlier job's id also finds that job here.
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
        with suppress(ConsoleError):  # the job is there: whoever asked for it must hear so
            self._warn_of_rate(job)
        log.info("job created", job=job_id, name=spec.name, workers=len(members))
        return self._created(row, spec, idempotency_key), True

    def _created_before(self, row: Record, spec: JobSpec, idempotency_key: str | None) -> JobCreated:
        """Answers for a job that was stored before, and takes it up if it is not in memory: the database may have
        stored it without its answer ever reaching this console."""
        created = self._created(row, spec, idempotency_key)
        job: LiveJob | None = None
        with self._lock, storing():  # waits for a thread that is just creating the job, which then has it in memory
            if row["id"] not in self._jobs and row["id"] not in self.past.lines():
                job = self.take_up(row["id"])
        if row["id"] in self._left_out:
            raise _unreadable(row["id"], idempotency_key)
        if job is not None and not job.state.over:
            self._console.job_begins(job)
        return created

    def _created(self, row: Record, spec: JobSpec, idempotency_key: str | None) -> JobCreated:
        """Returns the answer for a stored job to a client that asked for one of this spec. Raises ConsoleError if the
        specs differ."""
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
        """Does the same as `find` for an event loop: a job that is only a line is read in a thread. Raises
        ConsoleError."""
        job = self._jobs.get(job_id)
        return await in_thread(self.find, job_id) if job is None else job

    def live(self) -> list[LiveJob]:
        return list(self._jobs.values())

    def ids(self) -> list[str]:
        return [*self.past.lines(), *self._jobs]

    def follow(self) -> None:
        """Brings the registry up to date with jobs that are over and that another process, such as an import, has put
        into the database, or deleted from it. Raises SQLAlchemyError."""
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
        """Reads a stored job, unless it is in memory, and returns it. Returns None if there is none or its rows can't
        be read. Raises SQLAlchemyError."""
        if job_id not in self._jobs and job_id not in self._left_out and (row := self._store.job(job_id)) is not None:
            try:
                job = self._console.new_job(job_id, JobSpec.model_validate_json(row["spec"]), row["created_at"])
                job.restore(row)
                self._console.job_read(job)
                with self._lock:
                    self._jobs.setdefault(job_id, job)
            except (SQLAlchemyError, ConsoleError):  # it may be read when the database answers again
                raise
            except Exception as error:  # one job with damaged rows must not keep the console from starting
                self._left_out = self._left_out | _leave_out(row, error)
        self.past.drop(job_id)
        return self._jobs.get(job_id)

    def left_out(self, job_id: str) -> str | None:
        """Returns the name of a job whose rows can't be read; None if it is not known to be such a job."""
        return self._left_out.get(job_id)

    def rest(self, job: LiveJob) -> bool:
        """Replaces a LiveJob that has long been over by its line. Returns False, and keeps it, if somebody follows it.
        Raises SQLAlchemyError."""
        if job.topic.followed or job.generation_topic.followed:
            return False
        self.past.read([job.job_id])
        with self._lock:
            if self._jobs.get(job.job_id) is job:
                del self._jobs[job.job_id]
        return True

    def let_go(self, job_id: str) -> None:
        """Forgets a job that was deleted."""
        with self._lock:
            job = self._jobs.pop(job_id, None)
            self._left_out = {other: name for other, name in self._left_out.items() if other != job_id}
        self.past.drop(job_id)
        if job is not None:
            job.let_go()
            self._console.job_ended(job)

    def take_up_all(self, over: int) -> None:
        """Takes up every job of the database that is not over, and the newest `over` of the others. The rest, which may
        be thousands, are read one by one when somebody asks for them. Raises SQLAlchemyError."""
        self._left_out = self._left_out | self.past.read()
        states = self._store.job_states()
        for job_id in [*list(self.past.lines())[-over:], *(j for j in states if states[j] not in OVER)]:
            job = self.take_up(job_id)
            if job is not None and not job.state.over:
                self._check_failure_timeouts(job)
                self._console.job_begins(job)

    def _warn_of_rate(self, job: LiveJob) -> None:
        """Warns in the job's feed if its workers send more heartbeats than one token may. Launchers send those of all
        their workers together; a worker with a loop of its own sends its own. Raises ConsoleError."""
        workers, heartbeat = len(job.state.members), self.failure_timeouts.heartbeat
        most = int(AGENTS.per_second * heartbeat)
        if job.spec.own_loop and workers > most and self._console.security.access.guarded:
            text = (
                f"{workers:,} workers that each send a heartbeat every {heartbeat:g} s are more than the {most:,} that "
                "one token may have: some heartbeats will be refused; start the console with a longer --heartbeat, "
                "and then the job again"
            )
            job.record(Note("warning", "console", text))

    def _check_failure_timeouts(self, job: LiveJob) -> None:
        """Warns in the job's feed if this console's time-outs do not suit its agents. Another console accepted the job,
        and it runs, so it is not refused."""
        try:
            self.failure_timeouts.check_above(job.spec.transfer_timeout, job.spec.group_timeout)
        except PlannerError as error:
            job.record(Note("warning", "console", f"this console's time-outs do not suit the job's agents: {error}"))


def _unreadable(job_id: str, idempotency_key: str | None) -> ConsoleError:
    detail = f"Idempotency-Key: {idempotency_key!r} was used for job {job_id}, which can't be read; use another key"
    return ConsoleError(409, "idempotency_conflict", detail)


class PastJobs:
    """The lines of all jobs that are over and not in memory as a LiveJob. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lines: dict[str, JobSummary] = {}  # replaced as a whole: readers need no lock
        self._lock = threading.Lock()

    def read(self, job_ids: Collection[str] | None = None) -> dict[str, str]:
        """Reads the lines of these jobs; None: of all that are over. Returns the names of those that can't be read, by
        id. Raises SQLAlchemyError."""
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
        """Returns the lines by job id. Those that were read together are oldest first."""
        return self._lines

    def states(self) -> list[JobState]:
        return [line.state for line in self._lines.values()]

    def drop(self, job_id: str) -> None:
        if job_id in self._lines:
            with self._lock:
                self._lines = {known: line for known, line in self._lines.items() if known != job_id}


def _leave_out(row: Record, error: Exception) -> dict[str, str]:
    """Logs that a stored job can't be read. Returns its name, by its id."""
    job = {"job": row["id"], "name": row["name"]}
    if isinstance(error, ValueError | TypeError | LookupError):
        why = first_problem(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        log.error("a stored job is left out: its rows are of another version, or damaged", **job, reason=why)
    else:  # a fault of the console's own code: the log gets the traceback
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

# A validation report that was sent twice is looked for among this many of the newest events.
LOOK_BACK = 200


def skipped_note(report: Iteration, micro_batches: int) -> membership.Note:
    """Returns the line of the feed for micro-batches that an iteration skipped. micro_batches: of a pipeline."""
    numbers = micro_batch_names(report.skipped, micro_batches)
    of_others = "it has no loss" if math.isnan(report.loss) else "the loss is the mean of the others"
    text = f"iteration {report.iteration}: {numbers} left out; {of_others}"
    return membership.Note("warning", "step", text)


def validation_note(report: ValidationReport) -> membership.Note:
    """Returns the line of the feed for the result of the check of an iteration's gradients."""
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
    """Takes the reports of workers and launchers. Thread-safe.

    Every method raises ConsoleError for an unknown job or worker, for a fenced process, or when the database does not
    answer. `sender` is, for a job on several nodes, the term and node in whose name the launcher speaks; nothing
    changes if that node leads no more.

    ended: called with a job for which nothing more is to be done. measure: says which iteration the workers of a job
    are to record, if any. waited: says how long a job has waited for people.
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
        # The newest deployment of each job as JSON, with the key that it was made for: many workers ask for it.
        self._deployments: WeakKeyDictionary[LiveJob, tuple[object, bytes]] = WeakKeyDictionary()

    def register(self, job_id: str, said: Sequence[Registration], sender: LeadTerm | None = None) -> BatchReply:
        """Takes registrations; each is taken or refused by itself."""
        job, reports = self._find(job_id), list[IncomingReport]()
        for one in said:
            process = Arrival(plain(one.host), one.pid, one.ranks, one.made_of)
            of_spares = membership.all_were_spare(one.ranks, one.made_of)
            event = membership.WorkerRegistered(one.worker, one.incarnation, of_spares=of_spares)
            reports.append(IncomingReport(event, process))
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
        """Takes heartbeats; each is taken or refused by itself. Touches no database and waits for nothing."""
        job, refusals = self._find(job_id), list[ConsoleError | None]()
        for beat in beats:
            try:
                job.heard(beat)
                refusals.append(None)
            except ConsoleError as error:
                refusals.append(error)
        return self._reply(job, beats, refusals)

    def _reply(
        self,
        job: LiveJob,
        reports: Sequence[Registration | Heartbeat | Acknowledgement | FailureReport],
        refusals: Sequence[membership.Refuse | ConsoleError | None],
    ) -> BatchReply:
        """Makes the reply to a batch. refusals: for each report why it was refused; None: it was not."""
        refused = tuple(
            RefusedReport(index=index, worker=report.worker, code=refusal.code, detail=refusal.detail)
            for index, (report, refusal) in enumerate(zip(reports, refusals, strict=True))
            if refusal is not None
        )
        taken = len(reports) - len(refused)
        return BatchReply(generation=job.state.generation, measure=self._measure(job), taken=taken, refused=refused)

    def failures(self, job_id: str, said: Sequence[FailureReport], sender: LeadTerm | None = None) -> BatchReply:
        """Takes reports that workers have ended, raised, lost their state, or can't exchange data with a peer; each is
        taken or refused by itself. What one batch says of a generation is followed by one."""
        job = self._find(job_id)
        return self._reply(job, said, job.apply_all([_failure(one) for one in said], sender))

    def acknowledge(self, job_id: str, said: Sequence[Acknowledgement], sender: LeadTerm | None = None) -> BatchReply:
        """Takes acknowledgements; each is taken or refused by itself."""
        job, reports = self._find(job_id), list[IncomingReport]()
        for one in said:
            event = membership.GenerationAcknowledged(one.worker, one.incarnation, one.generation, one.state)
            reports.append(IncomingReport(event, acknowledgement={**one.model_dump(), "at": time.time()}))
        return self._reply(job, said, job.apply_all(reports, sender))

    def meanwhile(self, job_id: str, message: InterimPlan, sender: LeadTerm | None = None) -> str:
        """Takes the interim plan that a generation runs until newcomers have their state. Returns the coordinator's
        reason."""
        job = self._find(job_id)
        grid = job.spec.pipelines, job.spec.stages, job.spec.micro_batches
        try:
            plan = from_text(message.plan, grid=grid)
            wrong = check(plan)
        except PlannerError as error:
            raise invalid(error, "plan") from None
        if wrong:
            raise ConsoleError(422, "invalid", f"expected a valid plan: {wrong[0]}", field="plan")
        interim = Interim(plan.fingerprint, plan.failed)
        return job.apply(membership.InterimPlanUsed(message.generation, interim), plan=plan, sender=sender)

    def committed(
        self, job_id: str, iterations: Sequence[Iteration], age: float = 0.0, sender: LeadTerm | None = None
    ) -> None:
        """Takes iterations that were committed, oldest first. age: seconds since the newest was committed."""
        job = self._find(job_id)
        for report in iterations:
            if report.iteration >= job.spec.iterations:
                raise ConsoleError(
                    422,
                    "invalid",
                    f"got {report.iteration}, expected below {job.spec.iterations}, the number that the job runs",
                    field="iterations.iteration",
                )
        rows, at = list[dict[str, object]](), time.time() - age
        for report in reversed(iterations):
            rows.append({**report.model_dump(), "skipped": report.skipped, "committed_at": max(0.0, at)})
            at -= report.seconds  # each iteration was committed when the next one began
        with nullcontext() if sender is None else job.taking(sender), storing():
            self._store.add_iterations(job_id, rows[::-1])
            count = self._store.committed_iterations(job_id)
        job.stored()
        left_out = [i for i in iterations if i.skipped and i.iteration >= job.state.committed]
        if left_out:
            job.record(*(skipped_note(i, job.spec.micro_batches) for i in left_out))
        job.apply(membership.IterationsCommitted(count), sender=sender)

    def recovered(self, job_id: str, message: Recovery, sender: LeadTerm | None = None) -> None:
        """Takes the times of a recovery, with a line of the feed that says how long it took."""
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
        """Takes the report that layers have moved to a generation's partition, or that they could not."""
        job = self._find(job_id)
        try:
            partition = job.plans.nominal.check_partition(message.partition)
        except PlannerError as error:
            raise ConsoleError(409, "misfit", str(error)) from None
        count = message.moved_layers
        if count > sum(partition):
            raise ConsoleError(409, "misfit", f"got {count}, expected at most {sum(partition)}", field="moved_layers")
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
        """Takes the result of the check of an iteration's gradients. A report that was sent before changes nothing."""
        job, note = self._find(job_id), validation_note(report)
        with storing(), job.lock:
            newest = self._store.events(job_id, limit=LOOK_BACK, newest=True)
            if not any(row["kind"] == note.kind and row["text"] == note.text for row in newest):
                job.record(note)

    def printed(self, job_id: str, message: LogLines) -> None:
        """Takes lines that a worker's process has printed."""
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
        """Returns the newest deployment as JSON if its generation is above `after`, else None. Does not block."""
        job = self._find(job_id)
        state = job.state
        generation = state.current
        if generation is None or generation.number <= after:
            return None
        leaving = tuple(name for name in generation.failed if state.members[name].leaving)
        key = (generation.number, leaving)
        known = self._deployments.get(job)
        if known is None or known[0] != key:
            told = deployment_of(generation, leaving, own_loop=state.own_loop)
            known = self._deployments[job] = key, told.model_dump_json().encode()
        return known[1]


def _failure(message: FailureReport) -> IncomingReport:
    worker, incarnation, detail = message.worker, message.incarnation, plain(message.detail)
    match message.cause:
        case "closed":
            return IncomingReport(membership.Exited(worker, incarnation, message.reporter, detail, done=True))
        case "exit":
            late = message.age_milliseconds / 1000
            seen = f" (seen {late:.1f} s before the report came)" if late >= 1 else ""
            event = membership.Exited(worker, incarnation, message.reporter, detail + seen)
            restart = PlannedRestart.of(message.restart, time.time() - late) if message.restart else None
            return IncomingReport(event, spare=message.spare, restart=restart)
        case "exception":
            return IncomingReport(membership.OpRaised(worker, incarnation, message.generation, detail))
        case "state-lost":
            return IncomingReport(membership.StateLost(worker, incarnation, message.generation, detail))
        case "transfer":
            broken = membership.TransferBroken(message.reporter, incarnation, worker, message.generation, detail)
            return IncomingReport(broken)


# Between two writes of the newest heartbeats. A console that is killed forgets as much; workers send anew each second.
FLUSH_SECONDS = 5.0
# Jobs that are over stay in memory for this long, with the lines that their workers printed; the newest stay for good.
OVER_SECONDS = 86_400.0
# At least this long between two checks whether the database can be written.
PROBE_SECONDS = 1.0
# Workers of one job per write: more would keep the event loop waiting for tens of milliseconds.
FLUSH_AT_ONCE = 512


# -- the console as a service -------------------------------------------------------------------


class ConsoleService:
    """A console: all its features, put together. One per process and database. Call `start` before use, `close` at the
    end.

    tolerance: plans are made ahead for up to this many failures. keep: how long its history is kept. loop_watch:
    watches the event loop that receives heartbeats; while that stands still, no silence of a worker counts.

    jobs: the jobs that there are; reports: takes what their workers and launchers report; queries: what people see;
    operators: takes what people ask for. A thread of its own (`_keep_time`) ticks every job four times a second.
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
        self.advising = Advising(store, waited)
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
            advice=self.advising.advice,
        )
        self.histories = Histories(self.jobs, store.database)
        self._stop = threading.Event()
        self._seldom = Seldom()
        self._got_on = self._clock()
        self._probing, self._stored_at = threading.Lock(), -math.inf
        self._ticker = threading.Thread(target=self._keep_time, name="console-ticks", daemon=True)

    # -- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all services and threads, and takes up the jobs of the database (see JobRegistry.take_up_all)."""
        begin_without_pages()
        self.plans.start()
        self.advising.start()
        self.jobs.take_up_all(over=OVER_SHOWN)
        self._got_on = self._clock()
        self._ticker.start()
        self.recorder.start()
        self.histories.start()

    def stop_waiting(self) -> None:
        """Ends every long-poll, so that the server can end."""
        for job in self.jobs.live():
            job.topic.close()
            job.generation_topic.close()

    def close(self) -> None:
        """Writes what is not yet written, and ends threads and child processes."""
        self.stop_waiting()
        self._stop.set()
        if self._ticker.is_alive():
            self._ticker.join(2)
        self.security.close()
        self.catalogs.close()
        self.plans.close()
        self.advising.close()
        for job in self.jobs.live():
            with suppress(ConsoleError):
                job.take_heartbeats()
        self.histories.close()
        self.recorder.close()
        self.flush()
        self._unwatch()

    def new_job(self, job_id: str, spec: JobSpec, created_at: float) -> LiveJob:
        """Makes the LiveJob of a new or stored job. Raises PlannerError for a job that can't be planned."""
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
        """Starts the work for a job that runs, and is new or was taken up: plans are made ahead."""
        self.plans.ahead.make_ahead(job)

    def job_read(self, job: LiveJob) -> None:
        """Begins the metrics of a job that was read from the database."""
        self._job_metrics.begin(job)

    def job_ended(self, job: LiveJob) -> None:
        """Ends the work for a job that is over or deleted, and its tokens."""
        self.plans.ahead.cancel(job)
        self.plans.replanning.cancel(job)
        self.advising.cancel(job)
        self.security.tokens.end_job(job.job_id)

    def stuck(self) -> str:
        """Returns the name of the console's thread if it has ended, or has stood still for longer than anything should
        take; else ""."""
        if not self._ticker.ident or self._stop.is_set():
            return ""
        still = not self._ticker.is_alive() or self._clock() - self._got_on > STUCK_SECONDS
        return self._ticker.name if still else ""

    def ready(self) -> None:
        """Raises ConsoleError when the database does not answer or can't store anything. The latter is tried once a
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
        resting: dict[str, float] = {}  # jobs that are over, with nothing left to do; and since when (monotonic)
        while not self._stop.wait(TICK_SECONDS):
            self._got_on = self._clock()
            for job in self.jobs.live():
                self._got_on = self._clock()
                if job.job_id in resting and job.quiet:
                    continue
                over = job.state.over  # all below look once more at a job that ends meanwhile
                try:
                    self.tick(job)
                    if (missing := job.plan_missing()) is not None:  # (): the plan for all workers
                        job.ask_for(missing)
                    self.plans.consider(job)
                    self.advising.consider(job)
                    self.measuring.consider(job)
                    self.operators.consider(job)
                    self.accounts.consider(job)
                    if over:
                        job.plans.let_go()
                        resting.setdefault(job.job_id, time.monotonic())
                except Exception as error:  # could come four times a second for every job, so it is logged seldom
                    if job.deleted:  # meanwhile
                        continue
                    if refused := passing(error):
                        job.turn_failed()
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
                self.flush(FLUSH_AT_ONCE)

    def _rest(self, resting: dict[str, float]) -> None:
        """Reduces jobs that have long been at rest to their lines, all but the newest, and drops from `resting` those
        that are no longer in memory."""
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
        """Looks for workers that have fallen silent, unless this process itself can't hear them now. In that case the
        next tick counts the whole time as a pause of the console."""
        if self.loop_watch.overdue <= self.failure_timeouts.heartbeat:
            job.tick()

    def flush(self, most: int = MAX_WORKERS) -> None:
        """Writes the newest heartbeats to the database, for at most `most` workers of each job."""
        beats = {job: rows for job in self.jobs.live() if (rows := job.measurements.unsaved(most))}
        if not beats and not any(job.measurements.refused for job in self.jobs.live()):
            return
        refused = ""
        try:
            if beats:
                self._store.heartbeats({job.job_id: rows for job, rows in beats.items()})
            else:  # the workers may have ended, so that no heartbeats come; is the database well again?
                self._store.try_to_write()
        except SQLAlchemyError as error:
            # Only the latest heartbeat counts, and another one is on its way.
            unstored = unavailable(error)
            refused = unstored.detail if unstored.status == 503 else ""
            self._seldom.warn("heartbeats could not be stored", reason=unstored.detail)
        # After a success, the mark also goes from jobs that send no more heartbeats.
        for job in beats if refused else self.jobs.live():
            job.measurements.written(refused)


_console: ConsoleService | None = None


def get_console() -> ConsoleService:
    """The console of this process. Raises RuntimeError before `set_console`."""
    if _console is None:
        raise RuntimeError("no console runs in this process")
    return _console


def set_console(console: ConsoleService | None) -> None:
    global _console
    _console = console

"""One job in memory: the coordinator's state, its plans, and what its workers said last.

The database is the truth: a step of the coordinator is stored before it can be seen from outside.
Readers take `job.state`, which is replaced as a whole, and need no lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination import coordinator, membership
from openrecycle.agent.coordination.membership import (
    ConsoleRestarted,
    Decision,
    Event,
    Exited,
    FailureTimeouts,
    GenerationAcknowledged,
    HeartbeatsReceived,
    LeadTerm,
    Member,
    NeedPlan,
    Note,
    OpenGeneration,
    PlanReady,
    PlanRefused,
    Refuse,
    Stalled,
    State,
    Tick,
    WorkerRegistered,
)
from openrecycle.agent.messages.protocol import DEPOSED, Heartbeat, JobSpec
from openrecycle.app.jobs.feed import LOOK_BACK, JobFeed
from openrecycle.app.jobs.job_plans import JobPlans, LookUp, stored_plan
from openrecycle.app.jobs.lead import JobLead
from openrecycle.app.jobs.measurements import JobMeasurements
from openrecycle.app.jobs.records import (
    differs,
    generation_row,
    job_columns,
    later_columns,
    member_row,
    process_rows,
    read_processes,
    read_state,
    state_rows,
    waits_row,
)
from openrecycle.app.jobs.states import Arrival, PlannedRestart, ProcessState, WorkerStates, follow
from openrecycle.app.jobs.throughput import Baseline, read_baseline
from openrecycle.app.jobs.waiting import CommandQueue, Wait, after_change, pauses, read_waits
from openrecycle.app.runtime.errors import ConsoleError, refused, unavailable, unknown_job
from openrecycle.app.runtime.notify import Topic
from openrecycle.db.store import JobUpdate, Record, Store
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.packed import storable
from openrecycle.planner.plans.plan import Plan

log = structlog.get_logger()

TICK_SECONDS = 0.25

# How a job stands to a plan. SOON: an interim plan is run, which was too large to be sent here.
IN_FORCE, LAST, INTERIM, SOON = "in force", "last in force", "interim", "in force soon"


class PlanRun(NamedTuple):
    """A plan that workers run. failed: whom it goes without. words: one of those above."""

    fingerprint: str
    generation: int
    failed: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class IncomingReport:
    """An event, and what is stored beside it if it is accepted. process: of a worker that registers. spare: of one that
    has exited, the ranks that are spare; restart: what its launcher does about it. acknowledgement: a row."""

    event: WorkerRegistered | GenerationAcknowledged | Exited
    process: Arrival | None = None
    spare: tuple[int, ...] = ()
    restart: PlannedRestart | None = None
    acknowledgement: Mapping[str, Any] | None = None


def run_together(
    state: State, reports: Sequence[IncomingReport], now: float, failure_timeouts: FailureTimeouts
) -> tuple[State, list[Note], list[str | Refuse]]:
    """Takes reports up to the first one that asks for a plan or opens a generation, which is not taken.

    Returns the state after them, what they add to the event feed, and for each the reason or refusal.
    """
    notes: list[Note] = []
    answers: list[str | Refuse] = []
    for report in reports:
        after = coordinator.step(state, report.event, now, failure_timeouts)
        said = [decision for decision in after.decisions if isinstance(decision, Note)]
        if len(said) < len(after.decisions) - (after.refusal is not None):
            break
        notes += said
        answers.append(after.refusal or after.reason)
        state = after.state
    return state, notes, answers


def processes_of(reports: Iterable[IncomingReport]) -> dict[str, Arrival]:
    """Those that registered, by incarnation."""
    return {report.event.incarnation: report.process for report in reports if report.process}


def spares_of(reports: Iterable[IncomingReport]) -> dict[str, tuple[int, ...]]:
    """Of those that exited, by incarnation, the ranks that are spare."""
    return {report.event.incarnation: report.spare for report in reports if report.spare}


def restarts_of(reports: Iterable[IncomingReport]) -> dict[str, tuple[str, PlannedRestart]]:
    """Of those that exited, by incarnation, whose place it was, and what their launcher does about it."""
    restarts = ((report.event, report.restart) for report in reports)
    return {event.incarnation: (event.worker, restart) for event, restart in restarts if restart}


class LiveJob:
    """Thread-safe. want_plan: called with the failed workers when a plan has to be made elsewhere;
    the answer comes back by `plans.plan_made`. on_generation: called after a generation has
    opened. look_up: a plan made ahead that is kept elsewhere, and where it is from.

    Its parts, each with a state of its own: `state`, the membership as the coordinator has it, and `processes`, which
    hold the roles; `plans`; `measurements`, what workers say of themselves; `feed`; `commands` of operators;
    `choices`, when it waited for one; `baseline`, what its throughput is measured by, which `pin` alone changes;
    `lead`, which node leads, where there are several.
    """

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        created_at: float,
        *,
        store: Store,
        failure_timeouts: FailureTimeouts,
        want_plan: Callable[[LiveJob, tuple[str, ...]], None],
        on_generation: Callable[[LiveJob], None],
        look_up: LookUp = lambda question, failed: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job_id, self.spec, self.created_at = job_id, spec, created_at
        self.failure_timeouts = failure_timeouts
        self.lock = threading.RLock()
        self.version = 0  # rises with everything that is stored: what views are cached by
        self.topic = Topic()  # anything that is stored
        self.generation_topic = Topic()  # what thousands of workers may wait for: no other change wakes them
        self.plans = JobPlans(job_id, spec, store, self.lock, look_up, self._answered, self.stored)
        self.state = State.new(
            spec.pipelines,
            spec.stages,
            spec.iterations,
            checkpoints=spec.checkpoints,
            partition=self.plans.nominal.partition,
        )
        self.processes: dict[str, ProcessState] = {}  # by incarnation, those that came first first
        self.measurements = JobMeasurements(self.state.members, spec.stages)
        self.feed = JobFeed()
        self.commands = CommandQueue()
        self.choices: tuple[Wait, ...] = ()
        self.baseline: Baseline | None = None
        self.lead = JobLead()
        self._store = store
        self._want_plan = want_plan
        self._on_generation = on_generation
        self._clock = clock
        self._ticked = clock()
        self._published_generation = 0
        self._doubtful = False  # may the database hold another state than this object?

    def ask_for(self, failed: tuple[str, ...]) -> None:
        """Has the plan made elsewhere."""
        self.plans.asked_for = failed
        self._want_plan(self, failed)

    def plan_missing(self) -> tuple[str, ...] | None:
        """What a pending generation waits for, if nobody makes it: its answer could not be stored, say."""
        pending = self.state.pending
        return pending.failed if pending and pending.until is None and self.plans.asked_for is None else None

    def _answered(self, answer: PlanReady | PlanRefused, plan: Plan | None) -> None:
        self.apply(answer, plan=plan)

    @property
    def paused(self) -> bool:
        """Has an operator asked all workers to stop, and nobody yet to go on?"""
        return self.commands.paused_at is not None and not self.state.over

    @property
    def waits(self) -> tuple[Wait, ...]:
        """When it waited for a person: for a choice, or for the end of a pause."""
        return *self.choices, *pauses(self.commands.held)

    @property
    def stopped(self) -> frozenset[str]:
        """Who has said, since an operator asked for it, that it waits before an iteration."""
        since = self.commands.paused_at
        if since is None or self.state.over:
            return frozenset()
        return self.measurements.stopped(since, self.state.members)

    @property
    def plan_run(self) -> PlanRun | None:
        """What its workers run; None before the first generation."""
        state = self.state
        if (current := state.current) is None:
            return None
        if (interim := state.interim) is not None and interim.plan_fingerprint:
            return PlanRun(interim.plan_fingerprint, current.number, interim.failed, INTERIM)
        words = SOON if interim is not None else LAST if state.over else IN_FORCE
        return PlanRun(current.plan_fingerprint, current.number, current.failed, words)

    def worker_states(self, rerouted: Mapping[str, int] | None = None) -> WorkerStates:
        """Which process holds which role, and how each is. rerouted: by the plan that they run."""
        return WorkerStates(
            self.state,
            self.processes,
            self.paused,
            rerouted or {},
            self.measurements.slow,
            self.stopped,
            self.state.choosing,
            time.time(),
        )

    @property
    def quiet(self) -> bool:
        """Is it over, and nothing heard since that would have to be taken?"""
        return bool(self.state.over) and not self.measurements.fresh

    # -- events -----------------------------------------------------------------------------

    def apply(
        self,
        event: Event,
        *,
        beside: Sequence[IncomingReport] = (),
        plan: Plan | None = None,
        audit: Record | None = None,
        now: float | None = None,
        sender: LeadTerm | None = None,
    ) -> str:
        """Takes one event, stores what follows from it, and returns the reason.

        beside: the report of the event, if it is one. audit: a row that is stored if the event is
        accepted. plan: the one that a PlanReady speaks of. now: when it happened; None: at this moment. sender: see
        `taking`. Raises ConsoleError when the event is refused or can't be stored; then nothing has changed.
        """
        with self.taking(sender):
            old, now = self.state, self._clock() if now is None else now
            step = coordinator.step(old, event, now, self.failure_timeouts)
            if step.refusal:
                raise refused(step.refusal.code, step.refusal.detail)
            if (step.state is old or step.passing) and not (step.decisions or beside or audit):
                self.state = step.state  # as most ticks: nothing to look for among thousands of workers
                return step.reason
            decisions, wanted = list(step.decisions), None
            state, reason = step.state, step.reason
            for need in [d for d in step.decisions if isinstance(d, NeedPlan)]:
                self.plans.cut(need.partition)
                found = self.plans.plan_now(need.failed)
                if found is None:
                    wanted = need.failed
                    continue
                answer, plan = found
                step = coordinator.step(state, answer, now, self.failure_timeouts)
                decisions += step.decisions
                state, reason = step.state, step.reason
            change = self._take(old, state, decisions, plan, beside, audit)
        self._publish(change)
        if wanted is not None:
            self.ask_for(wanted)
        if change.generation:
            self._on_generation(self)
        return reason

    def apply_all(self, reports: Sequence[IncomingReport], sender: LeadTerm | None = None) -> list[str | ConsoleError]:
        """Takes reports as `apply` would take each, with few transactions; the reason or the error of each.

        Raises ConsoleError where the database fails: nobody knows which are stored, and all are to be sent again; and
        where another node leads than the one that sends them.
        """
        out: list[str | ConsoleError] = []
        while left := reports[len(out) :]:
            try:
                out += self._apply_quiet(left, sender) or [self.apply(left[0].event, beside=left[:1], sender=sender)]
            except ConsoleError as error:
                if error.status == 503 or error.code == DEPOSED:
                    raise
                out.append(error)
        return out

    def _apply_quiet(self, reports: Sequence[IncomingReport], sender: LeadTerm | None) -> list[str | ConsoleError]:
        """Those up to the first that asks for a plan, in one transaction. Raises ConsoleError if it fails."""
        with self.taking(sender):
            state, notes, answers = run_together(self.state, reports, self._clock(), self.failure_timeouts)
            taken = [report for report, answer in zip(reports, answers, strict=False) if isinstance(answer, str)]
            change = self._take(self.state, state, notes, None, taken, None)
        self._publish(change)
        return [refused(answer.code, answer.detail) if isinstance(answer, Refuse) else answer for answer in answers]

    def _publish(self, change: JobUpdate) -> None:
        if change:
            self.topic.publish()
        if self._published_generation != self.state.generation:
            self._published_generation = self.state.generation
            self.generation_topic.publish()

    def heard(self, beat: Heartbeat) -> int:
        """Takes a heartbeat, without lock or database; returns the newest generation.

        Raises ConsoleError for an unknown or fenced worker.
        """
        self.sender(beat.worker, beat.incarnation)
        self.measurements.fresh.append((beat, self._clock()))
        return self.state.generation

    def sender(self, worker: str, incarnation: str) -> Member:
        """Whose report it is that comes from `incarnation`, as `worker`: one that was given another place may
        not know it yet. Raises ConsoleError for an unknown or fenced one."""
        state = self.state
        member = membership.holder(state, worker, incarnation)
        if member is None:
            raise ConsoleError(404, "unknown_worker", membership.no_such_worker(state, worker))
        if not membership.counts(member, incarnation):
            raise ConsoleError(409, "fenced", membership.fenced_text(member, incarnation))
        return member

    def writer(self, worker: str, incarnation: str) -> Member:
        """As `sender`, of what a process has written: one that is out of the job wrote last why."""
        member = membership.holder(self.state, worker, incarnation)
        known = member is not None and incarnation in member.incarnations
        return member if member is not None and known else self.sender(worker, incarnation)

    # -- which node leads -------------------------------------------------------------------

    def heard_lead(self, sender: LeadTerm) -> None:
        """The launcher that leads, of several nodes, asks something. Raises ConsoleError when another leads since."""
        if not self.lead.heard(sender):
            with self.writing():
                if not self.lead.heard(sender):
                    self._store_lead(sender)

    @contextmanager
    def taking(self, sender: LeadTerm | None) -> Iterator[None]:
        """As `writing`, for what the launcher that led in `sender` has sent: it may have waited for a thread since it
        came, and counts only if that launcher still leads. None: of a job on one node. Raises ConsoleError."""
        with self.writing():
            if sender is not None:
                self.heard_lead(sender)
            yield

    def claim_lead(self, wanted: LeadTerm, after: int, *, ask: bool) -> tuple[bool, str]:
        """One that too few others follow would lead; see LeadClaim. Whether it may, and why."""
        with self.writing():
            granted, reason = self.lead.may_take(wanted, after, self.failure_timeouts.dead)
            if self.state.over:
                granted, reason = False, f"the job is {self.state.over}"
            if granted and not ask and wanted != self.lead.newest:
                self._store_lead(wanted)
        if granted and not ask:
            log.warning("another node leads a job", job=self.job_id, node=wanted.node, term=wanted.term, reason=reason)
        return granted, reason

    def _store_lead(self, lead: LeadTerm) -> None:
        if not self._store.take_lead(self.job_id, lead.term, lead.node, self.lead.newest.term):
            self._doubtful = True
            raise ConsoleError(503, "unavailable", "another node has taken the lead of the job meanwhile; try again")
        self.lead.read(lead.term, lead.node)
        self.version += 1
        log.info("a node leads a job", job=self.job_id, node=lead.node, term=lead.term)

    def tick(self) -> None:
        """Takes the heartbeats that came in, then looks for those that did not.

        Time in which the console did not get to run is nobody's silence: how long that was is known when the moment
        is taken that silences are counted to, and not before.
        """
        self.take_heartbeats()
        if self.state.over:
            return
        now = self._clock()
        late = now - self._ticked - TICK_SECONDS
        self.lead.wait(min(now - self._ticked, 2 * TICK_SECONDS))
        if late > self.failure_timeouts.heartbeat:
            self.apply(Stalled(late), now=now)
        self._ticked = now
        self.apply(Tick(), now=now)

    def take_heartbeats(self) -> None:
        """Gives the coordinator, and the next write to the database, what came in since the last call."""
        if beats := self.measurements.take():
            self.apply(HeartbeatsReceived(beats))

    # -- storing ----------------------------------------------------------------------------

    def record(self, *notes: Note, audit: Record | None = None) -> None:
        """Stores lines of the event feed that come from no step of the coordinator."""
        with self.writing():
            events, repeats = self.feed.split(notes, time.time())
            self._save(JobUpdate(events=events, audit=audit, repeats=repeats))
        self.topic.publish()

    def stored(self, events: int = 0) -> None:
        """Says that `events` numbered event rows have been stored."""
        self.feed.added(events)
        self.version += 1

    def pin(self, baseline: Baseline, note: Note | None = None, audit: Record | None = None) -> None:
        """What its throughput is measured by from now on. Raises ConsoleError."""
        with self.writing():
            events = self.feed.rows([note] if note else [])
            self._save(JobUpdate(job={"baseline": baseline.to_json()}, events=events, audit=audit))
            self.baseline = baseline
        self.topic.publish()

    def _take(
        self,
        old: State,
        new: State,
        decisions: Sequence[Decision],
        plan: Plan | None,
        reports: Sequence[IncomingReport],
        audit: Record | None,
    ) -> JobUpdate:
        """Stores that `old` has become `new`, and then has it so here."""
        now = time.time()
        before = old.members
        workers = [
            member_row(m) for name, m in new.members.items() if m is not before[name] and differs(m, before[name])
        ]
        # Most reports of a large job change nobody's role, and everybody's is looked at for those that do.
        spare, restarts = spares_of(reports), restarts_of(reports)
        changed, states = dict[str, ProcessState](), list[Record]()
        if workers or spare or restarts:
            changed = follow(self.processes, old, new, processes_of(reports), now, spare, restarts)
        known = {**self.processes, **changed} if changed else self.processes
        if workers or changed:
            states = state_rows(WorkerStates(old, self.processes), WorkerStates(new, known), now)
        rows = {row["name"]: row for row in workers}
        changed_rows, known = process_rows(known, changed)
        for row in changed_rows:
            rows.setdefault(row["name"], {}).update(row)
        choices = after_change(self.choices, new.choosing, new.generation + 1 if new.pending else new.generation, now)
        opened = next((d.generation for d in decisions if isinstance(d, OpenGeneration)), None)
        later = later_columns(old, new)
        events, repeats = self.feed.split((d for d in decisions if isinstance(d, Note)), now)
        change = JobUpdate(
            job=job_columns(old, new) | (waits_row(choices) if choices != self.choices else {}),
            workers=list(rows.values()),
            plan=(plan.fingerprint, storable(plan), plan.failed, False) if (opened or later) and plan else None,
            generation=generation_row(opened) if opened else None,
            later=later,
            events=events,
            # Of a job that is over none counts any more.
            acknowledgements=[dict(r.acknowledgement) for r in reports if r.acknowledgement and not old.over],
            audit=audit,
            states=states,
            repeats=repeats,
        )
        self._save(change)
        self.state, self.processes, self.choices = new, known, choices
        return change

    def _save(self, change: JobUpdate) -> None:
        """Raises ConsoleError (404) where the job was deleted since whoever changes it has found it."""
        if change:
            if not self._store.apply(self.job_id, change):
                raise unknown_job(self.job_id)
            self.feed.stored(change.events, change.repeats)
            self.version += 1

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The lock, for whoever changes what is stored of the job: what is in memory is what the database has.

        Raises ConsoleError when the database fails.
        """
        with self.lock:
            if self._doubtful:
                self._read_again()
            try:
                yield
            except SQLAlchemyError as error:
                # The database may have taken it all the same, and only its answer was lost.
                self._doubtful = True
                raise unavailable(error) from error

    # -- reading back -----------------------------------------------------------------------

    def restore(self, job_row: Record) -> None:
        """Takes the job up where the database says it was."""
        self._read(job_row)
        self.measurements.read(self._store.workers(self.job_id))
        if not self.state.over:
            for row in self._store.job_plans(self.job_id):
                try:
                    if (plan := stored_plan(self._store, row["fingerprint"])) is not None:
                        self.plans.take_plan(plan)
                except PlannerError as error:
                    log.warning("a stored plan is not used", job=self.job_id, reason=str(error))
            self.apply(ConsoleRestarted())

    def _read_again(self) -> None:
        try:
            if (row := self._store.job(self.job_id)) is None:
                raise unknown_job(self.job_id)
            self._read(row)
        except SQLAlchemyError as error:
            raise unavailable(error) from error
        self._doubtful = False
        if not self.state.over:
            self.apply(ConsoleRestarted("the database failed for a while; the job was read back from it"))

    def _read(self, job_row: Record) -> None:
        store, job_id = self._store, self.job_id
        state = read_state(store, job_row, self.spec, self.plans.nominal.home)
        self.feed.read(store.last_event(job_id), store.events(job_id, limit=LOOK_BACK, newest=True))
        self.commands.read(store.commands(job_id))
        self.choices, self.baseline = read_waits(job_row["waits"]), read_baseline(job_row["baseline"])
        self.processes = read_processes(store.workers(job_id))
        self.lead.read(job_row["lead_term"], job_row["lead_node"])
        self.version += 1
        self.plans.cut(state.current.partition if state.current else ())
        self.state = state

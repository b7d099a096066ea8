"""What people see of jobs: plain data for the pages and the API. `Queries` is a part of ConsoleService.

The data is made here and drawn by app.ui. `RollOuts` tells how far each worker has taken up the newest generation's
plan.

Times: `*_at` are POSIX seconds (wall clock, for display); `*_age` are seconds by the monotonic clock of the console.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from statistics import median
from typing import Annotated, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, Field

from openrecycle.agent.coordination.membership import ACK_ORDER, FailureTimeouts, LetGo, Member, State
from openrecycle.agent.messages.protocol import Doing, JobSpec, JobState, LogLine, OpKind, WorkerState
from openrecycle.app.jobs.live_job import LiveJob, Row, changes
from openrecycle.app.jobs.states import (
    HOLDING,
    OUT,
    Condition,
    JobSummary,
    ProcessState,
    Rank,
    RankState,
    RoleState,
    WorkerStates,
    sentence,
)
from openrecycle.app.jobs.throughput import (
    Figures,
    IterationView,
    Waited,
    iteration_view,
    pace,
    segments,
    share_of,
    unit_seconds,
)
from openrecycle.app.plans.library import PlanCache
from openrecycle.app.runtime.errors import damaged_plan, plain, storing, unknown_plan, unknown_worker
from openrecycle.app.runtime.processes import Seldom
from openrecycle.db.store import Record, Store
from openrecycle.planner.jobs.job import SECONDS, Worker
from openrecycle.planner.plans.packed import check_whole
from openrecycle.planner.plans.plan import Plan, PlanError

# -- how the newest generation's plan is taken up -----------------------------------------------


@dataclass(frozen=True)
class GenerationProgress:
    """How far a worker has taken up a generation: milliseconds from the opening of the generation until the console
    heard of each step; None: not yet."""

    worker: str
    adopted: float | None = None
    formed: float | None = None
    resumed: float | None = None

    @property
    def last(self) -> str:
        return [step for step, at in zip(ACK_ORDER, (0.0, *self.steps), strict=True) if at is not None][-1]

    @property
    def steps(self) -> tuple[float | None, float | None, float | None]:
        return self.adopted, self.formed, self.resumed


@dataclass(frozen=True)
class RollOut:
    """How the plan of a generation is taken up. workers: in grid order. opened_at: POSIX seconds."""

    generation: int
    opened_at: float
    reason: str
    workers: tuple[GenerationProgress, ...]

    def now_at(self, step: str) -> int:
        """Returns how many workers have come to `step` and no further; "": that have not acknowledged anything."""
        return sum(w.last == step for w in self.workers)

    @property
    def done(self) -> bool:
        """Whether all workers train by the plan."""
        return self.now_at("resumed") == len(self.workers)

    def slowest_first(self) -> list[GenerationProgress]:
        """Returns the workers, those that are furthest behind first; among equals, those that came last first."""
        never = float("inf")
        return sorted(
            self.workers, key=lambda w: [never if at is None else at for at in reversed(w.steps)], reverse=True
        )


class RollOuts:
    """The roll-outs of all jobs; one object per console. Thread-safe.

    A roll-out that is done is read from the database once, and one that goes on at each call.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._of: WeakKeyDictionary[LiveJob, RollOut] = WeakKeyDictionary()

    def of(self, job: LiveJob) -> RollOut | None:
        """Returns the roll-out of the newest generation; None before the first. Raises ConsoleError."""
        current = job.state.current
        if current is None:
            return None
        known = self._of.get(job)
        if known is not None and known.generation == current.number and known.done:
            return known
        with storing():
            if known is None or known.generation != current.number:
                row = self._store.generation(job.job_id, current.number)
                opened = row["opened_at"] if row else None
            else:
                opened = known.opened_at
            acknowledged = self._store.acknowledgements(job.job_id, current.number)
        if opened is None:
            return None
        at: dict[str, dict[str, float]] = {}
        for row in acknowledged:
            # By the process, since one that has moved may still report under the name of its former place.
            at.setdefault(row["incarnation"], {})[row["state"]] = max(0.0, 1000 * (row["at"] - opened))
        living = frozenset(current.living)
        members = (member for name, member in job.state.members.items() if name in living)
        workers = tuple(
            GenerationProgress(m.name, **next((at[i] for i in reversed(m.incarnations) if i in at), {}))
            for m in members
        )
        found = RollOut(current.number, opened, current.reason, workers)
        with self._lock:
            self._of[job] = found
        return found


# -- what people, pages and dashboards see of jobs ----------------------------------------------


@dataclass(slots=True)
class WorkerView:
    """A place of the grid, now: a role, and the process that holds it. heartbeat_age: seconds. takes_rerouted:
    micro-batches of other pipelines per iteration. slow: how many times its peers' op times the worker takes, if that
    is too long; else 0.

    host, pid, since (POSIX seconds), slot (the place that it was started for): of the process that holds the role, or
    of the last one if that ended in this role; "" and 0 if that process holds another role by now, which is moved_to.
    spare: how many of the process's ranks are spare.
    """

    # All fields are always there in an answer.
    __pydantic_config__ = ConfigDict(json_schema_serialization_defaults_required=True)

    # Nobody changes a view. The class is not frozen, as 8,192 of them may be made at each refresh: that takes a quarter
    # of the time of frozen ones.
    name: str
    pipeline: int
    stage: int
    state: RoleState
    takes_rerouted: int = 0
    heartbeat_age: float | None = None
    generation: int = 0
    iteration: int = 0
    phase: str = ""
    op_milliseconds: Mapping[OpKind, float] = field(default_factory=dict)
    resident_bytes: int = 0
    host: str = ""
    pid: int = 0
    acknowledged: str = ""
    detail: str = ""
    slow: float = 0.0
    doing: Annotated[Doing | None, Field(exclude=True)] = None  # for the pages alone
    since: float = 0.0
    slot: str = ""
    moved_to: str = ""
    spare: int = 0


@dataclass(frozen=True)
class EventView:
    """One line of the feed. severity: info, warning, error. kind: failure, generation, recovery, ...
    seen_by: who has taken note of it; empty: nobody yet. count: how often it was said, `last_at` the last time."""

    seq: int
    at: float
    severity: str
    kind: str
    worker: str | None
    text: str
    seen_by: str = ""
    count: int = 1
    last_at: float = 0.0


@dataclass(frozen=True)
class GenerationView:
    """A generation that opened, and why. Compared with the one before: lost: workers that died or were given up;
    let_go: workers that are out at somebody's wish; relayout: the partition differs; replanned: the same workers have
    another plan."""

    generation: int
    reason: str
    lost: tuple[str, ...] = ()
    let_go: tuple[LetGo, ...] = ()
    relayout: bool = False
    replanned: bool = False


@dataclass(frozen=True)
class RecoveryView:
    """The times of a recovery, in milliseconds after the death of `worker`, or after it was noticed if not death_known.
    steps: (words, milliseconds), which add up to the whole; the time in which it waited for a person is one of them."""

    worker: str
    generation: int
    detected_ms: float
    unblocked_ms: float
    reformed_ms: float
    resumed_ms: float
    at: float
    death_known: bool = True
    steps: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class JobView:
    """All that the page of one job shows.

    condition: of the job, in a word. sentence: what the coordinator does or waits for, and why. plan: the one that the
    workers run; plan_words: how the job uses it (app.jobs.live_job.PlanRun). missing: processes that have left the job
    and are not replaced. moved: processes that hold another role than at first.

    iterations: the newest ones, oldest first. generations: those from the first of these iterations to the last, 500 at
    most. recoveries: those of these generations, and the latest. events: the newest ones, newest first. figures: ETTR,
    goodput and the fault-free rate so far. advice: the best option without the workers that are out; None while none is
    known. held: layers per stage as the workers have them, () if stages can't be cut; coming: as they will have them,
    while layers move. spares: the spare ranks. suspect_seconds: silence after which this console suspects a worker.
    unstorable: the database takes nothing of the job at present.
    """

    job_id: str
    spec: JobSpec
    state: JobState
    sentence: str
    created_at: float
    generation: int
    workers: tuple[WorkerView, ...]
    plan: Plan | None
    iterations: tuple[IterationView, ...]
    events: tuple[EventView, ...]
    recoveries: tuple[RecoveryView, ...]
    generations: tuple[GenerationView, ...] = ()
    planned_ahead: int = 0
    plans_to_make: int = 0
    advice: str | None = None
    figures: Figures | None = None
    condition: Condition = Condition.RUNNING
    missing: tuple[ProcessState, ...] = ()
    moved: tuple[ProcessState, ...] = ()
    plan_words: str = ""
    held: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()
    spares: tuple[Rank, ...] = ()
    suspect_seconds: float = FailureTimeouts.suspect
    unstorable: bool = False


Made = TypeVar("Made")
# For jobs of SHARED workers and more, the views of the workers are made once a second, however many people look.
SHARED, SHARED_SECONDS = 256, 1.0
# They are made AT_ONCE at a time, with pauses: while another thread is at work, the event loop gets its turn once for
# each heartbeat, which is not often enough for thousands a second.
AT_ONCE, PAUSE_SECONDS = 256, 0.001
# How many of a job's newest iterations tell how long the unit of its plans is.
TIMED = 200
_MOST_GENERATIONS = 500


class _StoredHistory(NamedTuple):
    iterations: tuple[IterationView, ...]
    events: tuple[EventView, ...]
    recoveries: tuple[RecoveryView, ...]
    generations: tuple[GenerationView, ...]


def generation_views(rows: Sequence[Record]) -> tuple[GenerationView, ...]:
    """Makes the views of all generations but the first, which only serves for comparison. rows: of
    Store.all_generations."""
    return tuple(
        GenerationView(
            row["generation"],
            row["reason"],
            tuple(row["lost"]),
            tuple(starmap(LetGo, row["let_go"])),
            relayout=row["partition"] != before["partition"],
            replanned=row["plan_fingerprint"] != before["plan_fingerprint"] and row["failed"] == before["failed"],
        )
        for before, row in pairwise(rows)
    )


class _KeptView(NamedTuple):
    """A cached result, which is valid for the same key and until `until` (monotonic seconds)."""

    key: Hashable
    until: float
    made: Any


# At most about this many results are cached for a job, such as histories of several lengths.
MOST_KEPT = 10


def worker_view(job: LiveJob, member: Member, worker_states: WorkerStates) -> WorkerView:
    role = worker_states.role(member)
    process = role.process if role.process and role.process.role == role.name else None
    contact = job.measurements.contacts.get(member.name)
    beat = contact.beat if contact and contact.beat.incarnation == member.incarnation else None
    heard = job.last_heard(member)
    return WorkerView(
        name=member.name,
        pipeline=int(member.name[1:].partition("_")[0]),
        stage=member.stage,
        state=role.state,
        takes_rerouted=0 if role.state in OUT else worker_states.rerouted.get(member.name, 0),
        heartbeat_age=None if heard is None else max(0.0, time.monotonic() - heard),
        generation=max(0, member.generation),
        iteration=beat.iteration if beat else 0,
        phase=beat.phase if beat else "",
        op_milliseconds=beat.op_milliseconds if beat else {},
        resident_bytes=beat.resident_bytes if beat else 0,
        host=process.host if process else "",
        pid=process.pid if process else 0,
        acknowledged=member.acknowledged,
        detail=role.detail,
        slow=worker_states.slow.get(member.name, 0.0),
        since=process.since if process else 0.0,
        slot=process.slot if process else "",
        moved_to=role.moved_to,
        doing=beat.doing if beat else None,
        spare=sum(r.state is RankState.SPARE for r in worker_states.ranks(process)) if process and process.spare else 0,
    )


def _lives(member: Member, state: State) -> bool:
    """Says whether a member of the generation has not ended, or only with the job."""
    return member.state is not WorkerState.FAILED and (not member.closed or state.over is not None)


def summary(job: LiveJob, sentence: str) -> JobSummary:
    state = job.state
    living = state.current.living if state.current else ()
    return JobSummary(
        job_id=job.job_id,
        name=job.spec.name,
        state=state.job_state,
        sentence=sentence,
        created_at=job.created_at,
        generation=state.generation,
        living=sum(_lives(state.members[name], state) for name in living),
        workers=len(state.members),
        condition=job.worker_states().condition,
    )


EVENTS = 20
# Warnings and errors among so many of the newest events are shown as well, however many lines came after them.
SEVERE_AMONG = 20_000
# Workers in all generations that are read at once: each has its acknowledgements, and a job may have thousands.
GENERATION_ROWS = 32_768
_EVENT = ("seq", "at", "severity", "kind", "worker", "text", "count", "last_at")


def _event(row: Record, seen: Mapping[int, tuple[str, float]]) -> EventView:
    """Makes the view of an event. seen: by the number of an event, who has acknowledged it, and when."""
    return EventView(**{column: row[column] for column in _EVENT}, seen_by=seen.get(row["seq"], ("", 0.0))[0])


@dataclass(frozen=True)
class StateInterval:
    """The worker was in `state` from `begin` to `end` (POSIX seconds); the last stay ends now."""

    state: str
    begin: float
    end: float


@dataclass(frozen=True)
class OpTime:
    """The times of one op kind on a worker, in milliseconds. measured: smoothed. planned: None if the plan's unit is no
    time. peers: the median of the other living workers of its stage, None if there are none."""

    kind: str
    measured: float
    planned: float | None
    peers: float | None


@dataclass(frozen=True)
class WorkerDetail:
    """All that the dialog of one worker shows.

    op_times: in the order F, I, W, B, O. events: newest first. log: oldest first. activations: the most micro-batches
    whose activations it holds at once by the plan in force; None if the plan goes without it. held, coming: as in
    JobView. ranks: its processes, or its last ones, if it has several; made_of: the workers whose spare ranks these
    were. may_take: the bytes that were estimated for it before the start (JobSpec.stage_bytes); None: not known."""

    worker: WorkerView
    stays: tuple[StateInterval, ...]
    op_times: tuple[OpTime, ...]
    events: tuple[EventView, ...]
    log: tuple[LogLine, ...]
    activations: int | None
    held: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()
    ranks: tuple[Rank, ...] = ()
    made_of: tuple[str, ...] = ()
    may_take: int | None = None


def _op_times(job: LiveJob, view: JobView, worker: WorkerView) -> tuple[OpTime, ...]:
    own = job.measurements.op_times.smoothed(worker.name)
    others = [
        job.measurements.op_times.smoothed(w.name)
        for w in view.workers
        if w.stage == worker.stage and w.name != worker.name and w.state in HOLDING
    ]
    planned = _planned(view.plan, worker.name)
    made = []
    for kind in "FIWBO":
        if kind in own:
            peers = [times[kind] for times in others if kind in times]
            made.append(OpTime(kind, own[kind], planned.get(kind), median(peers) if peers else None))
    return tuple(made)


def _planned(plan: Plan | None, name: str) -> dict[str, float]:
    """Returns a worker's planned milliseconds by op kind; {} if the plan's unit is no time."""
    if plan is None or (second := SECONDS.get(plan.job.time_unit)) is None:
        return {}
    problem = plan.problem()
    ticks, unit = problem.worker_ticks(Worker.parse(name)), 1000 * second / problem.job.ticks_per_unit
    times = {"F": ticks.forward, "I": ticks.input_backward, "W": ticks.weight_backward, "O": ticks.optimizer}
    times["B"] = times["I"] + times["W"]
    return {kind: n * unit for kind, n in times.items()}


class Queries:
    """Answers what people want to know of jobs. Thread-safe. Every method raises ConsoleError for an unknown job, or
    when the database does not answer.

    find: a job by its id; raises ConsoleError. live: the jobs in memory; past: the lines of all others. plans: the
    stored plans. figures, waited, advice: what app.observing and app.advice say of a job.
    """

    def __init__(
        self,
        store: Store,
        failure_timeouts: FailureTimeouts,
        clock: Callable[[], float],
        *,
        find: Callable[[str], LiveJob],
        live: Callable[[], Iterable[LiveJob]],
        past: Callable[[], Mapping[str, JobSummary]],
        plans: PlanCache,
        figures: Callable[[LiveJob], Figures],
        waited: Callable[[LiveJob], Waited],
        advice: Callable[[LiveJob], str | None],
    ) -> None:
        self._store, self._failure_timeouts, self._clock = store, failure_timeouts, clock
        self.shared, self.shared_seconds = SHARED, SHARED_SECONDS
        """See SHARED and SHARED_SECONDS; tests set other values."""
        self._find, self._live, self._past = find, live, past
        self._plans, self._seldom = plans, Seldom()
        self._figures, self._waited, self._advice = figures, waited, advice
        self._seen: WeakKeyDictionary[LiveJob, dict[Hashable, _KeptView]] = WeakKeyDictionary()

    def list_jobs(self) -> list[JobSummary]:
        """Returns the lines of all jobs, newest first."""
        lines = {**self._past(), **{job.job_id: self._summary(job) for job in self._live()}}
        return sorted(lines.values(), key=lambda line: (-line.created_at, line.job_id))

    def _summary(self, job: LiveJob) -> JobSummary:
        # The line of a job that is over never changes, and there may be thousands of them. The line of a large job that
        # runs is made once a second, and whenever something is stored.
        over = bool(job.state.over)
        seconds = math.inf if over else self.shared_seconds if len(job.state.members) >= self.shared else 0.0
        return self._kept(job, "line", over or job.version, seconds, lambda: summary(job, self.sentence(job)))

    def _kept(self, job: LiveJob, what: Hashable, key: Hashable, seconds: float, make: Callable[[], Made]) -> Made:
        """Returns the cached result `what` if it was made for the same key, less than `seconds` ago; else makes it."""
        kept, now = self._seen.setdefault(job, {}), time.monotonic()
        known = kept.get(what)
        if known is not None and known.key == key and now < known.until:
            return known.made  # type: ignore[no-any-return]
        made = make()
        if len(kept) > MOST_KEPT:
            kept.clear()
        kept[what] = _KeptView(key, now + seconds, made)
        return made

    def view(self, job_id: str, iterations: int = 600, events: int = 200, *, workers: bool = True) -> JobView:
        """Returns the view of a job. iterations: how many at most. events: how many of the newest at most, and how many
        warnings and errors before them. workers: whether to include the views of the workers, which may be
        thousands."""
        job = self._find(job_id)
        with storing():
            figures, waited = self._figures(job), self._waited(job)
            state, run = job.state, job.plan_run
            fingerprint = run.fingerprint if run else None
            rerouted = self._plans.rerouted(fingerprint) if fingerprint else {}
            history = self._history(job, waited, iterations, events)
            worker_states = job.worker_states(rerouted)
            share = share_of(pace(history.iterations), figures)
            return JobView(
                job_id=job.job_id,
                spec=job.spec,
                state=state.job_state,
                sentence=self.sentence(job, worker_states, share),
                created_at=job.created_at,
                generation=state.generation,
                workers=self._workers(job, fingerprint, worker_states) if workers else (),
                plan=self._plans.get(fingerprint) if fingerprint else None,
                iterations=history.iterations,
                events=history.events,
                recoveries=history.recoveries,
                generations=history.generations,
                planned_ahead=job.plans.ahead.made,
                plans_to_make=job.plans.ahead.wanted,
                advice=self._advice(job),
                figures=figures,
                condition=worker_states.condition,
                missing=worker_states.missing,
                moved=worker_states.moved,
                plan_words=run.words if run else "",
                held=state.held,
                coming=state.current.partition if state.current and state.moving else (),
                spares=worker_states.spares,
                suspect_seconds=self._failure_timeouts.suspect,
                unstorable=bool(job.unstorable),
            )

    def _workers(self, job: LiveJob, fingerprint: str | None, worker_states: WorkerStates) -> tuple[WorkerView, ...]:
        """Returns the views of the workers, in grid order. For a large job they are made once a second, and whenever
        something is stored, for all who look."""
        members = worker_states.state.members
        if len(members) < self.shared:
            return tuple(worker_view(job, member, worker_states) for member in members.values())

        def made() -> Iterator[WorkerView]:
            for count, member in enumerate(members.values(), start=1):
                yield worker_view(job, member, worker_states)
                if count % AT_ONCE == 0:
                    time.sleep(PAUSE_SECONDS)

        return self._kept(job, "workers", (job.version, fingerprint), self.shared_seconds, lambda: tuple(made()))

    def _history(self, job: LiveJob, waited: Waited, iterations: int, events: int) -> _StoredHistory:
        """Returns a job's history, which is read again only after something was stored: many viewers share one read."""
        what = (iterations, events, tuple(waited.by_iteration))
        return self._kept(job, what, job.version, math.inf, lambda: self._read(job, waited, iterations, events))

    def _read(self, job: LiveJob, waited: Waited, iterations: int, events: int) -> _StoredHistory:
        feed = self._store.events(job.job_id, limit=events, newest=True)
        if feed and len(feed) == events:
            oldest, since = feed[-1]["seq"], feed[0]["seq"] - SEVERE_AMONG
            severe = self._store.events(job.job_id, after=since, limit=events, newest=True, severe=True)
            feed += [row for row in severe if row["seq"] < oldest]
        seen_by = self._store.seen_events(job.job_id, [row["seq"] for row in feed if row["severity"] != "info"])
        rows = self._store.iterations(job.job_id, limit=iterations, newest=True)
        # A job that opens many generations and commits little shows the newest ones only. Without an iteration none is
        # shown, since a generation is drawn at its first iteration.
        last = rows[-1]["generation"] if rows else 0
        since = max(rows[0]["generation"], last - _MOST_GENERATIONS) if rows else 0
        most = max(0, last - since + 1)
        return _StoredHistory(
            tuple(iteration_view(row, job.spec, waited) for row in rows),
            tuple(_event(row, seen_by) for row in feed),
            tuple(
                RecoveryView(**{k: v for k, v in row.items() if k != "job_id"}, steps=tuple(segments(row, waited)))
                for row in self._store.recoveries(job.job_id, after=max(0, since - 1))
            ),
            generation_views(self._store.all_generations(job.job_id, after=since - 1, limit=most)) if rows else (),
        )

    def worker_detail(self, view: JobView, name: str, now: float) -> WorkerDetail:
        """Returns all that is shown of one worker. now: POSIX seconds. Raises ConsoleError."""
        worker = next((w for w in view.workers if w.name == name), None)
        if worker is None:
            raise unknown_worker(name)
        job = self._find(view.job_id)
        states, known = job.worker_states(), job.processes
        role = states.roles[name]
        process = role.process if role.process and role.process.role == name else None
        with storing():
            rows = self._store.worker_states(job.job_id, name)
            events = self._store.events_of(job.job_id, name, limit=EVENTS)
            seen = self._store.seen_events(job.job_id, [e["seq"] for e in events])
        # A worker that has not registered yet has no row.
        ends = ([row["at"] for row in rows[1:]] + [now])[: len(rows)]
        return WorkerDetail(
            worker,
            tuple(
                StateInterval(row["state"], row["at"], max(end, row["at"])) for row, end in zip(rows, ends, strict=True)
            ),
            _op_times(job, view, worker),
            tuple(_event(row, seen) for row in events),
            job.measurements.logs.lines(name),
            view.plan.metrics.peak_activations.get(name) if view.plan else None,
            view.held,
            view.coming,
            states.ranks(process) if process else (),
            tuple(dict.fromkeys(known[whose].slot for whose, _ in process.made_of if whose in known))
            if process
            else (),
            job.spec.stage_bytes[worker.stage] if job.spec.stage_bytes else None,
        )

    def sentence(self, job: LiveJob, worker_states: WorkerStates | None = None, share: float | None = None) -> str:
        """Returns the sentence about a job. worker_states: if they are made already. share: see
        app.jobs.states.sentence."""
        states, now = worker_states or job.worker_states(), self._clock()
        still, unstorable = job.stood_still(now), job.unstorable
        return sentence(states, now, self._failure_timeouts, share=share, stood_still=still, unstorable=unstorable)

    def packed_plan(self, job_id: str, fingerprint: str) -> bytes:
        """Returns one of the job's plans as it is stored (planner.plans.packed). One that is damaged there is stored
        anew if the job runs it and has it in memory. Raises ConsoleError (404)."""
        self._check_plan_of(job_id, fingerprint)
        with storing():
            data = self._store.plan(fingerprint)
        if data is None:
            raise unknown_plan(fingerprint)
        try:
            check_whole(data, source=f"plan {fingerprint}")
        except PlanError as error:
            with storing():
                again = self._find(job_id).stored_again(fingerprint)
            self._seldom.warn("a stored plan is damaged", reason=str(error), job=job_id, stored_anew=again is not None)
            if again is None:
                raise damaged_plan(fingerprint, error) from None
            return again
        return data

    def job_plan(self, job_id: str, fingerprint: str) -> Plan:
        """Returns one of the job's plans. Raises ConsoleError (404)."""
        self._check_plan_of(job_id, fingerprint)
        return self._plans.plan(fingerprint)

    def _check_plan_of(self, job_id: str, fingerprint: str) -> None:
        self._find(job_id)
        with storing():
            if not self._store.is_plan_of(job_id, plain(fingerprint)):
                raise unknown_plan(fingerprint)

    def job_plans(self, job_id: str) -> list[Record]:
        """The job's plans, fewest failures first: fingerprint, failed, ahead, created_at."""
        self._find(job_id)
        with storing():
            return self._store.job_plans(job_id)

    def events(self, job_id: str, after: int, limit: int) -> list[Record]:
        self._find(job_id)
        with storing():
            return self._store.events(job_id, after=after, limit=limit)

    def iterations(self, job_id: str, after: int, limit: int) -> list[Record]:
        self._find(job_id)
        with storing():
            return self._store.iterations(job_id, after=after, limit=limit)

    def states(self, job_id: str, worker: str) -> list[Record]:
        """The newest changes of a worker's state, oldest first: state, at."""
        with storing():
            return self._store.worker_states(job_id, worker)

    def past_failures(self, job_id: str, seconds: float | None = None) -> tuple[tuple[Row, ...], float]:
        """Returns a job's failures and returns, for simulations, and how many seconds they cover.

        Each is (seconds since the first generation, worker, `failed` or `joined`), read off the generations. They cover
        the time until now, or the first `seconds`.
        """
        job = self._find(job_id)
        with storing():
            generations = self._store.all_generations(job_id)
        if not generations:
            return (), 0.0
        begin = generations[0]["opened_at"]
        rows = changes(generations, begin)
        iterations = self.iterations(job_id, after=max(-1, job.state.committed - 2), limit=1)
        last = iterations[-1]["committed_at"] if iterations else time.time()
        # In steps of ten seconds, so that a page that is opened again soon asks the same question.
        newest = generations[-1]["opened_at"]
        after = max(0.0, last - newest)  # added to the last row, whose time was shifted if the clock was put back
        ends = max(last - begin, newest - begin, *(row[0] + after for row in rows[-1:]), 0.0)
        covered = 10.0 * (ends // 10 + 1)
        if seconds is not None:
            covered = min(covered, seconds)
        return tuple(row for row in rows if row[0] <= covered), covered

    def unit_seconds(self, job_id: str) -> float | None:
        """Returns the real seconds of one time unit of the job's plans; None: no iteration tells."""
        self._find(job_id)
        with storing():
            iterations = self._store.iterations(job_id, limit=TIMED, newest=True)
            ran = {row["generation"] for row in iterations}
            plans = {
                row["generation"]: self._plans.get(row["plan_fingerprint"])
                for row in self._store.all_generations(job_id)
                if row["generation"] in ran
            }
        return unit_seconds(iterations, {number: plan.metrics.period for number, plan in plans.items() if plan})

    def generations(self, job_id: str, after: int = 0, limit: int = 1000) -> list[Record]:
        """Returns generations with a number > after with their acknowledgements, oldest first: `limit` at most, and
        fewer for a large job, since each of its workers has acknowledgements."""
        limit = min(limit, max(1, GENERATION_ROWS // len(self._find(job_id).state.members)))
        with storing():
            generations = self._store.generations(job_id, after=after, limit=limit)
            last = generations[-1]["generation"] if generations else 0
            acks = self._store.acknowledgements(job_id, after=after, last=last) if generations else []
        by_generation: dict[int, list[Record]] = {}
        for ack in acks:
            by_generation.setdefault(ack.pop("generation"), []).append({k: v for k, v in ack.items() if k != "job_id"})
        return [
            {
                **{k: v for k, v in e.items() if k != "job_id"},
                "acknowledgements": by_generation.get(e["generation"], []),
            }
            for e in generations
        ]

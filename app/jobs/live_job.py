"""One job in memory: the coordinator's state, its plans, what its workers said last, who leads it; and its rows.

The database is the truth: a step of the coordinator is stored before it can be seen from outside.
Readers take `job.state`, which is replaced as a whole, and need no lock.

The event feed: lines that say the same again and again are one line with a count, and when it was said last. On a
machine that is busy for an hour the console stands still every other minute, and workers fall silent and are heard
again: dozens of lines would hide the one that matters. Only such lines are folded, and only as long as nothing else
happens in the job: the feed stays in order.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import structlog
from pydantic import TypeAdapter
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination import coordinator, membership
from openrecycle.agent.coordination.blame import Links
from openrecycle.agent.coordination.membership import (
    ACK_ORDER,
    Broken,
    ConsoleRestarted,
    Decision,
    Event,
    Exited,
    FailureTimeouts,
    Generation,
    GenerationAcknowledged,
    HeartbeatsReceived,
    Interim,
    LeadTerm,
    Member,
    Mode,
    NeedPlan,
    Note,
    OpenGeneration,
    PendingGeneration,
    PlanReady,
    PlanRefused,
    Refuse,
    Release,
    Stalled,
    State,
    Tick,
    WorkerRegistered,
    back_to,
    may_speak_as_lead,
    may_take_lead,
)
from openrecycle.agent.messages.protocol import DEPOSED, Command, Heartbeat, JobSpec, JobState, WorkerState
from openrecycle.app.jobs.job_plans import JobPlans, LookUp, stored_plan
from openrecycle.app.jobs.measurements import JobMeasurements
from openrecycle.app.jobs.states import Arrival, PlannedRestart, ProcessState, WorkerStates, follow
from openrecycle.app.jobs.throughput import (
    Baseline,
    CommandQueue,
    Wait,
    after_change,
    pauses,
    read_baseline,
    read_waits,
)
from openrecycle.app.runtime.errors import ConsoleError, refused, unavailable, unknown_job
from openrecycle.app.runtime.notify import Topic
from openrecycle.db.store import JobUpdate, Record, Store
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.packed import storable
from openrecycle.planner.plans.plan import Plan

# -- the event feed of a job --------------------------------------------------------------------

KINDS = frozenset({"console", "worker"})
# A line that was not repeated for so long has come to its end: seconds.
WITHIN = 600.0
# So many of the newest lines may be folded into.
LOOK_BACK = 50

# What differs from one time to the next; not the digits of a worker's name.
_NUMBER = re.compile(r"(?<!\w)\d+(?:[.,]\d+)*")

Key = tuple[str, str, str | None, str]


class _FoldedLine(NamedTuple):
    seq: int
    times: int
    last_at: float


def _key(kind: str, severity: str, worker: str | None, text: str) -> Key | None:
    """Equal for lines that say the same; None for those that are never folded."""
    return (kind, severity, worker, _NUMBER.sub("#", text)) if kind in KINDS else None


class JobFeed:
    """What the next lines of one job's feed go by: the number of the newest line, and which may still be repeated.
    For whoever holds the job's lock; `last` may be read by anybody."""

    def __init__(self) -> None:
        self.last = 0
        self._lines: dict[Key, _FoldedLine] = {}

    def rows(self, notes: Iterable[Note]) -> list[Record]:
        """Numbered, of now."""
        now = time.time()
        return [{"seq": self.last + i, "at": now, **vars(note)} for i, note in enumerate(notes, start=1)]

    def split(self, notes: Iterable[Note], now: float) -> tuple[list[Record], list[Record]]:
        """Numbered rows of new lines; and rows (seq, count, last_at, text) of those that are repeated."""
        fresh: list[Note] = []
        repeats: dict[int, Record] = {}
        lines = dict(self._lines)
        for note in notes:
            key = _key(note.kind, note.severity, note.worker, note.text)
            line = None if key is None else lines.get(key)
            if key is None:
                lines.clear()
            if key is None or line is None or now - line.last_at > WITHIN:
                fresh.append(note)
                continue
            lines[key] = line._replace(times=line.times + 1, last_at=now)
            repeats[line.seq] = {"seq": line.seq, "count": line.times + 1, "last_at": now, "text": note.text}
        return self.rows(fresh), list(repeats.values())

    def stored(self, events: Sequence[Record], repeats: Sequence[Record]) -> None:
        """Such rows are in the database."""
        self.last += len(events)
        counted = {row["seq"]: row for row in repeats}
        for known, line in self._lines.items():
            if repeat := counted.get(line.seq):
                self._lines[known] = line._replace(times=repeat["count"], last_at=repeat["last_at"])
        for row in events:
            key = _key(row["kind"], row["severity"], row["worker"], row["text"])
            if key is None:
                self.unfold()
            else:
                self._lines[key] = _FoldedLine(row["seq"], 1, row["at"])
        newest = sorted(self._lines.items(), key=lambda item: item[1].seq)[-LOOK_BACK:]
        self._lines = dict(newest)

    def added(self, events: int) -> None:
        """So many numbered rows that are not to be repeated are in the database."""
        if events:
            self.unfold()
        self.last += events

    def unfold(self) -> None:
        """What was said so far has been seen, or something else has happened: said again, it is a new line."""
        self._lines = {}

    def read(self, last: int, newest: Iterable[Record]) -> None:
        """As the database has it. newest: the newest LOOK_BACK rows, newest first."""
        self.last, self._lines = last, {}
        for row in newest:
            key = _key(row["kind"], row["severity"], row["worker"], row["text"])
            if key is None:
                break
            self._lines.setdefault(key, _FoldedLine(row["seq"], row["count"], row["last_at"]))


# -- who leads a job of several nodes -----------------------------------------------------------


class JobLead:
    """Of one job. `newest` is stored by whoever has it changed; the rest is of this console alone.

    unheard: seconds since the newest lead was heard, that this console itself was at work: one that stood still, or has
    just started, has not waited for anybody.
    """

    def __init__(self) -> None:
        self.newest = LeadTerm()
        self.unheard = 0.0

    def read(self, term: int, node: int) -> None:
        if (stored := LeadTerm(term, node)) != self.newest:
            self.newest, self.unheard = stored, 0.0

    def heard(self, sender: LeadTerm) -> bool:
        """False: it is of a later term, which is to be stored first. Raises ConsoleError for one that leads no more."""
        speaks, reason = may_speak_as_lead(self.newest, sender)
        if not speaks:
            raise ConsoleError(409, DEPOSED, reason)
        if sender != self.newest:
            return False
        self.unheard = 0.0
        return True

    def may_take(self, wanted: LeadTerm, after: int, borne: float) -> tuple[bool, str]:
        return may_take_lead(self.newest, wanted, after, self.unheard, borne)

    def wait(self, seconds: float) -> None:
        """So long this console has been at work."""
        self.unheard += seconds


# -- between the coordinator's objects and the rows of the database -----------------------------

# Of the processes that were started for one place, the newest so many.
KEPT = 16


def differs(a: Member, b: Member) -> bool:
    """Is there a change to store? `last_heard` alone is none."""
    return (a.state, a.incarnation, a.generation, a.draining, a.detail, a.retired, a.leaving, a.let_go) != (
        *(b.state, b.incarnation, b.generation, b.draining, b.detail, b.retired, b.leaving, b.let_go),
    )


def member_row(member: Member) -> Record:
    """The worker columns that the coordinator decides on."""
    return {
        "name": member.name,
        "state": member.state.value,
        "incarnation": member.incarnation,
        "retired": json.dumps(member.retired),
        "member_generation": member.generation,
        "draining": member.draining,
        "detail": member.detail,
        "leaving": member.leaving,
        "let_go": json.dumps(member.let_go),
    }


_RELEASE: TypeAdapter[Release | None] = TypeAdapter(Release | None)


def read_member(row: Record, stage: int, acknowledged: dict[str, str]) -> Member:
    incarnation, state = row["incarnation"], WorkerState(row["state"])
    said = acknowledged.get(incarnation, "")
    return Member(
        name=row["name"],
        stage=stage,
        state=state,
        incarnation=incarnation,
        retired=tuple(json.loads(row["retired"])),
        generation=row["member_generation"],
        acknowledged="" if state is WorkerState.FAILED else said,  # type: ignore[arg-type]
        last_heard=0.0 if incarnation else None,  # ConsoleRestarted sets it to now
        draining=row["draining"],
        detail=row["detail"],
        leaving=row["leaving"],
        let_go=_RELEASE.validate_json(row["let_go"]),
    )


def job_columns(old: State, new: State) -> Record:
    """Those of the job's row that changed."""
    row: Record = {}
    if new.job_state != old.job_state or new.halted != old.halted:
        row = {"state": new.job_state.value, "reason": new.halted or new.over_reason, "unheard": new.unheard}
    if (new.mode, new.choice_timeout) != (old.mode, old.choice_timeout):
        row |= {"mode": new.mode.value, "choice_timeout": new.choice_timeout}
    if new.frozen_by != old.frozen_by:
        row |= {"frozen_by": new.frozen_by}
    if (new.broken, new.links) != (old.broken, old.links):
        row |= {"broken": _broken_text(new)}
    if (moves := _moves_text(new)) != _moves_text(old):
        row |= {"moves": moves}
    return row


_BROKEN: TypeAdapter[tuple[Broken | None, Links]] = TypeAdapter(tuple[Broken | None, Links])


def _broken_text(state: State) -> str:
    """The transfer that waits for its explanation, and what is remembered of links that broke; "": neither."""
    known = state.broken, state.links
    return "" if known == (None, Links()) else _BROKEN.dump_json(known).decode()


def read_broken(text: str) -> tuple[Broken | None, Links]:
    """What `_broken_text` wrote, at the beginning of another clock."""
    broken, links = _BROKEN.validate_json(text) if text else (None, Links())
    return broken and replace(broken, since=0.0), links


def _moves_text(state: State) -> str:
    return json.dumps(state.pending.moves if state.pending else ())


def _read_pending(row: Record) -> PendingGeneration | None:
    """A generation that was to open is worked out anew; of its moves nobody but the database knows."""
    moves = tuple((source, to) for source, to in json.loads(row["moves"]))
    return PendingGeneration((), (), (), "", moves) if moves else None


def generation_row(generation: Generation) -> Record:
    return {
        "generation": generation.number,
        "plan_fingerprint": generation.plan_fingerprint,
        "living": generation.living,
        "failed": generation.failed,
        "joining": generation.joining,
        "moves": generation.moves,
        "restore": generation.restore,
        "reason": generation.reason,
        "partition": generation.partition,
        "let_go": generation.let_go,
        "lost": generation.lost,
        "opened_at": time.time(),
    }


_GENERATION: TypeAdapter[Generation] = TypeAdapter(Generation)


def read_generation(row: Record) -> Generation:
    without, plan = tuple(row["interim_failed"]), row["interim_plan"]
    interim = Interim(plan, without) if without or plan else None
    return _GENERATION.validate_python({**row, "number": row["generation"], "interim": interim})


def later_columns(old: State, new: State) -> list[tuple[int, Record]]:
    """What is known of a generation after it has opened: the interim plan that it runs, and since when the workers have
    its layers. Numbers, and the columns that changed."""
    found = list[tuple[int, Record]]()
    current = new.current
    known = old.current.interim if old.current else None
    if current and current.interim and old.generation == current.number and current.interim != known:
        interim = current.interim
        found.append((current.number, {"interim_plan": interim.plan_fingerprint, "interim_failed": interim.failed}))
    if new.moved != old.moved:
        number, iteration = new.moved
        found.append((number, {"moved_at": iteration}))
    return found


def read_state(store: Store, job_row: Record, spec: JobSpec, partition: tuple[int, ...] = ()) -> State:
    """What the database says of a job; nobody has been heard in it yet. partition: layers per stage at its start."""
    job_id = job_row["id"]
    newest = store.newest_generation(job_id)
    current = read_generation(newest) if newest else None
    acknowledged: dict[str, str] = {}  # by incarnation: a process may still use the name it had
    for row in store.acknowledgements(job_id, current.number) if current else ():
        key = row["incarnation"]
        acknowledged[key] = max(acknowledged.get(key, ""), row["state"], key=ACK_ORDER.index)  # type: ignore[arg-type]
    returns = back_to(spec.checkpoints, spec.max_restarts)
    state = State.new(spec.pipelines, spec.stages, spec.iterations, back_to=returns, partition=partition)
    if moved := store.newest_move(job_id) if partition else None:
        state = replace(state, held=tuple(moved["partition"]), moved=(moved["generation"], moved["moved_at"]))
    members = dict(state.members)
    for row in store.workers(job_id):
        members[row["name"]] = read_member(row, members[row["name"]].stage, acknowledged)
    over = JobState(job_row["state"]) if job_row["state"] in ("finished", "stopped") else None
    broken, links = read_broken(job_row["broken"])
    return replace(
        state,
        members=members,
        current=current,
        committed=store.committed_iterations(job_id),
        halted=job_row["reason"] if job_row["state"] == "halted" else "",
        unheard=job_row["unheard"] and job_row["state"] == "halted",
        over=over,
        over_reason=job_row["reason"] if over else "",
        mode=Mode(job_row["mode"]),
        choice_timeout=job_row["choice_timeout"],
        frozen_by=job_row["frozen_by"],
        broken=broken,
        links=links,
        pending=_read_pending(job_row),
    )


def waits_row(waits: Sequence[Wait]) -> Record:
    return {"waits": json.dumps(waits)}


def state_rows(old: WorkerStates, new: WorkerStates, at: float) -> list[Record]:
    """Which role came into another state. at: POSIX seconds."""
    rows: list[Record] = []
    if new.state.current is None and not new.state.over:
        return rows  # nobody trains yet
    for name, member in new.state.members.items():
        before = old.state.members[name]
        # A role that its process has left is another's matter: it is empty once that has ended elsewhere.
        left = member.state is WorkerState.FAILED and member.incarnation is None
        if (member is not before or left) and (state := new.role(member).state) is not old.role(before).state:
            rows.append({"worker": name, "state": state.value, "at": at})
    return rows


# By name, without what is as usual: fields may come and go, and there is a list for each of thousands of places.
_PROCESSES: TypeAdapter[list[ProcessState]] = TypeAdapter(list[ProcessState])


def process_rows(
    known: Mapping[str, ProcessState], changed: Mapping[str, ProcessState]
) -> tuple[list[Record], dict[str, ProcessState]]:
    """The worker columns of the places that processes were started for, where one of those has changed; and those that
    are known from then on."""
    of: dict[str, list[ProcessState]] = {process.slot: [] for process in changed.values()}
    for process in known.values() if of else ():
        if process.slot in of:
            of[process.slot].append(process)
    rows, left = [], dict(known)
    for slot, own in of.items():
        # What became of the oldest nobody asks for any more.
        gone = {p.incarnation for p in own[:-KEPT] if p.ended}
        kept = [p for p in own if p.incarnation not in gone]
        text = _PROCESSES.dump_json(kept, exclude_defaults=True).decode()
        rows.append({"name": slot, "processes": text})
        for incarnation in gone:
            del left[incarnation]
    return rows, left


def read_processes(rows: Iterable[Record]) -> dict[str, ProcessState]:
    """By incarnation, those that came first first."""
    found = [process for row in rows for process in _PROCESSES.validate_json(row["processes"])]
    return {process.incarnation: process for process in sorted(found, key=lambda p: p.since)}


# -- past failures and returns, out of the rows: what a simulation can be run on ------------------------

Row = tuple[float, str, str]


def changes(generations: Iterable[Record], begin: float = 0.0) -> list[Row]:
    """(seconds since `begin`, worker, `failed` or `joined`) of a job's generations, oldest first. None is earlier than
    the one before: where the clock was put back meanwhile, it goes on from there.

    A worker that changes its stage is neither: the failure goes on at the place that it gave up, under
    the name that it began with.
    """
    rows: list[Row] = []
    at, put_back = -math.inf, 0.0
    failed: set[str] = set()
    began_as: dict[str, str] = {}  # place that is out -> where that failure began
    for generation in generations:
        opened, now = generation["opened_at"] - begin, set(generation["failed"])
        put_back = max(put_back, at - opened)
        at = opened + put_back
        for source, to in generation["moves"]:
            if to in failed and to not in now and source in now and source not in failed:
                failed = failed - {to} | {source}
                began_as[source] = began_as.pop(to, to)
        rows += [(at, worker, "failed") for worker in sorted(now - failed)]
        rows += [(at, began_as.pop(worker, worker), "joined") for worker in sorted(failed - now)]
        failed = now
    return rows


def repair_times(rows: Iterable[Row]) -> list[float]:
    """Seconds from each failure to the return, of those that have come back; where the clock was put back just then,
    nobody knows them."""
    times: list[float] = []
    since: dict[str, float] = {}
    for at, worker, what in rows:
        if what == "failed":
            since[worker] = at
        elif worker in since and (seconds := at - since.pop(worker)) > 0:
            times.append(seconds)
    return times


# -- one job in memory --------------------------------------------------------------------------

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
            back_to=back_to(spec.checkpoints, spec.max_restarts),
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
        self._refused = ""

    def ask_for(self, failed: tuple[str, ...]) -> None:
        """Has the plan made elsewhere."""
        self.plans.asks_for(failed)
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

    def last_heard(self, member: Member) -> float | None:
        """When its process was heard last, in monotonic seconds; None: never. A console that has begun anew judges
        nobody by the time before; what it shows is as old as it is."""
        contact = self.measurements.contacts.get(member.name)
        if contact is not None and contact.beat.incarnation == member.incarnation:
            return contact.heard
        # In a job that is over it judges nobody at all, and `last_heard` says nothing.
        return None if self.state.over else member.last_heard

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

    def asked(self, command: Command) -> None:
        """By an operator, just now; it is stored."""
        self.commands.add(command, time.time(), self._clock())

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
        self.lead.wait(min(now - self._ticked, 2 * TICK_SECONDS))
        if late := self.stood_still(now):
            self.apply(Stalled(late), now=now)
        self._ticked = now
        self.apply(Tick(), now=now)

    def stood_still(self, now: float) -> float:
        """Seconds for which the console has not looked at it, though it should have; 0: none to speak of."""
        late = now - self._ticked - TICK_SECONDS
        return late if late > self.failure_timeouts.heartbeat and not self.state.over else 0.0

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
        spare = {r.event.incarnation: r.spare for r in reports if r.spare}
        restarts = {r.event.incarnation: (r.event.worker, r.restart) for r in reports if r.restart}
        changed, states = dict[str, ProcessState](), list[Record]()
        if workers or spare or restarts:
            came = {r.event.incarnation: r.process for r in reports if r.process}
            changed = follow(self.processes, old, new, came, now, spare, restarts)
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
                refused = unavailable(error)
                self._refused = refused.detail if refused.status == 503 else ""
                raise refused from error

    @property
    def unstorable(self) -> str:
        """Why nothing of it can be stored at present, in words; empty: it can. Of a job that is paused there is nothing
        to be stored but heartbeats."""
        return (self._refused if self._doubtful else self.measurements.refused).partition("; ")[0]

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
        # As ConsoleRestarted has it, which may not be stored for long.
        self.state = state.with_heard(
            {n: m if m.last_heard is None else replace(m, last_heard=self._clock()) for n, m in state.members.items()}
        )

"""One job in the console's memory (`LiveJob`), and the conversion between it and its rows in the database.

A LiveJob owns the job's membership (the coordinator's state), its event feed and its lead. Its other parts, such as
plans and measurements, own theirs. The database is the truth: a step of the coordinator is stored before anybody can
see it. Readers take `job.state`, which is replaced as a whole, and need no lock.

The event feed folds lines that say the same again and again into one line with a count and the time of the last one.
On a machine that is busy for an hour the console stands still every other minute, and workers fall silent and are
heard again: dozens of lines would hide the one that matters. Only such lines are folded, and only as long as nothing
else happens in the job, so that the feed stays in order.
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
from itertools import groupby
from typing import Any, Literal, NamedTuple, cast

import structlog
from pydantic import TypeAdapter
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination import coordinator, membership
from openrecycle.agent.coordination.blame import Links
from openrecycle.agent.coordination.generations import moves_of
from openrecycle.agent.coordination.membership import (
    ACK_ORDER,
    STATELESS,
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
    LastHeartbeat,
    LeadTerm,
    Member,
    Mode,
    NeedPlan,
    Note,
    OpenGeneration,
    OpRaised,
    PendingGeneration,
    PlanReady,
    PlanRefused,
    Refuse,
    Release,
    Stalled,
    State,
    StateLost,
    Tick,
    TransferBroken,
    Transition,
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
from openrecycle.planner.plans.packed import packed
from openrecycle.planner.plans.plan import Plan

# -- the event feed of a job --------------------------------------------------------------------

# Only lines of these kinds are folded.
KINDS = frozenset({"console", "worker"})
# A line that was not repeated for this many seconds is not folded into any more.
WITHIN = 600.0
# Only this many of the newest lines may be folded into.
LOOK_BACK = 50

# The numbers by which repeated lines differ; the digits in a worker's name are not among them.
_NUMBER = re.compile(r"(?<!\w)\d+(?:[.,]\d+)*")

Key = tuple[str, str, str | None, str]


class _FoldedLine(NamedTuple):
    seq: int
    times: int
    last_at: float


def _key(kind: str, severity: str, worker: str | None, text: str) -> Key | None:
    """Returns a key that is equal for lines that say the same, or None for a line that is never folded."""
    return (kind, severity, worker, _NUMBER.sub("#", text)) if kind in KINDS else None


class JobFeed:
    """The end of one job's event feed: the number of the newest line, and the lines that new ones may be folded into.

    Callers hold the job's lock; only `last` may be read without it.
    """

    def __init__(self) -> None:
        self.last = 0
        self._lines: dict[Key, _FoldedLine] = {}

    def rows(self, notes: Iterable[Note]) -> list[Record]:
        """Returns rows for `notes`, numbered after the newest line and dated now. Does not fold."""
        now = time.time()
        return [{"seq": self.last + i, "at": now, **vars(note)} for i, note in enumerate(notes, start=1)]

    def split(self, notes: Iterable[Note], now: float) -> tuple[list[Record], list[Record]]:
        """Sorts `notes` into rows of new lines and updates (seq, count, last_at, text) of earlier lines. `stored` takes
        note of both once the database has them."""
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
        """Notes that the rows that `split` returned are in the database."""
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
        """Notes that `events` more numbered rows are in the database, into which nothing is folded."""
        if events:
            self.unfold()
        self.last += events

    def unfold(self) -> None:
        """Ends folding into the lines so far, since somebody has seen them or something else has happened."""
        self._lines = {}

    def read(self, last: int, newest: Iterable[Record]) -> None:
        """Takes the feed's end from the database. newest: the newest LOOK_BACK rows, newest first."""
        self.last, self._lines = last, {}
        for row in newest:
            key = _key(row["kind"], row["severity"], row["worker"], row["text"])
            if key is None:
                break
            self._lines.setdefault(key, _FoldedLine(row["seq"], row["count"], row["last_at"]))


# -- who leads a job of several nodes -----------------------------------------------------------


class JobLead:
    """Which node leads one job of several nodes.

    newest: the newest leadership, which callers store in the database before they pass it to `read`.
    unheard: seconds since its launcher was heard, known to this console alone. Only time in which this console was at
    work counts: a console that stood still or has just started has not waited for anybody.
    """

    def __init__(self) -> None:
        self.newest = LeadTerm()
        self.unheard = 0.0

    def read(self, term: int, node: int) -> None:
        if (stored := LeadTerm(term, node)) != self.newest:
            self.newest, self.unheard = stored, 0.0

    def heard(self, sender: LeadTerm) -> bool:
        """Notes that a launcher that leads has been heard. Returns False if its term is later than `newest`, which the
        caller has to store first. Raises ConsoleError if the launcher leads no more."""
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
        """Adds time in which this console was at work and may not have heard the lead."""
        self.unheard += seconds


# -- between the coordinator's objects and the rows of the database -----------------------------

# How many of the processes that were started for one place are remembered.
KEPT = 16


def differs(a: Member, b: Member) -> bool:
    """Says whether there is a change to store; a change of `last_heard` alone is not stored."""
    return (a.state, a.incarnation, a.generation, a.draining, a.detail, a.retired, a.leaving, a.let_go) != (
        *(b.state, b.incarnation, b.generation, b.draining, b.detail, b.retired, b.leaving, b.let_go),
    )


def member_row(member: Member) -> Record:
    """Returns the columns of a worker's row that the coordinator decides on."""
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


def read_member(row: Record, stage: int, generation: int, acknowledged: dict[str, str]) -> Member:
    """Reads a member. generation: the one in force. acknowledged: what its processes have said of it: that of one which
    has been given another place since, or whose state is gone, counts no more."""
    incarnation, state = row["incarnation"], WorkerState(row["state"])
    said = acknowledged.get(incarnation, "") if row["member_generation"] == generation else ""
    return Member(
        name=row["name"],
        stage=stage,
        state=state,
        incarnation=incarnation,
        retired=tuple(json.loads(row["retired"])),
        generation=row["member_generation"],
        acknowledged="" if state is WorkerState.FAILED else said,  # type: ignore[arg-type]
        last_heard=0.0 if incarnation else None,  # the database does not know it
        draining=row["draining"],
        detail=row["detail"],
        leaving=row["leaving"],
        let_go=_RELEASE.validate_json(row["let_go"]),
    )


def job_columns(old: State, new: State) -> Record:
    """Returns the columns of the job's row that differ between two states."""
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
    """Encodes the broken transfer that waits for its explanation and the record of links that broke; "" for neither."""
    known = state.broken, state.links
    return "" if known == (None, Links()) else _BROKEN.dump_json(known).decode()


def read_broken(text: str) -> tuple[Broken | None, Links]:
    """Decodes what `_broken_text` wrote. The transfer broke at 0 of the new process's clock."""
    broken, links = _BROKEN.validate_json(text) if text else (None, Links())
    return broken and replace(broken, since=0.0), links


def _moves_text(state: State) -> str:
    if state.pending is None and not state.halted:
        return "[]"
    return json.dumps(state.pending.moves if state.pending else moves_of(state))


def _read_pending(row: Record) -> PendingGeneration | None:
    """Returns the pending generation with its moves alone, which only the database knows; the coordinator works out
    the rest anew."""
    moves = tuple((source, to) for source, to in json.loads(row["moves"]))
    return PendingGeneration((), (), (), "", moves) if moves else None


def _incarnations(
    generation: Generation, members: Mapping[str, Member], pending: PendingGeneration | None
) -> dict[str, str]:
    """Returns the process at each place of the generation in force, of those that are still somewhere."""
    stay = (members[n] for n in generation.living if members[n].generation in (generation.number, STATELESS))
    found = {member.name: member.incarnation for member in stay if member.incarnation}
    for source, to in pending.moves if pending else ():
        member = members[to]
        if member.generation == 0 and member.incarnation:  # it has moved since
            found[source] = member.incarnation
    return found


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
    interim = Interim(plan, without) if plan else None
    return _GENERATION.validate_python({**row, "number": row["generation"], "interim": interim})


def later_columns(old: State, new: State) -> list[tuple[int, Record]]:
    """Returns (generation number, changed columns) for what becomes known only after a generation has opened: the
    interim plan that it runs, and since which iteration the workers have its layers."""
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
    """Reads a job's membership from the database, with no worker heard yet. partition: layers per stage at the job's
    start."""
    job_id = job_row["id"]
    newest = store.newest_generation(job_id)
    current = read_generation(newest) if newest else None
    acknowledged: dict[str, str] = {}  # by incarnation, since a process may still report under its former name
    number = current.number if current else 0
    for row in store.acknowledgements(job_id, number) if current else ():
        key = row["incarnation"]
        acknowledged[key] = max(acknowledged.get(key, ""), row["state"], key=ACK_ORDER.index)  # type: ignore[arg-type]
    returns = back_to(spec.checkpoints, spec.max_restarts)
    state = State.new(
        *(spec.pipelines, spec.stages, spec.iterations),
        back_to=returns,
        own_loop=spec.own_loop,
        partition=partition,
    )
    if moved := store.newest_move(job_id) if partition else None:
        state = replace(state, held=tuple(moved["partition"]), moved=(moved["generation"], moved["moved_at"]))
    members = dict(state.members)
    for row in store.workers(job_id):
        members[row["name"]] = read_member(row, members[row["name"]].stage, number, acknowledged)
    over = JobState(job_row["state"]) if job_row["state"] in ("finished", "stopped") else None
    broken, links = read_broken(job_row["broken"])
    pending = _read_pending(job_row)
    if current is not None:
        current = replace(current, incarnations=_incarnations(current, members, pending))
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
        pending=pending,
    )


def state_rows(old: WorkerStates, new: WorkerStates, at: float) -> list[Record]:
    """Returns a row for each role whose state (a RoleState) changed. at: POSIX seconds."""
    rows: list[Record] = []
    if new.state.current is None and not new.state.over:
        return rows  # nobody trains yet
    for name, member in new.state.members.items():
        before = old.state.members[name]
        # A role whose process has moved on turns from MOVED to EMPTY when that process ends at its new place, though
        # its own member stays the same.
        left = member.state is WorkerState.FAILED and member.incarnation is None
        if (member is not before or left) and (state := new.role(member).state) is not old.role(before).state:
            rows.append({"worker": name, "state": state.value, "at": at})
    return rows


# Written by field name and without defaults: fields may come and go, and each of thousands of places has a list.
_PROCESSES: TypeAdapter[list[ProcessState]] = TypeAdapter(list[ProcessState])


def process_rows(
    known: Mapping[str, ProcessState], changed: Mapping[str, ProcessState]
) -> tuple[list[Record], dict[str, ProcessState]]:
    """Returns worker columns for each place (slot) with a process in `changed`, and the processes that are known from
    now on: `known` without the oldest ended ones of these places. known, changed: processes by incarnation."""
    of: dict[str, list[ProcessState]] = {process.slot: [] for process in changed.values()}
    for process in known.values() if of else ():
        if process.slot in of:
            of[process.slot].append(process)
    rows, left = [], dict(known)
    for slot, own in of.items():
        # Nobody asks any more what became of the oldest processes.
        gone = {p.incarnation for p in own[:-KEPT] if p.ended}
        kept = [p for p in own if p.incarnation not in gone]
        text = _PROCESSES.dump_json(kept, exclude_defaults=True).decode()
        rows.append({"name": slot, "processes": text})
        for incarnation in gone:
            del left[incarnation]
    return rows, left


def read_processes(rows: Iterable[Record]) -> dict[str, ProcessState]:
    """Reads the processes of all places, by incarnation, in the order in which they came."""
    found = [process for row in rows for process in _PROCESSES.validate_json(row["processes"])]
    return {process.incarnation: process for process in sorted(found, key=lambda p: p.since)}


# -- past failures and returns, out of the rows: what a simulation can be run on ------------------------

Row = tuple[float, str, Literal["failed", "joined"]]


def changes(generations: Iterable[Record], begin: float = 0.0) -> list[Row]:
    """Lists failures and returns as (seconds since `begin`, worker, `failed` or `joined`). generations: oldest first.

    Times never decrease: where the system clock was put back, later times are shifted to follow on.

    A worker that changes its stage neither fails nor joins. The failure lasts on at the place that it gave up, and is
    listed under the place where it began.
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
    """Returns the seconds from failure to return of each worker that came back. Those that are unknown because the
    system clock was put back in between are left out."""
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
# How long a job that was read back in vain waits until its next tick, at least.
AGAIN_SECONDS = 1.0

# How a job uses the plan that is shown.
IN_FORCE, LAST, INTERIM = "in force", "last in force", "interim"


class PlanRun(NamedTuple):
    """A plan that workers run. failed: the workers that it goes without. words: IN_FORCE, LAST or INTERIM."""

    fingerprint: str
    generation: int
    failed: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class IncomingReport:
    """An event, and what is stored with it if it is accepted.

    process: of a worker that registers. spare: the spare ranks of a worker that has exited; restart: what its launcher
    does about the exit. acknowledgement: a database row.
    """

    event: WorkerRegistered | GenerationAcknowledged | Exited | OpRaised | StateLost | TransferBroken
    process: Arrival | None = None
    spare: tuple[int, ...] = ()
    restart: PlannedRestart | None = None
    acknowledgement: Mapping[str, Any] | None = None


class TakenTogether(NamedTuple):
    """Reports that were taken together. states: the one before, each from which processes moved to other places, and
    the one after. decisions: of all. refused: for each report, why it was refused; None: it was not."""

    states: list[State]
    decisions: list[Decision]
    refused: list[Refuse | None]


def run_together(
    state: State, reports: Sequence[IncomingReport], now: float, failure_timeouts: FailureTimeouts
) -> TakenTogether:
    """Takes reports one after the other, with no plan in between. Ends of processes are taken at once if nothing else
    comes between them than transfers that broke, as those do that the survivors had with the lost ones."""
    states, decisions, refused = [state], list[Decision](), dict[int, Refuse | None]()
    order = _order([report.event for report in reports])

    def take(after: Transition, refusals: Sequence[Refuse | None]) -> None:
        nonlocal state, decisions
        refused.update(zip(order[len(refused) :], refusals, strict=False))
        before, state = state, after.state
        decisions += [decision for decision in after.decisions if not isinstance(decision, Refuse)]
        # A place may be filled, emptied and filled again: then the last state alone does not tell by whom.
        if _moves(state) != _moves(before) and before is not states[-1]:
            states.append(before)

    for kind, events in groupby((reports[index].event for index in order), type):
        if kind is Exited:
            take(*coordinator.all_exited(state, cast("Iterator[Exited]", events), now))
            continue
        for event in events:
            after = coordinator.step(state, event, now, failure_timeouts)
            take(after, [after.refusal])
    return TakenTogether([*states, state], decisions, [refused[index] for index in range(len(reports))])


def _order(events: Sequence[Event]) -> list[int]:
    """Returns in which order the events of one batch are taken (see run_together)."""
    order, behind_ends = list[int](), None
    for index, event in enumerate(events):
        if isinstance(event, Exited) and behind_ends is not None:
            order.insert(behind_ends, index)
            behind_ends += 1
            continue
        order.append(index)
        if not isinstance(event, TransferBroken):
            behind_ends = len(order) if isinstance(event, Exited) else None
    return order


def _moves(state: State) -> tuple[tuple[str, str], ...]:
    return state.pending.moves if state.pending else ()


class LiveJob:
    """One job as the console has it. Thread-safe.

    want_plan: called with the job and its failed workers when a plan has to be made elsewhere; the answer comes back
    through `plans.plan_made`. on_generation: called after a generation has opened. look_up: finds a plan made ahead
    that is kept elsewhere, and says where it is from.

    Its parts: `state`, the membership as the coordinator has it; `processes`, which hold the roles; `plans`;
    `measurements`, what workers report of themselves; `feed`, the event feed; `commands` of operators; `choices`, the
    times in which the job waited for an operator's choice; `baseline`, what its throughput is compared with, which
    only `pin` changes; `lead`, which node leads where there are several.
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
        self.version = 0  # rises with everything that is stored; cached views are keyed by it
        self.topic = Topic()  # published whenever anything is stored
        # Thousands of workers may wait for it: only a new generation wakes them, and the end of the job.
        self.generation_topic = Topic()
        self.plans = JobPlans(job_id, spec, store, self.lock, look_up, self._answered, self.stored)
        self.state = State.new(
            spec.pipelines,
            spec.stages,
            spec.iterations,
            back_to=back_to(spec.checkpoints, spec.max_restarts),
            own_loop=spec.own_loop,
            partition=self.plans.nominal.partition,
        )
        self.processes: dict[str, ProcessState] = {}  # by incarnation, in the order in which they came
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
        self._beats: dict[str, LastHeartbeat] = {}  # heartbeats that the coordinator has not taken yet
        self._published_generation, self._published_over = 0, self.state.over is not None
        self.deleted = False  # then nothing of it is stored any more
        self._doubtful = False  # may the database hold another state than this object?
        # When, by `clock`, the job may be read back again, and until when ticks wait for that after one was in vain.
        self._read_again_at, self._again_at = -math.inf, -math.inf
        self._refused = ""

    def ask_for(self, failed: tuple[str, ...]) -> None:
        """Has the plan without these workers made elsewhere, by `want_plan`."""
        self.plans.asks_for(failed)
        try:
            self._want_plan(self, failed)
        except BaseException:  # as where no thread can be started: the next tick asks again
            self.plans.give_up()
            raise

    def plan_missing(self) -> tuple[str, ...] | None:
        """Returns the failed workers of the plan that a pending generation waits for and nobody makes, for example
        because the answer could not be stored; else None."""
        pending = self.state.pending
        return pending.failed if pending and pending.until is None and self.plans.asked_for is None else None

    def _answered(self, answer: PlanReady | PlanRefused, plan: Plan | None) -> None:
        self.apply(answer, plan=plan)

    @property
    def paused(self) -> bool:
        """Whether an operator has paused the job and nobody has resumed it."""
        return self.commands.paused_at is not None and not self.state.over

    @property
    def waits(self) -> tuple[Wait, ...]:
        """The times in which the job waited for a person: for a choice, or for the end of a pause."""
        return *self.choices, *pauses(self.commands.held)

    @property
    def stopped(self) -> frozenset[str]:
        """The workers that have reported, since an operator paused the job, that they wait before an iteration."""
        since = self.commands.paused_at
        if since is None or self.state.over:
            return frozenset()
        return self.measurements.stopped(since, self.state.members)

    def last_heard(self, member: Member) -> float | None:
        """Returns when the member's process was last heard, in monotonic seconds, for display; None: never. A console
        that has just started judges no worker by an older heartbeat, but shows its true age."""
        contact = self.measurements.contacts.get(member.name)
        if contact is not None and contact.beat.incarnation == member.incarnation:
            return contact.heard
        # In a job that is over nobody is judged, so `last_heard` is not kept up to date.
        return None if self.state.over else member.last_heard

    @property
    def plan_run(self) -> PlanRun | None:
        """The plan that the workers run; None before the first generation."""
        state = self.state
        if (current := state.current) is None:
            return None
        if (interim := state.interim) is not None:
            return PlanRun(interim.plan_fingerprint, current.number, interim.failed, INTERIM)
        return PlanRun(current.plan_fingerprint, current.number, current.failed, LAST if state.over else IN_FORCE)

    def worker_states(self, rerouted: Mapping[str, int] | None = None) -> WorkerStates:
        """Returns which process holds which role, and the state of each. rerouted: by role, how many micro-batches of
        other pipelines it runs by the plan in force."""
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
        """Whether the job is over and no heartbeat waits to be taken."""
        return bool(self.state.over) and not self.measurements.fresh

    # -- events -----------------------------------------------------------------------------

    def apply(
        self,
        event: Event,
        *,
        plan: Plan | None = None,
        audit: Record | None = None,
        now: float | None = None,
        sender: LeadTerm | None = None,
    ) -> str:
        """Takes one event, stores what follows from it, and returns the reason.

        audit: a row that is stored if the event is accepted. plan: the plan that a PlanReady names. now: monotonic
        seconds when it happened; None: this moment. sender: see `taking`. Raises ConsoleError when the event is refused
        or can't be stored; then nothing has changed.
        """
        with self.taking(sender):
            old, now = self.state, self._clock() if now is None else now
            step = coordinator.step(old, event, now, self.failure_timeouts)
            if step.refusal:
                raise refused(step.refusal.code, step.refusal.detail)
            if (step.state is old or step.passing) and not (step.decisions or audit):
                self.state = step.state  # most ticks end here, without a search among thousands of workers
                return step.reason
            change, wanted, reason = self._settle([old, step.state], step.decisions, now, plan=plan, audit=audit)
        self._publish(change, wanted)
        return reason or step.reason

    def apply_all(self, reports: Sequence[IncomingReport], sender: LeadTerm | None = None) -> list[Refuse | None]:
        """Takes reports as `apply` would take each, but in one transaction: of the generations that they ask for, only
        the last one opens. Returns for each why it was refused, or None.

        Raises ConsoleError when the database fails (nobody knows whether the reports are stored, and all have to be
        sent again) or when another node leads than the one that sends them.
        """
        with self.taking(sender):
            now = self._clock()
            taken = run_together(self.state, reports, now, self.failure_timeouts)
            counted = [report for report, refusal in zip(reports, taken.refused, strict=True) if refusal is None]
            change, wanted, _ = self._settle(taken.states, taken.decisions, now, counted)
        self._publish(change, wanted)
        return taken.refused

    def _settle(
        self,
        states: Sequence[State],
        decisions: Sequence[Decision],
        now: float,
        reports: Sequence[IncomingReport] = (),
        *,
        plan: Plan | None = None,
        audit: Record | None = None,
    ) -> tuple[JobUpdate, tuple[str, ...] | None, str]:
        """Opens the generation that waits for a plan, if the decisions ask for one and it is here; then stores all.

        Returns what was stored, the failed workers of the plan that has to be made elsewhere, if any, and the reason of
        the coordinator's answer to the plan ("": it was given none).
        """
        pending, wanted, reason = states[-1].pending, None, ""
        # An earlier one is superseded by the last, or by what the job waits for or has halted for since.
        if pending and pending.until is None and any(isinstance(decision, NeedPlan) for decision in decisions):
            self.plans.cut(pending.partition)
            if (found := self.plans.plan_now(pending.failed)) is None:
                wanted = pending.failed
            else:
                answer, plan = found
                step = coordinator.step(states[-1], answer, now, self.failure_timeouts)
                states, decisions, reason = [*states, step.state], [*decisions, *step.decisions], step.reason
        return self._take(states, decisions, plan, reports, audit), wanted, reason

    def _publish(self, change: JobUpdate, wanted: tuple[str, ...] | None) -> None:
        """Says what has changed to all that wait for it, and has the plan without the workers `wanted` made."""
        if change:
            self.topic.publish()
        if self._published_generation != self.state.generation:
            self._published_generation = self.state.generation
            self.generation_topic.publish()
        if self.state.over and not self._published_over:
            self._published_over = True
            self.generation_topic.dismiss()
        if wanted is not None:
            self.ask_for(wanted)
        if change.generation:
            self._on_generation(self)

    def heard(self, beat: Heartbeat) -> int:
        """Takes a heartbeat, without lock or database; returns the newest generation.

        Raises ConsoleError for an unknown or fenced worker.
        """
        self.sender(beat.worker, beat.incarnation)
        self.measurements.fresh.append((beat, self._clock()))
        return self.state.generation

    def asked(self, command: Command) -> None:
        """Notes a command that an operator has just given, and that is stored."""
        self.commands.add(command, time.time(), self._clock())

    def sender(self, worker: str, incarnation: str) -> Member:
        """Returns the member whose process sent a report as `worker` from `incarnation`: it may still report under its
        former name after it was given another place. Raises ConsoleError for an unknown or fenced worker."""
        state = self.state
        member = membership.holder(state, worker, incarnation)
        if member is None:
            raise ConsoleError(404, "unknown_worker", membership.no_such_worker(state, worker))
        if not membership.counts(member, incarnation):
            raise ConsoleError(409, "fenced", membership.fenced_text(member, incarnation))
        return member

    def writer(self, worker: str, incarnation: str) -> Member:
        """Does the same as `sender` for lines that a process printed, but takes them from a process that is out of the
        job, too: its last lines say why."""
        member = membership.holder(self.state, worker, incarnation)
        known = member is not None and incarnation in member.incarnations
        return member if member is not None and known else self.sender(worker, incarnation)

    # -- which node leads -------------------------------------------------------------------

    def heard_lead(self, sender: LeadTerm) -> None:
        """Notes that the launcher that leads a job of several nodes was heard. Raises ConsoleError when another node
        leads by now."""
        if not self.lead.heard(sender):
            with self.writing():
                if not self.lead.heard(sender):
                    self._store_lead(sender)

    @contextmanager
    def taking(self, sender: LeadTerm | None) -> Iterator[None]:
        """Does the same as `writing`, for something that the launcher that led in `sender` has sent. It may have waited
        for a thread, and counts only if that launcher still leads. None: the job is on one node. Raises ConsoleError.
        """
        with self.writing():
            if sender is not None:
                self.heard_lead(sender)
            yield

    def claim_lead(self, wanted: LeadTerm, after: int, *, ask: bool) -> tuple[bool, str]:
        """Decides whether a node that too few others follow may lead (see LeadClaim). Returns the decision and why.
        ask: only ask, and change nothing."""
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
        """Takes the heartbeats that came in, then looks for workers that are silent.

        Time in which the console did not get to run is no worker's silence. So that time is measured against the same
        moment to which silences are counted.

        Raises ConsoleError when the database fails, or has just failed: to read thousands of workers back takes a fifth
        of a second, and with a full disk that would be done four times a second, in vain. Only ticks count for this:
        others may fail at each moment, with changes of their own that can't be stored.
        """
        with self.lock:  # whoever reads the job back has it until it is known whether that could be stored
            if self._doubtful and self._clock() < self._again_at:
                raise ConsoleError(503, "unavailable", self._refused or "the database has just failed; try again")
        try:
            self._tick()
        except ConsoleError:
            self.turn_failed()
            raise

    def turn_failed(self) -> None:
        """Has the ticks wait before they read the job back again. To be called, too, where what the console does for
        the job after a tick, in the same turn, has failed."""
        self._again_at = self._read_again_at

    def _tick(self) -> None:
        self.take_heartbeats()
        if self.state.over:
            return
        with self.writing():  # first, since it may read the job back, and then spares the same time
            now = self._clock()
            self.lead.wait(min(now - self._ticked, 2 * TICK_SECONDS))
            if late := self.stood_still(now):
                self.apply(Stalled(late), now=now)
            self._ticked = now
        self.apply(Tick(), now=now)

    def stood_still(self, now: float) -> float:
        """Returns for how many seconds beyond the usual the console has not looked at the job; 0: not long enough to
        matter."""
        late = now - self._ticked - TICK_SECONDS
        return late if late > self.failure_timeouts.heartbeat and not self.state.over else 0.0

    def take_heartbeats(self) -> None:
        """Passes the heartbeats since the last call to the coordinator, and marks them for the next write. Those that
        it could not take as the database failed are passed again."""
        self._beats = beats = {**self._beats, **self.measurements.take()}
        if beats:
            self.apply(HeartbeatsReceived(beats))
            self._beats = {}

    # -- storing ----------------------------------------------------------------------------

    def record(self, *notes: Note, audit: Record | None = None) -> None:
        """Stores lines of the event feed that come from no step of the coordinator."""
        with self.writing():
            events, repeats = self.feed.split(notes, time.time())
            self._save(JobUpdate(events=events, audit=audit, repeats=repeats))
        self.topic.publish()

    def let_go(self) -> None:
        """Notes that the job was deleted; all that wait for news of it are told to stop."""
        self.deleted = True
        self.topic.close()
        self.generation_topic.close()

    def stored(self, events: int = 0) -> None:
        """Says that `events` numbered event rows have been stored."""
        self.feed.added(events)
        self.version += 1

    def pin(self, baseline: Baseline, note: Note | None = None, audit: Record | None = None) -> None:
        """Stores what the job's throughput is compared with from now on. Raises ConsoleError."""
        with self.writing():
            events = self.feed.rows([note] if note else [])
            self._save(JobUpdate(job={"baseline": baseline.to_json()}, events=events, audit=audit))
            self.baseline = baseline
        self.topic.publish()

    def _take(
        self,
        states: Sequence[State],
        decisions: Sequence[Decision],
        plan: Plan | None,
        reports: Sequence[IncomingReport],
        audit: Record | None,
    ) -> JobUpdate:
        """Stores the change from the first of `states` to the last, then makes it visible here."""
        now, old, new = time.time(), states[0], states[-1]
        before = old.members
        workers = [
            member_row(m) for name, m in new.members.items() if m is not before[name] and differs(m, before[name])
        ]
        # To find changed roles takes a look at every role; most reports of a large job change none, so it is skipped.
        spare = {r.event.incarnation: r.spare for r in reports if r.spare}
        restarts = {r.event.incarnation: (r.event.worker, r.restart) for r in reports if r.restart}
        changed, changed_states = dict[str, ProcessState](), list[Record]()
        if workers or spare or restarts:
            came = {r.event.incarnation: r.process for r in reports if r.process}
            changed = follow(self.processes, states, came, now, spare, restarts)
        known = {**self.processes, **changed} if changed else self.processes
        if workers or changed:
            changed_states = state_rows(WorkerStates(old, self.processes), WorkerStates(new, known), now)
        rows = {row["name"]: row for row in workers}
        changed_rows, known = process_rows(known, changed)
        for row in changed_rows:
            rows.setdefault(row["name"], {}).update(row)
        choices = after_change(self.choices, new.choosing, new.generation + 1 if new.pending else new.generation, now)
        opened = next((d.generation for d in decisions if isinstance(d, OpenGeneration)), None)
        later = later_columns(old, new)
        events, repeats = self.feed.split((d for d in decisions if isinstance(d, Note)), now)
        change = JobUpdate(
            job=job_columns(old, new) | ({"waits": json.dumps(choices)} if choices != self.choices else {}),
            workers=list(rows.values()),
            plan=(plan.fingerprint, packed(plan), plan.failed, False) if (opened or later) and plan else None,
            generation=generation_row(opened) if opened else None,
            later=later,
            events=events,
            # In a job that is over no acknowledgement counts any more.
            acknowledgements=[dict(r.acknowledgement) for r in reports if r.acknowledgement and not old.over],
            audit=audit,
            states=changed_states,
            repeats=repeats,
        )
        self._save(change)
        self.state, self.processes, self.choices = new, known, choices
        return change

    def _save(self, change: JobUpdate) -> None:
        """Stores a change. Raises ConsoleError (404) if the job has been deleted meanwhile."""
        if change:
            if not self._store.apply(self.job_id, change):
                raise unknown_job(self.job_id)
            self.feed.stored(change.events, change.repeats)
            self.version += 1

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the lock while the caller changes what is stored of the job. Before that, memory is made equal to the
        database, if a failed write has left that in doubt.

        Raises ConsoleError when the database fails, or the job was deleted.
        """
        with self.lock:
            if self.deleted:
                raise unknown_job(self.job_id)
            if self._doubtful:
                self._read_again()
            try:
                yield
            except SQLAlchemyError as error:
                # The database may have stored it all the same, and only its answer was lost.
                self._doubtful = True
                refused = unavailable(error)
                self._refused = refused.detail if refused.status == 503 else ""
                raise refused from error

    @property
    def unstorable(self) -> str:
        """Why nothing of the job can be stored at present, in words; empty: it can be. A failed write of heartbeats
        counts too: in a paused job there is nothing else to store."""
        return (self._refused if self._doubtful else self.measurements.refused).partition("; ")[0]

    # -- reading back -----------------------------------------------------------------------

    def restore(self, job_row: Record) -> None:
        """Takes the job up from its rows in the database. job_row: of the job itself."""
        self.read(job_row)
        self.measurements.read(self._store.workers(self.job_id))
        if not self.state.over:
            for row in self._store.job_plans(self.job_id):
                try:
                    if (plan := stored_plan(self._store, row["fingerprint"])) is not None:
                        self.plans.take_plan(plan)
                except PlannerError as error:
                    log.warning("a stored plan is not used", job=self.job_id, reason=str(error))
            self.apply(ConsoleRestarted())

    def stored_again(self, fingerprint: str) -> bytes | None:
        """Stores the plan in force anew, in place of one that is damaged. Returns its packed form; None: memory does
        not have it. Raises SQLAlchemyError."""
        current = self.state.current
        if current is None or current.plan_fingerprint != fingerprint:
            return None
        plan = self.plans.in_memory(fingerprint, current.failed)
        if plan is None:
            return None
        self._store.put_plan(self.job_id, fingerprint, packed(plan), plan.failed, False)
        return packed(plan)

    def _read_again(self) -> None:
        began, known = self._clock(), self.state
        try:
            if (row := self._store.job(self.job_id)) is None:
                raise unknown_job(self.job_id)
            self.read(row)
        except SQLAlchemyError as error:
            raise unavailable(error) from error
        # Silence counts on: otherwise no worker would be lost by it while any change fails every few seconds. But time
        # in which nobody could be judged is not held against a worker. Where it is too short to be spared, it goes on.
        now = self._clock()
        spared = now - self._ticked if self.stood_still(now) else 0.0
        self.state = self._remembered(known, now, spared)
        self._doubtful, self._ticked = False, now if spared else self._ticked
        self._read_again_at = now + max(AGAIN_SECONDS, 4 * (now - began))
        if not self.state.over:
            text = "the database failed for a while; the job was read back from it"
            self.apply(ConsoleRestarted(text, listened=True))

    def _remembered(self, known: State, now: float, spared: float) -> State:
        """Returns the state that was read, with what only memory has: how silent each process is, how long an operator
        still has for a choice, and the newest offer. known: the state before. spared: seconds that count for nobody."""
        state, came = self.state, False
        members = dict(state.members)
        for name, member in state.members.items():
            before = known.members[name]
            if member.incarnation != before.incarnation:
                came = True  # it was heard just now
            elif member.last_heard is not None and before.last_heard is not None:
                members[name] = replace(member, last_heard=min(now, before.last_heard + spared))
        if came and coordinator.nobody_heard(known, now) > self.failure_timeouts.suspect:
            members = dict(state.members)  # all have their full time after the first sign of life
        pending = state.pending
        if known.choosing and known.pending is not None and known.generation == state.generation:
            moves, until = pending.moves if pending else (), known.pending.until
            pending = replace(known.pending, moves=moves, until=until and until + spared)
        broken = state.broken and replace(state.broken, since=now)
        if broken and known.broken:
            broken = replace(broken, since=min(now, known.broken.since + spared))
        state = replace(state, pending=pending, broken=broken, offer=known.offer, unmovable=known.unmovable)
        return state.with_heard(members)

    def read(self, job_row: Record) -> None:
        """Makes memory equal to the job's rows in the database."""
        store, job_id = self._store, self.job_id
        state = read_state(store, job_row, self.spec, self.plans.nominal.home)
        self.feed.read(store.last_event(job_id), store.events(job_id, limit=LOOK_BACK, newest=True))
        self.commands.read(store.commands(job_id))
        self.choices, self.baseline = read_waits(job_row["waits"]), read_baseline(job_row["baseline"])
        self.processes = read_processes(store.workers(job_id))
        self.lead.read(job_row["lead_term"], job_row["lead_node"])
        self.version += 1
        self.plans.cut(state.current.partition if state.current else ())
        # All count as heard just now, as after ConsoleRestarted: that event may not be stored for a long time.
        self.state = state.with_heard(
            {n: m if m.last_heard is None else replace(m, last_heard=self._clock()) for n, m in state.members.items()}
        )

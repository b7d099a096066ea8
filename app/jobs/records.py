"""Between the coordinator's objects and the rows of the database."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from openrecycle.agent.coordination.blame import Complaint, Links
from openrecycle.agent.coordination.membership import (
    ACK_ORDER,
    Broken,
    Generation,
    Interim,
    Member,
    Mode,
    PendingGeneration,
    State,
)
from openrecycle.agent.messages.protocol import JobSpec, JobState, WorkerState
from openrecycle.app.jobs.states import PlannedRestart, ProcessState, WorkerStates
from openrecycle.app.jobs.waiting import Wait
from openrecycle.db.store import Record, Store

# Of the processes that were started for one place, the newest so many.
KEPT = 16


def differs(a: Member, b: Member) -> bool:
    """Is there a change to store? `last_heard` alone is none."""
    return (a.state, a.incarnation, a.generation, a.draining, a.detail, a.retired, a.leaving) != (
        *(b.state, b.incarnation, b.generation, b.draining, b.detail, b.retired, b.leaving),
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
    }


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
    )


def job_columns(old: State, new: State) -> Record:
    """Those of the job's row that changed."""
    row: Record = {}
    if new.job_state != old.job_state or new.halted != old.halted:
        row = {"state": new.job_state.value, "reason": new.halted or new.over_reason}
    if (new.mode, new.choice_timeout) != (old.mode, old.choice_timeout):
        row |= {"mode": new.mode.value, "choice_timeout": new.choice_timeout}
    if new.frozen_by != old.frozen_by:
        row |= {"frozen_by": new.frozen_by}
    if (new.broken, new.links) != (old.broken, old.links):
        row |= {"broken": _broken_text(new)}
    if (moves := _moves_text(new)) != _moves_text(old):
        row |= {"moves": moves}
    return row


def _broken_text(state: State) -> str:
    """The transfer that waits for its explanation, and what is remembered of links that broke; "": neither."""
    broken = state.broken
    first = [broken.reporter, broken.worker, broken.detail] if broken else None
    if broken is None and state.links == Links():
        return ""
    complaints = [[c.reporter, c.peer, c.detail] for c in broken.complaints] if broken else []
    return json.dumps({"broken": first, "complaints": complaints, "links": state.links.to_json()})


def read_broken(text: str) -> tuple[Broken | None, Links]:
    """What `_broken_text` wrote; or, of a version that knew no links, the transfer alone."""
    said = json.loads(text) if text else {"broken": None, "complaints": [], "links": Links().to_json()}
    if isinstance(said, list):
        said = {"broken": said, "complaints": [], "links": Links().to_json()}
    complaints = tuple(Complaint(*c) for c in said["complaints"])
    links = Links.from_json(said["links"])
    if not said["broken"]:
        return None, links
    reporter, worker, detail = said["broken"]
    return Broken(0.0, reporter, worker, detail, complaints), links


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
        "opened_at": time.time(),
    }


def read_generation(row: Record) -> Generation:
    living, failed, joining = (tuple(row[key]) for key in ("living", "failed", "joining"))
    moves = tuple((source, to) for source, to in row["moves"])
    plan, reason = row["plan_fingerprint"], row["reason"]
    without = tuple(row["interim_failed"])
    interim = Interim(row["interim_plan"], without) if without or row["interim_plan"] else None
    cut, restore = tuple(row["partition"]), row["restore"]
    return Generation(row["generation"], living, failed, joining, plan, reason, moves, restore, interim, cut)


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
    state = State.new(spec.pipelines, spec.stages, spec.iterations, checkpoints=spec.checkpoints, partition=partition)
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
        rows.append({"name": slot, "processes": json.dumps([[*vars(p).values()] for p in kept])})
        for incarnation in gone:
            del left[incarnation]
    return rows, left


def read_processes(rows: Iterable[Record]) -> dict[str, ProcessState]:
    """By incarnation, those that came first first."""
    found = []
    for row in rows:
        # Those that an older version has stored say nothing of ranks, or of restarts.
        for incarnation, host, pid, held, ended, detail, *of_ranks in json.loads(row["processes"]):
            roles = tuple((str(role), float(since)) for role, since in held)
            ranks, spare, made_of, *more = of_ranks or ((), (), ())
            restart = PlannedRestart(*more[0]) if more and more[0] else None
            made = tuple((str(whose), int(rank)) for whose, rank in made_of)
            numbers = tuple(ranks), tuple(spare), made
            found.append(ProcessState(incarnation, host, pid, roles, ended, detail, *numbers, restart))
    return {process.incarnation: process for process in sorted(found, key=lambda p: p.since)}


# -- past failures and returns, out of the rows: what a simulation can be run on ------------------------

Row = tuple[float, str, str]


def changes(generations: Iterable[Record], begin: float = 0.0) -> list[Row]:
    """(seconds since `begin`, worker, `failed` or `joined`) of a job's generations, oldest first.

    A worker that changes its stage is neither: the failure goes on at the place that it gave up, under
    the name that it began with.
    """
    rows: list[Row] = []
    failed: set[str] = set()
    began_as: dict[str, str] = {}  # place that is out -> where that failure began
    for generation in generations:
        at, now = generation["opened_at"] - begin, set(generation["failed"])
        for source, to in generation["moves"]:
            if to in failed and to not in now and source in now and source not in failed:
                failed = failed - {to} | {source}
                began_as[source] = began_as.pop(to, to)
        rows += [(at, worker, "failed") for worker in sorted(now - failed)]
        rows += [(at, began_as.pop(worker, worker), "joined") for worker in sorted(failed - now)]
        failed = now
    return rows


def repair_times(rows: Iterable[Row]) -> list[float]:
    """Seconds from each failure to the return, of those that have come back."""
    times: list[float] = []
    since: dict[str, float] = {}
    for at, worker, what in rows:
        if what == "failed":
            since[worker] = at
        elif worker in since:
            times.append(at - since.pop(worker))
    return times

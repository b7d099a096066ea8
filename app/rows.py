"""Between the coordinator's objects and the rows of the database."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import NamedTuple

import orjson

from agent.blame import Complaint, Links
from agent.protocol import Heartbeat, JobSpec, JobState, WorkerState
from app.coordination.choices import Mode
from app.coordination.membership import ACK_ORDER, Broken, Epoch, Member, Pending, State
from db.store import Record, Store


class Contact(NamedTuple):
    """The newest heartbeat of a worker, and when it came (wall clock)."""

    beat: Heartbeat
    at: float


def differs(a: Member, b: Member) -> bool:
    """Is there a change to store? `last_heard` alone is none."""
    return a is not b and (
        (a.state, a.incarnation, a.epoch, a.draining, a.detail, a.retired, a.leaving)
        != (b.state, b.incarnation, b.epoch, b.draining, b.detail, b.retired, b.leaving)
    )


def member_row(member: Member) -> Record:
    """The worker columns that the coordinator decides on."""
    return {
        "name": member.name,
        "state": member.state.value,
        "incarnation": member.incarnation,
        "retired": json.dumps(member.retired),
        "member_epoch": member.epoch,
        "draining": member.draining,
        "detail": member.detail,
        "leaving": member.leaving,
    }


def read_member(row: Record, stage: int, acknowledged: dict[tuple[str, str], str]) -> Member:
    incarnation, state = row["incarnation"], WorkerState(row["state"])
    said = acknowledged.get((row["name"], incarnation), "")
    return Member(
        name=row["name"],
        stage=stage,
        state=state,
        incarnation=incarnation,
        retired=tuple(json.loads(row["retired"])),
        epoch=row["member_epoch"],
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
    if (new.mode, new.patience) != (old.mode, old.patience):
        row |= {"mode": new.mode.value, "patience": new.patience}
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


def _read_broken(text: str) -> tuple[Broken | None, Links]:
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


def _read_pending(row: Record) -> Pending | None:
    """An epoch that was to open is worked out anew; of its moves nobody but the database knows."""
    moves = tuple((source, to) for source, to in json.loads(row["moves"]))
    return Pending((), (), (), "", moves) if moves else None


def epoch_row(epoch: Epoch) -> Record:
    return {
        "epoch": epoch.number,
        "plan_fingerprint": epoch.plan_fingerprint,
        "living": epoch.living,
        "failed": epoch.failed,
        "joining": epoch.joining,
        "moves": epoch.moves,
        "restore": epoch.restore,
        "reason": epoch.reason,
        "opened_at": time.time(),
    }


def read_epoch(row: Record) -> Epoch:
    living, failed, joining = (tuple(row[key]) for key in ("living", "failed", "joining"))
    moves = tuple((source, to) for source, to in row["moves"])
    plan, reason = row["plan_fingerprint"], row["reason"]
    return Epoch(row["epoch"], living, failed, joining, plan, reason, moves, row["restore"])


def contact_row(name: str, contact: Contact) -> Record:
    """The worker columns that a heartbeat brings."""
    beat = contact.beat
    return {
        "name": name,
        "seq": beat.seq,
        "epoch": beat.epoch,
        "iteration": beat.iteration,
        "phase": beat.phase,
        "op_milliseconds": orjson.dumps(beat.op_milliseconds).decode(),
        "resident_bytes": beat.resident_bytes,
        "heard_at": contact.at,
    }


def read_contact(row: Record) -> Contact:
    beat = Heartbeat.model_construct(
        worker=row["name"],
        incarnation=row["incarnation"],
        seq=row["seq"],
        epoch=row["epoch"],
        iteration=row["iteration"],
        phase=row["phase"],
        op_milliseconds=json.loads(row["op_milliseconds"]),
        resident_bytes=row["resident_bytes"],
    )
    return Contact(beat, row["heard_at"])


def read_state(store: Store, job_row: Record, spec: JobSpec) -> State:
    """What the database says of a job; nobody has been heard in it yet."""
    job_id = job_row["id"]
    newest = store.newest_epoch(job_id)
    current = read_epoch(newest) if newest else None
    acknowledged: dict[tuple[str, str], str] = {}
    for row in store.acknowledgements(job_id, current.number) if current else ():
        key = (row["worker"], row["incarnation"])
        acknowledged[key] = max(acknowledged.get(key, ""), row["state"], key=ACK_ORDER.index)  # type: ignore[arg-type]
    state = State.new(spec.pipelines, spec.stages, spec.iterations, checkpoints=spec.checkpoints)
    members = dict(state.members)
    for row in store.workers(job_id):
        members[row["name"]] = read_member(row, members[row["name"]].stage, acknowledged)
    over = JobState(job_row["state"]) if job_row["state"] in ("finished", "stopped") else None
    broken, links = _read_broken(job_row["broken"])
    return replace(
        state,
        members=members,
        current=current,
        committed=store.committed_iterations(job_id),
        halted=job_row["reason"] if job_row["state"] == "halted" else "",
        over=over,
        over_reason=job_row["reason"] if over else "",
        mode=Mode(job_row["mode"]),
        patience=job_row["patience"],
        frozen_by=job_row["frozen_by"],
        broken=broken,
        links=links,
        pending=_read_pending(job_row),
    )


def state_rows(old: State, new: State) -> list[Record]:
    """Who came into another state."""
    now = time.time()
    return [
        {"worker": name, "state": member.state.value, "at": now}
        for name, member in new.members.items()
        if member is not old.members[name] and member.state is not old.members[name].state
    ]


def follow_moves(old: State, workers: list[Record], processes: dict[str, tuple[str, int]]) -> None:
    """A process that has taken another place is known there by its host and number too. workers: rows of
    those that changed; processes: by place, (host, number)."""
    new = [row for row in workers if row["incarnation"] and row["incarnation"] != old.members[row["name"]].incarnation]
    if not new:
        return
    places = {member.incarnation: name for name, member in old.members.items()}
    for row in new:
        came_from = places.get(row["incarnation"])
        if came_from in processes:
            processes[row["name"]] = host, pid = processes[came_from]
            row.update(host=host, pid=pid)

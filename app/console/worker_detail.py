"""All that is known of one worker, for people: its states so far, its op times beside plan and peers, its log."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from openrecycle.agent.messages.protocol import LogLine
from openrecycle.app.console.service import Console
from openrecycle.app.console.view import EventView, JobView, WorkerView
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.runtime.errors import ConsoleError, storing
from openrecycle.app.workers.states import HOLDING, Rank
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.layers.migration import SECONDS
from openrecycle.planner.plans.plan import Plan

EVENTS = 20
# What older versions stored, and how it is called since.
BEFORE = {"starting": "empty", "re-joining": "joining"}
_EVENT = ("seq", "at", "severity", "kind", "worker", "text", "count", "last_at")


@dataclass(frozen=True)
class StateInterval:
    """The worker was in `state` from `begin` to `end` (POSIX seconds); the last stay ends now."""

    state: str
    begin: float
    end: float


@dataclass(frozen=True)
class OpTime:
    """Of one op kind, milliseconds: smoothed as measured; planned, None where the plan's unit is no
    time; peers: the median of the other living workers of its stage, None when there is none."""

    kind: str
    measured: float
    planned: float | None
    peers: float | None


@dataclass(frozen=True)
class WorkerDetail:
    """op_times: in the order F, I, W, B, O. events: newest first. log: oldest first. activations: of micro-batches,
    that it holds at most at once by the plan in force, None when it has no part in it. held, coming: as in JobView.
    ranks: the processes that it consists of, or did last, where there are several; made_of: the workers whose spare
    ranks these were."""

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


def worker_detail(console: Console, view: JobView, name: str, now: float) -> WorkerDetail:
    """now: POSIX seconds. Raises ConsoleError."""
    worker = next((w for w in view.workers if w.name == name), None)
    if worker is None:
        raise ConsoleError(404, "unknown_worker", f"worker: got {name!r}, expected one of the job's grid")
    job = console.job(view.job_id)
    states, known = job.worker_states(), job.processes
    role = states.roles[name]
    process = role.process if role.process and role.process.role == name else None
    with storing():
        rows = console.observing.observations.states(job.job_id, name)
        events = console.observing.observations.events_of(job.job_id, name, limit=EVENTS)
        seen = console.observing.observations.seen_events(job.job_id, [e["seq"] for e in events])
    # Of a worker that has not registered yet there is no state.
    ends = ([row["at"] for row in rows[1:]] + [now])[: len(rows)]
    return WorkerDetail(
        worker,
        tuple(
            StateInterval(BEFORE.get(row["state"]) or row["state"], row["at"], max(end, row["at"]))
            for row, end in zip(rows, ends, strict=True)
        ),
        _op_times(job, view, worker),
        tuple(EventView(**{k: e[k] for k in _EVENT}, seen_by=seen.get(e["seq"], ("",))[0]) for e in events),
        console.observing.logs.lines(job.job_id, name),
        view.plan.metrics.peak_activations.get(name) if view.plan else None,
        view.held,
        view.coming,
        states.ranks(process) if process else (),
        tuple(dict.fromkeys(known[whose].slot for whose, _ in process.made_of if whose in known)) if process else (),
    )


def _op_times(job: LiveJob, view: JobView, worker: WorkerView) -> tuple[OpTime, ...]:
    own = job.op_times.smoothed(worker.name)
    others = [
        job.op_times.smoothed(w.name)
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
    """Milliseconds by op kind; {} where the plan's unit is no time."""
    if plan is None or (second := SECONDS.get(plan.job.time_unit)) is None:
        return {}
    problem = plan.problem()
    ticks, unit = problem.worker_ticks(Worker.parse(name)), 1000 * second / problem.job.ticks_per_unit
    times = {"F": ticks.forward, "I": ticks.input_backward, "W": ticks.weight_backward, "O": ticks.optimizer}
    times["B"] = times["I"] + times["W"]
    return {kind: n * unit for kind, n in times.items()}

"""What the UI sees of a job: plain data, made by app.console.service, drawn by app.ui.

Times: `*_at` are POSIX seconds (wall clock, for display); `*_age` are seconds by the monotonic
clock of the console.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from openrecycle.agent.messages.protocol import Doing, JobSpec, JobState, OpKind
from openrecycle.app.observing.goodput import Figures
from openrecycle.app.observing.rates import IterationView
from openrecycle.app.workers.states import Condition, ProcessState, Rank, RoleState
from openrecycle.planner.plans.plan import Plan


class WorkerView(NamedTuple):
    """One cell of the grid, now: a role, and the process that holds it. takes_rerouted: micro-batches of other
    pipelines per iteration. slow: how many times its peers' op times it takes, where that is too long; else 0.

    host, pid, since (POSIX seconds), slot (the place it was started in): of the process that holds the role, or of
    the last one where that has ended in it; "" and 0 where it holds another role by now, which is moved_to. spare: of
    that one's ranks, how many run nothing since another one has ended.

    A tuple: of 8,192 workers as many are made at each refresh, in a fifth of the time that a frozen dataclass takes."""

    name: str
    pipeline: int
    stage: int
    state: RoleState
    takes_rerouted: int = 0
    heartbeat_age: float | None = None
    generation: int = 0
    iteration: int = 0
    phase: str = ""
    op_milliseconds: Mapping[OpKind, float] = MappingProxyType({})
    resident_bytes: int = 0
    host: str = ""
    pid: int = 0
    acknowledged: str = ""
    detail: str = ""
    slow: float = 0.0
    doing: Doing | None = None
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
class RecoveryView:
    """Milliseconds after the death of `worker`; after it was seen when not death_known. steps: what it was spent on,
    which adds up to the whole, people's time apart."""

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
    """condition: of the job, in a word. sentence: what the coordinator does or waits for, and why. plan: the one that
    is run; plan_words: how the job stands to it (app.jobs.live_job.PlanRun). missing: processes that have left the job
    and are not replaced. moved: those that hold another role than at first.

    iterations: the newest ones, oldest first. events: the newest ones, newest first.
    figures: ETTR, goodput and the fault-free rate so far. waits_since: when the wait for a person began that lasts
    (POSIX seconds), None: nobody is waited for.
    advice: the best option with the workers that are out, None while nothing is known of it. held: layers per stage as
    the workers have them, () where stages can't be cut; coming: as they will, while layers move. spares: ranks that
    run nothing since another one of their worker has ended.
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
    planned_ahead: int = 0
    plans_to_make: int = 0
    advice: str | None = None
    figures: Figures | None = None
    condition: Condition = Condition.RUNNING
    missing: tuple[ProcessState, ...] = ()
    moved: tuple[ProcessState, ...] = ()
    waits_since: float | None = None
    plan_words: str = ""
    held: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()
    spares: tuple[Rank, ...] = ()


@dataclass(frozen=True)
class JobHead:
    """What every page says of a job: little, and nothing that has to be read. workers: of the grid. plan: the
    fingerprint of the one that is run, and plan_words how the job stands to it."""

    job_id: str
    spec: JobSpec
    state: JobState
    condition: Condition
    workers: int
    plan: str | None
    plan_words: str
    planned_ahead: int
    plans_to_make: int


@dataclass(frozen=True)
class JobSummary:
    """One line of the list of jobs. living: workers in the generation; workers: size of the grid."""

    job_id: str
    name: str
    state: JobState
    sentence: str
    created_at: float
    generation: int
    living: int
    workers: int
    condition: Condition = Condition.RUNNING

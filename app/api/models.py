"""What the API answers where agent.messages.protocol has no message for it: what people and dashboards read."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Header, Query
from pydantic import BaseModel, BeforeValidator, Field

from openrecycle.agent.messages.protocol import JobSpec, JobState
from openrecycle.app.jobs.states import Condition, RoleState
from openrecycle.app.plans.profiles import NAME
from openrecycle.app.plans.solving import Migrations, Point, Solve, SolveState
from openrecycle.app.security.callers import MAX_ACTOR, actor_of

# What requests have in common: who asks (where no token says so), for how long an answer may wait, a profile.
Actor = Annotated[str, Header(max_length=MAX_ACTOR, alias="X-Actor"), BeforeValidator(actor_of)]
Wait = Annotated[float, Query(ge=0, le=60, description="seconds to wait for something new, at most")]
ProfileName = Annotated[str, Field(pattern=NAME)]


class JobInfo(BaseModel):
    """created_at: POSIX seconds. living: workers in the generation. workers: size of the grid. condition: how it is, in
    the word that the pages use: also whether it is degraded, paused, or waits for a person, and whether workers that it
    needs are silent."""

    job_id: str
    name: str
    state: JobState
    sentence: str
    created_at: float
    generation: int
    living: int
    workers: int
    condition: Condition


class JobDetail(JobInfo):
    """committed: iterations so far. plan_fingerprint: of the plan that is run, and plan_state whether it is `in force`,
    `interim` (until a newcomer has its state), `last in force` (the job is over), or `in force soon` (an interim one
    is run that was too large to be sent). advice: which option is best with the workers that are out, and why; null
    when none is, and until it is worked out. ettr: productive time / wall time so far; goodput: the same weighted with
    throughput / fault-free throughput. fault_free_samples_per_second: what throughput is measured by, and
    fault_free_source: where that number is from. waited_seconds: for a person, so far; in no other number.
    partition: layers per stage as the workers hold them, empty where stages can't be cut; moving_to: as they will,
    while layers are on their way."""

    spec: JobSpec
    committed: int
    plan_fingerprint: str | None
    plan_state: str = ""
    planned_ahead: int
    plans_to_make: int
    fault_free_samples_per_second: float | None
    fault_free_source: str | None = None
    waited_seconds: float = 0.0
    advice: str | None = None
    partition: list[int] = []
    moving_to: list[int] = []
    ettr: float | None = None
    goodput: float | None = None


class WorkerInfo(BaseModel):
    """A place of the grid, and the process that holds it. heartbeat_age: seconds. takes_rerouted: micro-batches of
    other pipelines per iteration. slow: how many times its peers' op times it takes, where that is too long; else 0.

    host, pid, since (POSIX seconds), slot (the place it was started in): of that process, or of the last one where it
    has ended there; "" and 0 where it holds another place by now, which is moved_to. spare: of that one's ranks, how
    many run nothing since another one has ended.
    """

    name: str
    pipeline: int
    stage: int
    state: RoleState
    takes_rerouted: int
    heartbeat_age: float | None
    generation: int
    iteration: int
    phase: str
    op_milliseconds: dict[str, float]
    resident_bytes: int
    host: str
    pid: int
    acknowledged: str
    detail: str
    slow: float = 0.0
    since: float = 0.0
    slot: str = ""
    moved_to: str = ""
    spare: int = 0


class EventInfo(BaseModel):
    """count: how often it was said, `at` the first time and `last_at` the last: what the console, or a worker's
    silence, gives cause to say again and again is one line. Its seq stays, and streams do not send it again."""

    seq: int
    at: float
    severity: Literal["info", "warning", "error"]
    kind: str
    worker: str | None
    text: str
    count: int = 1
    last_at: float


class IterationInfo(BaseModel):
    """loss_hex: the loss as a hexadecimal float, exact. skipped: micro-batches, numbered over the pipelines, that are
    in no sum of the iteration: one that gave NaN or infinity, or whose data nobody could run."""

    iteration: int
    loss: float
    loss_hex: str
    seconds: float
    generation: int
    living: int
    committed_at: float
    skipped: list[int] = []


class AcknowledgementInfo(BaseModel):
    worker: str
    incarnation: str
    state: Literal["adopted", "formed", "resumed"]
    iteration: int
    at: float


class GenerationInfo(BaseModel):
    """interim_plan: what it ran until newcomers had their state, "" if nothing; interim_failed: whom that goes
    without. partition: layers per stage that its plan is for; moved_at: the iteration from which on workers had them,
    null where they had them before, or have not got them."""

    generation: int
    plan_fingerprint: str
    living: list[str]
    failed: list[str]
    joining: list[str]
    moves: list[tuple[str, str]]
    restore: bool
    reason: str
    opened_at: float
    interim_plan: str = ""
    interim_failed: list[str] = []
    partition: list[int] = []
    moved_at: int | None = None
    acknowledgements: list[AcknowledgementInfo]


class PlanInfo(BaseModel):
    """ahead: made before its failure happened. The document is at .../plans/{fingerprint}."""

    fingerprint: str
    failed: list[str]
    ahead: bool
    created_at: float


class ReportOutcome(BaseModel):
    """reason: what the coordinator made of the report, in a sentence."""

    reason: str


class JobsPage(BaseModel):
    """next: `after` of the next page; null: there is none."""

    jobs: list[JobInfo]
    next: str | None = None


class Workers(BaseModel):
    workers: list[WorkerInfo]


class Events(BaseModel):
    events: list[EventInfo]


class Iterations(BaseModel):
    iterations: list[IterationInfo]


class Generations(BaseModel):
    generations: list[GenerationInfo]


class PlansPage(BaseModel):
    """next: `after` of the next page; null: there is none."""

    plans: list[PlanInfo]
    next: str | None = None


class SolveInfo(BaseModel):
    """incumbent, bound: in the job's time unit, null until known. elapsed: seconds of solving. points: from
    `after` on. plan_fingerprint: once it is done; the document is at .../plan."""

    id: str
    kind: str
    state: SolveState
    stopped: bool
    elapsed: float
    incumbent: float | None
    bound: float | None
    points: list[Point]
    plan_fingerprint: str | None
    migrations: Migrations | None
    error: str


def solve_info(solve: Solve, after: int) -> SolveInfo:
    last = solve.points[-1] if solve.points else None
    return SolveInfo(
        id=solve.id,
        kind=solve.request.kind,
        state=solve.state,
        stopped=solve.stopped,
        elapsed=round(solve.elapsed, 3),
        incumbent=last.incumbent if last else None,
        bound=last.bound if last else None,
        points=solve.points[after:],
        plan_fingerprint=solve.plan.fingerprint if solve.plan else None,
        migrations=solve.migrations,
        error=solve.error,
    )

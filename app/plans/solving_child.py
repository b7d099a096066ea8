"""What a planning process of app.plans.solving is asked, and what it says: its progress and its answer."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from openrecycle.app.runtime.processes import Channel
from openrecycle.planner.check import checked
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.failures import parse_workers
from openrecycle.planner.jobs.job import MAX_LAYERS, Job, MemoryLimit, Over, Problem, Technique, Worker
from openrecycle.planner.layers.distribution import COPY_BANDWIDTH, CopyCost
from openrecycle.planner.layers.migration import best_migrations
from openrecycle.planner.layers.partition import Layout, lay_out
from openrecycle.planner.plans.packed import to_bytes
from openrecycle.planner.plans.plan import INTEGER, JobDoc, WorkerName
from openrecycle.planner.solvers.base import SolverProgress
from openrecycle.planner.solvers.portfolio import SOLVERS, make_plan

log = structlog.get_logger()

# A plan of so many ops is some 40 MB of JSON, which the console reads; the command line takes larger ones.
MAX_SOLVED_OPS = 400_000
MAX_SECONDS = 3_600.0
# At most so many points a second leave the child, beside each better plan.
POINTS_PER_SECOND = 10
# Before a packed plan, which is not wrapped into another document; all other messages are JSON objects.
PLAN = b"+"


class _Settings(BaseModel):
    """failed, technique, memory: as in planner.jobs.job.Problem."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    failed: Annotated[tuple[WorkerName, ...], Field(fail_fast=True)] = ()
    technique: Technique = Technique.STAGGERED
    memory: Annotated[str, Field(max_length=20)] = "uniform"


class PlanSettings(_Settings):
    """All of a request for a plan but its job. solver: auto, list, cp-sat or milp. time_limit: seconds. over: what may
    be chosen beside the order of the ops (planner.jobs.job.Over); partition: layers per stage, where it is given."""

    kind: Literal["plan"] = "plan"
    solver: str = "auto"
    time_limit: Annotated[float, Field(strict=True, gt=0, le=MAX_SECONDS, allow_inf_nan=False)] = 20.0
    over: Over = "schedules"
    partition: Annotated[tuple[Annotated[int, INTEGER], ...], Field(max_length=MAX_LAYERS)] = ()


class MigrationsSettings(_Settings):
    """All of a request for migrations but its job. state_bytes: of weights and optimizer of every stage; 0: what the
    profile says. bandwidth: bytes per second of a copy. heals_in: seconds until the failed workers are back; None:
    they don't come back."""

    kind: Literal["migrations"] = "migrations"
    state_bytes: Annotated[int, Field(ge=0, le=1 << 60), INTEGER] = 0
    bandwidth: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = COPY_BANDWIDTH
    heals_in: Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)] | None = None


class _Asked(_Settings):
    """job: as in planner.jobs.job.Problem."""

    job: JobDoc

    @property
    def id(self) -> str:
        """Equal requests have equal ids."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def checked_job(self) -> Job:
        """Raises InputError, before memory is taken, for a job that is none or too large for here."""
        if self.job.pipelines > 0 and self.job.stages > 0 and self.job.ops > MAX_SOLVED_OPS:
            raise InputError(
                "pipelines x stages x micro_batches x 3 ops",
                self.job.ops,
                f"at most {MAX_SOLVED_OPS:,} ops here; `openrecycle plan` takes more",
            )
        return self.job.job()

    def dead(self) -> frozenset[Worker]:
        return parse_workers(self.failed)


class PlanAsked(_Asked, PlanSettings):
    @property
    def timeout(self) -> float:
        return self.time_limit

    def problem(self) -> Problem:
        """Raises InputError, and InfeasibleError when no schedule can exist."""
        if self.solver not in SOLVERS:
            raise InputError("solver", self.solver, "one of " + ", ".join(SOLVERS))
        job = self.checked_job()
        job = job.with_partition(self.partition) if self.partition else job
        return Problem(job, self.dead(), self.technique, MemoryLimit.parse(self.memory, field="memory"))

    def check(self) -> None:
        """Raises what `problem` or `layout` would, as far as it takes no time."""
        if self.over != "schedules" and not self.job.layers:
            raise InputError("over", self.over, "schedules, since this job comes without layers")
        if self.over != "layouts":
            self.problem()
            return
        # A stage whose workers are all dead is given others.
        alive = self.model_copy(update={"failed": ()}).problem()
        for worker in self.dead():
            alive.job.check_worker(worker, field="failed")

    def layout(self) -> Layout | None:
        """The best of those that `over` leaves open. Takes a while. Raises PlannerError."""
        if self.over == "schedules":
            return None
        job = self.checked_job()
        job = job.with_partition(self.partition) if self.partition else job
        return lay_out(
            job,
            self.dead(),
            technique=self.technique,
            memory=MemoryLimit.parse(self.memory, field="memory"),
            over=self.over,
            present=job.partition,
        )


class MigrationsAsked(_Asked, MigrationsSettings):
    @property
    def timeout(self) -> float:
        return 60.0

    def cost(self) -> CopyCost:
        """Raises InputError for a job that is none."""
        own = tuple(profile.fixed_bytes for profile in self.checked_job().profiles)
        return CopyCost((self.state_bytes,) * self.job.stages if self.state_bytes else own, self.bandwidth)


Request: TypeAlias = PlanAsked | MigrationsAsked
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])


class MigrationAnswer(BaseModel):
    """`worker` leaves its stage for the place of `takes`; `source` gives it the weights (None: a checkpoint)."""

    worker: WorkerName
    takes: WorkerName
    source: WorkerName | None


class Migrations(BaseModel):
    """What planner.layers.migration says: failed, the empty places afterwards; periods in the job's time unit;
    present, counts: failures per stage now and afterwards; pause: seconds; gained: iterations."""

    migrations: list[MigrationAnswer]
    failed: list[WorkerName]
    present: list[int]
    counts: list[int]
    period_now: float | None
    period: float
    pause: float
    gained: float | None
    reason: str


def serve(channel: Channel, document: bytes) -> None:
    """In the child: points of progress, then what it made, or a sentence."""

    def report(point: Any) -> None:
        channel.say(json.dumps({"point": point}).encode())

    try:
        channel.say(answer(_REQUEST.validate_json(document), report, channel.wanted))
    except PlannerError as error:
        _say_why(channel, str(error))
    except MemoryError:
        _say_why(channel, "this machine has too little memory for a plan of this size")
    except Exception as error:
        log.exception("the planner failed")
        _say_why(channel, f"the planner failed ({type(error).__name__}); the console's log says more")


def _say_why(channel: Channel, sentence: str) -> None:
    channel.say(json.dumps({"error": sentence}).encode())


def answer(request: Request, report: Any, wanted: Callable[[], bool]) -> bytes:
    """{"migrations": document} as JSON, or PLAN and the packed plan. report: called with
    (seconds, incumbent, bound, solver), times in the job's unit. Raises PlannerError."""
    if isinstance(request, MigrationsAsked):
        return json.dumps({"migrations": _migrations(request).model_dump()}).encode()
    begin = time.monotonic()
    layout = request.layout()
    problem = request.problem() if layout is None else layout.problem
    job = problem.job
    last: tuple[float, int | None] = (-1.0, None)

    def on_progress(progress: SolverProgress) -> None:
        nonlocal last
        now = time.monotonic() - begin
        if progress.incumbent == last[1] and now - last[0] < 1 / POINTS_PER_SECOND:
            return
        last = (now, progress.incumbent)
        incumbent = None if progress.incumbent is None else job.units(progress.incumbent)
        report((round(now, 4), incumbent, job.units(progress.bound), progress.solver))

    plan = make_plan(
        problem,
        solver=request.solver,
        time_limit=request.time_limit,
        on_progress=on_progress,
        cancelled=lambda: not wanted(),
        layout=layout,
    )
    metrics = checked(plan).metrics
    report((round(time.monotonic() - begin, 4), metrics.period, metrics.lower_bound, plan.solver.name))
    return PLAN + to_bytes(plan)


def _migrations(request: MigrationsAsked) -> Migrations:
    job = request.checked_job()
    found = best_migrations(
        job,
        request.dead(),
        technique=request.technique,
        memory=MemoryLimit.parse(request.memory, field="memory"),
        cost=request.cost(),
        heals_in=request.heals_in,
    )
    return Migrations(
        migrations=[
            MigrationAnswer(worker=str(m.worker), takes=str(m.takes), source=str(m.source) if m.source else None)
            for m in found.migrations
        ],
        failed=[str(worker) for worker in sorted(found.failed)],
        present=list(found.present),
        counts=list(found.counts),
        period_now=None if found.period_now is None else job.units(found.period_now),
        period=job.units(found.period),
        pause=found.pause,
        gained=found.iterations_gained,
        reason=found.reason,
    )

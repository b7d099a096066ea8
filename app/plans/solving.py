"""Plans and migrations that are made in child processes: for running jobs, for pages at once, and for people who ask
for them and see the progress.

Plans for jobs (`plan_maker`) and plans for pages (`Making`) have one process each, so that a page never holds up a
job's own plans. Large plans cross the pipe in columns (planner.plans.packed).

Each request of a person (`Solves`) has a process of its own. Equal requests share one result, a bounded number runs at
once, and the rest wait in order. Stopping one keeps its best plan so far.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import structlog
from cachetools import LRUCache
from pydantic import BaseModel, ConfigDict, Field

from openrecycle.app.catalogs.contents import Located
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.processes import Channel, Children, PendingAnswer
from openrecycle.app.runtime.task_queue import TaskQueue
from openrecycle.planner.check import checked
from openrecycle.planner.jobs.errors import InputError, PlannerError, in_words
from openrecycle.planner.jobs.failures import parse_workers
from openrecycle.planner.jobs.job import MAX_LAYERS, Job, MemoryLimit, Over, Problem, Technique, Worker
from openrecycle.planner.layers.migration import (
    COPY_BANDWIDTH,
    LEAST_BANDWIDTH,
    MOST_HEALS_IN,
    CopyCost,
    Migrations,
    best_migrations,
    check_copy_cost,
)
from openrecycle.planner.layers.partition import Layout, best_relayout, lay_out
from openrecycle.planner.plans.packed import packed, unpack
from openrecycle.planner.plans.plan import INTEGER, JobDoc, Plan, WorkerName
from openrecycle.planner.solvers.base import SolverProgress
from openrecycle.planner.solvers.portfolio import SOLVERS, make_plan, reference_plan

log = structlog.get_logger()

# -- what is asked --------------------------------------------------------------------------------

# A plan of this many ops is some 40 MB of JSON, which the console reads. The command line takes larger ones.
MAX_SOLVED_OPS = 400_000
MAX_SECONDS = 3_600.0


class PlanningSettings(BaseModel):
    """failed, technique, memory: as in planner.jobs.job.Problem. over: what may be chosen beside the order of the ops
    (planner.jobs.job.Over); partition: layers per stage, where it is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    failed: Annotated[tuple[WorkerName, ...], Field(fail_fast=True)] = ()
    technique: Technique = Technique.STAGGERED
    memory: Annotated[str, Field(max_length=20)] = "uniform"
    over: Over = "schedules"
    partition: Annotated[tuple[Annotated[int, INTEGER], ...], Field(max_length=MAX_LAYERS)] = ()


class PlanSettings(PlanningSettings):
    """All of a request for a plan but its job. solver: auto, list, cp-sat or milp. time_limit: seconds."""

    kind: Literal["plan"] = "plan"
    solver: str = "auto"
    time_limit: Annotated[float, Field(strict=True, gt=0, le=MAX_SECONDS, allow_inf_nan=False)] = 20.0


class MigrationsSettings(PlanningSettings):
    """All of a request for migrations but its job. over: if it is not `schedules`, the layers are cut anew, with and
    without migrations. state_bytes: of weights and optimizer of every stage; None: what the profile says. bandwidth:
    bytes per second of a copy. heals_in: seconds until the failed workers are back; None: they don't come back."""

    kind: Literal["migrations"] = "migrations"
    state_bytes: Annotated[int, Field(ge=0, le=1 << 60), INTEGER] | None = None
    bandwidth: Annotated[float, Field(strict=True, ge=LEAST_BANDWIDTH, allow_inf_nan=False)] = COPY_BANDWIDTH
    heals_in: Annotated[float, Field(strict=True, ge=0, le=MOST_HEALS_IN, allow_inf_nan=False)] | None = None


class PlanningAsked(PlanningSettings):
    """job: as in planner.jobs.job.Problem."""

    job: JobDoc

    @property
    def id(self) -> str:
        """Equal requests have equal ids."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raises InputError, before memory is taken, for a job that is too large for here, and then what the child
        would raise, as far as that can be found out at once."""
        if self.job.pipelines > 0 and self.job.stages > 0 and self.job.ops > MAX_SOLVED_OPS:
            raise InputError(
                "pipelines x stages x micro_batches x 3 ops",
                self.job.ops,
                f"at most {MAX_SOLVED_OPS:,} ops here; `openrecycle plan` takes more",
            )

    def whole_job(self) -> Job:
        """Returns the job with its partition. Raises InputError for a job that is none."""
        if self.over != "schedules" and not self.job.layers:
            raise InputError("over", self.over, "schedules, since this job comes without layers")
        job = self.job.job()
        return job.with_partition(self.partition) if self.partition else job

    def dead(self) -> frozenset[Worker]:
        return parse_workers(self.failed)

    def limit(self) -> MemoryLimit:
        return MemoryLimit.parse(self.memory, field="memory")


class PlanAsked(PlanningAsked, PlanSettings):
    @property
    def timeout(self) -> float:
        return self.time_limit

    def problem(self) -> Problem:
        """Raises InputError, and InfeasibleError when no schedule can exist."""
        if self.solver not in SOLVERS:
            raise InputError("solver", self.solver, "one of " + ", ".join(SOLVERS))
        return Problem(self.whole_job(), self.dead(), self.technique, self.limit())

    def check(self) -> None:
        super().check()
        if self.over != "layouts":
            self.problem()
            return
        # A stage whose workers are all dead is no error here: a layout gives it workers of other stages.
        alive = self.model_copy(update={"failed": ()}).problem()
        for worker in self.dead():
            alive.job.check_worker(worker, field="failed")

    def layout(self) -> Layout | None:
        """Returns the best layout of those that `over` leaves open; None if only the schedule is open. Takes a while.
        Raises PlannerError."""
        if self.over == "schedules":
            return None
        job, memory = self.whole_job(), self.limit()
        return lay_out(job, self.dead(), technique=self.technique, memory=memory, over=self.over, present=job.partition)


class MigrationsAsked(PlanningAsked, MigrationsSettings):
    @property
    def timeout(self) -> float:
        return 60.0

    def check(self) -> None:
        super().check()
        self.whole_job()

    def cost(self, job: Job) -> CopyCost:
        """Returns what copying a stage's state costs. job: with its partition."""
        return check_copy_cost(job, None if self.state_bytes is None else [self.state_bytes], self.bandwidth)


Request: TypeAlias = PlanAsked | MigrationsAsked


# -- plans that child processes make or look up -------------------------------------------------


def plan_maker(name: str = "planning", *, on_made: Callable[[Plan], None] = lambda made: None) -> TaskQueue[Plan]:
    """Makes a task queue that takes PlanAsked, with the job as it is, and Located."""
    return TaskQueue(serve_at_once, name, read_plan, on_made=on_made)


def read_plan(document: bytes) -> Plan:
    return unpack(document, source="the planning process")


def serve_at_once(channel: Channel, request: PlanAsked | Located) -> None:
    """Answers one request, in the child."""
    channel.say(packed(_plan(request)))


def _plan(request: PlanAsked | Located) -> Plan:
    """Makes or looks up the plan. Raises PlannerError, also for a stored plan that is damaged or does not fit the
    failures."""
    if isinstance(request, Located):
        return request.plan()
    # With "list", workers may be waiting for the plan.
    look_ahead, limit = request.solver != "list", request.time_limit
    return checked(make_plan(request.problem(), solver=request.solver, time_limit=limit, look_ahead=look_ahead))


# The most ops of all answers that are kept, each of 100 bytes or more; and the least and the most that one plan counts
# as. So the plans that one page compares are always kept.
ANSWERED_OPS, LEAST_ANSWERED, MOST_ANSWERED = 3_200_000, 100_000, 400_000
TIME_LIMIT = 5.0
# An answer without a plan is tried again after this many seconds.
FAILED_SECONDS = 30.0
# For more ops than this a page gets the list scheduler's plan; better ones are for the Planner page.
SEARCHED_OPS = 20_000


@dataclass
class Answer:
    """The answer to a page's question: once it is `done`, a plan, or why there is none. ops: of the plan. asked, ended:
    monotonic seconds."""

    ops: int
    plan: Plan | None = None
    why: str = ""
    done: bool = False
    asked: float = field(default_factory=time.monotonic)
    ended: float = math.inf

    def end(self, plan: Plan | None, why: str) -> None:
        self.plan, self.why, self.ended, self.done = plan, why, time.monotonic(), True

    @property
    def stale(self) -> bool:
        """Whether it failed some time ago. It may succeed now, for example if its process had died."""
        return self.done and self.plan is None and time.monotonic() - self.ended > FAILED_SECONDS


class Making:
    """Makes plans for pages, without a delay for the page. Thread-safe. Its child process begins with the first
    question."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: LRUCache[str, Answer] = LRUCache(
            ANSWERED_OPS, lambda answer: min(max(answer.ops, LEAST_ANSWERED), MOST_ANSWERED)
        )
        self._maker = plan_maker("page-planning")
        self._started = False

    def get(self, job: JobDoc, failed: tuple[str, ...], technique: Technique, memory: str) -> Answer:
        """Returns the answer, which may not be done yet. Equal questions share one answer; the first one begins it."""
        solver = "auto" if job.ops <= SEARCHED_OPS else "list"
        limit = TIME_LIMIT
        asked = PlanAsked(job=job, failed=failed, technique=technique, memory=memory, solver=solver, time_limit=limit)
        with self._lock:
            known = self._answers.get(asked.id)
            if known is None or known.stale:
                known = self._answers[asked.id] = self._begin(asked)
            return known

    def close(self) -> None:
        with self._lock:
            if self._started:
                self._maker.close()

    def _begin(self, asked: PlanAsked) -> Answer:
        answer = Answer(asked.job.ops)
        plain = asked.technique is Technique.FAULT_FREE and asked.memory == "1f1b" and not asked.failed
        if plain and asked.job.ops <= SEARCHED_OPS:
            # The order of ops is fixed and nothing is searched for, so this needs no child process.
            try:
                answer.end(checked(reference_plan(asked.job.job(), "1f1b")), "")
            except PlannerError as error:
                answer.end(None, in_words(error))
            return answer
        if not self._started:
            self._started = True
            self._maker.start(child=False)
        self._maker.submit("a page", asked, answer.end)
        return answer


# -- the child ------------------------------------------------------------------------------------

# The child reports at most this many points a second, beside one for each better plan.
POINTS_PER_SECOND = 10


def serve(channel: Channel, request: Request) -> None:
    """Answers one request, in the child: sends points of progress, then the result."""
    channel.say(answer(request, lambda point: channel.say({"point": point}), channel.wanted))


def answer(request: Request, report: Callable[[Any], object], wanted: Callable[[], bool]) -> bytes | dict[str, Any]:
    """Returns the result's message: {"migrations": document}, or the packed plan.

    report: called with (seconds, incumbent, bound, solver), the middle two in the job's time unit. wanted: says whether
    to go on. Raises PlannerError."""
    request.check()  # a page may ask for what has just been typed, before anybody has looked at it
    if isinstance(request, MigrationsAsked):
        return {"migrations": _migrations(request).model_dump()}
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
    return packed(plan)


def _migrations(request: MigrationsAsked) -> Migrations:
    job, dead, heals_in = request.whole_job(), request.dead(), request.heals_in
    technique, memory = request.technique, request.limit()
    if request.over == "schedules":
        cost = request.cost(job)
        found = best_migrations(job, dead, technique=technique, memory=memory, cost=cost, heals_in=heals_in)
    else:
        found = best_relayout(job, dead, technique=technique, memory=memory, cost=request.cost, heals_in=heals_in)
    return found.document(job)


# -- the console ----------------------------------------------------------------------------------

MAX_RUNNING = 2
MAX_WAITING = 16
# How many finished requests are kept, and ops of their plans; a plan of 393,216 ops takes about 300 MB.
MAX_KEPT = 32
MAX_KEPT_OPS = 400_000
# The most points of one solve that are kept: a search may report hundreds a second.
MAX_POINTS = 2_000
# Seconds that a child has to end its search after it was told to stop; then its process is ended.
STOP_GRACE = 30.0

SolveState = Literal["waiting", "running", "stopping", "done", "failed"]
OVER = ("done", "failed")


class Point(NamedTuple):
    """A point of a search's progress. elapsed: seconds. incumbent (the best period so far; None: no plan yet) and bound
    are in the job's time unit."""

    elapsed: float
    incumbent: float | None
    bound: float
    solver: str


@dataclass
class Solve:
    """One request and its results so far. error: a sentence, if its state is `failed`. stopped: somebody has stopped
    it. shared: it was asked for more than once, so that several may want its result.

    asked: POSIX seconds; begun: monotonic seconds; seconds: how long it ran, once it is over. child: the process's
    answer, while it runs.
    """

    id: str
    request: Request
    state: SolveState = "waiting"
    points: list[Point] = field(default_factory=list)
    plan: Plan | None = None
    migrations: Migrations | None = None
    error: str = ""
    stopped: bool = False
    shared: bool = False
    asked: float = field(default_factory=time.time)
    begun: float | None = None
    seconds: float | None = None
    child: PendingAnswer | None = None

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def elapsed(self) -> float:
        """Seconds that it has run so far."""
        if self.seconds is not None:
            return self.seconds
        return 0.0 if self.begun is None else time.monotonic() - self.begun


class Solves:
    """The requests of people for plans and migrations. One per console. Thread-safe.

    running, waiting: how many may run and wait at a time. stop_grace: seconds that a child has to stop in. kept_ops:
    the most ops of the plans that are kept."""

    def __init__(
        self,
        *,
        running: int = MAX_RUNNING,
        waiting: int = MAX_WAITING,
        stop_grace: float = STOP_GRACE,
        kept_ops: int = MAX_KEPT_OPS,
        work: Callable[[Channel, Request], None] = serve,
        on_made: Callable[[Plan], None] = lambda plan: None,
    ) -> None:
        self._most, self._most_waiting, self._stop_grace, self._kept_ops = running, waiting, stop_grace, kept_ops
        self._children = Children(work, name="planning")
        self._on_made = on_made
        self._lock = threading.RLock()
        self._solves: dict[str, Solve] = {}
        self._closed = False

    def find(self, request: Request) -> Solve | None:
        """Returns the Solve of an equal request, if there is one, and starts nothing."""
        return self._solves.get(request.id)

    def get(self, solve_id: str) -> Solve:
        """Raises ConsoleError (404)."""
        found = self._solves.get(solve_id)
        if found is None:
            raise ConsoleError(
                404, "unknown_solve", f"got {solve_id!r}, expected the id of one that is kept", field="solve"
            )
        return found

    def all(self) -> list[Solve]:
        """Returns all that are kept, in the order in which they were asked for."""
        with self._lock:
            return sorted(self._solves.values(), key=lambda s: (s.asked, s.id))

    def start(self, request: Request) -> Solve:
        """Begins a request, or lets it wait for its turn. An equal request that is known is returned instead, unless it
        has failed or was stopped. Raises ConsoleError (429) when too many wait."""
        with self._lock:
            known = self._solves.get(request.id)
            if known is not None and not (known.state == "failed" or (known.over and known.stopped)):
                known.shared = True
                return known
            if sum(s.state == "waiting" for s in self._solves.values()) >= self._most_waiting:
                raise ConsoleError(
                    429, "too_many", f"{self._most_waiting} plans wait to be made already; stop one, or ask again later"
                )
            self._solves.pop(request.id, None)
            solve = self._solves[request.id] = Solve(request.id, request)
            self._drop_old()
            self._begin_next()
            return solve

    def stop(self, solve_id: str) -> Solve:
        """Stops a solve, which ends with its best plan so far. Raises ConsoleError (404)."""
        with self._lock:
            solve = self.get(solve_id)
            if solve.state == "waiting":
                solve.stopped = True
                self._over(solve, "stopped before it had begun")
            elif solve.state == "running":
                solve.stopped, solve.state = True, "stopping"
                if solve.child is not None:
                    solve.child.stop()
        return solve

    def warm(self) -> None:
        """Prepares a process with the planner imported, so that the next plan need not wait for that."""
        self._children.prepare()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._children.close()

    # -- details ----------------------------------------------------------------------------

    def _begin_next(self) -> None:
        for solve in self.all():
            busy = sum(s.state in ("running", "stopping") for s in self._solves.values())
            if self._closed or busy >= self._most:
                return
            if solve.state == "waiting":
                self._begin(solve)

    def _begin(self, solve: Solve) -> None:
        # A search that lasts longer than its time limit is stopped, and ends with its best plan so far.
        try:
            solve.child = self._children.begin(solve.request, timeout=solve.request.timeout, grace=self._stop_grace)
        except ConsoleError as error:
            self._over(solve, error.detail)
            return
        solve.state, solve.begun = "running", time.monotonic()
        threading.Thread(target=self._collect, args=(solve, solve.child), name="solve", daemon=True).start()

    def _collect(self, solve: Solve, child: PendingAnswer) -> None:
        """Takes the child's messages until it is done, has died, or takes too long; runs in a thread of its own."""
        try:
            for message in child.messages():
                self._take(solve, message)
                if solve.over:
                    return
            raise EOFError
        except ConsoleError as error:
            self._over(solve, error.detail)
        except Exception as error:
            log.exception("what a planning process said can't be read")
            self._over(solve, f"what the planning process said can't be read ({type(error).__name__})")

    def _take(self, solve: Solve, message: object) -> None:
        match message:
            case bytes():
                solve.plan = read_plan(message)
                self._on_made(solve.plan)
                self._over(solve)
            case {"point": [float() | int() as elapsed, incumbent, bound, str(solver)]}:
                _add(solve.points, Point(elapsed, incumbent, bound, solver))  # type: ignore[arg-type]
            case {"migrations": document}:
                solve.migrations = Migrations.model_validate(document)
                self._over(solve)
            case _:
                raise ValueError("unknown message")

    def _over(self, solve: Solve, error: str = "") -> None:
        with self._lock:
            if solve.over:
                return
            solve.seconds = solve.elapsed
            solve.error = error
            solve.state = "failed" if error else "done"
            self._drop_old()
            self._begin_next()

    def _drop_old(self) -> None:
        over = [s for s in self.all() if s.over]
        ops = sum(s.request.job.ops for s in over if s.plan is not None)
        while over and (len(over) > MAX_KEPT or (len(over) > 1 and ops > self._kept_ops)):
            oldest = over.pop(0)
            ops -= oldest.request.job.ops if oldest.plan is not None else 0
            del self._solves[oldest.id]


def _add(points: list[Point], point: Point) -> None:
    """Adds a point if it differs from the last one. When the list is full, it replaces the last one."""
    if points and points[-1][1:] == point[1:]:
        return
    if len(points) >= MAX_POINTS:
        points[-1] = point
    else:
        points.append(point)

"""The CP-SAT solver: proves small grids optimal, improves windows of large ones.

It starts from the list scheduler's schedule (or the one given) and never returns a worse one.

1. The pooled relaxation raises the bound, which holds for all routings. On small grids it often
   meets the schedule there and then.
2. Routes as in that schedule: one model of the whole reduction where that is of a size to be
   solved, else slice after slice of the schedule (see lns) to the end of the time.
3. A proof for given routes says nothing of others. So when that leaves a gap, the relaxation is
   given more time, and then routes become free as well: which living peer runs what.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ortools.sat.python import cp_model

from openrecycle.planner.jobs.job import Problem
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Cancelled, Run, Solution
from openrecycle.planner.solvers.cp_sat_model import PooledModel, RoutingModel, ScheduleModel, SliceModel
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.lns import ScheduleGraph, Slices
from openrecycle.planner.solvers.reduction import Reduction, proven_for_routing, routes_of

# Ops in one model: up to the first, the whole time is given to it; up to the second, a share.
WHOLE_OPS = 700
SHARED_OPS = 4_000
SHARE = 0.35
# The relaxation is given a share before the schedule is worked on, and another after.
POOLED_OPS = 2_500
EARLY, LATE = 0.25, 0.5
# With free routes every op is there once per living peer.
ROUTED_OPS = 1_500
# Seconds for one slice.
SLICE_SECONDS = 1.0
# CP-SAT adds up the times of a model's ops, none of which is beyond twice the period.
MOST_TICKS = (1 << 62) // (2 * SHARED_OPS)
# Slices in a row without a gain, after which one is re-arranged at the same period.
PATIENCE = 20


class CpSatSolver:
    """The Solver of this module.

    workers: CP-SAT's threads. free_routes: whether step 2 is taken. Equal questions have equal searches, as far as the
    clock lets them (a time limit cuts where it cuts).
    """

    name = "cp-sat"

    def __init__(self, *, workers: int = 2, free_routes: bool = True) -> None:
        self.workers = workers
        self.free_routes = free_routes

    def solve(self, problem: Problem, run: Run | None = None, *, warm_start: Schedule | None = None) -> Solution:
        run = run or Run()
        if warm_start is None or not problem.technique.reroutes:
            first = ListScheduler().solve(problem, run.quiet())
            if not problem.technique.reroutes:
                # Fault-free names one schedule, 1F1B: there is nothing to choose.
                return replace(first, solver=self.name, seconds=run.elapsed)
            warm_start = first.schedule
        if warm_start.period > MOST_TICKS:
            why = "CP-SAT takes no op times of so many digits; this is the plan that it was to improve"
            return Solution(warm_start, period_bound(problem), self.name, run.elapsed, why)
        search = _Search(problem, warm_start, period_bound(problem), run, self.workers)
        message = search.go(free_routes=self.free_routes)
        return Solution(search.best, search.bound, self.name, run.elapsed, message)


@dataclass
class _Search:
    """One solve: the incumbent, the bound, and what is left of the time."""

    problem: Problem
    best: Schedule
    bound: int
    run: Run
    workers: int
    seed: int = field(init=False, default=0)

    def go(self, *, free_routes: bool) -> str:
        """Improves `best` and `bound`; returns what is to be said about the result."""
        self.tell(self.best.period, self.bound)
        if self.closed:
            return ""
        self._pooled(EARLY)
        reduction = Reduction.of(self.problem, routes_of(self.best))
        proven = False
        if reduction.ops <= SHARED_OPS and self.left > 0 and not self.closed:
            proven = self._whole(reduction, self.left if reduction.ops <= WHOLE_OPS else self.left * SHARE)
        if not proven and not self.closed:
            self._slices(reduction)
        if proven and not self.closed:
            self._pooled(LATE)
        if proven and free_routes and not self.closed:
            self._routes()
        return self._message(proven)

    # -- where it stands -------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.best.period <= self.bound

    @property
    def left(self) -> float:
        return self.run.left

    def tell(self, incumbent: int, bound: int) -> None:
        self.run.tell(CpSatSolver.name, incumbent, bound)

    def take(self, schedule: Schedule) -> None:
        if schedule.period < self.best.period:
            self.best = schedule
            self.tell(self.best.period, self.bound)

    def raise_bound(self, bound: int) -> None:
        """`bound` holds for all schedules better than `best`; no more than that is known."""
        self.bound = max(self.bound, min(bound, self.best.period))
        self.tell(self.best.period, self.bound)

    # -- steps -----------------------------------------------------------------------------------

    def _run(
        self, model: ScheduleModel | SliceModel | RoutingModel | PooledModel, seconds: float, watch: Watcher | None
    ) -> CpSatOutcome:
        stop = self.run.cancelled and (lambda: self.run.stopped)
        return run(model.model, time_limit=seconds, workers=self.workers, seed=self.seed, watch=watch, cancelled=stop)

    def _whole(self, reduction: Reduction, seconds: float) -> bool:
        """All ops in one model. True when nothing better exists for these routes."""
        model = ScheduleModel(reduction, self.bound, self.best.period, reduction.times_of(self.best))

        def watch(objective: int | None, _: int) -> None:
            if objective is not None:
                self.tell(min(objective, self.best.period), self.bound)

        outcome = self._run(model, seconds, watch)
        if outcome.solved:
            self.take(reduction.schedule(model.read(outcome.solver)))
        return outcome.proven

    def _slices(self, reduction: Reduction) -> None:
        """Slice after slice, until the time is up or the gap is closed."""
        if not self.left:
            return
        times = reduction.times_of(self.best)
        assert times is not None  # the routes are those of `best`
        frame = self._adopt(ScheduleGraph(reduction, times))
        slices = Slices(seed=self.seed)
        vain = 0
        while self.left and not self.closed:
            sideways = vain >= PATIENCE
            vain = 0 if sideways else vain + 1
            room = frame.room(*slices.next(frame), self.best.period - (0 if sideways else 1))
            if room is None or not self.left:
                continue
            model = SliceModel(room)
            self.seed += 1  # another answer to the same question, when moving sideways
            outcome = self._run(model, min(SLICE_SECONDS, self.left), None)
            if not outcome.proven:
                slices.unanswered()
                continue
            slices.answered()
            if outcome.solved:
                frame = self._adopt(model.read(outcome.solver))

    def _adopt(self, frame: ScheduleGraph) -> ScheduleGraph:
        """The frame with its stages started late; the new incumbent if it is better."""
        frame = frame.late()
        if frame.period < self.best.period:
            self.take(frame.reduction.schedule(frame.times()))
        return frame

    def _pooled(self, share: float) -> None:
        """A higher bound, from the relaxation, for a share of the time left."""
        if not self.left or PooledModel.ops(self.problem) > POOLED_OPS:
            return
        model = PooledModel(self.problem, self.bound, self.best.period)
        outcome = self._run(model, self.left * share, lambda _, bound: self.raise_bound(bound))
        self.raise_bound(outcome.bound)

    def _routes(self) -> None:
        """Routes free as well: a better schedule, or a proof that there is none."""
        if not self.left or RoutingModel.ops(self.problem) > ROUTED_OPS or self.problem.job.speeds:
            return
        model = RoutingModel(self.problem, self.bound, self.best.period - 1)
        # The model keeps to the limits, and proves nothing where more may fit.
        proves = self.problem.limits_are_exact

        def watch(objective: int | None, bound: int) -> None:
            if proves:
                self.raise_bound(bound)
            if objective is not None:
                self.tell(min(objective, self.best.period), self.bound)

        outcome = self._run(model, self.left, watch)
        if outcome.solved:
            self.take(model.read(outcome.solver))
        if proves:
            self.raise_bound(self.best.period if outcome.infeasible else outcome.bound)

    def _message(self, proven: bool) -> str:
        if self.closed:
            return ""
        if proven:
            return proven_for_routing(self.problem, self.bound)
        return (
            "stopped before the gap was closed" if self.run.stopped else "time limit reached before the gap was closed"
        )


# -- a model runs so that it can be watched and stopped from the calling thread ----------------------

_log = logging.getLogger(__name__)

# Seconds between two looks at `cancelled` while the solver has nothing to say.
POLL = 0.05

Watcher = Callable[[int | None, int], None]
"""Called in the calling thread with (objective of the incumbent, bound), each time one improves."""


@dataclass(frozen=True)
class CpSatOutcome:
    """status: CP-SAT's. objective: None without a solution. bound: of the objective, rounded up.

    cancelled: whether the caller ended it. solver: to read values from; only where `solved`.
    """

    status: cp_model.CpSolverStatus
    objective: int | None
    bound: int
    solver: cp_model.CpSolver
    cancelled: bool

    @property
    def solved(self) -> bool:
        return self.objective is not None

    @property
    def infeasible(self) -> bool:
        return bool(self.status == cp_model.INFEASIBLE)

    @property
    def proven(self) -> bool:
        """Optimal, or proven to have no solution."""
        return self.status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)


class _Incumbents(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    def __init__(self, events: queue.SimpleQueue[tuple[float | None, float] | None]) -> None:
        super().__init__()
        self._events = events

    def on_solution_callback(self) -> None:
        self._events.put((self.objective_value, self.best_objective_bound))


def run(
    model: cp_model.CpModel,
    *,
    time_limit: float,
    workers: int,
    seed: int,
    watch: Watcher | None = None,
    cancelled: Cancelled | None = None,
) -> CpSatOutcome:
    """Minimizes `model` for at most `time_limit` seconds.

    The search runs in a thread of its own: CP-SAT holds neither the GIL nor the calling thread, so
    `cancelled` is polled, and Ctrl-C answered, while it works. Raises ValueError for a model that
    CP-SAT calls invalid, which is a mistake of ours.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.catch_sigint_signal = False
    events: queue.SimpleQueue[tuple[float | None, float] | None] = queue.SimpleQueue()
    solver.best_bound_callback = lambda bound: events.put((None, bound))
    status = cp_model.UNKNOWN
    proven = -math.inf
    stopped = False

    def work() -> None:
        nonlocal status, proven
        try:
            status = solver.solve(model, _Incumbents(events))
            proven = solver.best_objective_bound
        except Exception:
            # CP-SAT 9.15 now and then throws from within. What the caller has is still good.
            _log.warning("CP-SAT broke off its search", exc_info=True)
        finally:
            events.put(None)

    thread = threading.Thread(target=work, name="cp-sat", daemon=True)
    thread.start()
    deadline = time.monotonic() + time_limit
    try:
        best: float | None = None
        while True:
            try:
                event = events.get(timeout=POLL)
            except queue.Empty:
                event = (None, -math.inf)
            if event is None:
                break
            objective, bound = event
            if objective is not None:
                best = objective
            if watch and bound > -math.inf:
                watch(None if best is None else round(best), _whole(bound))
            stopped = stopped or bool(cancelled and cancelled())
            # CP-SAT looks at its own limit too seldom while it presolves.
            if stopped or time.monotonic() > deadline:
                solver.stop_search()
    finally:
        while thread.is_alive():  # a stop before the search has begun is not heeded
            solver.stop_search()
            thread.join(POLL)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT refuses the model: {model.validate()}")
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    objective_value = round(solver.objective_value) if found else None
    return CpSatOutcome(status, objective_value, 0 if math.isinf(proven) else _whole(proven), solver, stopped)


def _whole(bound: float) -> int:
    """A bound of a whole objective, rounded up but for the noise of floating point."""
    return math.ceil(bound - 1e-6)

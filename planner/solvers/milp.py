"""The textbook MILP of a routed problem, as a check on CP-SAT: it shares no model code with it.

It is time-indexed, in step form: y[op, t] = 1 once the op has started by tick t. So precedence is
y[b, t] <= y[a, t - duration - transfer]; a worker's load at t is the sum of y[op, t] - y[op, t - duration]; and the
activations that it holds are the sum of y[F, t] - y[W, t - W]. In bytes, they weigh what I needs until I's end, and
from there on what W needs. Of the usual forms HiGHS solves this one soonest.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ortools.math_opt.python import mathopt

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Problem, StageRoom, Worker
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Cancelled, Run, Solution
from openrecycle.planner.solvers.routing import Routes, proven_for_routing, routes_of, schedule_of

# Above this many 0/1 variables HiGHS takes minutes where CP-SAT takes seconds.
MAX_VARIABLES = 12_000
# HiGHS may take 1e-6 for 0, and 1 - 1e-6 for 1. Up to this number a sum of such terms still rounds to the right one.
MOST_ROOM = 10_000
POLL = 0.05
# A larger time limit is the same as none, and HiGHS refuses it.
MOST_SECONDS = 1e9

# Infeasible means that nothing is as short as the known schedule, so that one is the best of its routing.
PROVEN = ("OPTIMAL", "INFEASIBLE", "INFEASIBLE_OR_UNBOUNDED")

_Op = tuple[str, int, int]  # kind, micro-batch index, stage


class MilpSolver:
    """The solver of this module. Raises InputError for a model that needs more than MAX_VARIABLES."""

    name = "milp"

    def solve(self, problem: Problem, run: Run, *, warm_start: Schedule) -> Solution:
        best, bound, message = warm_start, period_bound(problem), ""
        model = StepModel(problem, routes_of(best), best.period)
        run.tell(self.name, best.period, bound)
        outcome = solve_apart(model.model, run.left, run.cancelled)
        if outcome.values:
            found = model.read(outcome.values)
            best = min(found, best, key=lambda schedule: schedule.period)
        if not outcome.proven:
            message = "stopped" if run.stopped else "time limit reached"
            message += " before the MILP was solved"
        elif best.period > bound:
            message = proven_for_routing(problem, bound, exact=model.exact)
        run.tell(self.name, best.period, bound)
        return Solution(best, bound, self.name, run.elapsed, message)


@dataclass(frozen=True)
class _Outcome:
    proven: bool
    values: dict[int, float]


def solve_apart(model: mathopt.Model, seconds: float, cancelled: Cancelled | None) -> _Outcome:
    """Solves in a child process, which is killed when the time is up or `cancelled` returns true."""
    if seconds <= 0:
        return _Outcome(False, {})
    script = Path(__file__).with_name("milp_process.py")
    deadline = time.monotonic() + min(seconds, MOST_SECONDS)
    with tempfile.TemporaryFile() as request:
        request.write(model.export_model().SerializeToString())
        request.seek(0)
        child = subprocess.Popen([sys.executable, str(script), str(deadline)], stdin=request, stdout=subprocess.PIPE)
    try:
        while True:
            try:
                answer, _ = child.communicate(timeout=POLL)
                break
            except subprocess.TimeoutExpired:
                if (cancelled and cancelled()) or time.monotonic() > deadline + 1.0:
                    return _Outcome(False, {})
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    if child.returncode:
        raise RuntimeError(f"the MILP's process ended with status {child.returncode}")
    result = json.loads(answer)
    values = {int(key): value for key, value in result["values"].items()}
    return _Outcome(result["reason"] in PROVEN, values)


def small_room(room: StageRoom, count: int) -> StageRoom | None:
    """Return the smallest numbers with which exactly the same combinations of `count` micro-batches fit; None if they
    would be too large."""
    capacity, need, keep = room
    if capacity <= MOST_ROOM:
        return room
    fitting = [(a, kept) for a in range(count + 1) if (kept := room.beside(a, count - a)) >= 0]
    for most in range(1, MOST_ROOM + 1):
        # Rounded up, so that nothing fits that did not fit before.
        small = StageRoom(most, -(-need * most // capacity), -(-keep * most // capacity))
        if all(a * small.need + kept * small.keep <= most for a, kept in fitting):
            return small
    return None


class StepModel:
    """The model for given routes (planner.solvers.routing.assign). It minimizes the period, 0 to `upper` ticks.

    exact: does it admit every schedule that fits in memory?
    """

    def __init__(self, problem: Problem, routes: Routes, upper: int) -> None:
        self.problem, self.routes = problem, routes
        job = problem.job
        if job.speeds:
            raise InputError("--solver", "milp", "auto, cp-sat or list: the MILP knows no per-worker speeds")
        self.stages = range(job.stages)
        self.indices = range(job.pipelines * job.micro_batches)
        self.kinds = "FIW" if problem.technique.splits else "FB"
        self.back, self.last = self.kinds[1], self.kinds[-1]
        durations = [d for t in problem.ticks for d in (t.forward, t.input_backward, t.weight_backward, t.optimizer)]
        # All starts of an earliest-start schedule are sums of durations, and so multiples of this unit.
        self.unit = math.gcd(*durations, *job.transfer_ticks, *job.backward_transfer_ticks)
        self.wire = [t // self.unit for t in job.transfer_ticks]
        self.wire_back = [t // self.unit for t in job.backward_transfer_ticks]
        self.optimizer = [t.optimizer // self.unit for t in problem.ticks]
        self.upper = upper // self.unit
        self.earliest, self.latest = self._earliest(), self._latest()
        size = len(self.indices) * sum(
            max(0, self.latest[kind, s] - self.earliest[kind, s]) for s in self.stages for kind in self.kinds
        )
        if size > MAX_VARIABLES:
            raise InputError(
                "--solver",
                "milp",
                f"cp-sat or auto: the MILP takes at most {MAX_VARIABLES:,} variables and this problem needs {size:,}",
            )
        small = {room: small_room(room, len(self.indices)) for room in set(problem.room)}
        # (Where W keeps more than I needs, a whole B needs less, and the model does not know whole B's.)
        self.exact = all(room is not None and room.keep <= room.need for room in small.values())
        self.rooms = [
            small[room] or StageRoom(limit or 0, 1, 1) for room, limit in zip(problem.room, problem.limits, strict=True)
        ]
        self.model = mathopt.Model()
        self.period = self.model.add_variable(lb=0, ub=self.upper)
        self.steps: dict[_Op, dict[int, mathopt.Variable]] = {}
        for index in self.indices:
            for s in self.stages:
                for kind in self.kinds:
                    self._op(kind, index, s)
        for index in self.indices:
            self._chain(index)
        self._workers()
        self._span()
        self.model.minimize(self.period)

    # -- data ------------------------------------------------------------------------------------

    def duration(self, kind: str, stage: int) -> int:
        return self.problem.ticks[stage].by_kind[kind] // self.unit

    def _earliest(self) -> dict[tuple[str, int], int]:
        """The first unit at which an op of (kind, stage) can start: down the pipeline and back up."""
        at: dict[tuple[str, int], int] = {}
        clock = 0
        for s in self.stages:
            at["F", s] = clock
            clock += self.duration("F", s) + (self.wire[s] if s < len(self.wire) else 0)
        for s in reversed(self.stages):
            at[self.back, s] = clock
            clock += self.duration(self.back, s)
            if self.last == "W":
                at["W", s] = clock
            clock += self.wire_back[s - 1] if s else 0
        return at

    def _latest(self) -> dict[tuple[str, int], int]:
        """The last unit at which an op of (kind, stage) can start when the period is `upper`."""
        at: dict[tuple[str, int], int] = {}
        staggers = self.problem.technique.staggers
        end = self.upper - (self.optimizer[0] if staggers else max(self.optimizer))
        clock = end
        for s in self.stages:
            weight = self.duration("W", s) if self.last == "W" else 0
            if s == 0 or not staggers:
                clock = min(clock, end - weight)
            clock -= self.duration(self.back, s)
            at[self.back, s] = clock
            clock -= self.wire_back[s] if s < len(self.wire) else 0
        clock = at[self.back, self.stages[-1]]
        for s in reversed(self.stages):
            clock -= self.duration("F", s)
            at["F", s] = clock
            if self.last == "W":
                # Staggered: the stage's first F starts no later than this, and its last W within a period from then.
                limit = clock + self.upper - self.optimizer[s] if staggers and s else end
                at["W", s] = limit - self.duration("W", s)
            clock -= self.wire[s - 1] if s else 0
        return at

    # -- constraints -----------------------------------------------------------------------------

    def _op(self, kind: str, index: int, stage: int) -> None:
        low, high = self.earliest[kind, stage], self.latest[kind, stage]
        row = {t: self.model.add_binary_variable() for t in range(low, high)}
        self.steps[kind, index, stage] = row
        for t in range(low, high - 1):
            self.model.add_linear_constraint(row[t] <= row[t + 1])

    def step(self, op: _Op, t: int) -> mathopt.Variable | int:
        """Returns y[op, t]; a constant outside the op's window."""
        if t < self.earliest[op[0], op[2]]:
            return 0
        return 1 if t >= self.latest[op[0], op[2]] else self.steps[op][t]

    def start(self, op: _Op) -> mathopt.LinearBase:
        return self.latest[op[0], op[2]] - mathopt.fast_sum(self.steps[op].values())

    def _after(self, first: _Op, then: _Op, wire: int) -> None:
        lag = self.duration(first[0], first[2]) + wire
        for t in range(self.earliest[then[0], then[2]], self.latest[then[0], then[2]] + 1):
            self._at_most([(self.step(then, t), 1), (self.step(first, t - lag), -1)], 0)

    def _at_most(self, terms: list[tuple[mathopt.Variable | int, int]], limit: int) -> None:
        """Requires that the sum of factor x term is at most `limit`; constants are moved to the right. Adds nothing
        when that is always true."""
        constant = sum(factor * term for term, factor in terms if isinstance(term, int))
        free = [(term, factor) for term, factor in terms if not isinstance(term, int)]
        if constant + sum(factor for _, factor in free if factor > 0) <= limit:
            return
        self.model.add_linear_constraint(mathopt.fast_sum([factor * term for term, factor in free]) <= limit - constant)

    def _chain(self, index: int) -> None:
        for s in self.stages:
            self._after(("F", index, s), (self.back, index, s), 0)
            if self.last == "W":
                self._after(("I", index, s), ("W", index, s), 0)
            if s:
                self._after(("F", index, s - 1), ("F", index, s), self.wire[s - 1])
                self._after((self.back, index, s), (self.back, index, s - 1), self.wire_back[s - 1])

    def _workers(self) -> None:
        guests: dict[Worker, list[int]] = defaultdict(list)
        for s, row in enumerate(self.routes):
            for index, pipeline in enumerate(row):
                guests[Worker(pipeline, s)].append(index)
        for worker, indices in guests.items():
            s, room = worker.stage, self.rooms[worker.stage]
            ops = [(kind, index, s) for index in indices for kind in self.kinds]
            self._instants(ops)
            end = max(self.latest[kind, s] + self.duration(kind, s) for kind in self.kinds)
            for t in range(self.earliest["F", s], end):
                running = [(self.step(op, t), 1) for op in ops]
                running += [(self.step(op, t - self.duration(op[0], s)), -1) for op in ops]
                self._at_most(running, 1)
                if room.capacity and len(indices) * max(room.need, room.keep) > room.capacity:
                    held = [(self.step(("F", i, s), t), room.need) for i in indices]
                    for kind, more in ((self.back, room.keep - room.need), (self.last, -room.keep)):
                        held += [(self.step((kind, i, s), t - self.duration(kind, s)), more) for i in indices if more]
                    self._at_most(held, room.capacity)

    def _instants(self, ops: list[_Op]) -> None:
        """Keeps ops without duration, which are no load, out of the inside of other ops of their worker."""
        lengths = {op: self.duration(op[0], op[2]) for op in ops}
        longer = [op for op, length in lengths.items() if length > 1]
        for op, length in lengths.items():
            for t in range(self.earliest[op[0], op[2]], self.latest[op[0], op[2]] + 1) if length == 0 else ():
                starts = [(self.step(op, t), 1), (self.step(op, t - 1), -1)]
                across = [(self.step(other, t - 1), 1) for other in longer]
                across += [(self.step(other, t - lengths[other]), -1) for other in longer]
                self._at_most([*starts, *across], 1)

    def _span(self) -> None:
        add = self.model.add_linear_constraint
        for s in self.stages:
            first: mathopt.Variable | int = 0
            if self.problem.technique.staggers and s:
                first = self.model.add_variable(lb=self.earliest["F", s], ub=self.latest["F", s])
            optimizer = self.optimizer[s] if self.problem.technique.staggers else max(self.optimizer)
            for index in self.indices:
                end = self.start((self.last, index, s)) + self.duration(self.last, s)
                add(end + optimizer - first <= self.period)
                if not isinstance(first, int):
                    add(self.start(("F", index, s)) >= first)

    # -- reading a solution ----------------------------------------------------------------------

    def read(self, values: dict[int, float]) -> Schedule:
        """Makes the schedule of a solution, given as variable id -> value."""

        def ticks(kind: str, index: int, stage: int) -> int:
            row = self.steps[kind, index, stage].values()
            return self.unit * (self.latest[kind, stage] - sum(round(values[v.id]) for v in row))

        starts = {("I" if op[0] == "B" else op[0], *op[1:]): ticks(*op) for op in self.steps}
        homes = [divmod(index, self.problem.job.micro_batches) for index in self.indices]
        return schedule_of(self.problem, starts, homes, self.routes)

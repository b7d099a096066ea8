"""The CP-SAT model of a routed problem.

Variables are the starts of F, I and W (B where it isn't split). Staggered: first[s] is the earliest
start of stage s, and every op of the stage lies within first[s] .. first[s] + period - O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from ortools.sat.python import cp_model

from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.solvers.lns import OpKey
from openrecycle.planner.solvers.reduction import Reduction, StartTicks


@dataclass
class ScheduleModel:
    """A model that looks for a period of `lower` to `upper` ticks, O included.

    hint: a schedule of the reduction to start from.
    """

    reduction: Reduction
    lower: int
    upper: int
    hint: StartTicks | None = None
    model: cp_model.CpModel = field(init=False, default_factory=cp_model.CpModel)

    def __post_init__(self) -> None:
        problem = self.reduction.problem
        job = problem.job
        self.splits = problem.technique.splits
        self.staggers = problem.technique.staggers
        self.fastest = problem.fastest
        self.longest = problem.longest_optimizer
        self.wire, self.wire_back = job.transfer_ticks, job.backward_transfer_ticks
        # Every stage starts before stage 0 ends, and lasts no longer than a period.
        self.horizon = 2 * self.upper if self.staggers else self.upper
        self.heads = [0]
        for s in range(1, job.stages):
            self.heads.append(self.heads[-1] + self.fastest[s - 1].forward + self.wire[s - 1])
        self.starts: dict[OpKey, cp_model.IntVar] = {}
        self.period = self.model.new_int_var(self.lower, self.upper, "period")
        self.first: list[cp_model.IntVar | int] = [0] * job.stages
        if self.staggers:
            self.first[1:] = [
                self.model.new_int_var(self.heads[s], self.upper, f"first{s}") for s in range(1, job.stages)
            ]
        for members in self.reduction.kept:
            self._class(members)
        self._workers()
        self.model.minimize(self.period)
        if self.hint is not None:
            self._hint(self.hint)

    # -- what is asked ---------------------------------------------------------------------------

    def duration(self, kind: str, index: int, stage: int) -> int:
        """Ticks on the worker that the micro-batch meets there."""
        ticks = self.reduction.problem.worker_ticks(Worker(self.reduction.routes[stage][index], stage))
        if kind == "F":
            return ticks.forward
        if kind == "W":
            return ticks.weight_backward
        return ticks.input_backward if self.splits else ticks.backward

    def end(self, kind: str, index: int, stage: int) -> cp_model.LinearExpr:
        return self.starts[kind, index, stage] + self.duration(kind, index, stage)

    def last_end(self, index: int, stage: int) -> cp_model.LinearExpr:
        """When the activation is free."""
        return self.end("W" if self.splits else "I", index, stage)

    # -- constraints -----------------------------------------------------------------------------

    def _class(self, members: tuple[int, ...]) -> None:
        """Chains of the class, its order (see reduction), and the period."""
        add, stages = self.model.add, len(self.fastest)
        kinds = "FIW" if self.splits else "FI"
        for index in members:
            for s in range(stages):
                for kind in kinds:
                    self.starts[kind, index, s] = self.model.new_int_var(
                        self.heads[s], self.horizon, f"{kind}{index}_{s}"
                    )
                add(self.starts["I", index, s] >= self.end("F", index, s))
                if self.splits:
                    add(self.starts["W", index, s] >= self.end("I", index, s))
                if self.staggers:
                    add(self.starts["F", index, s] >= self.first[s])
                    add(self.last_end(index, s) + self.fastest[s].optimizer <= self.first[s] + self.period)
                else:
                    add(self.last_end(index, s) + self.longest <= self.period)
            for s in range(stages - 1):
                add(self.starts["F", index, s + 1] >= self.end("F", index, s) + self.wire[s])
                add(self.starts["I", index, s] >= self.end("I", index, s + 1) + self.wire_back[s])
        for before, after in pairwise(members):
            for s in range(stages):
                for kind in kinds:
                    add(self.starts[kind, after, s] >= self.end(kind, before, s))

    def _workers(self) -> None:
        """One op at a time, and no more activations than fit."""
        kinds = "FIW" if self.splits else "FI"
        for worker, classes in self.reduction.by_worker().items():
            keys = [(kind, i, worker.stage) for c in classes for i in c for kind in kinds]
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(self.starts[k], self.duration(*k), "") for k in keys
            )
            self._memory(worker, classes)

    def _memory(self, worker: Worker, classes: list[tuple[int, ...]]) -> None:
        limit = self.reduction.problem.limits[worker.stage]
        guests = [i for c in classes for i in c]
        if limit is None or len(guests) <= limit:
            return
        for members in classes:  # alone, a class fills the limit with its next `limit` members
            for before, after in zip(members, members[limit:], strict=False):
                self.model.add(self.starts["F", after, worker.stage] >= self.last_end(before, worker.stage))
        if len(classes) > 1:
            intervals = [
                self.model.new_interval_var(
                    self.starts["F", i, worker.stage],
                    self.model.new_int_var(self.reduction.problem.worker_ticks(worker).work, self.horizon, ""),
                    self.last_end(i, worker.stage),
                    "",
                )
                for i in guests
            ]
            self.model.add_cumulative(intervals, [1] * len(intervals), limit)

    # -- hint and solution ------------------------------------------------------------------------

    def _hint(self, times: StartTicks) -> None:
        zero = min(times.forward[i][0] for c in self.reduction.kept for i in c)
        for key, variable in self.starts.items():
            self.model.add_hint(variable, _table(times, key[0])[key[1]][key[2]] - zero)
        for s, variable in enumerate(self.first):
            if not isinstance(variable, int):
                earliest = min(times.forward[i][s] for c in self.reduction.kept for i in c)
                self.model.add_hint(variable, earliest - zero)

    def read(self, value: cp_model.CpSolver | cp_model.CpSolverSolutionCallback) -> StartTicks:
        """The starts of a solution; those of micro-batches that were left out are 0."""
        count, stages = len(self.reduction.routes[0]), len(self.fastest)
        times = StartTicks(*([[0] * stages for _ in range(count)] for _ in range(3)))
        for (kind, index, stage), variable in self.starts.items():
            _table(times, kind)[index][stage] = value.value(variable)
        return times


def _table(times: StartTicks, kind: str) -> list[list[int]]:
    return times.forward if kind == "F" else times.backward if kind == "I" else times.weight

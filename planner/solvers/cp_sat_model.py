"""The CP-SAT model of a routed problem, whole or with all but a window of its order fixed.

Variables are the starts of F, I and W (B where it isn't split). Staggered: first[s] is the earliest
start of stage s, and every op of the stage lies within first[s] .. first[s] + period - O.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from ortools.sat.python import cp_model

from planner.job import Worker
from planner.solvers.reduction import Reduction, Times

# (kind, micro-batch index, stage); the backward of either technique is I.
OpKey = tuple[str, int, int]


@dataclass
class ScheduleModel:
    """A model that looks for a period of `lower` to `upper` ticks, O included.

    incumbent: a schedule of the reduction to start from. window: ops whose order may change; the
    others keep the order that they have on their worker in the incumbent (their times may still
    move). None: all are free, and no order is kept. The ops of a window are to be contiguous on
    each worker. tidy: prefer, among equal periods, schedules whose workers end early and whose
    stages start late; it makes room for the next improvement and costs time.
    """

    reduction: Reduction
    lower: int
    upper: int
    incumbent: Times | None = None
    window: Collection[OpKey] | None = None
    tidy: bool = False
    model: cp_model.CpModel = field(init=False, default_factory=cp_model.CpModel)

    def __post_init__(self) -> None:
        problem = self.reduction.problem
        job = problem.job
        self.splits = problem.technique.splits
        self.staggers = problem.technique.staggers
        self.ticks = job.ticks
        self.wire = job.transfer_ticks
        # Every stage starts before stage 0 ends, and lasts no longer than a period.
        self.horizon = 2 * self.upper if self.staggers else self.upper
        self.heads = [0]
        for s in range(1, job.stages):
            self.heads.append(self.heads[-1] + self.ticks[s - 1].forward + self.wire[s - 1])
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
        self._objective()
        if self.incumbent is not None:
            self._hint(self.incumbent)

    # -- what is asked ---------------------------------------------------------------------------

    def duration(self, kind: str, stage: int) -> int:
        ticks = self.ticks[stage]
        if kind == "F":
            return ticks.forward
        if kind == "W":
            return ticks.weight_backward
        return ticks.input_backward if self.splits else ticks.backward

    def end(self, kind: str, index: int, stage: int) -> cp_model.LinearExpr:
        return self.starts[kind, index, stage] + self.duration(kind, stage)

    def last_end(self, index: int, stage: int) -> cp_model.LinearExpr:
        """When the activation is free."""
        return self.end("W" if self.splits else "I", index, stage)

    # -- constraints -----------------------------------------------------------------------------

    def _class(self, members: tuple[int, ...]) -> None:
        """Chains of the class, its order (see reduction), and the period."""
        add, stages = self.model.add, len(self.ticks)
        longest = max(t.optimizer for t in self.ticks)
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
                    add(self.last_end(index, s) + self.ticks[s].optimizer <= self.first[s] + self.period)
                else:
                    add(self.last_end(index, s) + longest <= self.period)
            for s in range(stages - 1):
                add(self.starts["F", index, s + 1] >= self.end("F", index, s) + self.wire[s])
                add(self.starts["I", index, s] >= self.end("I", index, s + 1) + self.wire[s])
        for before, after in pairwise(members):
            for s in range(stages):
                for kind in kinds:
                    add(self.starts[kind, after, s] >= self.end(kind, before, s))

    def _workers(self) -> None:
        """One op at a time, and no more activations than fit."""
        kinds = "FIW" if self.splits else "FI"
        for worker, classes in self.reduction.by_worker().items():
            keys = [(kind, i, worker.stage) for c in classes for i in c for kind in kinds]
            if self.window is None:
                self._exclusive(keys)
                self._memory(worker, classes)
            else:
                self._keep_order(worker, keys)

    def _exclusive(self, keys: Collection[OpKey]) -> None:
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(self.starts[k], self.duration(k[0], k[2]), "") for k in keys
        )

    def _memory(self, worker: Worker, classes: list[tuple[int, ...]]) -> None:
        limit = self.reduction.problem.limits[worker.stage]
        guests = [i for c in classes for i in c]
        if limit is None or len(guests) <= limit:
            return
        for members in classes:  # alone, a class fills the limit with its next `limit` members
            for before, after in zip(members, members[limit:], strict=False):
                self.model.add(self.starts["F", after, worker.stage] >= self.last_end(before, worker.stage))
        if len(classes) > 1:
            self._held(guests, worker.stage, limit)

    def _held(self, guests: Collection[int], stage: int, limit: int) -> None:
        """At most `limit` of these activations at once."""
        intervals = [
            self.model.new_interval_var(
                self.starts["F", i, stage],
                self.model.new_int_var(self.ticks[stage].work, self.horizon, ""),
                self.last_end(i, stage),
                "",
            )
            for i in guests
        ]
        self.model.add_cumulative(intervals, [1] * len(intervals), limit)

    def _keep_order(self, worker: Worker, keys: list[OpKey]) -> None:
        """The incumbent's order on this worker, but for the ops of the window."""
        assert self.incumbent is not None and self.window is not None
        stage, limit = worker.stage, self.reduction.problem.limits[worker.stage]
        at = {key: start_of(self.incumbent, key) for key in keys}
        # Of two ops that start together the one without duration comes first.
        row = sorted(keys, key=lambda k: (at[k], self.duration(k[0], stage), "FIW".index(k[0])))
        places = [n for n, key in enumerate(row) if key in self.window]
        begin, end = (places[0], places[-1] + 1) if places else (len(row), len(row))
        before, free, after = row[:begin], row[begin:end], row[end:]
        for one, other in (*pairwise(before), *pairwise(after)):
            self.model.add(self.starts[other] >= self.end(*one))
        if before and free:
            for key in free:
                self.model.add(self.starts[key] >= self.end(*before[-1]))
        if after:
            for key in free or before[-1:]:
                self.model.add(self.starts[after[0]] >= self.end(*key))
        self._exclusive(free)
        if limit is not None and len(keys) > limit * (3 if self.splits else 2):
            self._keep_memory(row, begin, end, stage, limit)

    def _keep_memory(self, row: list[OpKey], begin: int, end: int, stage: int, limit: int) -> None:
        """The F of rank k waits for the release of rank k - limit, wherever both ranks are known.

        Ranks inside the window are not; there a cumulative holds over all activations that live
        in the window, or whose F waits for a release in it.
        """
        last = "W" if self.splits else "I"
        forwards = [(n, key[1]) for n, key in enumerate(row) if key[0] == "F"]
        releases = [(n, key[1]) for n, key in enumerate(row) if key[0] == last]
        involved: set[int] = set()
        waiting = 0  # F's after the window up to this rank count too, since the last waits for it
        for rank, (place, index) in enumerate(forwards):
            inside = begin <= place < end
            if rank < limit:
                continue
            released, giver = releases[rank - limit]
            if not inside and not begin <= released < end:
                self.model.add(self.starts["F", index, stage] >= self.last_end(giver, stage))
            elif not inside:
                waiting = rank
        release_of = {index: place for place, index in releases}
        for rank, (place, index) in enumerate(forwards):
            if (place < end or rank <= waiting) and release_of[index] >= begin:
                involved.add(index)
        if begin < end and len(involved) > limit:
            self._held(sorted(involved), stage, limit)

    # -- objective and hint ----------------------------------------------------------------------

    def _objective(self) -> None:
        if not self.tidy:
            self.model.minimize(self.period)
            return
        rests: list[cp_model.LinearExprT] = []
        for worker, classes in self.reduction.by_worker().items():
            rest = self.model.new_int_var(0, self.horizon, f"end{worker}")
            for members in classes:
                self.model.add(rest >= self.last_end(members[-1], worker.stage) - self.first[worker.stage])
            rests.append(rest)
        self.model.minimize(self.period * (len(rests) * self.horizon + 1) + sum(rests))

    def _hint(self, times: Times) -> None:
        zero = min(times.forward[i][0] for c in self.reduction.kept for i in c)
        for key, variable in self.starts.items():
            self.model.add_hint(variable, start_of(times, key) - zero)
        for s, variable in enumerate(self.first):
            if not isinstance(variable, int):
                earliest = min(times.forward[i][s] for c in self.reduction.kept for i in c)
                self.model.add_hint(variable, earliest - zero)

    # -- reading a solution ----------------------------------------------------------------------

    def read(self, value: cp_model.CpSolver | cp_model.CpSolverSolutionCallback) -> Times:
        """The starts of a solution; those of micro-batches that were left out are 0."""
        count, stages = len(self.reduction.routes[0]), len(self.ticks)
        times = Times(*([[0] * stages for _ in range(count)] for _ in range(3)))
        for (kind, index, stage), variable in self.starts.items():
            _table(times, kind)[index][stage] = value.value(variable)
        return times


def start_of(times: Times, key: OpKey) -> int:
    kind, index, stage = key
    return _table(times, kind)[index][stage]


def _table(times: Times, kind: str) -> list[list[int]]:
    return times.forward if kind == "F" else times.backward if kind == "I" else times.weight

"""planner.check for a plan in columns: the same rules over arrays, quick enough for every plan that is put in force.

Written from the definitions as planner.check is: it reads the columns as they lie there, and shares no code with the
solvers, with what planner.plan_columns computes from them, or with the metrics of planner.schedule. It says of each
rule whether it holds, and where not; planner.check then tells every clash in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from planner.baseline import reference_period
from planner.check import established_bound
from planner.columnar import ColumnarPlan
from planner.job import Job, Problem, Worker
from planner.op_rows import Ints
from planner.plan import PROVERS
from planner.plan_columns import Columns

F, I, W, O = range(4)  # noqa: E741 -- the field's names


def check_columns(plan: ColumnarPlan) -> list[str]:
    """A sentence for each rule that the plan breaks; empty when it is valid. Of what the plan says of itself all is
    compared but the fingerprint, which is a hash and no promise, and slowdown_vs_best, which takes planning."""
    columns = plan.columns
    return list(_shapes(columns)) or list(_each(columns)) or [*_Timed(columns).broken()] or list(_numbers(plan))


def _shapes(columns: Columns) -> Iterator[str]:
    job = columns.problem.job
    s, p, n = job.stages, job.pipelines, job.pipelines * job.micro_batches
    found = [a.shape for a in (columns.route, columns.starts, columns.split, columns.durations, columns.step)]
    if found != [(s, n), (3, s, n), (s, p), (4, s, p), (s,)]:
        yield f"the columns have shapes {found}, which are not those of the job"
    elif columns.route.min() < 0 or columns.route.max() >= p:
        yield "an op is on a worker that is not of the grid"


def _each(columns: Columns) -> Iterator[str]:
    """Each op for itself: on whom, how long, allowed at all."""
    problem, job = columns.problem, columns.problem.job
    living = _living(problem)
    stages = np.arange(job.stages)[:, None]
    if where := _first(~living[stages, columns.route]):
        yield f"W{columns.route[where]}_{where[0]} has failed, and has ops"
    home = np.repeat(np.arange(job.pipelines), job.micro_batches)
    if not problem.technique.reroutes and (columns.route != home).any():
        yield f"{problem.technique.value} does not re-route"
    if not problem.technique.splits and (columns.split * living).any():
        yield f"{problem.technique.value} does not split B"
    works = np.zeros_like(living)
    works[stages, columns.route] = True
    for kind, expected in enumerate(_durations(job, problem)):
        wrong = (columns.durations[kind] != expected) & (living if kind == O else works)
        if where := _first(wrong):
            yield f"{'FIWO'[kind]} on W{where[1]}_{where[0]} lasts other than its {job.units(int(expected[where]))}"
    if columns.starts.min() < 0:
        yield "an op starts before time 0"


class _Timed:
    """What follows from the times of the ops. All arrays are [S, n]."""

    def __init__(self, columns: Columns) -> None:
        self.columns, self.problem, self.job = columns, columns.problem, columns.problem.job
        stages = np.arange(self.job.stages)[:, None]
        self.worker = stages * self.job.pipelines + columns.route
        self.split = columns.split[stages, columns.route] == 1
        length = [columns.durations[kind][stages, columns.route] for kind in (F, I, W)]
        self.forward, self.backward, self.weight = columns.starts
        self.forward_end = self.forward + length[F]
        self.backward_end = self.backward + length[I] + np.where(self.split, 0, length[W])
        # Where B is whole, its end is that of W.
        self.end = np.where(self.split, self.weight + length[W], self.backward_end)

    def broken(self) -> Iterator[str]:
        yield from self._overlaps()
        yield from self._memory()
        yield from self._precedence()
        yield from self._barriers()

    def name(self, worker: int) -> str:
        stage, pipeline = divmod(int(worker), self.job.pipelines)
        return f"W{pipeline}_{stage}"

    def _overlaps(self) -> Iterator[str]:
        split = self.split
        who = np.concatenate([self.worker.ravel(), self.worker.ravel(), self.worker[split]])
        start = np.concatenate([self.forward.ravel(), self.backward.ravel(), self.weight[split]])
        end = np.concatenate([self.forward_end.ravel(), self.backward_end.ravel(), self.end[split]])
        order = np.lexsort((end, start, who))
        who, start, end = who[order], start[order], end[order]
        if where := _first((who[1:] == who[:-1]) & (start[1:] < end[:-1])):
            yield f"two ops of {self.name(who[where])} overlap"

    def _memory(self) -> Iterator[str]:
        """What ends at a tick is free at that tick."""
        job, problem = self.job, self.problem
        one, moments = np.ones_like(self.forward), [self.forward, self.end]
        changes, limits, fixed = [one, -one], list(problem.limits), [0] * job.stages
        if problem.memory.text == "bytes":
            held = np.array([profile.activation_bytes for profile in job.profiles], np.int64)[:, None] * one
            kept = np.array([profile.weight_backward_bytes for profile in job.profiles], np.int64)[:, None] * self.split
            moments = [self.forward, self.backward_end, self.backward_end, self.end]
            changes, limits = [held, -held, kept, -kept], list(job.capacity_bytes)
            fixed = [profile.weight_bytes + profile.optimizer_bytes for profile in job.profiles]
        who = np.concatenate([self.worker.ravel()] * len(moments))
        when, change = (np.concatenate([a.ravel() for a in arrays]) for arrays in (moments, changes))
        order = np.lexsort((change, when, who))
        who, total = who[order], np.cumsum(change[order])  # each worker ends with as much as it began with
        most = np.array([2**62 if limit is None else limit for limit in limits], np.int64) - np.array(fixed, np.int64)
        if where := _first(total > most[who // job.pipelines]):
            stage = int(who[where]) // job.pipelines
            yield f"{self.name(who[where])} holds {int(total[where]) + fixed[stage]:,}, and may hold {limits[stage]:,}"

    def _precedence(self) -> Iterator[str]:
        scale = self.job.ticks_per_unit
        wire, back = (
            np.array([round(t * scale) for t in times], np.int64)[:, None]
            for times in (self.job.transfers, self.job.backward_transfers)
        )
        for broken, what in (
            (self.backward < self.forward_end, "a backward starts before the end of its F"),
            (self.split & (self.weight < self.backward_end), "a W starts before the end of its I"),
            (self.forward[1:] < self.forward_end[:-1] + wire, "an F starts before that of the stage above has arrived"),
            (
                self.backward[:-1] < self.backward_end[1:] + back,
                "a backward starts before that of the stage below has arrived",
            ),
        ):
            if where := _first(broken):
                yield f"{what}: item {where[1]} of stage {where[0]}"

    def _barriers(self) -> Iterator[str]:
        """Staggered: a stage's O's start when its last peer has finished. Else all at the makespan."""
        ends = np.maximum(self.end, self.forward_end).max(1)
        expected = ends if self.problem.technique.staggers else np.full_like(ends, ends.max())
        if where := _first(self.columns.step != expected):
            yield f"the O's of stage {where[0]} start at another time than the end of those before"


def _numbers(plan: ColumnarPlan) -> Iterator[str]:
    """Recomputes what the plan says of itself."""
    columns, said = plan.columns, plan.metrics
    problem, job, timed = columns.problem, columns.problem.job, _Timed(columns)
    living = _living(problem)
    last = columns.step + np.where(living, columns.durations[O], 0).max(1)
    makespan = int(timed.end.max() - timed.forward.min())
    period = int((last - timed.forward.min(1)).max())
    if not problem.technique.staggers:
        period = makespan + int(np.where(living, columns.durations[O], 0).max())
    busy = int(np.where(living, columns.durations[O], 0).sum())
    for begin, end in ((timed.forward, timed.forward_end), (timed.backward, timed.backward_end)):
        busy += int((end - begin).sum())
    busy += int((timed.end - timed.weight)[timed.split].sum())
    expected: dict[str, float] = {
        "makespan": job.units(makespan),
        "period": job.units(period),
        "bubble_fraction": 1 - busy / (int(living.sum()) * period),
        "slowdown_vs_1f1b": period / reference_period(job) - 1,
    }
    if said.lower_bound > 0:
        expected["gap"] = said.period / said.lower_bound - 1
    for name, value in expected.items():
        if not math.isclose(getattr(said, name), value, rel_tol=1e-9, abs_tol=1e-9):
            yield f"metrics.{name} is {getattr(said, name)}, and it should be {value:.6g}"
    for worker, held in zip(problem.living_workers(), _peaks(timed), strict=True):
        if said.peak_activations.get(str(worker)) != held:
            yield f"metrics.peak_activations of {worker} is not the {held} that it holds"
            break
    if said.lower_bound > said.period:
        yield f"metrics.lower_bound {said.lower_bound} is above the period {said.period}"
    proven = job.units(established_bound(problem, period))
    if said.lower_bound > proven and plan.solver.name not in PROVERS:
        yield f"metrics.lower_bound is {said.lower_bound}, and what is proven is {proven}"
    if (plan.solver.status == "optimal") != (said.lower_bound == said.period):
        yield f"solver.status is {plan.solver.status} with period {said.period} and lower bound {said.lower_bound}"


def _peaks(timed: _Timed) -> Iterator[int]:
    """The most activations that each living worker holds, pipeline by pipeline."""
    job, one = timed.job, np.ones(timed.worker.size, np.int64)
    who = np.concatenate([timed.worker.ravel()] * 2)
    when, change = np.concatenate([timed.forward.ravel(), timed.end.ravel()]), np.concatenate([one, -one])
    order = np.lexsort((change, when, who))
    most = np.zeros(job.stages * job.pipelines, np.int64)
    np.maximum.at(most, who[order], np.cumsum(change[order]))
    held, living = most.reshape(job.stages, job.pipelines), _living(timed.problem)
    return iter(held.T[living.T].tolist())


def _durations(job: Job, problem: Problem) -> list[Ints]:
    """[S, P] of F, I, W and O: what each must last on each worker, from the profiles and the workers' speeds."""
    out = [np.zeros((job.stages, job.pipelines), np.int64) for _ in range(4)]
    dead = [sum(worker.stage == s for worker in problem.failed) for s in range(job.stages)]
    scale = job.ticks_per_unit

    def ticks(stage: int, speed: Fraction) -> Sequence[int]:
        profile = job.profiles[stage]
        times = (profile.forward, profile.input_backward, profile.weight_backward, profile.optimizer)
        found = [math.ceil(round(time * scale) / speed) for time in times]
        if profile.reductions:
            found[O] += round(profile.reductions[-1 - dead[stage]] * scale)
        return found

    for stage in range(job.stages):
        for kind, length in enumerate(ticks(stage, Fraction(1))):
            out[kind][stage] = length
    for worker, speed in job.speeds:
        for kind, length in enumerate(ticks(worker.stage, Fraction(str(speed)))):
            out[kind][worker.stage, worker.pipeline] = length
    return out


def _living(problem: Problem) -> NDArray[np.bool_]:
    """[S, P]"""
    living = np.ones((problem.job.stages, problem.job.pipelines), bool)
    for pipeline, stage in map(Worker._make, problem.failed):
        living[stage, pipeline] = False
    return living


def _first(broken: NDArray[np.bool_]) -> tuple[int, ...]:
    """Where it is true first; empty: nowhere."""
    return tuple(int(i) for i in np.unravel_index(int(broken.argmax()), broken.shape)) if broken.any() else ()

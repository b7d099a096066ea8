"""Checks whether a schedule is valid, and whether the numbers of a plan are true.

The rules and the metrics are written here from the definitions, without code of the solvers or of the metrics of
planner.plans.schedule, so that a mistake in one is not repeated in the other. Some numbers do not follow from the ops
alone. Their code is shared with the code that makes plans, so a mistake in it is not found here:

- A document is turned into ticks, and written for its fingerprint, by planner.plans.plan alone.
- `period_bound` (planner.plans.bounds) proves a lower bound. A search that went further left no proof in the document,
  so a higher bound is accepted only from PROVERS, and `claim` says so. A bound over all partitions of the layers is
  proven anew (`_Layouts`).
- `reference_period` (planner.plans.baseline) is the period of 1F1B, for `slowdown_vs_1f1b`; `least_reference` is the
  shortest published schedule, for the bound of fault-free plans.
- `best_fault_free` (planner.solvers.list_scheduler) finds the baseline of `slowdown_vs_best`. The list scheduler makes
  it, and its schedule is checked here like any other; that no better one exists is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Worker
from openrecycle.planner.plans.baseline import least_reference, reference_period
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.plan import PROVERS, MetricsDoc, Plan
from openrecycle.planner.plans.schedule import Op, OpsByWorker, Schedule

Ints = NDArray[np.int64]
KINDS = "FIWBO"
F, I, W, B, O = range(5)  # noqa: E741 -- the field's names
# Larger than every number of a schedule (planner.jobs.job.MAX_TICKS), and small enough that two of them can be added.
_MOST = 1 << 61
# Nobody reads more violations, and a small document may claim a job of a million micro-batches without any of its ops.
MOST_VIOLATIONS = 1_000


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong. sentence: for the user; ops: the ops concerned, two where two clash.

    rule: for programs, the rule that is broken.

    - Its layers: `layers` (a stage is not what its layers are together).
    - Workers: `failed-worker` (has ops), `missing-worker` (lives and has none).
    - Each op: `range` (numbers that no job has), `row` (it is not of the worker in whose row it stands), `outside-grid`
      (also: a row's worker is), `kind`, `micro-batch`, `technique` (it splits B or re-routes, and may not), `duration`,
      `start` (before time 0).
    - Each micro-batch: `missing-op`, `doubled-op`, `other-worker` (than that of F, which keeps the activation). The
      first two are also said of a worker's O.
    - Together: `order` (of a worker's ops), `step-last` (O is a worker's last op), `overlap`, `memory`, `precedence`,
      `barrier` (of O).
    - A plan's numbers: `fingerprint`, `metrics.NAME`, `unproven` (metrics.lower_bound is higher than what is proven),
      `solver.seconds`, `solver.status`; `baseline` (the plan that slowdown_vs_best compares with is not valid).
    """

    rule: str
    sentence: str
    ops: tuple[Op, ...] = ()

    def __str__(self) -> str:
        return self.sentence


def check(subject: Schedule | Plan, *, hashed: bool = True) -> list[Violation]:
    """Return what is wrong with a schedule or plan, at most MOST_VIOLATIONS; empty when it is valid.

    A plan's numbers (metrics, fingerprint) are recomputed and compared as well, unless its
    schedule is invalid already: the metrics of an invalid schedule mean nothing. hashed: whether to check the
    fingerprint, which takes as long as all else; False for a plan whose fingerprint was computed in this process.
    """
    if isinstance(subject, Schedule):
        return list(islice(_Checker(subject).violations(), MOST_VIOLATIONS))
    checker = _Checker(subject.schedule())
    found = list(islice(checker.violations(), MOST_VIOLATIONS))
    if found:
        return found
    return [*(_fingerprint(subject) if hashed else ()), *_numbers(subject, checker)]


def checked(plan: Plan) -> Plan:
    """Return a plan that has just been made, if it is valid. Raises PlannerError if not, a mistake of its maker."""
    if wrong := check(plan, hashed=False):
        raise PlannerError(f"the plan of {plan.solver.name} is not valid, and is not used: {wrong[0]}")
    return plan


def further(found: Sequence[Violation]) -> str:
    """Say how many violations there are beside the first; "" if there are none."""
    if len(found) < 2:
        return ""
    return f"{'at least ' if len(found) == MOST_VIOLATIONS else ''}{len(found) - 1} more"


def claim(plan: Plan) -> str | None:
    """Return a sentence about the bound that a valid plan claims and that can't be proven here; None if it can."""
    problem = plan.problem()
    job = problem.job
    proven = established_bound(problem, round(plan.metrics.period * job.ticks_per_unit))
    if plan.metrics.lower_bound <= job.units(proven):
        return None
    what = "optimal" if plan.solver.status == "optimal" else f"lower bound {plan.metrics.lower_bound}"
    return (
        f"{what}: claimed by {plan.solver.name}, whose proof is not in the plan; "
        f"the lower bound that is established here is {job.units(proven)}"
    )


def established_bound(problem: Problem, period: int) -> int:
    """Return the ticks that no plan of `problem` can beat, by planner.plans.bounds. period: of a valid plan.

    A fault-free plan runs in 1F1B's order, or as GPipe where the memory limit allows it.
    """
    bound = period_bound(problem)
    if problem.technique.reroutes:
        return bound
    least = least_reference(problem)
    return bound if least is None or least.period > period else max(bound, least.period)


class _Checker:
    """The ops of a schedule in arrays, worker by worker as the schedule has them, and the rules as methods.

    Arrays find the ops that break a rule; sentences are made for these ops only. Arrays of three dimensions are
    [pipelines, micro-batches, stages] and hold the index of each op, -1 for none.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.problem: Problem = schedule.problem
        self.job: Job = schedule.problem.job
        self.workers = list(schedule.ops)
        self.ops = schedule.ops
        arrays = schedule.arrays
        self.bounds = arrays.bounds
        self.kind, self.pipeline, self.number, self.stage, self.start, self.duration = arrays.columns
        self.row = np.repeat(np.arange(len(self.workers)), np.diff(self.bounds))
        self.beyond = np.zeros(len(self.row), bool)
        for numbers in arrays.columns:
            self.beyond |= (numbers > _MOST) | (numbers < -_MOST)
        self.end = self.start + self.duration
        self.on = None
        if not isinstance(schedule.ops, OpsByWorker):  # its ops name a worker themselves, perhaps not that of their row
            self.on = np.array([op.worker for row in schedule.ops.values() for op in row], np.int64).reshape(-1, 2)

    def violations(self) -> Iterator[Violation]:
        if self.beyond.any():
            for op in self._where(self.beyond):
                yield Violation("range", f"an op of {op.worker} has numbers that no job has", (op,))
            return
        broken = missing = False
        for violation in chain(self._stages(), self._workers(), self._each_op(), self._doubled()):
            broken = True
            yield violation
        if broken:  # the rules below look ops up by micro-batch and stage
            return
        for violation in self._completeness():
            missing = True
            yield violation
        yield from self._overlaps()
        yield from self._memory()
        if not missing:
            yield from self._precedence()
            yield from self._barriers()

    def op(self, place: int) -> Op:
        row = int(self.row[place])
        return self.ops[self.workers[row]][place - int(self.bounds[row])]

    def show(self, op: Op) -> str:
        name = "O" if op.kind == "O" else f"{op.kind} of micro-batch {op.micro_batch} of pipeline {op.pipeline}"
        start, end = self.job.units(op.start), self.job.units(op.start + op.duration)
        return f"{name} on {op.worker} ({start} to {end})"

    def _where(self, broken: NDArray[np.bool_]) -> Iterator[Op]:
        return (self.op(int(place)) for place in np.flatnonzero(broken))

    def _stages(self) -> Iterator[Violation]:
        """The rule for jobs with layers: a stage takes what its layers take together."""
        job, at = self.job, 0
        for stage, count in enumerate(job.partition):
            members, at = job.layers[at : at + count], at + count
            profile = job.profiles[stage]
            for name in ("forward", "input_backward", "weight_backward", "optimizer"):
                total = sum(round(getattr(layer, name) * job.ticks_per_unit) for layer in members)
                if round(getattr(profile, name) * job.ticks_per_unit) != total:
                    yield Violation("layers", f"{name} of stage {stage} is not that of its {count} layers")
            for name in ("activation_bytes", "weight_backward_bytes", "weight_bytes", "optimizer_bytes"):
                if getattr(profile, name) != sum(getattr(layer, name) for layer in members):
                    yield Violation("layers", f"{name} of stage {stage} is not that of its {count} layers")
            if stage < job.stages - 1:
                back = members[-1].transfer if members[-1].backward_transfer is None else members[-1].backward_transfer
                if (job.transfers[stage], job.backward_transfers[stage]) != (members[-1].transfer, back):
                    yield Violation("layers", f"the transfers behind stage {stage} are not those behind its last layer")
        if job.layers and (at != len(job.layers) or len(job.partition) != job.stages):
            yield Violation(
                "layers", f"{len(job.layers)} layers are not cut into {job.stages} stages by {job.partition}"
            )

    def _workers(self) -> Iterator[Violation]:
        job = self.job
        there = set(self.workers)
        expected = {Worker(p, s) for p in range(job.pipelines) for s in range(job.stages)} - self.problem.failed
        for worker in there - expected:
            failed = worker in self.problem.failed
            why = "has failed" if failed else "is not of the grid"
            rule = "failed-worker" if failed else "outside-grid"
            yield Violation(rule, f"{worker} has ops and {why}", self.ops[worker][:1])
        for worker in sorted(expected - there):
            yield Violation("missing-worker", f"{worker} lives and has no ops, not even its O")

    def _each_op(self) -> Iterator[Violation]:
        """Rules for each op alone: its worker, its place in the grid, its kind, its duration."""
        job, technique = self.job, self.problem.technique
        workers = np.array(self.workers, np.int64).reshape(-1, 2)
        own_pipeline, own_stage = (column[self.row] for column in workers.T)
        compute = self.kind != O
        misplaced = self.stage != own_stage
        if self.on is not None:
            misplaced |= (self.on[:, 0] != own_pipeline) | (self.on[:, 1] != own_stage)
        outside = (self.stage < 0) | (self.stage >= job.stages) | (self.pipeline < 0) | (self.pipeline >= job.pipelines)
        unnumbered = compute & ((self.number < 0) | (self.number >= job.micro_batches))
        guest = self.pipeline != own_pipeline
        for place in np.flatnonzero(misplaced).tolist():
            op, worker = self.op(place), self.workers[int(self.row[place])]
            yield Violation("row", f"{self.show(op)} of stage {op.stage} stands in the row of {worker}", (op,))
        for op in self._where(~misplaced & outside):
            yield Violation("outside-grid", f"{self.show(op)} is outside the grid of the job", (op,))
        placed = ~misplaced & ~outside
        for op in self._where(placed & ~compute & guest):
            yield Violation("row", f"{self.show(op)} is entered under pipeline {op.pipeline}", (op,))
        for op in self._where(placed & (self.kind < 0)):
            yield Violation("kind", f"{op.worker} has an op of unknown kind {op.kind!r}", (op,))
        for op in self._where(placed & (self.kind >= 0) & unnumbered):
            yield Violation(
                "micro-batch", f"{self.show(op)}: the job's micro-batches are 0 to {job.micro_batches - 1}", (op,)
            )
        if not technique.splits:
            for op in self._where((self.kind == I) | (self.kind == W)):
                yield Violation("technique", f"{self.show(op)}: {technique.value} does not split B", (op,))
        if not technique.reroutes:
            for op in self._where(placed & compute & guest):
                yield Violation("technique", f"{self.show(op)}: {technique.value} does not re-route", (op,))
        known = placed & (self.kind >= 0)
        of_grid = (workers >= 0).all(1) & (workers[:, 0] < job.pipelines)
        inside = of_grid[self.row] & known
        at = (self.kind * job.stages + own_stage) * job.pipelines + own_pipeline
        expected = self._durations().ravel().take(at, mode="clip")  # (what is clipped is not inside)
        for place in np.flatnonzero(inside & (self.duration != expected)).tolist():
            should = job.units(int(expected[place]))
            yield Violation("duration", f"{self.show(self.op(place))} lasts other than its {should}", (self.op(place),))
        for op in self._where(self.start < 0):
            yield Violation("start", f"{self.show(op)} starts before time 0", (op,))

    def _durations(self) -> Ints:
        """[KINDS, stages, pipelines]: the duration that each op must have, by profiles and workers' speeds."""
        job = self.job
        out = np.zeros((len(KINDS), job.stages, job.pipelines), np.int64)
        scale = job.ticks_per_unit

        def lengths(stage: int, speed: Fraction) -> list[int]:
            profile = job.profiles[stage]
            times = (profile.forward, profile.input_backward, profile.weight_backward, profile.optimizer)
            forward, backward, weight, step = (math.ceil(round(time * scale) / speed) for time in times)
            step += _reduction_ticks(self.problem, stage)
            return [min(_MOST + 1, ticks) for ticks in (forward, backward, weight, backward + weight, step)]

        for stage in range(job.stages):
            out[:, stage] = np.array(lengths(stage, Fraction(1)), np.int64)[:, None]
        for worker, speed in job.speeds:
            out[:, worker.stage, worker.pipeline] = lengths(worker.stage, Fraction(str(speed)))
        return out

    def _key(self) -> Ints:
        """The index of each compute op's micro-batch and stage in the arrays of three dimensions."""
        key: Ints = (self.pipeline * self.job.micro_batches + self.number) * self.job.stages + self.stage
        return key

    def _doubled(self) -> Iterator[Violation]:
        """The rule that no op is there twice. Also fills `at`, the index of each op."""
        job = self.job
        places = np.arange(len(self.kind))
        known = (self.kind >= 0) & (self.kind != O) & (self.number >= 0) & (self.number < job.micro_batches)
        known &= (self.pipeline >= 0) & (self.pipeline < job.pipelines) & (self.stage >= 0) & (self.stage < job.stages)
        at = np.full((O, job.pipelines * job.micro_batches * job.stages), -1, np.int64)
        kind, key = self.kind[known], self._key()[known]
        at[kind, key] = places[known]
        for place in places[known][at[kind, key] != places[known]].tolist():
            op, other = self.op(place), self.op(int(at[self.kind[place], self._key()[place]]))
            yield Violation("doubled-op", f"{self.show(other)} is there twice: {self.show(op)}", (op, other))
        self.at: Ints = at.reshape(O, job.pipelines, job.micro_batches, job.stages)

    def _completeness(self) -> Iterator[Violation]:
        """The rule that each micro-batch has on each stage F, and either B or both I and W, all on one worker."""
        there = self.at >= 0
        forward, split, whole = there[F], there[I] & there[W], there[B]
        row = np.append(self.row, -1)[self.at]  # (-1 reads the last entry: no worker)
        elsewhere = (there[1:] & forward & (row[1:] != row[F])).any(0)
        wrong = ~forward | (whole == split) | (whole & (there[I] | there[W])) | elsewhere
        for p, j, s in (place.tolist() for place in np.argwhere(wrong)):  # (all at once may be a million lists)
            found = [self.op(place) if place >= 0 else None for place in self.at[:, p, j, s].tolist()]
            own, back = found[F], found[B]
            parts = [op for op in (found[I], found[W]) if op is not None]
            what = f"micro-batch {j} of pipeline {p} on stage {s}"
            if own is None:
                yield Violation("missing-op", f"{what} has no F")
            if back is not None and parts:
                yield Violation(
                    "doubled-op", f"{what} has both {self.show(back)} and {self.show(parts[0])}", (back, parts[0])
                )
            elif back is None and len(parts) < 2:
                lacks = "B, and no I and W" if not parts else ("W" if parts[0].kind == "I" else "I")
                yield Violation("missing-op", f"{what} has no {lacks}", tuple(parts))
            for op in (*parts, *([back] if back else ())):
                if own is not None and op.worker != own.worker:
                    text = f"{self.show(op)} is not on the worker of {self.show(own)}, which keeps its activation"
                    yield Violation("other-worker", text, (own, op))
        steps = np.bincount(self.row[self.kind == O], minlength=len(self.workers))
        for row_of in np.flatnonzero(steps != 1).tolist():
            worker = self.workers[row_of]
            ops = tuple(op for op in self.ops[worker] if op.kind == "O")
            rule = "doubled-op" if ops else "missing-op"
            yield Violation(rule, f"{worker} has {len(ops)} O, expected 1", ops[:2])
        last = self.bounds[1:][steps == 1] - 1
        for place in last[self.kind[last] != O].tolist():
            worker = self.workers[int(self.row[place])]
            yield Violation(
                "step-last", f"{self.show(self.op(place))} stands behind the O of {worker}", (self.op(place),)
            )

    def _overlaps(self) -> Iterator[Violation]:
        """The rule that a worker runs one op at a time, in the order of its row: workers keep to that order, not to
        times."""
        for place in np.flatnonzero((self.row[1:] == self.row[:-1]) & (self.start[1:] < self.end[:-1])).tolist():
            before, op = self.op(place), self.op(place + 1)
            if op.start < before.start or op.duration == 0:
                worker = self.workers[int(self.row[place])]
                rule, text = "order", f"the ops of {worker} are not in time order: {self.show(before)}, {self.show(op)}"
            else:
                rule, text = "overlap", f"{self.show(op)} overlaps {self.show(before)}"
            yield Violation(rule, text, (before, op))

    def _releases(self) -> Ints:
        """By op, when the activation of its micro-batch and stage is free again; meaningless for O."""
        last = np.where(self.at[B] >= 0, self.at[B], self.at[W]).ravel()
        ends = np.where(last >= 0, self.end[last], _MOST)
        ends_of: Ints = ends[np.where(self.kind == O, 0, self._key())]
        return ends_of

    def held(self, changes: Sequence[tuple[NDArray[np.bool_], Ints, Ints]]) -> tuple[Ints, Ints]:
        """Returns (indices of ops, what the op's worker holds from then on), worker by worker in time order.

        changes: (which ops, when by op, how much by op). What ends at a tick is free at that tick.
        """
        places = np.concatenate([np.flatnonzero(which) for which, _, _ in changes])
        when = np.concatenate([when[which] for which, when, _ in changes])
        change = np.concatenate([change[which] for which, _, change in changes])
        row = self.row[places]
        span = 2 * (int(when.max(initial=0)) + 1)
        if span * len(self.workers) < _MOST and when.min(initial=0) >= 0:  # one key sorts in a third of the time
            order = np.argsort(row * span + 2 * when + (change > 0), kind="stable")
        else:
            order = np.lexsort((change, when, row))
        row, total = row[order], np.cumsum(change[order])
        first = np.append(True, row[1:] != row[:-1])
        before = np.append(0, total[:-1])[first]
        return places[order], total - np.repeat(before, np.diff(np.append(np.flatnonzero(first), len(row))))

    @cached_property
    def activations(self) -> tuple[Ints, Ints]:
        """As `held`, in micro-batches: each counts one from F's start to W's (or B's) end."""
        one = np.ones_like(self.start)
        release = (self.kind == W) | (self.kind == B)
        return self.held([(self.kind == F, self.start, one), (release, self.end, -one)])

    def _memory(self) -> Iterator[Violation]:
        if self.problem.memory.text == "bytes":
            yield from self._bytes()
            return
        limits = np.array([_MOST if n is None else n for n in self.problem.limits], np.int64)
        places, held = self.activations
        told = set()
        for k in np.flatnonzero(held > limits[self.stage[places]]).tolist():
            place = int(places[k])
            if (row := int(self.row[place])) in told:
                continue
            told.add(row)
            op, limit = self.op(place), int(limits[self.stage[place]])
            mine = (self.row == row) & (self.kind == F) & (self.start <= op.start) & (self._releases() > op.start)
            oldest = self.op(min(np.flatnonzero(mine).tolist(), key=lambda i: int(self.start[i])))
            yield Violation(
                "memory",
                f"{self.show(op)} starts while {op.worker} holds {held[k] - 1} activations and may hold {limit}; "
                f"the oldest is that of {self.show(oldest)}",
                (oldest, op),
            )

    def _bytes(self) -> Iterator[Violation]:
        """The memory rule in bytes: weights, optimizer state, and of each micro-batch what I needs until I's (or B's)
        end and then what W needs until W's end are at no time above the capacity."""
        profiles = self.job.profiles
        most = max((p.activation_bytes + p.weight_backward_bytes for p in profiles), default=0)
        exact: Any = np.int64 if most * len(self.kind) < _MOST else object  # (Python's own integers)
        needed, kept, fixed, capacity = (
            np.array(values, exact)
            for values in (
                [p.activation_bytes for p in profiles],
                [p.weight_backward_bytes for p in profiles],
                [p.weight_bytes + p.optimizer_bytes for p in profiles],
                self.job.capacity_bytes,
            )
        )
        back = (self.kind == I) | (self.kind == B)
        places, held = self.held(
            [
                (self.kind == F, self.start, needed[self.stage]),
                (back, self.end, -needed[self.stage]),
                (self.kind == I, self.end, kept[self.stage]),
                (self.kind == W, self.end, -kept[self.stage]),
            ]
        )
        held = held + fixed[self.stage[places]]
        told = set()
        for k in np.flatnonzero(held > capacity[self.stage[places]]).tolist():
            op = self.op(int(places[k]))
            if op.worker not in told:
                told.add(op.worker)
                limit = self.job.capacity_bytes[op.stage]
                yield Violation(
                    "memory", f"{op.worker} holds {held[k]:,} bytes of {limit:,} with {self.show(op)}", (op,)
                )

    def _precedence(self) -> Iterator[Violation]:
        scale = self.job.ticks_per_unit
        wire, wire_back = (
            np.array([min(_MOST, round(t * scale)) for t in times], np.int64)
            for times in (self.job.transfers, self.job.backward_transfers)
        )
        forward, weight = self.at[F], self.at[W]
        backward = np.where(self.at[B] >= 0, self.at[B], self.at[I])
        none = np.zeros(self.job.stages, np.int64)
        split = weight >= 0
        for first, then, lag, given in (
            (forward, backward, none, np.ones_like(split)),
            (forward[..., :-1], forward[..., 1:], wire, split[..., 1:] | True),
            (backward[..., 1:], backward[..., :-1], wire_back, split[..., 1:] | True),
            (backward, weight, none, split),
        ):
            early = given & (self.start[then] < self.end[first] + lag)
            for p, j, s in np.argwhere(early).tolist():
                a, b, wait = self.op(first[p, j, s]), self.op(then[p, j, s]), int(lag[s])
                after = f" and a transfer of {self.job.units(wait)}" if wait else ""
                yield Violation("precedence", f"{self.show(b)} starts before the end of {self.show(a)}{after}", (a, b))

    def _barriers(self) -> Iterator[Violation]:
        """The rule for O. Staggered: a stage's O's start when its last peer has finished. Else all start at the
        makespan."""
        group = self.stage if self.problem.technique.staggers else np.zeros_like(self.stage)
        compute = self.kind != O
        done = np.zeros(self.job.stages, np.int64)
        np.maximum.at(done, group[compute], self.end[compute])
        for place in np.flatnonzero(~compute & (self.start != done[group])).tolist():
            own = self.op(place)
            last = self.op(int(np.flatnonzero(compute & (group == group[place]) & (self.end == done[group[place]]))[0]))
            side = "before" if own.start < last.end else "after"
            yield Violation("barrier", f"{self.show(own)} starts {side} the end of {self.show(last)}", (last, own))

    # -- the plan's own numbers, by their definitions -----------------------------------------

    def times(self) -> dict[str, int]:
        """Computes makespan, period and busy ticks."""
        stages, compute, step = self.job.stages, self.kind != O, self.kind == O
        first, last, done = np.full(stages, _MOST), np.zeros(stages, np.int64), np.zeros(stages, np.int64)
        np.minimum.at(first, self.stage[compute], self.start[compute])
        np.maximum.at(last, self.stage[compute], self.end[compute])
        np.maximum.at(done, self.stage, self.end)
        makespan = int(last.max() - first.min())
        period = makespan + int(self.duration[step].max())
        if self.problem.technique.staggers:
            period = int((done - first).max())
        return {"makespan": makespan, "period": period, "busy": int(self.duration.sum())}

    def peaks(self) -> dict[str, int]:
        places, held = self.activations
        most = np.zeros(len(self.workers), np.int64)
        np.maximum.at(most, self.row[places], held)
        return {str(worker): count for worker, count in zip(self.workers, most.tolist(), strict=True)}


def _reduction_ticks(problem: Problem, stage: int) -> int:
    """Return what the all-reduce adds to the O of each peer: entries are by living peers, so dead ones count from the
    end."""
    job = problem.job
    times = job.profiles[stage].reductions
    dead = sum(worker.stage == stage for worker in problem.failed)
    return round(times[-1 - dead] * job.ticks_per_unit) if times else 0


def _fingerprint(plan: Plan) -> Iterator[Violation]:
    if plan.fingerprint != (own := plan.compute_fingerprint()):
        yield Violation("fingerprint", f"fingerprint is {plan.fingerprint!r}, and that of these ops is {own}")


def _numbers(plan: Plan, checker: _Checker) -> Iterator[Violation]:
    """Recompute the plan's metrics and compare."""
    problem, job, said = checker.problem, checker.job, plan.metrics
    true = checker.times()
    for name in ("makespan", "period"):
        if getattr(said, name) != job.units(true[name]):
            yield Violation(
                f"metrics.{name}", f"metrics.{name} is {getattr(said, name)}, and the ops give {job.units(true[name])}"
            )
    peaks = checker.peaks()
    for name in sorted(said.peak_activations.keys() | peaks.keys()):
        if said.peak_activations.get(name) != peaks.get(name):
            yield Violation(
                "metrics.peak_activations",
                f"metrics.peak_activations of {name} is {said.peak_activations.get(name)}, "
                f"and the ops give {peaks.get(name)}",
            )
    for name, value in _ratios(checker, said, true).items():
        if not math.isclose(getattr(said, name), value, rel_tol=1e-9, abs_tol=1e-9):
            yield Violation(f"metrics.{name}", f"metrics.{name} is {getattr(said, name)}, and it should be {value:.6g}")
    yield from _baseline(problem, said, true["period"])
    if said.lower_bound > said.period:
        yield Violation(
            "metrics.lower_bound", f"metrics.lower_bound {said.lower_bound} is above the period {said.period}"
        )
    proven = job.units(established_bound(problem, true["period"]))
    if said.lower_bound > proven and plan.solver.name not in PROVERS:
        yield Violation(
            "unproven",
            f"metrics.lower_bound is {said.lower_bound}, and what is proven is {proven}; "
            f"{plan.solver.name} proves no more than that",
        )
    yield from _over_layouts(problem, said)
    if said.lower_bound <= 0:
        yield Violation(
            "metrics.lower_bound", f"metrics.lower_bound is {said.lower_bound}, and no iteration takes no time"
        )
    if not 0 <= plan.solver.seconds < math.inf:
        yield Violation(
            "solver.seconds", f"solver.seconds is {plan.solver.seconds}, expected a number of seconds of at least 0"
        )
    if (plan.solver.status == "optimal") != (said.lower_bound == said.period):
        yield Violation(
            "solver.status",
            f"solver.status is {plan.solver.status} with period {said.period} and lower bound {said.lower_bound}",
        )


def _over_layouts(problem: Problem, said: MetricsDoc) -> Iterator[Violation]:
    """Check a bound that is claimed over other partitions too: none of them may be able to do better."""
    if said.bound_over == "schedules":
        return
    if not problem.job.layers:
        yield Violation(
            "metrics.bound_over", f"metrics.bound_over is {said.bound_over}, and the job has no layers to be cut anew"
        )
        return
    less = math.ceil(said.lower_bound * problem.job.ticks_per_unit - 0.5) - 1
    layouts = _Layouts(problem)
    beaten = layouts.partition_within(less) if said.bound_over == "partitions" else layouts.staffed_within(less)
    if beaten:
        yield Violation(
            "unproven",
            f"metrics.lower_bound is {said.lower_bound} over all {said.bound_over}, and what is proven "
            "leaves room for one with a shorter period",
        )


class _Layouts:
    """Decides whether some layout may finish every stage within a number of ticks: a partition of the layers and, where
    they may change, the numbers of workers per stage. The search goes forwards from the first stage. The least time of
    a stage is that of planner.plans.bounds for it alone and for it with the first stage; they are written here anew.
    """

    def __init__(self, problem: Problem) -> None:
        job = problem.job
        self.problem, self.job, self.total = problem, job, job.pipelines * job.micro_batches
        scale, split = job.ticks_per_unit, problem.technique.splits
        own = {
            name: [round(getattr(layer, name) * scale) for layer in job.layers]
            for name in ("forward", "input_backward", "weight_backward", "optimizer")
        }
        down = [round(layer.transfer * scale) for layer in job.layers[:-1]]
        up = [
            round((layer.transfer if layer.backward_transfer is None else layer.backward_transfer) * scale)
            for layer in job.layers[:-1]
        ]
        work = sum(map(sum, own.values())) + sum(down) + sum(up)
        self.kind: Any = np.int64 if work * 8 * (self.total + 1) < _MOST >> 8 else object
        back = [i + (0 if split else w) for i, w in zip(own["input_backward"], own["weight_backward"], strict=True)]
        self.to = {
            name: np.array([0, *accumulate(values)], self.kind)
            for name, values in (
                ("F", own["forward"]),
                ("I", back),
                ("W", own["weight_backward"] if split else [0] * len(back)),
                ("O", own["optimizer"]),
            )
        }
        # The least sum of k transfers: behind[b][k] behind a stage that ends before layer b, and before[..][a][k]
        # before a stage that begins with layer a.
        both = [d + u for d, u in zip(down, up, strict=True)]
        layers = len(job.layers)
        self.behind = [[0, *accumulate(sorted(both[b:]))] for b in range(layers + 1)]
        self.before = {
            name: [[0, *accumulate(sorted(times[: max(0, a - 1)]))] for a in range(layers + 1)]
            for name, times in (("both", both), ("down", down), ("up", up))
        }
        self.cut = {"both": both, "down": down, "up": up}
        self.speed = max([Fraction(1), *(Fraction(str(speed)) for _, speed in job.speeds)])

    def partition_within(self, ticks: int) -> bool:
        """Is there such a partition with the workers where they are?"""
        job, layers = self.job, len(self.job.layers)
        peers = [len(self.problem.living_peers(s)) for s in range(job.stages)]
        ends = np.arange(1, layers - job.stages + 2)
        own, _ = self.times(0, 0, ends, np.array([peers[0]]))
        firsts = ends[own[0] <= ticks]
        if job.stages == 1:
            return bool((firsts == layers).any())
        tails = self.last_of_first(firsts, peers[0])
        reached = np.zeros((len(firsts), layers + 1), bool)
        reached[np.arange(len(firsts)), firsts] = True
        for s in range(1, job.stages):
            following = np.zeros_like(reached)
            left = job.stages - 1 - s
            for a in np.flatnonzero(reached.any(0)).tolist():
                ends = np.arange(a + 1, layers - left + 1) if left else np.array([layers])
                if a >= layers - left:
                    continue
                own, pair = self.times(s, a, ends, np.array([peers[s]]))
                fits = (own[0] <= ticks)[None, :] & (pair[0][None, :] + tails[:, None] <= ticks)
                following[:, ends] |= reached[:, a][:, None] & fits
            reached = following
        return bool(reached[:, layers].any())

    def staffed_within(self, ticks: int) -> bool:
        """Is there such a partition with as many workers as live, on any stages?"""
        job, layers = self.job, len(self.job.layers)
        peers = np.arange(1, job.pipelines + 1)
        tail = min(
            int(self.last_of_first(np.arange(1, layers - job.stages + 2), n).min()) for n in range(1, job.pipelines + 1)
        )
        none = len(self.problem.living_workers()) + 1
        fewest = np.full(layers + 1, none)
        fewest[0] = 0
        for s in range(job.stages):
            following = np.full(layers + 1, none)
            left = job.stages - 1 - s
            for a in np.flatnonzero(fewest < none).tolist():
                if a >= layers - left:
                    continue
                ends = np.arange(a + 1, layers - left + 1) if left else np.array([layers])
                own, pair = self.times(s, a, ends, peers)
                fits = (own <= ticks) & (pair + tail <= ticks)
                # Takes the fewest workers that suffice. More may take longer, since their all-reduce does.
                needed = np.where(fits.any(0), fits.argmax(0) + 1, none)
                following[ends] = np.minimum(following[ends], np.minimum(fewest[a] + needed, none))
            fewest = following
        return bool(fewest[layers] < none)

    def last_of_first(self, ends: Ints, peers: int) -> Ints:
        """W and O of the first stage, by the layer before which it ends; 0 where a global barrier delays them."""
        if not self.problem.technique.staggers:
            return np.zeros(len(ends), self.kind)
        weight, step = self._at_speed(self.to["W"][ends]), self._at_speed(self.to["O"][ends])
        out: Ints = weight + step + np.array([self._reduced(0, int(b), peers) for b in ends.tolist()], self.kind)
        return out

    def _at_speed(self, ticks: Ints) -> Ints:
        out: Ints = -(-ticks * self.speed.denominator // self.speed.numerator)
        return out

    def _reduced(self, a: int, b: int, peers: int) -> int:
        scale = self.job.ticks_per_unit
        known = [layer.reductions for layer in self.job.layers[a:b] if layer.reductions]
        return sum(round(times[len(times) - 1 - (self.job.pipelines - peers)] * scale) for times in known)

    def _held(self, s: int, a: int, ends: Ints) -> Ints:
        """Most activations that a worker can hold, by end; 0 where its layers and one micro-batch don't fit."""
        if self.problem.memory.text != "bytes":
            limit = self.problem.limits[s]
            return np.full(len(ends), self.total if limit is None else min(limit, self.total), self.kind)
        out = []
        for b in ends.tolist():
            layers = self.job.layers[a:b]
            free = self.job.capacity_bytes[s] - sum(x.weight_bytes + x.optimizer_bytes for x in layers)
            parts = [sum(x.activation_bytes for x in layers)]
            if self.problem.technique.splits:
                parts.append(sum(x.weight_backward_bytes for x in layers))
            least = min(parts)
            out.append(0 if free < max(parts) else min(self.total, free // least) if least else self.total)
        return np.array(out, self.kind)

    def times(self, s: int, a: int, ends: Ints, peers: Ints) -> tuple[Ints, Ints]:
        """Returns [peers, ends] twice, for stage s with the layers from a to each of `ends`: the least period by this
        stage alone; and that by it and the first stage, without the first stage's W and O."""
        job, staggers, own = self.job, self.problem.technique.staggers, self._at_speed
        F, I, W, O = (own(self.to[k][ends] - self.to[k][a]) for k in "FIWO")  # noqa: E741 -- the field's names
        turns = self.to["F"][-1] - self.to["F"][ends] + self.to["I"][-1] - self.to["I"][ends]
        cuts = job.stages - 1 - s
        if cuts:
            wires = [self.cut["both"][b - 1] + self.behind[b][cuts - 1] for b in ends.tolist()]
            turns = turns + np.array(wires, self.kind)
        turn = F + own(turns)
        limit = self._held(s, a, ends)
        n = np.array(-(-self.total // peers), self.kind)[:, None]
        C = np.maximum(1, np.minimum(limit, n))
        until_last_F = np.maximum(turn, C * F) + (n - C) * F
        last_I = until_last_F + n * I + (n - C) * W
        span = until_last_F + n * (I + W)
        span = span + np.where(n > C, np.maximum(0, turn + I + W - F - C * (I + W)), 0)
        resident = -(-n // C) * (turn + I + W)
        step = O + np.array([[self._reduced(a, b, p) for b in ends.tolist()] for p in peers.tolist()], self.kind)
        zero = np.zeros_like(span)
        if staggers:
            period = np.maximum(span, resident) + step
            pair = last_I + own(self._above(s, a, "FI", "both")) if s else zero
        else:
            head = own(self._above(s, a, "F", "down"))
            tail = np.maximum(W, own(self._above(s, a, "I", "up")) + own(self.to["W"][1])) if s else W
            period = head + step + np.maximum(span, np.maximum(last_I + tail, resident - W + tail))
            pair = zero
        if job.speeds and len(peers) == 1:
            period = np.maximum(period, self._shared(s, a, ends, int(peers[0])) + step)
        beyond = _MOST if self.kind is np.int64 else 1 << 200
        return np.where(limit > 0, period, beyond), np.where(limit > 0, pair, 0)

    def _above(self, s: int, a: int, ops: str, wires: str) -> Ints:
        """What a micro-batch passes through before a stage that begins with layer a."""
        way = sum(self.to[k][a] for k in ops)
        if s:
            way += self.cut[wires][a - 1] + self.before[wires][a][s - 1]
        return np.array(way, self.kind)

    def _shared(self, s: int, a: int, ends: Ints, peers: int) -> Ints:
        """All work of the stage, divided by the speed of its fastest workers together."""
        speeds = [Fraction(str(v)) for w, v in self.job.speeds if w.stage == s]
        speeds += [Fraction(1)] * (self.job.pipelines - len(speeds))
        rate = sum(sorted(speeds)[-peers:], Fraction(0))
        work = sum(self.to[k][ends] - self.to[k][a] for k in "FIW")
        out: Ints = -(-work * self.total * rate.denominator // rate.numerator)
        return out


def _baseline(problem: Problem, said: MetricsDoc, period: int) -> Iterator[Violation]:
    """Check slowdown_vs_best: against the best fault-free plan, or this one where it is shorter."""
    best, wrong = _best_without_failures(problem.job, problem.memory)
    if wrong is not None:
        yield Violation("baseline", f"the best fault-free plan, which this one is compared with, is invalid: {wrong}")
        return
    mark = min(best, period)
    expected = period / mark - 1
    if not math.isclose(said.slowdown_vs_best, expected, rel_tol=1e-9, abs_tol=1e-9):
        yield Violation(
            "metrics.slowdown_vs_best",
            f"metrics.slowdown_vs_best is {said.slowdown_vs_best}, and it should be {expected:.6g}",
        )


@lru_cache(maxsize=64)
def _best_without_failures(job: Job, memory: MemoryLimit) -> tuple[int, Violation | None]:
    """Return the period in ticks of the best fault-free plan, and what is wrong with that plan. Cached, as
    `best_fault_free` caches the plan: all plans of a job are compared with the same."""
    # Nothing else here is made by a solver, and its result is checked. It is imported for this alone.
    from openrecycle.planner.solvers.list_scheduler import best_fault_free

    best = _Checker(best_fault_free(job, memory))
    wrong = next(best.violations(), None)
    return (0, wrong) if wrong is not None else (best.times()["period"], None)


def _ratios(checker: _Checker, said: MetricsDoc, true: dict[str, int]) -> dict[str, float]:
    period, living = true["period"], len(checker.workers)
    ratios = {
        "bubble_fraction": 1 - true["busy"] / (living * period),
        "slowdown_vs_1f1b": period / reference_period(checker.job.at_home) - 1,
    }
    if said.lower_bound > 0:
        ratios["gap"] = said.period / said.lower_bound - 1
    return ratios

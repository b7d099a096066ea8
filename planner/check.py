"""Says whether a schedule is valid, and whether a plan tells the truth about itself.

Written from the definitions and nothing else: no code is shared with the solvers or with the
metrics of planner.schedule, so that a mistake in one is not repeated in the other. Two numbers are no
matter of the ops alone. The baseline of `slowdown_vs_best` is looked for anew, and its schedule checked here like
any other. Of the lower bound, what planner.bounds proves is established; a search that went further left no
proof in the document, so a bound above that is believed of PROVERS only, and `claim` says so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from planner.baseline import reference_period
from planner.bounds import period_bound
from planner.errors import PlannerError
from planner.fault_free import best_fault_free
from planner.job import Job, Problem, Worker
from planner.plan import PROVERS, MetricsDoc, Plan
from planner.schedule import Op, Schedule

_Key = tuple[int, int, int]  # pipeline, micro-batch, stage


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong. sentence: for the user; ops: those that clash, two where two do."""

    sentence: str
    ops: tuple[Op, ...] = ()

    def __str__(self) -> str:
        return self.sentence


def check(subject: Schedule | Plan) -> list[Violation]:
    """Everything that is wrong with a schedule or plan; empty when it is valid.

    A plan's numbers (metrics, fingerprint) are recomputed and compared as well, unless its
    schedule is invalid already: the metrics of an invalid schedule mean nothing.
    """
    if isinstance(subject, Schedule):
        return list(_Checker(subject).violations())
    try:
        schedule = subject.schedule()
    except PlannerError as error:
        return [Violation(f"the plan describes no problem: {error}")]
    found = [*_document(subject, schedule), *_Checker(schedule).violations()]
    return found or list(_numbers(subject, schedule))


def claim(plan: Plan) -> str | None:
    """What a valid plan says of its bound that can't be established here, in a sentence; None: nothing."""
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
    """Ticks that no plan of `problem` can beat, by planner.bounds. period: of a valid one.

    What is called fault-free runs in 1F1B's order, or as GPipe, which may be the shorter.
    """
    bound = period_bound(problem)
    if not problem.technique.reroutes and reference_period(problem.job) <= period:
        bound = max(bound, reference_period(problem.job))
    return bound


class _Checker:
    def __init__(self, schedule: Schedule) -> None:
        self.problem: Problem = schedule.problem
        self.job: Job = schedule.problem.job
        self.speeds = dict(self.job.speeds)
        self.rows = {worker: list(ops) for worker, ops in schedule.ops.items()}
        self.at: dict[str, dict[_Key, Op]] = {kind: {} for kind in "FIWB"}
        self.optimizers: dict[Worker, list[Op]] = defaultdict(list)

    def violations(self) -> Iterator[Violation]:
        broken = [*self._workers(), *self._each_op()]
        yield from broken
        if broken:  # what follows reads the ops by their keys
            return
        missing = list(self._completeness())
        yield from missing
        yield from self._overlaps()
        yield from self._memory()
        if not missing:
            yield from self._precedence()
            yield from self._barriers()

    def show(self, op: Op) -> str:
        name = "O" if op.kind == "O" else f"{op.kind} of micro-batch {op.micro_batch} of pipeline {op.pipeline}"
        start, end = self.job.units(op.start), self.job.units(op.start + op.duration)
        return f"{name} on {op.worker} ({start} to {end})"

    def _workers(self) -> Iterator[Violation]:
        job = self.job
        expected = {Worker(p, s) for p in range(job.pipelines) for s in range(job.stages)} - self.problem.failed
        for worker in self.rows.keys() - expected:
            why = "has failed" if worker in self.problem.failed else "is not of the grid"
            yield Violation(f"{worker} has ops and {why}", tuple(self.rows[worker][:1]))
        for worker in sorted(expected - self.rows.keys()):
            yield Violation(f"{worker} lives and has no ops, not even its O")

    def _each_op(self) -> Iterator[Violation]:
        """Each op for itself: who, what, how long, allowed at all."""
        job, technique = self.job, self.problem.technique
        for worker, row in self.rows.items():
            for op in row:
                if op.worker != worker or op.stage != worker.stage:
                    yield Violation(f"{self.show(op)} of stage {op.stage} stands in the row of {worker}", (op,))
                elif not 0 <= op.stage < job.stages or not 0 <= op.pipeline < job.pipelines:
                    yield Violation(f"{self.show(op)} is outside the grid of the job", (op,))
                elif op.kind == "O":
                    self.optimizers[worker].append(op)
                    if op.pipeline != worker.pipeline:
                        yield Violation(f"{self.show(op)} is entered under pipeline {op.pipeline}", (op,))
                elif op.kind not in self.at:
                    yield Violation(f"{worker} has an op of unknown kind {op.kind!r}", (op,))
                elif not 0 <= op.micro_batch < job.micro_batches:
                    yield Violation(f"{self.show(op)}: the job's micro-batches are 0 to {job.micro_batches - 1}", (op,))
                elif op.kind in "IW" and not technique.splits:
                    yield Violation(f"{self.show(op)}: {technique.value} does not split B", (op,))
                elif op.pipeline != worker.pipeline and not technique.reroutes:
                    yield Violation(f"{self.show(op)}: {technique.value} does not re-route", (op,))
                else:
                    yield from self._register(op)
                expected = self._duration(op)
                if expected is not None and op.duration != expected:
                    yield Violation(f"{self.show(op)} lasts other than its {job.units(expected)}", (op,))
                if op.start < 0:
                    yield Violation(f"{self.show(op)} starts before time 0", (op,))

    def _register(self, op: Op) -> Iterator[Violation]:
        key = (op.pipeline, op.micro_batch, op.stage)
        other = self.at[op.kind].get(key)
        if other is not None:
            yield Violation(f"{self.show(op)} is there twice: {self.show(other)}", (other, op))
        self.at[op.kind][key] = op

    def _duration(self, op: Op) -> int | None:
        """What the op must last, from the profile and the worker's speed; None: no such op."""
        if not 0 <= op.stage < self.job.stages:
            return None
        profile, scale = self.job.profiles[op.stage], self.job.ticks_per_unit
        speed = Fraction(str(self.speeds.get(op.worker, 1.0)))

        def ticks(duration: float) -> int:
            return math.ceil(round(duration * scale) / speed)

        if op.kind == "O":
            return ticks(profile.optimizer) + _reduction_ticks(self.problem, op.stage)
        return {
            "F": ticks(profile.forward),
            "I": ticks(profile.input_backward),
            "W": ticks(profile.weight_backward),
            "B": ticks(profile.input_backward) + ticks(profile.weight_backward),
        }.get(op.kind)

    def _keys(self) -> Iterator[_Key]:
        job = self.job
        for p in range(job.pipelines):
            for j in range(job.micro_batches):
                for s in range(job.stages):
                    yield p, j, s

    def _completeness(self) -> Iterator[Violation]:
        """F, and either B or both I and W, of each micro-batch and stage, on one worker."""
        f_at, i_at, w_at, b_at = (self.at[kind] for kind in "FIWB")
        for key in self._keys():
            forward, backward = f_at.get(key), b_at.get(key)
            parts = [op for op in (i_at.get(key), w_at.get(key)) if op is not None]
            what = f"micro-batch {key[1]} of pipeline {key[0]} on stage {key[2]}"
            if forward is None:
                yield Violation(f"{what} has no F")
            if backward is not None and parts:
                yield Violation(
                    f"{what} has both {self.show(backward)} and {self.show(parts[0])}", (backward, parts[0])
                )
            elif backward is None and len(parts) < 2:
                lacks = "B, and no I and W" if not parts else ("W" if parts[0].kind == "I" else "I")
                yield Violation(f"{what} has no {lacks}", tuple(parts))
            for op in (*parts, *([backward] if backward else ())):
                if forward is not None and op.worker != forward.worker:
                    yield Violation(
                        f"{self.show(op)} is not on the worker of {self.show(forward)}, which keeps its activation",
                        (forward, op),
                    )
        for worker in self.rows:
            if len(self.optimizers[worker]) != 1:
                yield Violation(
                    f"{worker} has {len(self.optimizers[worker])} O, expected 1", tuple(self.optimizers[worker][:2])
                )

    def _overlaps(self) -> Iterator[Violation]:
        for worker, row in self.rows.items():
            in_time = sorted(row, key=lambda op: (op.start, op.start + op.duration))
            if [op.start for op in row] != [op.start for op in in_time]:
                a, b = next((a, b) for a, b in pairwise(row) if b.start < a.start)
                yield Violation(f"the ops of {worker} are not in time order: {self.show(a)}, {self.show(b)}", (a, b))
            running: Op | None = None
            for op in in_time:
                if running is not None and op.start < running.start + running.duration:
                    yield Violation(f"{self.show(op)} overlaps {self.show(running)}", (running, op))
                if running is None or op.start + op.duration >= running.start + running.duration:
                    running = op

    def _memory(self) -> Iterator[Violation]:
        """Held from F's start to W's (or B's) end; what ends at a tick is free at that tick."""
        if self.problem.memory.text == "bytes":
            yield from self._bytes()
            return
        for worker, row in self.rows.items():
            limit = self.problem.limits[worker.stage]
            if limit is None:
                continue
            moments: list[tuple[int, int, Op]] = []
            for op in row:
                if op.kind == "F":
                    moments.append((op.start, 1, op))
                elif op.kind in ("W", "B"):
                    moments.append((op.start + op.duration, -1, op))
            held: dict[_Key, Op] = {}
            for _, change, op in sorted(moments, key=lambda m: (m[0], m[1])):
                key = (op.pipeline, op.micro_batch, op.stage)
                if change < 0:
                    held.pop(key, None)
                    continue
                if len(held) >= limit:
                    oldest = next(iter(held.values()))
                    yield Violation(
                        f"{self.show(op)} starts while {worker} holds {len(held)} activations and may hold {limit}; "
                        f"the oldest is that of {self.show(oldest)}",
                        (oldest, op),
                    )
                    break
                held[key] = op

    def _bytes(self) -> Iterator[Violation]:
        """Weights, optimizer state, and of each micro-batch what I still needs until I's (or B's)
        end, and then what W still needs until W's; together at no time above the capacity."""
        for worker, row in self.rows.items():
            profile, capacity = self.job.profiles[worker.stage], self.job.capacity_bytes[worker.stage]
            moments: list[tuple[int, int, Op]] = []
            for op in row:
                end = op.start + op.duration
                if op.kind == "F":
                    moments.append((op.start, profile.activation_bytes, op))
                elif op.kind in ("I", "B"):
                    moments.append((end, -profile.activation_bytes, op))
                if op.kind == "I":
                    moments.append((end, profile.weight_backward_bytes, op))
                elif op.kind == "W":
                    moments.append((end, -profile.weight_backward_bytes, op))
            held = profile.weight_bytes + profile.optimizer_bytes
            for _, change, op in sorted(moments, key=lambda m: (m[0], m[1])):
                held += change
                if held > capacity:
                    yield Violation(f"{worker} holds {held:,} bytes of {capacity:,} with {self.show(op)}", (op,))
                    break

    def _precedence(self) -> Iterator[Violation]:
        last = self.job.stages - 1
        scale = self.job.ticks_per_unit
        wire = [round(t * scale) for t in self.job.transfers]
        wire_back = [round(t * scale) for t in self.job.backward_transfers]
        for p, j, s in self._keys():
            forward = self.at["F"][p, j, s]
            backward = self._backward(p, j, s)
            pairs = [(forward, backward, 0)]
            if s > 0:
                pairs.append((self.at["F"][p, j, s - 1], forward, wire[s - 1]))
            if s < last:
                pairs.append((self._backward(p, j, s + 1), backward, wire_back[s]))
            if backward.kind == "I":
                pairs.append((backward, self.at["W"][p, j, s], 0))
            for first, then, lag in pairs:
                if then.start < first.start + first.duration + lag:
                    after = f" and a transfer of {self.job.units(lag)}" if lag else ""
                    yield Violation(
                        f"{self.show(then)} starts before the end of {self.show(first)}{after}", (first, then)
                    )

    def _backward(self, p: int, j: int, s: int) -> Op:
        return self.at["B"].get((p, j, s)) or self.at["I"][p, j, s]

    def _barriers(self) -> Iterator[Violation]:
        """Staggered: a stage's O's start when its last peer has finished. Else all at the makespan."""
        ends: dict[int, Op] = {}
        for kind in "FIWB":
            for op in self.at[kind].values():
                group = op.stage if self.problem.technique.staggers else 0
                if group not in ends or op.start + op.duration > ends[group].start + ends[group].duration:
                    ends[group] = op
        for (own,) in self.optimizers.values():
            latest = ends[own.stage if self.problem.technique.staggers else 0]
            end = latest.start + latest.duration
            if own.start != end:
                side = "before" if own.start < end else "after"
                yield Violation(f"{self.show(own)} starts {side} the end of {self.show(latest)}", (latest, own))


def _reduction_ticks(problem: Problem, stage: int) -> int:
    """What the reduction adds to the O of each peer: the more peers are dead, the earlier in the list."""
    job = problem.job
    times = job.profiles[stage].reductions
    dead = sum(worker.stage == stage for worker in problem.failed)
    return round(times[-1 - dead] * job.ticks_per_unit) if times else 0


def _document(plan: Plan, schedule: Schedule) -> Iterator[Violation]:
    """Names in their one spelling; times that are whole ticks."""
    for name in (*plan.workers, *plan.failed):
        if str(Worker.parse(name)) != name:
            yield Violation(f"worker {name!r} should be spelt {Worker.parse(name)}")
    if len(set(plan.failed)) != len(plan.failed):
        yield Violation("failed names a worker twice")
    units = schedule.problem.job.units
    for name, documents in plan.workers.items():
        for document, op in zip(documents, schedule.ops.get(Worker.parse(name), ()), strict=False):
            if document.start != units(op.start) or document.duration != units(op.duration):
                yield Violation(
                    f"{op}: start {document.start} and duration {document.duration} are finer than the job's durations",
                    (op,),
                )
            if (document.micro_batch is None) != (document.kind == "O"):
                yield Violation(f"{op}: micro_batch is null for O and a number for all others", (op,))


def _numbers(plan: Plan, schedule: Schedule) -> Iterator[Violation]:
    """Recomputes what the plan says of itself."""
    if plan.fingerprint != plan.compute_fingerprint():
        yield Violation(f"fingerprint is {plan.fingerprint}, and that of these ops is {plan.compute_fingerprint()}")
    job, said = schedule.problem.job, plan.metrics
    true = _recomputed(schedule)
    for name in ("makespan", "period"):
        if getattr(said, name) != job.units(true[name]):
            yield Violation(f"metrics.{name} is {getattr(said, name)}, and the ops give {job.units(true[name])}")
    peaks = {str(worker): count for worker, count in _peaks(schedule).items()}
    for name in sorted(said.peak_activations.keys() | peaks.keys()):
        if said.peak_activations.get(name) != peaks.get(name):
            yield Violation(
                f"metrics.peak_activations of {name} is {said.peak_activations.get(name)}, "
                f"and the ops give {peaks.get(name)}"
            )
    for name, value in _ratios(schedule, said, true).items():
        if not math.isclose(getattr(said, name), value, rel_tol=1e-9, abs_tol=1e-9):
            yield Violation(f"metrics.{name} is {getattr(said, name)}, and it should be {value:.6g}")
    yield from _baseline(schedule, said, true["period"])
    if said.lower_bound > said.period:
        yield Violation(f"metrics.lower_bound {said.lower_bound} is above the period {said.period}")
    proven = job.units(established_bound(schedule.problem, true["period"]))
    if said.lower_bound > proven and plan.solver.name not in PROVERS:
        yield Violation(
            f"metrics.lower_bound is {said.lower_bound}, and what is proven is {proven}; "
            f"{plan.solver.name} proves no more than that"
        )
    if said.lower_bound <= 0:
        yield Violation(f"metrics.lower_bound is {said.lower_bound}, and no iteration takes no time")
    if not 0 <= plan.solver.seconds < math.inf:
        yield Violation(f"solver.seconds is {plan.solver.seconds}, expected a number of seconds of at least 0")
    if (plan.solver.status == "optimal") != (said.lower_bound == said.period):
        yield Violation(
            f"solver.status is {plan.solver.status} with period {said.period} and lower bound {said.lower_bound}"
        )


def _baseline(schedule: Schedule, said: MetricsDoc, period: int) -> Iterator[Violation]:
    """slowdown_vs_best: against the best fault-free plan, or this one where it is shorter."""
    best = best_fault_free(schedule.problem.job, schedule.problem.memory)
    wrong = next(_Checker(best.schedule).violations(), None)
    if wrong is not None:
        yield Violation(f"the best fault-free plan, which this one is compared with, is invalid: {wrong}")
        return
    mark = min(_recomputed(best.schedule)["period"], period)
    expected = period / mark - 1
    if not math.isclose(said.slowdown_vs_best, expected, rel_tol=1e-9, abs_tol=1e-9):
        yield Violation(f"metrics.slowdown_vs_best is {said.slowdown_vs_best}, and it should be {expected:.6g}")


def _recomputed(schedule: Schedule) -> dict[str, int]:
    """Makespan, period and busy ticks, by their definitions."""
    problem = schedule.problem
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    done: dict[int, int] = {}
    busy = 0
    for row in schedule.ops.values():
        for op in row:
            busy += op.duration
            end = op.start + op.duration
            done[op.stage] = max(done.get(op.stage, end), end)
            if op.kind != "O":
                first[op.stage] = min(first.get(op.stage, op.start), op.start)
                last[op.stage] = max(last.get(op.stage, end), end)
    makespan = max(last.values()) - min(first.values())
    period = makespan + max(op.duration for row in schedule.ops.values() for op in row if op.kind == "O")
    if problem.technique.staggers:
        period = max(done[s] - first[s] for s in first)
    return {"makespan": makespan, "period": period, "busy": busy}


def _ratios(schedule: Schedule, said: MetricsDoc, true: dict[str, int]) -> dict[str, float]:
    period, living = true["period"], len(schedule.ops)
    ratios = {
        "bubble_fraction": 1 - true["busy"] / (living * period),
        "slowdown_vs_1f1b": period / reference_period(schedule.problem.job) - 1,
    }
    if said.lower_bound > 0:
        ratios["gap"] = said.period / said.lower_bound - 1
    return ratios


def _peaks(schedule: Schedule) -> dict[Worker, int]:
    peaks = {}
    for worker, row in schedule.ops.items():
        starts = sorted(op.start for op in row if op.kind == "F")
        ends = sorted(op.start + op.duration for op in row if op.kind in ("W", "B"))
        peak = freed = 0
        for count, start in enumerate(starts, 1):
            while freed < len(ends) and ends[freed] <= start:
                freed += 1
            peak = max(peak, count - freed)
        peaks[worker] = peak
    return peaks

"""A schedule as arrays: what a plan of 10^5 ops needs to be stored, renamed and read in no time.

Items are numbered as in planner.solvers.dispatch, per stage: pipeline * micro_batches +
micro-batch. Times are ticks. Needs numpy, which the console has and an agent need not have.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner import plan_text
from planner.errors import InputError, PlannerError
from planner.job import Job, MemoryLimit, Problem, Technique, Worker
from planner.op_rows import Ints, OpRows
from planner.plan import SCHEMA_VERSION, MetricsDoc, OpDoc, Plan, SolverDoc, job_doc
from planner.schedule import Schedule
from planner.solvers.table import ArraySchedule

KINDS = "FIWB"
F, I, W, O = range(4)  # noqa: E741 -- the field's names
B = 3  # in KINDS; `durations` has O there


class NotColumnar(PlannerError):
    """The plan has ops that these arrays can't hold, such as two durations of F on one worker."""


@dataclass(frozen=True)
class Columns:
    """One schedule. S stages, P pipelines, n = P * micro-batches.

    route [S, n]: pipeline of the worker that runs the item. starts [3, S, n]: of F, of I (or B)
    and of W (where B is not split, the end of its first I ticks). split [S, P]: 1 where the worker
    splits B. durations [4, S, P]: of F, I, W and O on each worker. step [S]: start of the stage's O.
    """

    problem: Problem
    route: Ints
    starts: Ints
    split: Ints
    durations: Ints
    step: Ints

    # -- from schedules ----------------------------------------------------------------------

    @classmethod
    def of(cls, schedule: Schedule) -> Columns:
        """Raises NotColumnar."""
        if isinstance(schedule, ArraySchedule):
            return cls._of_arrays(schedule)
        problem, job = schedule.problem, schedule.problem.job
        n = job.pipelines * job.micro_batches
        route = np.full((job.stages, n), -1, np.int64)
        starts = np.full((3, job.stages, n), -1, np.int64)
        split = np.zeros((job.stages, job.pipelines), np.int64)
        durations = np.full((4, job.stages, job.pipelines), -1, np.int64)
        step = np.zeros(job.stages, np.int64)
        for worker, ops in schedule.ops.items():
            at = (worker.stage, worker.pipeline)
            split[at] = int(any(op.kind in "IW" for op in ops))
            for op in ops:
                if op.kind == "O":
                    step[op.stage] = op.start
                    durations[(O, *at)] = op.duration
                    continue
                item = op.pipeline * job.micro_batches + op.micro_batch
                kind = I if op.kind == "B" else KINDS.index(op.kind)
                starts[kind, op.stage, item] = op.start
                if op.kind == "F":
                    route[op.stage, item] = worker.pipeline
                length = op.duration
                if op.kind == "B":
                    durations[(W, *at)] = problem.worker_ticks(worker).weight_backward
                    length -= int(durations[(W, *at)])
                    starts[W, op.stage, item] = op.start + length
                durations[(kind, *at)] = length
        if route.min(initial=0) < 0 or starts.min(initial=0) < 0:
            raise NotColumnar("the plan lacks an op of some micro-batch and stage")
        return cls(problem, route, starts, split, _filled(problem, durations), step)

    @classmethod
    def _of_arrays(cls, schedule: ArraySchedule) -> Columns:
        table, result, problem = schedule.table, schedule.result, schedule.problem
        job = problem.job
        shape = (job.stages, job.pipelines)
        n = job.pipelines * job.micro_batches
        starts = np.array([np.asarray(s, np.int64).reshape(job.stages, n) for s in result.starts])
        split = np.array(table.split(result.split), np.int64).reshape(shape)
        for worker in problem.failed:
            split[worker.stage, worker.pipeline] = 0
        route = np.asarray(table.route, np.int64).reshape(job.stages, n) % job.pipelines
        durations = _filled(problem, np.full((4, *shape), -1, np.int64))
        whole = ~np.take_along_axis(split, route, 1).astype(bool)
        starts[W][whole] = (starts[I] + np.take_along_axis(durations[I], route, 1))[whole]
        ends = result.last if problem.technique.staggers else [max(result.last)] * job.stages
        return cls(problem, route, starts, split, durations, np.array(ends, np.int64))

    # -- what is read off them ---------------------------------------------------------------

    def duration(self, kind: int) -> Ints:
        """[S, n]: how long each item's F, I or W takes where it runs."""
        durations: Ints = np.take_along_axis(self.durations[kind], self.route, 1)
        return durations

    def backward(self) -> Ints:
        """[S, n]: how long I, or B where it is not split, takes."""
        whole = np.take_along_axis(self.split, self.route, 1) == 0
        return self.duration(I) + np.where(whole, self.duration(W), 0)

    def peaks(self) -> Ints:
        """[S, P]: most activations each worker holds at once, as planner.schedule counts them."""
        one = np.ones_like(self.route)
        return self._highest([self.starts[F], self.starts[W] + self.duration(W)], [one, -one])

    def peak_bytes(self) -> Ints:
        """[S, P]: most bytes each worker holds at once, as planner.schedule counts them."""
        profiles = self.problem.job.profiles
        activation, for_weights, fixed = (
            np.array([getattr(p, name) for p in profiles], np.int64)[:, None]
            for name in ("activation_bytes", "weight_backward_bytes", "fixed_bytes")
        )
        for_weights = for_weights * np.take_along_axis(self.split, self.route, 1)
        times = [self.starts[F], self.starts[I] + self.backward(), self.starts[W] + self.duration(W)]
        return self._highest(times, [activation, for_weights - activation, -for_weights]) + fixed

    def _highest(self, times: Sequence[Ints], changes: Sequence[Ints]) -> Ints:
        """[S, P]: what each worker has at most, where each item changes it at each of its times. All [S, n]."""
        job = self.problem.job
        worker = np.arange(job.stages)[:, None] * job.pipelines + self.route
        who = np.concatenate([worker.ravel()] * len(times))
        when = np.concatenate([t.ravel() for t in times])
        change = np.concatenate([np.broadcast_to(c, worker.shape).ravel() for c in changes])
        order = np.lexsort((when, who))
        who, when, held = who[order], when[order], np.cumsum(change[order])
        # What happens at one tick counts together, so only the last step of each tick is a state.
        last = np.append((who[1:] != who[:-1]) | (when[1:] != when[:-1]), True)
        peaks = np.zeros(job.stages * job.pipelines, np.int64)
        np.maximum.at(peaks, who[last], held[last])
        return peaks.reshape(job.stages, job.pipelines)

    def busy(self) -> int:
        """Ticks in which workers work, all together, O included."""
        return int(self.busy_by_worker().sum())

    def busy_by_worker(self) -> Ints:
        """[S, P]: ticks in which each worker works, O included; failed ones do nothing."""
        job = self.problem.job
        busy = np.where(self.living(), self.durations[O], 0)
        for s in range(job.stages):
            work = sum(self.duration(kind)[s] for kind in (F, I, W))
            np.add.at(busy[s], self.route[s], work)
        return busy

    def rerouted(self) -> Ints:
        """[S, P]: micro-batches of other pipelines that each worker runs."""
        job = self.problem.job
        away = self.route != np.repeat(np.arange(job.pipelines), job.micro_batches)
        counts = [np.bincount(self.route[s][away[s]], minlength=job.pipelines) for s in range(job.stages)]
        return np.array(counts, np.int64)

    def living(self) -> NDArray[np.bool_]:
        """[S, P]"""
        living = np.ones(self.durations.shape[1:], bool)
        for worker in self.problem.failed:
            living[worker.stage, worker.pipeline] = False
        return living

    def op_count(self) -> int:
        """Of all workers, O's included."""
        split = np.take_along_axis(self.split, self.route, 1)
        return 2 * self.route.size + int(split.sum()) + int(self.living().sum())

    def period(self) -> int:
        """Ticks; the definition is that of planner.schedule."""
        if not self.problem.technique.staggers:
            return self.makespan() + self.problem.longest_optimizer
        ends = self.step + np.where(self.living(), self.durations[O], 0).max(1)
        return int((ends - self.starts[F].min(1)).max())

    def makespan(self) -> int:
        """Ticks from the first compute op's start to the last one's end."""
        return int((self.starts[W] + self.duration(W)).max() - self.starts[F].min())

    def summary(self) -> Schedule:
        """A Schedule that knows its metrics and has no ops: what metrics are written from."""
        problem = self.problem
        peaks, living = self.peaks(), problem.living_workers()
        schedule = Schedule(problem, {})
        schedule.__dict__.update(
            period=self.period(),
            makespan=self.makespan(),
            peak_activations={w: int(peaks[w.stage, w.pipeline]) for w in living},
            bubble_fraction=1 - self.busy() / (len(living) * self.period()),
        )
        return schedule

    def renamed(self, names: Sequence[int], workers: Sequence[Sequence[int]]) -> Columns:
        """Pipeline p becomes names[p], and the worker of (new) pipeline p on stage s becomes workers[s][p].

        The first changes nothing but names. The second lets peers of one stage swap their parts,
        so that any failures with as many per stage fit; a micro-batch's home stays what it was.
        Raises InputError for a job whose workers are not alike.
        """
        job = self.problem.job
        if job.speeds:
            raise InputError("speeds", f"{len(job.speeds)} workers", "workers alike where a plan is to be renamed")
        new = np.asarray(names, np.int64)
        swap = np.asarray(workers, np.int64)
        items = (new[:, None] * job.micro_batches + np.arange(job.micro_batches)).ravel()
        route = np.empty_like(self.route)
        route[:, items] = np.take_along_axis(swap, new[self.route], 1)
        starts = np.empty_like(self.starts)
        starts[:, :, items] = self.starts
        places = swap[:, new]  # [S, P]: where each old worker's part goes
        split, durations = np.empty_like(self.split), np.empty_like(self.durations)
        np.put_along_axis(split, places, self.split, 1)
        for kind in range(4):
            np.put_along_axis(durations[kind], places, self.durations[kind], 1)
        failed = frozenset(Worker(int(places[w.stage, w.pipeline]), w.stage) for w in self.problem.failed)
        problem = Problem(job, failed, self.problem.technique, self.problem.memory)
        return Columns(problem, route, starts, split, durations, self.step)

    # -- the Plan document -------------------------------------------------------------------

    def plan(self, metrics: MetricsDoc, solver: SolverDoc, *, fingerprint: str | None = None) -> Plan:
        """The document. `peak_activations` of `metrics` is filled in from the columns."""
        head = self.head(metrics, solver)
        return Plan.model_construct(
            **head, workers=self.documents(), fingerprint=fingerprint or plan_text.fingerprint(self)
        )

    def head(self, metrics: MetricsDoc, solver: SolverDoc) -> dict[str, Any]:
        """The fields of the document but for `workers` and `fingerprint`."""
        problem, peaks = self.problem, self.peaks().tolist()
        counts = {str(w): peaks[w.stage][w.pipeline] for w in problem.living_workers()}
        return {
            "schema_version": SCHEMA_VERSION,
            "job": job_doc(problem.job),
            "failed": tuple(map(str, sorted(problem.failed))),
            "technique": problem.technique,
            "memory": problem.memory.text,
            "metrics": metrics.model_copy(update={"peak_activations": counts}),
            "solver": solver,
        }

    def documents(self) -> dict[str, tuple[OpDoc, ...]]:
        """The ops of each living worker."""
        with _without_collector():
            return {
                str(ops.worker): tuple(_op(ops.worker.stage, *op) for op in zip(*ops[1:], strict=True))
                for ops in plan_text.worker_ops(self)
            }

    def rows(self) -> OpRows:
        """All compute ops, worker by worker, each worker's by their start."""
        job = self.problem.job
        n = job.pipelines * job.micro_batches
        stage = np.repeat(np.arange(job.stages), n)
        item = np.tile(np.arange(n), job.stages)
        worker = self.route.ravel() * job.stages + stage  # sorts as Worker does
        split = np.take_along_axis(self.split, self.route, 1).ravel()
        lengths = np.stack([self.duration(k).ravel() for k in (F, I, W)], 1)
        lengths[:, I] += np.where(split == 1, 0, lengths[:, W])
        starts = np.stack([self.starts[k].ravel() for k in (F, I, W)], 1)
        kinds = np.tile(np.array([F, I, W]), (len(item), 1))
        kinds[:, I] = np.where(split == 1, I, B)
        keep = np.repeat(split[:, None] == 1, 3, 1)
        keep[:, :W] = True
        flat = keep.ravel()

        def each(values: NDArray[Any]) -> Ints:
            three: Ints = np.repeat(values, 3)[flat]
            return three

        who, start, length = each(worker), starts.ravel()[flat], lengths.ravel()[flat]
        order = np.lexsort((start + length, start, who))
        who = who[order]
        home, number = np.divmod(each(item)[order], job.micro_batches)
        bounds = np.searchsorted(who, np.arange(job.pipelines * job.stages + 1))
        return OpRows(job.stages, bounds, kinds.ravel()[flat][order], home, number, start[order], length[order])


def problem_of(job: Job, failed: Sequence[Sequence[int]], technique: Technique, memory: MemoryLimit) -> Problem:
    """failed: by stage, the pipelines whose worker is dead."""
    dead = frozenset(Worker(p, s) for s, row in enumerate(failed) for p in row)
    return Problem(job, dead, technique, memory)


def _filled(problem: Problem, durations: Ints) -> Ints:
    """Where a worker runs no op of a kind (-1), its time for one."""
    own = np.repeat(np.array(problem.ticks, np.int64).T[:, :, None], problem.job.pipelines, 2)
    for worker, _ in problem.job.speeds:
        own[:, worker.stage, worker.pipeline] = problem.worker_ticks(worker)
    return np.where(durations < 0, own, durations)


@contextmanager
def _without_collector() -> Iterator[None]:
    """10^6 new objects and no garbage among them: looking for cycles would double the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_FIELDS = set(OpDoc.model_fields)  # shared by all: OpDoc is frozen, and a copy of one copies it


def _op(
    stage: int, kind: str, pipeline: int, micro_batch: int | None, start: int | float, duration: int | float
) -> OpDoc:
    """OpDoc.model_construct, eight times as fast: a plan has up to 10^6 of them."""
    op = OpDoc.__new__(OpDoc)
    values = {
        "kind": kind,
        "pipeline": pipeline,
        "micro_batch": micro_batch,
        "stage": stage,
        "start": start,
        "duration": duration,
    }
    object.__setattr__(op, "__dict__", values)
    object.__setattr__(op, "__pydantic_fields_set__", _FIELDS)
    object.__setattr__(op, "__pydantic_extra__", None)
    object.__setattr__(op, "__pydantic_private__", None)
    return op

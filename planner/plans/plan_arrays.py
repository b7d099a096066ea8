"""A plan in arrays: its ops become objects only where somebody looks at them.

A plan of 2,048 workers has 400,000 ops. As documents they take 300 MB and seconds to read; in arrays they are stored,
renamed, checked and drawn in no time. Items are numbered as in planner.solvers.dispatch, per stage: pipeline *
micro_batches + micro-batch. Times are ticks. Needs numpy, which the console has and an agent need not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.plan import (
    SCHEMA_VERSION,
    InArrays,
    MetricsDoc,
    OpColumns,
    Ops,
    Plan,
    SolverDoc,
    job_doc,
)
from openrecycle.planner.plans.schedule import Op, OpsOnDemand, Schedule

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class OpRows:
    """Compute ops in arrays. kind: index into KINDS. start, duration: ticks. bounds: where each worker's
    ops begin, by pipeline * stages + stage, and where the last one's end."""

    stages: int
    bounds: Ints
    kind: Ints
    home: Ints
    micro_batch: Ints
    start: Ints
    duration: Ints

    def of(self, worker: Worker) -> slice:
        """The part that is one worker's."""
        at = worker.pipeline * self.stages + worker.stage
        return slice(int(self.bounds[at]), int(self.bounds[at + 1]))

    def count(self, worker: Worker) -> int:
        part = self.of(worker)
        return int(part.stop - part.start)


KINDS = "FIWB"
F, I, W, O = range(4)  # noqa: E741 -- the field's names
B = 3  # in KINDS; `durations` has O there


# Documents of fewer ops are read in ten milliseconds.
SMALL_OPS = 3_000


class NotColumnar(PlannerError):
    """The plan has ops that these arrays can't hold, such as two durations of F on one worker."""


@runtime_checkable
class HasColumns(Protocol):
    """A schedule that is in arrays already."""

    def columns(self) -> Columns: ...


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
        if isinstance(schedule, HasColumns):
            return schedule.columns()
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
    def of_times(
        cls, problem: Problem, route: object, starts: Sequence[object], split: Sequence[object], ends: Sequence[int]
    ) -> Columns:
        """route: [S * n], of each item the worker's number, its pipeline modulo the pipelines. starts: of F, I and W,
        [S * n] each. split: [S * P], is I apart from W? ends: [S], when the stage's step begins."""
        job = problem.job
        shape = (job.stages, job.pipelines)
        n = job.pipelines * job.micro_batches
        times = np.array([np.asarray(s, np.int64).reshape(job.stages, n) for s in starts])
        apart = np.array(split, np.int64).reshape(shape)
        for worker in problem.failed:
            apart[worker.stage, worker.pipeline] = 0
        runs = np.asarray(route, np.int64).reshape(job.stages, n) % job.pipelines
        durations = _filled(problem, np.full((4, *shape), -1, np.int64))
        whole = ~np.take_along_axis(apart, runs, 1).astype(bool)
        times[W][whole] = (times[I] + np.take_along_axis(durations[I], runs, 1))[whole]
        return cls(problem, runs, times, apart, durations, np.array(ends, np.int64))

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
        """[S, P]: most activations each worker holds at once, as planner.plans.schedule counts them."""
        one = np.ones_like(self.route)
        return self._highest([self.starts[F], self.starts[W] + self.duration(W)], [one, -one])

    def peak_bytes(self) -> Ints:
        """[S, P]: most bytes each worker holds at once, as planner.plans.schedule counts them."""
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
        """Ticks; the definition is that of planner.plans.schedule."""
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

    def plan(
        self,
        metrics: MetricsDoc,
        solver: SolverDoc,
        *,
        fingerprint: str | None = None,
        stored: tuple[bytes, bytes] = (b"", b""),
    ) -> Plan:
        """In these arrays. `peak_activations` of `metrics` is filled in from them. fingerprint: that of the same plan's
        document; None: it is computed. stored: as InArrays has it."""
        workers = WorkersInArrays(self, stored)
        plan = Plan.model_construct(
            **self._head(metrics, solver),
            workers=workers,
            fingerprint=fingerprint or "",  # type: ignore[arg-type]
        )
        return plan if fingerprint else plan.hashed()

    def _head(self, metrics: MetricsDoc, solver: SolverDoc) -> dict[str, Any]:
        """The fields of the document but for `workers` and `fingerprint`."""
        problem, peaks = self.problem, self.peaks().tolist()
        counts = {str(w): peaks[w.stage][w.pipeline] for w in problem.living_workers()}
        return {
            "schema_version": SCHEMA_VERSION,
            "job": job_doc(problem.job),
            "failed": tuple(map(str, sorted(problem.failed))),
            "partition": problem.job.partition,
            "technique": problem.technique,
            "memory": problem.memory.text,
            "metrics": metrics.model_copy(update={"peak_activations": counts}),
            "solver": solver,
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
        span, longest = int(start.max(initial=0)) + 1, int(length.max(initial=0)) + 1
        if start.min(initial=0) >= 0 and span * longest * (int(who.max(initial=0)) + 1) < 1 << 62:
            order = np.argsort((who * span + start) * longest + length, kind="stable")  # in a third of the time
        else:
            order = np.lexsort((start + length, start, who))
        who = who[order]
        home, number = np.divmod(each(item)[order], job.micro_batches)
        bounds = np.searchsorted(who, np.arange(job.pipelines * job.stages + 1))
        return OpRows(job.stages, bounds, kinds.ravel()[flat][order], home, number, start[order], length[order])


def units(job: Job, ticks: Ints) -> list[int | float]:
    """Job.units of each."""
    if job.ticks_per_unit == 1:
        whole: list[int | float] = ticks.tolist()
        return whole
    return [int(v) if v.is_integer() else v for v in (ticks / job.ticks_per_unit).tolist()]


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


class ColumnarSchedule(Schedule):
    """A Schedule whose ops are made worker by worker, on demand; what is read off all of them comes from arrays."""

    columns: Columns
    rows: OpRows

    def __init__(self, columns: Columns, rows: OpRows | None = None) -> None:
        """rows: those of `columns`, where they are made already."""
        rows = rows or columns.rows()
        super().__init__(columns.problem, OpsOnDemand(columns.problem, self._row))
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "rows", rows)

    def _row(self, worker: Worker) -> Iterator[Op]:
        rows, part, stage = self.rows, self.rows.of(worker), worker.stage
        columns = (rows.kind, rows.home, rows.micro_batch, rows.start, rows.duration)
        for kind, home, number, start, duration in zip(*(c[part].tolist() for c in columns), strict=True):
            yield Op(KINDS[kind], home, number, stage, worker, start, duration)
        step, length = self.columns.step[stage], self.columns.durations[O, stage, worker.pipeline]
        yield Op("O", worker.pipeline, -1, stage, worker, int(step), int(length))

    # What the base class computes from all ops; tested equal.

    @cached_property
    def period(self) -> int:
        return self.columns.period()

    @cached_property
    def makespan(self) -> int:
        return self.columns.makespan()

    @cached_property
    def ends(self) -> dict[Worker, int]:
        return self._of_each(self.columns.step[:, None] + self.columns.durations[O])

    @cached_property
    def _busy(self) -> dict[Worker, int]:
        return self._of_each(self.columns.busy_by_worker())

    @cached_property
    def peak_activations(self) -> dict[Worker, int]:
        return self._of_each(self.columns.peaks())

    @cached_property
    def rerouted_forwards(self) -> dict[Worker, int]:
        return self._of_each(self.columns.rerouted())

    @cached_property
    def op_counts(self) -> dict[Worker, int]:
        return {w: self.rows.count(w) + 1 for w in self.ops}

    @cached_property
    def helpers(self) -> frozenset[Worker]:
        return frozenset(w for w, moved in self.rerouted_forwards.items() if moved)

    def _of_each(self, values: Ints) -> dict[Worker, int]:
        """values: [S, P]."""
        rows = values.tolist()
        return {w: rows[w.stage][w.pipeline] for w in self.ops}

    @cached_property
    def peak_bytes(self) -> dict[Worker, int]:
        return self._of_each(self.columns.peak_bytes())

    def table(self) -> tuple[Ints, list[Ints]]:
        """(where each worker's ops begin, and where the last one's end; the ops worker by worker, O last). Of
        these: kind, an index into FIWBO; home; micro-batch, -1 for O; stage; start and duration in ticks."""
        job, rows, living = self.problem.job, self.rows, list(self.ops)
        own = np.array(living, np.int64)
        at = own[:, 0] * job.stages + own[:, 1]
        alive = np.zeros(len(rows.bounds) - 1, bool)
        alive[at] = True  # what a failed worker is said to run is not in the plan
        counts = rows.bounds[at + 1] - rows.bounds[at]
        keep = np.repeat(alive, np.diff(rows.bounds))
        stage = np.repeat(own[:, 1], counts)
        lengths = self.columns.durations[O, own[:, 1], own[:, 0]]
        last = (np.full_like(at, 4), own[:, 0], np.full_like(at, -1), own[:, 1], self.columns.step[own[:, 1]], lengths)
        ops = [rows.kind, rows.home, rows.micro_batch, rows.start, rows.duration]
        if not keep.all():
            ops = [column[keep] for column in ops]
        ops.insert(3, stage)
        bounds = np.append(0, np.cumsum(counts + 1))
        steps = np.zeros(bounds[-1], bool)
        steps[bounds[1:] - 1] = True
        compute = ~steps
        # (Not stacked: at this size, memory that is new costs more than all that is computed in it.)
        table = [np.empty(bounds[-1], np.int64) for _ in ops]
        for column, values, end in zip(table, ops, last, strict=True):
            column[compute], column[steps] = values, end
        return bounds, table

    def arrays(self, worker: Worker) -> tuple[Ints, Ints, list[str]]:
        """Starts and ends (ticks) and kinds of one living worker's ops, O last, without making them."""
        part, columns = self.rows.of(worker), self.columns
        start, last = self.rows.start[part], columns.step[worker.stage]
        ends = np.append(start + self.rows.duration[part], last + columns.durations[O, worker.stage, worker.pipeline])
        return np.append(start, last), ends, [*(KINDS[k] for k in self.rows.kind[part].tolist()), "O"]


def worker_arrays(schedule: Schedule, worker: Worker) -> tuple[Ints, Ints, list[str]]:
    """Starts and ends (ticks) and kinds of one living worker's ops, by start, of any schedule."""
    if isinstance(schedule, ColumnarSchedule):
        return schedule.arrays(worker)
    ops = schedule.ops[worker]
    starts, ends = (np.array([getattr(op, name) for op in ops], np.int64) for name in ("start", "end"))
    return starts, ends, [op.kind for op in ops]


class WorkersInArrays(InArrays):
    """See InArrays. Each worker's ops are made when they are looked up, and not kept."""

    def __init__(self, columns: Columns, stored: tuple[bytes, bytes] = (b"", b"")) -> None:
        self.columns, self.stored = columns, stored

    def __getitem__(self, name: str) -> Ops:
        worker = self._living[name]
        job, columns, rows, stage = self.columns.problem.job, self.columns, self._rows, worker.stage
        part = rows.of(worker)
        return Ops(
            OpColumns(
                [*(KINDS[kind] for kind in rows.kind[part].tolist()), "O"],
                [*rows.home[part].tolist(), worker.pipeline],
                [*rows.micro_batch[part].tolist(), None],
                [stage] * (part.stop - part.start + 1),
                units(job, np.append(rows.start[part], columns.step[stage])),
                units(job, np.append(rows.duration[part], columns.durations[O, stage, worker.pipeline])),
            )
        )

    def __contains__(self, name: object) -> bool:
        return name in self._living

    def __iter__(self) -> Iterator[str]:
        return iter(self._living)

    def __len__(self) -> int:
        return len(self._living)

    @cached_property
    def _living(self) -> dict[str, Worker]:
        return {str(worker): worker for worker in self.columns.problem.living_workers()}

    @cached_property
    def _rows(self) -> OpRows:
        return self.columns.rows()

    @property
    def op_count(self) -> int:  # type: ignore[override]
        return self.columns.op_count()

    def schedule(self) -> Schedule:
        return ColumnarSchedule(self.columns, self._rows)

    def renamed(self, names: Sequence[int]) -> WorkersInArrays:
        job = self.columns.problem.job
        return WorkersInArrays(self.columns.renamed(names, [range(job.pipelines)] * job.stages))

    def rerouted(self) -> dict[str, int]:
        moved = self.columns.rerouted().tolist()
        return {name: moved[w.stage][w.pipeline] for name, w in self._living.items()}


def columns_of(plan: Plan) -> Columns:
    """Raises NotColumnar, and what a plan without sense raises."""
    workers = plan.workers
    return workers.columns if isinstance(workers, WorkersInArrays) else Columns.of(plan.schedule())

"""Op, OpArrays and Schedule, and the one definition of every number that is computed from a schedule.

Times are whole ticks (see planner.jobs.job). A Schedule is plain data; planner.check says whether it is *valid*, and
shares no code with the users of this module. A plan of 2,048 workers has 400,000 ops. They are kept in arrays, and `Op`
objects are made only of those that somebody looks at.

There are two chains of ops: those of one micro-batch (`micro_batch_path`), and those that set the period
(`critical_path`).

The times of a plan are a forecast; workers keep only to the order of their ops. When ops take longer than planned, the
same order still runs, and `steady_period` computes how fast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Problem, Technique, Worker

# -- op, OpArrays and Schedule, and every number that is read off a schedule --------------------

Ints = NDArray[np.int64]
Numbers = NDArray[Any]  # int64; dtype object with Python's integers where one of them needs more bits
KINDS = "FIWBO"
F, I, W, B, O = range(5)  # noqa: E741 -- the field's names
_MOST = 1 << 62

MicroBatch = tuple[int, int]
"""(home pipeline, micro-batch index inside it)."""


class Op(NamedTuple):
    """One piece of work on one worker.

    kind: F forward, I gradient of the input, W gradient of the weights, B = I and W fused,
    O the stage's all-reduce and optimizer step.
    pipeline, micro_batch: the home of the micro-batch, and its index there from 0; for O the worker's own pipeline
    and -1. worker: the worker that runs the op. start, duration: ticks.
    """

    kind: str
    pipeline: int
    micro_batch: int
    stage: int
    worker: Worker
    start: int
    duration: int

    @property
    def end(self) -> int:
        return self.start + self.duration

    @property
    def rerouted(self) -> bool:
        """Does a worker of another pipeline run it?"""
        return self.pipeline != self.worker.pipeline

    def __str__(self) -> str:
        name = "O" if self.kind == "O" else f"{self.kind}{self.pipeline}.{self.micro_batch}"
        return f"{name}@{self.worker}"


@dataclass(frozen=True, eq=False)
class OpArrays:
    """The ops of all workers in columns: worker by worker, and each worker's ops in the order in which it runs them.

    bounds [workers + 1]: ops bounds[k] to bounds[k + 1] are those of worker k. All other columns are [ops]. kind: index
    into KINDS, -1 for an unknown kind. micro_batch: -1 for O. The rest is as in Op. Columns are int64, or of dtype
    object with Python's integers where a number needs more bits.
    """

    bounds: Ints
    kind: Ints
    pipeline: Numbers
    micro_batch: Numbers
    stage: Numbers
    start: Numbers
    duration: Numbers

    @classmethod
    def of(cls, rows: Iterable[Sequence[Op]]) -> OpArrays:
        rows = list(rows)
        ops = [op for row in rows for op in row]
        columns = zip(*((KINDS.find(op.kind), *op[1:4], *op[5:]) for op in ops), strict=True) if ops else [()] * 6
        return cls(bounds_of(map(len, rows)), *(whole(list(column)) for column in columns))

    @property
    def columns(self) -> tuple[Numbers, ...]:
        return self.kind, self.pipeline, self.micro_batch, self.stage, self.start, self.duration

    @cached_property
    def row(self) -> Ints:
        """[ops]: the index of the worker that runs each op."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    @cached_property
    def end(self) -> Numbers:
        return self.start + self.duration

    def part(self, row: int) -> slice:
        """Returns where the ops of one worker are in the columns."""
        return slice(int(self.bounds[row]), int(self.bounds[row + 1]))

    def rows(self, rows: Sequence[int]) -> OpArrays:
        """Returns the ops of these workers only, in this order."""
        at = np.asarray(rows, np.int64)
        begin, counts = self.bounds[at], np.diff(self.bounds)[at]
        bounds = bounds_of(counts)
        order = np.arange(bounds[-1]) + np.repeat(begin - bounds[:-1], counts)
        return OpArrays(bounds, *(column[order] for column in self.columns))

    def renamed(self, names: Sequence[int], rows: Sequence[int], pipelines: Sequence[int]) -> OpArrays:
        """Renames each pipeline p to names[p], and puts the workers in the order of `rows`.

        pipelines: by worker, its new pipeline, under which its O is entered. Ops without duration that begin together
        are sorted again as in `Schedule.build`.
        """
        moved = self.rows(rows)
        own = np.asarray(pipelines, np.int64)[moved.row]
        moved = replace(moved, pipeline=np.where(moved.kind == O, own, np.asarray(names, np.int64)[moved.pipeline]))
        row, start, end, last = moved.row, moved.start, moved.end, moved.kind == O
        same = row[1:] == row[:-1]
        later = (start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (end[1:] >= end[:-1]))
        tied = same & (start[1:] == end[1:]) & (start[1:] == start[:-1]) & (end[1:] == end[:-1])
        if not tied.any() or (same & ~later).any():
            return moved
        order = np.lexsort((moved.kind, moved.micro_batch, moved.pipeline, end, start, last, row))
        return OpArrays(moved.bounds, *(column[order] for column in moved.columns))

    @classmethod
    def assembled(
        cls,
        problem: Problem,
        counts: Ints,
        order: Ints,
        columns: Sequence[Numbers],
        *,
        step: Numbers | None = None,
        lengths: Numbers | None = None,
    ) -> OpArrays:
        """Adds each living worker's O behind its compute ops. counts: compute ops of each living worker.

        columns: kind, pipeline, micro-batch, start and duration of the compute ops, in any order; order: indices into
        them, sorted by worker and time. step [stages]: start of each stage's O; None: computed as in `Schedule.build`.
        lengths: duration of each living worker's O; None: as the problem says.
        """
        living = problem.living_workers()
        pipeline, stage = np.array(living, np.int64).T
        if lengths is None:
            lengths = whole([problem.worker_ticks(worker).optimizer for worker in living])
        if step is None:
            step = np.zeros(problem.job.stages, columns[3].dtype)
            np.maximum.at(step, np.repeat(stage, counts), (columns[3] + columns[4])[order])
            if not problem.technique.staggers:
                step[:] = step.max(initial=0)
        bounds = bounds_of(counts + 1)
        places = np.empty(bounds[-1], np.int64)  # indices into the compute ops, followed by the O's
        places[np.arange(len(order)) + np.repeat(np.arange(len(living)), counts)] = order
        places[bounds[1:] - 1] = len(columns[0]) + np.arange(len(living))
        last = (np.full_like(stage, O), pipeline, np.full_like(stage, -1), step[stage], lengths)
        kind, home, number, start, duration = (np.concatenate(both)[places] for both in zip(columns, last, strict=True))
        return cls(bounds, kind, home, number, np.repeat(stage, counts + 1), start, duration)

    @classmethod
    def of_items(
        cls, problem: Problem, route: Ints, starts: Numbers, split: Ints, durations: Numbers, step: Numbers
    ) -> OpArrays:
        """Makes the arrays out of the result of planner.solvers.loops. An item of a stage is a micro-batch, numbered
        pipeline * micro_batches + micro-batch.

        There are S stages, P pipelines and n = P * micro-batches items. route [S, n]: pipeline of the worker that runs
        the item. starts [3, S, n]: of F, of I (or B) and of W. split [S, P]: 1 where the worker splits B. durations
        [4, S, P]: of F, I, W and O on each worker. step [S]: start of the stage's O.
        """
        job, living = problem.job, problem.living_workers()
        pipelines, stages = np.array(living, np.int64).T
        places = np.full((job.stages, job.pipelines), -1, np.int64)
        places[stages, pipelines] = np.arange(len(living))
        worker = np.arange(job.stages)[:, None] * job.pipelines + route
        who, apart = places.ravel()[worker].ravel(), (split.ravel()[worker] == 1).ravel()
        begins, lengths = starts.reshape(3, -1), durations[:3].reshape(3, -1)[:, worker.ravel()]
        lengths[I] += np.where(apart, 0, lengths[W])
        # Items that are routed to a failed worker are left out. Ops of equal times stand in the order of their items.
        there = np.stack([who >= 0, who >= 0, (who >= 0) & apart])
        ranks = 3 * np.arange(who.size) + np.arange(3)[:, None]
        table = (np.broadcast_to(who, there.shape), begins, lengths, ranks)
        whose, start, duration, rank = (column.ravel() if there.all() else column[there] for column in table)
        item, kind = np.divmod(_by_time(whose, start, duration, rank, ranks.size), 3)
        home, number = np.divmod(np.arange(route.shape[1]), job.micro_batches)
        kinds = np.concatenate([np.full(who.size, F), np.where(apart, I, B), np.full(who.size, W)])
        columns = kinds, np.tile(home, 3 * job.stages), np.tile(number, 3 * job.stages), begins.ravel(), lengths.ravel()
        counts = np.bincount(whose, minlength=len(living))
        order = kind * who.size + item
        return cls.assembled(problem, counts, order, columns, step=step, lengths=durations[3, stages, pipelines])


def renamed(worker: Worker, names: Sequence[int], workers: Sequence[Sequence[int]] = ()) -> Worker:
    """Return the worker's new name once each pipeline p is names[p] and its part has gone to workers[stage][p]."""
    pipeline = names[worker.pipeline]
    return Worker(workers[worker.stage][pipeline] if workers else pipeline, worker.stage)


def bounds_of(counts: Iterable[int]) -> Ints:
    """Return [workers + 1]: where the ops of each worker begin, followed by where the last worker's end."""
    return np.cumsum([0, *counts], dtype=np.int64)


def whole(values: Sequence[Any]) -> Numbers:
    """Make an int64 array or, where a number needs more bits, an array of Python's integers."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array(list(values), object)


def op_times(problem: Problem) -> Numbers:
    """Return [4, S, P]: how long F, I, W and O take on each worker."""
    pipelines = problem.job.pipelines
    own = np.repeat(np.stack([whole(ticks) for ticks in problem.ticks], 1)[:, :, None], pipelines, 2)
    for worker, _ in problem.job.speeds:
        own[:, worker.stage, worker.pipeline] = problem.worker_ticks(worker)
    return own


def _by_time(who: Ints, start: Numbers, duration: Numbers, ranks: Ints, most: int) -> Ints:
    """Return `ranks` sorted by worker, start and end, then by rank. most: a number above all ranks."""
    if start.dtype == object or duration.dtype == object:
        order = sorted(range(len(who)), key=lambda k: (who[k], start[k], start[k] + duration[k], ranks[k]))
        return ranks[np.array(order, np.int64)]
    span, longest = int(start.max(initial=0)) + 1, int(duration.max(initial=0)) + 1
    positive = start.min(initial=0) >= 0 and duration.min(initial=0) >= 0
    if positive and (int(who.max(initial=0)) + 1) * span * longest * most < _MOST:
        # With the four sort keys packed into one number, sorting takes a fraction of the time.
        keys = who * span
        for column, by in ((start, longest), (duration, most), (ranks, 1)):
            keys += column
            keys *= by
        keys.sort()
        keys %= most
        return keys
    return ranks[np.lexsort((ranks, start + duration, start, who))]


class OpsByWorker(Mapping[Worker, tuple[Op, ...]]):
    """The ops of OpArrays as Op objects, by worker. A worker's objects are made when they are first asked for.

    make: returns the arrays of these workers, in this order; it is called when the first op is asked for.
    """

    def __init__(self, workers: Iterable[Worker], make: Callable[[], OpArrays]) -> None:
        self.places = {worker: row for row, worker in enumerate(workers)}
        self._make = make
        self._made: dict[Worker, tuple[Op, ...]] = {}

    @cached_property
    def arrays(self) -> OpArrays:
        return self._make()

    def __getitem__(self, worker: Worker) -> tuple[Op, ...]:
        made = self._made.get(worker)
        if made is None:
            part = self.arrays.part(self.places[worker])
            rows = zip(*(column[part].tolist() for column in self.arrays.columns), strict=True)
            made = tuple(Op(KINDS[kind], p, m, s, worker, start, length) for kind, p, m, s, start, length in rows)
            self._made[worker] = made
        return made

    def __contains__(self, worker: object) -> bool:
        return worker in self.places

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True)
class Schedule:
    """ops: of each living worker its ops by start time, O included (last). made_for: where `for_fewer` made this
    schedule, the original, which is for more failures."""

    problem: Problem
    ops: Mapping[Worker, tuple[Op, ...]]
    made_for: Schedule | None = field(default=None, compare=False, repr=False)

    @classmethod
    def build(cls, problem: Problem, compute_ops: Iterable[Op]) -> Schedule:
        """Sorts compute ops by worker, start and end, and adds the O of each worker.

        Ops without duration that begin together are sorted by their micro-batch, alike on all workers. Staggered: a
        stage's O starts when its last peer has finished its last op. Otherwise every O starts at the makespan (the
        global barrier).
        """
        living = problem.living_workers()
        places = {worker: row for row, worker in enumerate(living)}
        rows = sorted(
            (places[op.worker], op.start, op.end, op.pipeline, op.micro_batch, KINDS.find(op.kind))
            for op in compute_ops
        )
        who, start, end, pipeline, micro_batch, kind = map(whole, zip(*rows, strict=True)) if rows else [whole([])] * 6
        counts = np.bincount(who, minlength=len(living))
        columns = (kind, pipeline, micro_batch, start, end - start)
        arrays = OpArrays.assembled(problem, counts, np.arange(len(who)), columns)
        return cls(problem, OpsByWorker(living, lambda: arrays))

    def for_fewer(self, problem: Problem) -> Schedule:
        """Returns the same ops for `problem`, whose failures are some of this one's: the extra workers stay idle."""
        arrays, living = self.arrays, problem.living_workers()
        places = {worker: row for row, worker in enumerate(living)}
        compute = arrays.kind != O
        who = np.array([places[worker] for worker in self.ops], np.int64)[arrays.row]
        at = np.flatnonzero(compute)
        order = _by_time(who[at], arrays.start[at], arrays.duration[at], at, len(who))
        counts = np.bincount(who[at], minlength=len(living))
        kind, pipeline, micro_batch, _, start, duration = arrays.columns
        made = OpArrays.assembled(problem, counts, order, (kind, pipeline, micro_batch, start, duration))
        return Schedule(problem, OpsByWorker(living, lambda: made), made_for=self.made_for or self)

    def renamed(self, names: Sequence[int], workers: Sequence[Sequence[int]]) -> Schedule:
        """Renames pipeline p to names[p]; then the worker of (new) pipeline p on stage s becomes workers[s][p].

        The first changes nothing but names. The second lets peers of one stage swap their parts, so that the schedule
        fits any failures with as many per stage; the homes of micro-batches are not affected by it.
        Raises InputError for a job whose workers differ in speed, and for ops or workers that the grid does not have.
        """
        problem = self.problem
        if problem.job.speeds:
            speeds = f"{len(problem.job.speeds)} workers"
            raise InputError("speeds", speeds, "workers alike where a plan is to be renamed")
        for worker in self.ops:
            problem.job.check_worker(worker, field="workers")
        pipelines = self.arrays.pipeline
        if (odd := (pipelines < 0) | (pipelines >= problem.job.pipelines)).any():
            expected = f"a pipeline of the grid, 0 to {problem.job.pipelines - 1}"
            raise InputError("workers.pipeline", int(pipelines[odd.argmax()]), expected)

        rows = {renamed(worker, names, workers): row for row, worker in enumerate(self.ops)}
        living = sorted(rows)
        made = self.arrays.renamed(names, [rows[w] for w in living], [w.pipeline for w in living])
        problem = replace(problem, failed=frozenset(renamed(w, names, workers) for w in problem.failed))
        return Schedule(problem, OpsByWorker(living, lambda: made))

    @cached_property
    def arrays(self) -> OpArrays:
        """The ops of all workers, in the order of `ops`."""
        return self.ops.arrays if isinstance(self.ops, OpsByWorker) else OpArrays.of(self.ops.values())

    def part(self, worker: Worker) -> slice:
        """Returns where the worker's ops are in `arrays`."""
        return self.arrays.part(self._places[worker])

    @cached_property
    def _places(self) -> dict[Worker, int]:
        return self.ops.places if isinstance(self.ops, OpsByWorker) else {w: row for row, w in enumerate(self.ops)}

    def compute_ops(self) -> Iterable[Op]:
        """Yields every op but the O's, worker by worker."""
        return (op for ops in self.ops.values() for op in ops if op.kind != "O")

    @cached_property
    def makespan(self) -> int:
        """Ticks from the first compute op's start to the last one's end; O does not count."""
        compute = self.arrays.kind != O
        return int(self.arrays.end[compute].max()) - int(self.arrays.start[compute].min())

    @cached_property
    def period(self) -> int:
        """Smallest number of ticks after which the next iteration can follow.

        Staggered: the largest, over stages, of (end of the stage's O) - (earliest start in the
        stage). Otherwise makespan + the longest O.
        """
        if self.problem.technique is not Technique.STAGGERED:
            return self.makespan + self.problem.longest_optimizer
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for worker, start in self._starts.items():
            first[worker.stage] = min(first.get(worker.stage, start), start)
        for worker, end in self.ends.items():
            last[worker.stage] = max(last.get(worker.stage, 0), end)
        return max(last[s] - first[s] for s in first)

    def busy(self, worker: Worker) -> int:
        """Ticks in which `worker` works, O included."""
        return self._busy[worker]

    @cached_property
    def _busy(self) -> dict[Worker, int]:
        until = np.append(0, np.cumsum(self.arrays.duration))[self.arrays.bounds]
        return self._of_each(until[1:] - until[:-1])

    @cached_property
    def end(self) -> int:
        """The tick at which the last op ends, O included."""
        return max(self.ends.values())

    @cached_property
    def ends(self) -> dict[Worker, int]:
        """The tick at which each living worker's last op ends."""
        return self._at(self.arrays.bounds[1:] - 1, self.arrays.end)

    @cached_property
    def _starts(self) -> dict[Worker, int]:
        """The tick at which the first compute op of each worker begins; workers without one are left out."""
        first = self.arrays.bounds[:-1]
        kinds = self._at(first, self.arrays.kind)
        return {w: start for w, start in self._at(first, self.arrays.start).items() if kinds[w] != O}

    def _at(self, places: Ints, column: Numbers) -> dict[Worker, int]:
        """Reads one number per worker that has ops. places: by worker, the index of the op to read in `column`."""
        there = np.flatnonzero(np.diff(self.arrays.bounds))
        workers = list(self.ops)
        numbers = column[places[there]].tolist()
        return {workers[row]: number for row, number in zip(there.tolist(), numbers, strict=True)}

    def _of_each(self, numbers: Numbers) -> dict[Worker, int]:
        """Makes a dictionary of an array with one number per worker."""
        return dict(zip(self.ops, numbers.tolist(), strict=True))

    @cached_property
    def op_counts(self) -> dict[Worker, int]:
        """Number of ops of each living worker, O included."""
        return self._of_each(np.diff(self.arrays.bounds))

    @cached_property
    def away(self) -> NDArray[np.bool_]:
        """[ops]: does a worker of another pipeline run it?"""
        own = np.array([worker.pipeline for worker in self.ops], np.int64)
        away: NDArray[np.bool_] = self.arrays.pipeline != own[self.arrays.row]
        return away

    @cached_property
    def rerouted_forwards(self) -> dict[Worker, int]:
        """How many micro-batches of other pipelines each living worker runs."""
        moved = self.arrays.row[self.away & (self.arrays.kind == F)]
        return self._of_each(np.bincount(moved, minlength=len(self.ops)))

    @cached_property
    def helpers(self) -> frozenset[Worker]:
        """The workers that run micro-batches of other pipelines."""
        workers = list(self.ops)
        return frozenset(workers[row] for row in np.unique(self.arrays.row[self.away]).tolist())

    def worker_bubble_fraction(self, worker: Worker) -> float:
        """1 - busy / period."""
        return 1 - self.busy(worker) / self.period

    @cached_property
    def bubble_fraction(self) -> float:
        """1 - total busy / (living workers x period)."""
        return 1 - sum(self._busy.values()) / (len(self.ops) * self.period)

    def held_activations(self, worker: Worker) -> list[tuple[int, int]]:
        """Returns (tick, activations that the worker holds from then on) for each change.

        A micro-batch counts 1 from F's start to the end of its W (or B).
        """
        _, ticks, held = self._held(self.part(worker), in_bytes=False)
        return list(zip(ticks.tolist(), held.tolist(), strict=True))

    @cached_property
    def counts_bytes(self) -> bool:
        """Do the stages' profiles say what a worker holds in bytes?"""
        return any(profile.counts_bytes for profile in self.problem.job.profiles)

    def held_bytes(self, worker: Worker) -> list[tuple[int, int]]:
        """Returns (tick, bytes that the worker holds from then on) for each change, the first at tick 0.

        Weights and optimizer state are held all the time. A micro-batch holds what I needs from F's start to the end
        of I (or B), and from then to the end of W what W needs.
        """
        fixed = self.problem.job.profiles[worker.stage].fixed_bytes
        _, ticks, held = self._held(self.part(worker), in_bytes=True)
        steps = [(tick, fixed + more) for tick, more in zip(ticks.tolist(), held.tolist(), strict=True)]
        return steps if steps and steps[0][0] == 0 else [(0, fixed), *steps]

    @cached_property
    def peak_bytes(self) -> dict[Worker, int]:
        """Most bytes each living worker holds at once; 0 where the profile does not say."""
        profiles = self.problem.job.profiles
        return {w: profiles[w.stage].fixed_bytes + most for w, most in self._peaks(in_bytes=True).items()}

    @cached_property
    def over_capacity(self) -> dict[Worker, int]:
        """The peak in bytes of each worker that exceeds its memory; empty where the job gives no capacity."""
        capacity = self.problem.job.capacity_bytes
        return {w: most for w, most in self.peak_bytes.items() if most > capacity[w.stage]} if capacity else {}

    @cached_property
    def peak_activations(self) -> dict[Worker, int]:
        """Most activations each living worker holds at once."""
        return self._peaks(in_bytes=False)

    def _peaks(self, *, in_bytes: bool) -> dict[Worker, int]:
        rows, _, held = self._held(slice(None), in_bytes=in_bytes)
        most = np.zeros(len(self.ops), held.dtype)
        np.maximum.at(most, rows, held)
        return self._of_each(most)

    def _held(self, part: slice, *, in_bytes: bool) -> tuple[Ints, Numbers, Numbers]:
        """Returns three arrays with an entry for each tick at which a worker's memory changes, worker by worker: its
        row, the tick, and what its micro-batches hold from then on. Changes at one tick count together.
        part: the ops to read, those of whole workers."""
        arrays = self.arrays
        kind, row, start, end = (column[part] for column in (arrays.kind, arrays.row, arrays.start, arrays.end))
        first, later = np.ones(1, np.int64), np.ones(1, np.int64)  # held until I (or B) ends; then until W ends
        stage: Any = 0
        if in_bytes:
            profiles, stage = self.problem.job.profiles, arrays.stage[part]
            most = max(p.activation_bytes + p.weight_backward_bytes for p in profiles)
            exact: Any = np.int64 if most * len(kind) < _MOST else object
            first, later = (
                np.array([getattr(p, name) for p in profiles], exact)
                for name in ("activation_bytes", "weight_backward_bytes")
            )
        change = np.stack([first, later - first, -later, -first, 0 * first])[kind, stage]  # in the order of KINDS
        changes = np.flatnonzero(change)
        row, change = row[changes], change[changes]
        when = np.where(kind[changes] == F, start[changes], end[changes])
        order = _by_time(row, when, np.zeros_like(when), np.arange(len(row)), max(1, len(row)))
        row, when, held = row[order], when[order], np.cumsum(change[order])
        last = np.append((row[1:] != row[:-1]) | (when[1:] != when[:-1]), True)[: len(row)]
        # A valid schedule gives all memory back. For others, the rest must not be carried on to the next worker.
        ends = np.flatnonzero(np.append(row[1:] != row[:-1], True)[: len(row)])
        left = np.repeat(np.append(0, held[ends])[:-1], np.diff(ends, prepend=-1))
        return row[last], when[last], (held - left)[last]


def inputs(kind: str, stage: int, job: Job) -> list[tuple[str, int, int]]:
    """Return what an F, I, W or B needs of its own micro-batch: (kind, stage, ticks that pass between that op's end and
    the arrival of its result). B counts as I.
    """
    if kind == "W":
        return [("I", stage, 0)]
    if kind == "F":
        return [("F", stage - 1, job.transfer_ticks[stage - 1])] if stage else []
    below = [("I", stage + 1, job.backward_transfer_ticks[stage])] if stage < job.stages - 1 else []
    return [("F", stage, 0), *below]


# -- chains of ops in a schedule ----------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One op of a chain. waited: ticks from the time its last input was ready to its start."""

    op: Op
    waited: int


def micro_batch_path(schedule: Schedule, pipeline: int, micro_batch: int) -> tuple[Op, ...]:
    """Return all ops of one micro-batch, in order of start; empty when there is no such micro-batch."""
    found = [op for op in schedule.compute_ops() if op.pipeline == pipeline and op.micro_batch == micro_batch]
    return tuple(sorted(found, key=lambda op: (op.start, op.end, op.stage)))


def critical_path(schedule: Schedule) -> tuple[Link, ...]:
    """Return the chain of ops that ends with the last op of the stage which sets the period, first op first.

    Each op of the chain is the one that the next op had to wait for longest: its input, its own forward, or the op
    before it on its worker. If the chain has no waits, only shorter ops or another order can make the period shorter;
    a wait in it is the price of the order itself, or of a memory limit.
    """
    staggers = schedule.problem.technique.staggers
    ops, waits = _graph(schedule, schedule.problem, staggers=staggers)
    first: dict[int, int] = {}
    for op in ops:
        first[op.stage] = min(first.get(op.stage, op.start), op.start)

    def set_period(step: int) -> tuple[int, int, int, Op]:
        """Sort key: the O that sets the period is largest; among peers, that of the worker which finished last."""
        own, before = ops[step], ops[step - 1]
        length, stage = (own.end - first[own.stage], -own.stage) if staggers else (own.end, 0)
        return length, stage, before.end if before.worker == own.worker else 0, own

    node = max((n for n, op in enumerate(ops) if op.kind == "O"), key=set_period)
    links: list[Link] = []
    while befores := waits(node):
        ready, before = max(((ops[given].end + lag, given) for given, lag in befores), key=lambda found: found[0])
        links.append(Link(ops[node], ops[node].start - ready))
        node = before
    return (Link(ops[node], 0), *reversed(links))


def waited(path: tuple[Link, ...]) -> int:
    """Return the ticks of a chain in which none of its ops runs."""
    return sum(link.waited for link in path)


# -- how long an iteration takes when workers keep to a plan's order ----------------------------


def steady_period(schedule: Schedule, job: Job | None = None) -> float:
    """Return the ticks from one iteration to the next once they repeat, with the op times and transfers of `job`.

    Every op begins as soon as its worker and its inputs allow it, a stage's O when the last peer has finished its W's,
    and a worker's next iteration after its own O. The number of simulated iterations is twice what a delay needs to
    reach every stage and come back; the mean is taken over their second half. The result is no longer than the
    schedule's period when the times are as planned.

    job: another job on the schedule's grid; None: the schedule's own. Raises InputError when the order makes a worker
    wait for itself, which no valid schedule does.
    """
    problem = schedule.problem
    timed = Problem(job or problem.job, problem.failed, problem.technique, problem.memory)
    ops, waits_of = _graph(schedule, timed)
    waits = [waits_of(node) for node in range(len(ops))]
    try:
        order = [*TopologicalSorter({n: {given for given, _ in w} for n, w in enumerate(waits)}).static_order()]
    except CycleError:
        raise InputError("plan", "an order in which ops wait for each other", "one that can be run") from None
    ticks = [timed.worker_ticks(op.worker).by_kind[op.kind] for op in ops]
    free = dict.fromkeys(schedule.ops, 0)
    rounds = 4 * timed.job.stages + 8
    last_ends = []
    for _ in range(rounds):
        ends = [0] * len(ops)
        for node in order:
            op = ops[node]
            begin = max([free[op.worker], *(ends[given] + lag for given, lag in waits[node])])
            free[op.worker] = ends[node] = begin + ticks[node]
        last_ends.append(max(free.values()))
    half = rounds // 2
    return (last_ends[-1] - last_ends[-1 - half]) / half


def _graph(
    schedule: Schedule, problem: Problem, *, staggers: bool = True
) -> tuple[list[Op], Callable[[int], list[tuple[int, int]]]]:
    """Return all ops, worker by worker, and a function. It takes an op's index and returns (index, ticks from its end)
    for every op that this one waits for, the op before it on its worker first. An O waits for the last op of every
    peer or, without staggering, of every worker.
    """
    ops: list[Op] = []
    last: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for worker in problem.living_workers():
        own = schedule.ops.get(worker, ())
        ops += (op for op in own if op.kind != "O")
        if ops and ops[-1].worker == worker:
            last[worker.stage if staggers else 0].append((len(ops) - 1, 0))
        ops.append(next((op for op in own if op.kind == "O"), Op("O", worker.pipeline, -1, worker.stage, worker, 0, 0)))
    found = {
        ("I" if op.kind == "B" else op.kind, op.pipeline, op.micro_batch, op.stage): node for node, op in enumerate(ops)
    }

    def waits(node: int) -> list[tuple[int, int]]:
        op = ops[node]
        if op.kind == "O":
            return last[op.stage if staggers else 0]
        out = [(node - 1, 0)] if node and ops[node - 1].worker == op.worker else []
        for kind, stage, lag in inputs(op.kind, op.stage, problem.job):
            given = found.get((kind, op.pipeline, op.micro_batch, stage))
            if given is not None:
                out.append((given, lag))
        return out

    return ops, waits

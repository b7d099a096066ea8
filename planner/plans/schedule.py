"""Op and Schedule, and every number that is read off a schedule: one definition each, used by all.

Times are whole ticks (see planner.jobs.job). A Schedule is data; whether it is *valid* is for
planner.check to say, which shares no code with this module's users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from openrecycle.planner.jobs.job import Problem, Technique, Worker


class Op(NamedTuple):
    """One piece of work on one worker.

    kind: F forward, I gradient of the input, W gradient of the weights, B = I and W fused,
    O the stage's reduction and optimizer step.
    pipeline, micro_batch: the micro-batch's home (micro_batch counts from 0 inside it); for O the
    worker's own pipeline and -1. worker: who runs it. start, duration: ticks.
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
        """Does another pipeline's worker run it?"""
        return self.pipeline != self.worker.pipeline

    def __str__(self) -> str:
        name = "O" if self.kind == "O" else f"{self.kind}{self.pipeline}.{self.micro_batch}"
        return f"{name}@{self.worker}"


class OpsOnDemand(Mapping[Worker, tuple[Op, ...]]):
    """The ops of each living worker, made when they are first asked for: a worker needs only its own.

    row: one worker's ops by start time, O last.
    """

    def __init__(self, problem: Problem, row: Callable[[Worker], Iterable[Op]]) -> None:
        self._problem, self._row = problem, row
        self._made: dict[Worker, tuple[Op, ...]] = {}

    def __getitem__(self, worker: Worker) -> tuple[Op, ...]:
        made = self._made.get(worker)
        if made is None:
            if worker not in self._living:
                raise KeyError(worker)
            made = self._made[worker] = tuple(self._row(worker))
        return made

    def __contains__(self, worker: object) -> bool:
        return worker in self._living

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._living)

    def __len__(self) -> int:
        return len(self._living)

    @cached_property
    def _living(self) -> dict[Worker, None]:
        return dict.fromkeys(self._problem.living_workers())


@dataclass(frozen=True)
class Schedule:
    """ops: for each living worker its ops by start time (O last). Includes the O ops. made_for: the schedule for
    more failures that this one is, where it is one (`for_fewer`)."""

    problem: Problem
    ops: Mapping[Worker, tuple[Op, ...]]
    made_for: Schedule | None = field(default=None, compare=False, repr=False)

    @classmethod
    def build(cls, problem: Problem, compute_ops: Iterable[Op]) -> Schedule:
        """Sorts compute ops by worker and start, and adds each worker's O where it belongs.

        Staggered: a stage's O starts when its last peer has finished its last op. Otherwise all
        O start at the makespan (the global barrier).
        """
        by_worker: dict[Worker, list[Op]] = {w: [] for w in problem.living_workers()}
        for op in compute_ops:
            by_worker[op.worker].append(op)
        ends = [0] * problem.job.stages
        for worker, ops in by_worker.items():
            ops.sort(key=lambda o: (o.start, o.end))
            if ops:
                ends[worker.stage] = max(ends[worker.stage], ops[-1].end)
        barrier = max(ends)
        for worker, ops in by_worker.items():
            start = ends[worker.stage] if problem.technique.staggers else barrier
            length = problem.worker_ticks(worker).optimizer
            ops.append(Op("O", worker.pipeline, -1, worker.stage, worker, start, length))
        return cls(problem, {w: tuple(ops) for w, ops in by_worker.items()})

    def for_fewer(self, problem: Problem) -> Schedule:
        """The same ops for `problem`, whose failures are among this one's: whoever lives after all stays idle."""
        return replace(Schedule.build(problem, self.compute_ops()), made_for=self.made_for or self)

    def compute_ops(self) -> Iterable[Op]:
        """Every op but the O's, worker by worker."""
        return (op for ops in self.ops.values() for op in ops if op.kind != "O")

    @cached_property
    def makespan(self) -> int:
        """Ticks from the first compute op's start to the last one's end; O does not count."""
        starts = [ops[0].start for ops in self.ops.values() if ops[0].kind != "O"]
        ends = [op.end for op in self.compute_ops()]
        return max(ends) - min(starts)

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
        for worker, ops in self.ops.items():
            s = worker.stage
            last[s] = max(last.get(s, 0), ops[-1].end)
            if ops[0].kind != "O":
                first[s] = min(first.get(s, ops[0].start), ops[0].start)
        return max(last[s] - first[s] for s in first)

    def busy(self, worker: Worker) -> int:
        """Ticks in which `worker` works, O included."""
        return self._busy[worker]

    @cached_property
    def _busy(self) -> dict[Worker, int]:
        return {worker: sum(op.duration for op in ops) for worker, ops in self.ops.items()}

    @cached_property
    def end(self) -> int:
        """The tick at which the last op ends, O included."""
        return max(self.ends.values())

    @cached_property
    def ends(self) -> dict[Worker, int]:
        """Of each living worker the tick at which its last op ends."""
        return {w: ops[-1].end for w, ops in self.ops.items() if ops}

    @cached_property
    def op_counts(self) -> dict[Worker, int]:
        """Of each living worker, O included."""
        return {w: len(ops) for w, ops in self.ops.items()}

    @cached_property
    def rerouted_forwards(self) -> dict[Worker, int]:
        """Of each living worker, how many micro-batches of other pipelines it runs."""
        return {w: sum(op.kind == "F" and op.rerouted for op in ops) for w, ops in self.ops.items()}

    @cached_property
    def helpers(self) -> frozenset[Worker]:
        """The workers that run micro-batches of other pipelines."""
        return frozenset(w for w, ops in self.ops.items() if any(op.rerouted for op in ops))

    def worker_bubble_fraction(self, worker: Worker) -> float:
        """1 - busy / period."""
        return 1 - self.busy(worker) / self.period

    @cached_property
    def bubble_fraction(self) -> float:
        """1 - total busy / (living workers x period)."""
        return 1 - sum(map(self.busy, self.ops)) / (len(self.ops) * self.period)

    def held_activations(self, worker: Worker) -> list[tuple[int, int]]:
        """Steps (tick, activations held from then on) of one worker.

        One micro-batch counts 1 from F's start to the end of its W (or B).
        """
        change: dict[int, int] = {}
        for op in self.ops[worker]:
            if op.kind == "F":
                change[op.start] = change.get(op.start, 0) + 1
            elif op.kind in ("W", "B"):
                change[op.end] = change.get(op.end, 0) - 1
        held, steps = 0, []
        for tick in sorted(change):
            held += change[tick]
            steps.append((tick, held))
        return steps

    @cached_property
    def counts_bytes(self) -> bool:
        """Do the stages' profiles say what a worker holds in bytes?"""
        return any(profile.counts_bytes for profile in self.problem.job.profiles)

    def held_bytes(self, worker: Worker) -> list[tuple[int, int]]:
        """Steps (tick, bytes held from then on) of one worker, the first at tick 0.

        Weights and optimizer state all along; of each micro-batch what I needs from F's start to
        the end of I (or B), and what W needs from there to the end of W.
        """
        profile = self.problem.job.profiles[worker.stage]
        change: dict[int, int] = {0: profile.fixed_bytes}
        for op in self.ops[worker]:
            if op.kind == "F":
                change[op.start] = change.get(op.start, 0) + profile.activation_bytes
            elif op.kind in ("I", "B"):
                kept = profile.weight_backward_bytes if op.kind == "I" else 0
                change[op.end] = change.get(op.end, 0) - profile.activation_bytes + kept
            elif op.kind == "W":
                change[op.end] = change.get(op.end, 0) - profile.weight_backward_bytes
        held, steps = 0, []
        for tick in sorted(change):
            held += change[tick]
            steps.append((tick, held))
        return steps

    @cached_property
    def peak_bytes(self) -> dict[Worker, int]:
        """Most bytes each living worker holds at once; 0 where the profile does not say."""
        return {w: max(n for _, n in self.held_bytes(w)) for w in self.ops}

    @cached_property
    def peak_activations(self) -> dict[Worker, int]:
        """Most activations each living worker holds at once."""
        return {w: max((n for _, n in self.held_activations(w)), default=0) for w in self.ops}

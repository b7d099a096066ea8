"""Large-neighbourhood search: a slice of a schedule is taken up again, all else keeps its order.

To shorten a schedule to `target` ticks, what comes before the slice starts as early, and what
comes after it as late, as its order and the target allow; only the slice's ops are left to place
in between. That is a small question, answered in fractions of a second in a schedule of thousands.

A slice is a run of consecutive ops in an order of all ops that follows every precedence. So no op
outside lies between two inside: each is either before or after.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.solvers.reduction import Reduction, StartTicks

# (kind, micro-batch index, stage); the backward of either technique is I.
OpKey = tuple[str, int, int]
Edges = dict[OpKey, list[tuple[OpKey, int]]]


class ScheduleGraph:
    """A schedule of a reduction as a graph: its ops in an order, and what waits for what.

    rows: the ops of each worker in order. place: an op's position in `order`. first: the start
    that each stage's period is counted from, kept by all slices; 0 without staggering.
    links: precedences that hold whatever the order, as (op, then, ticks from start to start).
    """

    def __init__(self, reduction: Reduction, times: StartTicks) -> None:
        self.reduction = reduction
        problem = reduction.problem
        job = problem.job
        self.optimizer = [t.optimizer for t in problem.fastest]  # (the longest of the stage)
        self.staggers = problem.technique.staggers
        self.kinds = "FIW" if problem.technique.splits else "FI"
        self.stages = range(job.stages)
        # By kind, stage and micro-batch: that of the worker on its route.
        ticks = [[problem.worker_ticks(Worker(p, s)) for p in row] for s, row in enumerate(reduction.routes)]
        self._lengths = {
            "F": [[t.forward for t in row] for row in ticks],
            "I": [[t.input_backward if problem.technique.splits else t.backward for t in row] for row in ticks],
            "W": [[t.weight_backward for t in row] for row in ticks],
        }
        tables = {"F": times.forward, "I": times.backward, "W": times.weight}
        keys = [(kind, i, s) for c in reduction.kept for i in c for s in self.stages for kind in self.kinds]
        starts = {key: tables[key[0]][key[1]][key[2]] for key in keys}
        zero = min(starts.values())
        self.starts: dict[OpKey, int] = {key: start - zero for key, start in starts.items()}
        # Ops without duration come before those that start with them, and downstream ones first.
        self.order = sorted(keys, key=lambda k: (self.starts[k], self.starts[k] + self.length(k), -k[2]))
        self.place = {key: n for n, key in enumerate(self.order)}
        self.rows: dict[Worker, list[OpKey]] = defaultdict(list)
        self.first = [0] * job.stages
        if self.staggers:
            self.first = [min(self.starts[k] for k in keys if k[2] == s) for s in self.stages]
        for key in self.order:
            self.rows[Worker(reduction.routes[key[2]][key[1]], key[2])].append(key)
        self.links = self._chains()
        self._before: Edges = defaultdict(list)
        self._after: Edges = defaultdict(list)
        for one, then, lag in [*self.links, *self._orders()]:
            self._before[then].append((one, lag))
            self._after[one].append((then, lag))

    def length(self, key: OpKey) -> int:
        return self._lengths[key[0]][key[2]][key[1]]

    def limit(self, stage: int) -> int | None:
        return self.reduction.problem.limits[stage]

    @property
    def period(self) -> int:
        """Ticks, O included; by `first`."""
        ends = [
            max(self.starts[row[-1]] + self.length(row[-1]) for w, row in self.rows.items() if w.stage == s)
            for s in self.stages
        ]
        if self.staggers:
            return max(ends[s] + self.optimizer[s] - self.first[s] for s in self.stages)
        return max(ends) + max(self.optimizer)

    def deadline(self, stage: int, target: int) -> int:
        """When the stage's last op must have ended."""
        if self.staggers:
            return self.first[stage] + target - self.optimizer[stage]
        return target - max(self.optimizer)

    def _chains(self) -> list[tuple[OpKey, OpKey, int]]:
        """F, I, W of a micro-batch along the stages, and the order inside a class (see reduction)."""
        job = self.reduction.problem.job
        wire, back = job.transfer_ticks, job.backward_transfer_ticks
        links: list[tuple[OpKey, OpKey, int]] = []
        for members in self.reduction.kept:
            for i in members:
                for s in self.stages:
                    for one, then in pairwise((kind, i, s) for kind in self.kinds):
                        links.append((one, then, self.length(one)))
                    if s:
                        down, up = ("F", i, s - 1), ("I", i, s)
                        links.append((down, ("F", i, s), self.length(down) + wire[s - 1]))
                        links.append((up, ("I", i, s - 1), self.length(up) + back[s - 1]))
            for before, after in pairwise(members):
                for s in self.stages:
                    links += [((k, before, s), (k, after, s), self.length((k, before, s))) for k in self.kinds]
        return links

    def _orders(self) -> list[tuple[OpKey, OpKey, int]]:
        """One op after the other on each worker, and each F after the release that makes room for it."""
        links = []
        for worker, row in self.rows.items():
            links += [(one, then, self.length(one)) for one, then in pairwise(row)]
            limit = self.limit(worker.stage)
            if limit is not None:
                forwards = [key for key in row if key[0] == "F"]
                releases = [key for key in row if key[0] == self.kinds[-1]]
                links += [(one, then, self.length(one)) for one, then in zip(releases, forwards[limit:], strict=False)]
        return links

    def room(self, begin: int, end: int, target: int) -> SliceWindows | None:
        """What order[begin:end] may use; None when the rest alone already exceeds `target`."""
        earliest: dict[OpKey, int] = {}
        for key in self.order[:begin]:
            earliest[key] = max([self.first[key[2]], *(earliest[k] + lag for k, lag in self._before[key])])
        latest: dict[OpKey, int] = {}
        for key in reversed(self.order[end:]):
            due = self.deadline(key[2], target) - self.length(key)
            latest[key] = min([due, *(latest[k] - lag for k, lag in self._after[key])])
        for key, start in earliest.items():
            for then, lag in self._after[key]:
                if then in latest and start + lag > latest[then]:
                    return None
        windows: dict[OpKey, tuple[int, int]] = {}
        for worker, row in self.rows.items():
            stage = worker.stage
            before = [key for key in row if self.place[key] < begin]
            inside = [key for key in row if begin <= self.place[key] < end]
            after = [key for key in row if self.place[key] >= end]
            free = max(self.first[stage], earliest[before[-1]] + self.length(before[-1]) if before else 0)
            due = latest[after[0]] if after else self.deadline(stage, target)
            for key in inside:
                windows[key] = free, due - self.length(key)
        for one, then, lag in self.links:
            if then in windows and one in earliest:
                windows[then] = max(windows[then][0], earliest[one] + lag), windows[then][1]
            if one in windows and then in latest:
                windows[one] = windows[one][0], min(windows[one][1], latest[then] - lag)
        if any(low > high for low, high in windows.values()):
            return None
        return SliceWindows(self, begin, end, target, earliest, latest, windows)

    def with_starts(self, starts: Mapping[OpKey, int]) -> ScheduleGraph:
        return ScheduleGraph(self.reduction, self._times(starts))

    def times(self) -> StartTicks:
        return self._times(self.starts)

    def _times(self, starts: Mapping[OpKey, int]) -> StartTicks:
        count, stages = len(self.reduction.routes[0]), len(self.stages)
        times = StartTicks(*([[0] * stages for _ in range(count)] for _ in range(3)))
        for (kind, index, stage), start in starts.items():
            table = times.forward if kind == "F" else times.backward if kind == "I" else times.weight
            table[index][stage] = start
        return times

    def late(self) -> ScheduleGraph:
        """The same order with every op as late as the period allows: stages start later."""
        room = self.room(0, 0, self.period)
        assert room is not None  # the schedule itself is the witness
        return self.with_starts(room.latest)


@dataclass(frozen=True)
class SliceWindows:
    """earliest: starts of the ops before the slice; latest: of those after; windows: first and last
    start of each op inside."""

    frame: ScheduleGraph
    begin: int
    end: int
    target: int
    earliest: Mapping[OpKey, int]
    latest: Mapping[OpKey, int]
    windows: Mapping[OpKey, tuple[int, int]]


class Slices:
    """Which slice next. `size`, in ops, grows while slices are answered and shrinks when not."""

    SMALLEST, LARGEST = 60, 3_000

    def __init__(self, *, seed: int) -> None:
        self.size = 300
        self._random = random.Random(seed)

    def next(self, frame: ScheduleGraph) -> tuple[int, int]:
        """begin, end in `frame.order`. The ends of a schedule come up as often as its middle."""
        count = len(frame.order)
        size = min(self.size, count)
        begin = self._random.randint(-size // 2, count - size // 2)
        return max(0, begin), min(count, begin + size)

    def answered(self) -> None:
        self.size = min(self.LARGEST, self.size * 9 // 8 + 1)

    def unanswered(self) -> None:
        self.size = max(self.SMALLEST, self.size * 3 // 4)

"""The CP-SAT solver: it proves small grids optimal, and improves large ones window by window.

It starts from a given schedule, and never returns a worse one. Its steps:

1. The pooled relaxation raises the bound, which holds for all routings. On small grids it often equals the period of
   the given schedule at once.
2. With the routes of that schedule: one model of the whole reduction where that is small enough to be solved, else
   slice after slice of the schedule until the time is up.
3. A proof for given routes says nothing about others. So when it leaves a gap, the relaxation gets more time, and then
   the routes become free as well: the model chooses which living peer runs which micro-batch.

Models. The variables of a routed problem are the starts of F, I and W (B where it isn't split). Staggered: first[s] is
the earliest start of stage s, and every op of the stage lies within first[s] .. first[s] + period - O.

Slices. To shorten a schedule to `target` ticks, the ops before the slice start as early, and those after it as late, as
their order and the target allow; only the slice's ops are left to place in between. That is a small question, answered
in fractions of a second in a schedule of thousands of ops. A slice is a run of consecutive ops in an order of all ops
that follows every precedence. So no op outside lies between two inside: each is either before or after.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ortools.sat.python import cp_model

from openrecycle.planner.jobs.job import Problem, StageRoom, Worker
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import MicroBatch, Schedule
from openrecycle.planner.solvers.base import Cancelled, Run, Solution
from openrecycle.planner.solvers.routing import (
    Link,
    OpKey,
    Reduction,
    Starts,
    chains,
    kinds_of,
    lengths_of,
    proven_for_routing,
    routes_of,
    schedule_of,
)

# -- large-neighbourhood search -----------------------------------------------------------------

Edges = dict[OpKey, list[tuple[OpKey, int]]]


class ScheduleGraph:
    """A schedule of a reduction as a graph: its ops in an order, and the precedences between them.

    rows: the ops of each worker in order. place: an op's position in `order`. first: by stage, the start that its
    period is counted from; it is the same for all slices, and 0 without staggering.
    """

    def __init__(self, reduction: Reduction, starts: Starts) -> None:
        self.reduction, self.lengths = reduction, reduction.lengths
        problem = reduction.problem
        job = problem.job
        self.optimizer = [t.optimizer for t in problem.fastest]  # (the longest of the stage)
        self.staggers = problem.technique.staggers
        self.stages = range(job.stages)
        zero = min(starts.values())
        self.starts = {key: starts[key] - zero for key in self.lengths}
        # Ops without duration come before those that start together with them, and downstream ones first.
        self.order = sorted(self.starts, key=lambda k: (self.starts[k], self.starts[k] + self.lengths[k], -k[2]))
        self.place = {key: n for n, key in enumerate(self.order)}
        self.rows: dict[Worker, list[OpKey]] = defaultdict(list)
        self.first = [0] * job.stages
        if self.staggers:
            self.first = [min(self.starts[k] for k in self.order if k[2] == s) for s in self.stages]
        for key in self.order:
            self.rows[Worker(reduction.routes[key[2]][key[1]], key[2])].append(key)
        # Each worker keeps the order of its ops, so its use of memory stays the same as well.
        orders = [(one, then, self.lengths[one]) for row in self.rows.values() for one, then in pairwise(row)]
        self._before: Edges = defaultdict(list)
        self._after: Edges = defaultdict(list)
        for one, then, lag in [*reduction.links, *orders]:
            self._before[then].append((one, lag))
            self._after[one].append((then, lag))

    @property
    def period(self) -> int:
        """Ticks, O included, counted from `first`."""
        ends = [
            max(self.starts[row[-1]] + self.lengths[row[-1]] for w, row in self.rows.items() if w.stage == s)
            for s in self.stages
        ]
        if self.staggers:
            return max(ends[s] + self.optimizer[s] - self.first[s] for s in self.stages)
        return max(ends) + max(self.optimizer)

    def deadline(self, stage: int, target: int) -> int:
        """The tick at which the stage's last op must have ended."""
        if self.staggers:
            return self.first[stage] + target - self.optimizer[stage]
        return target - max(self.optimizer)

    def room(self, begin: int, end: int, target: int) -> SliceWindows | None:
        """Returns the times that order[begin:end] may use; None when the ops outside alone exceed `target`."""
        earliest: dict[OpKey, int] = {}
        for key in self.order[:begin]:
            earliest[key] = max([self.first[key[2]], *(earliest[k] + lag for k, lag in self._before[key])])
        latest: dict[OpKey, int] = {}
        for key in reversed(self.order[end:]):
            due = self.deadline(key[2], target) - self.lengths[key]
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
            free = max(self.first[stage], earliest[before[-1]] + self.lengths[before[-1]] if before else 0)
            due = latest[after[0]] if after else self.deadline(stage, target)
            for key in inside:
                windows[key] = free, due - self.lengths[key]
        for one, then, lag in self.reduction.links:
            if then in windows and one in earliest:
                windows[then] = max(windows[then][0], earliest[one] + lag), windows[then][1]
            if one in windows and then in latest:
                windows[one] = windows[one][0], min(windows[one][1], latest[then] - lag)
        if any(low > high for low, high in windows.values()):
            return None
        return SliceWindows(self, begin, end, target, earliest, latest, windows)

    def late(self) -> ScheduleGraph:
        """Returns the same order with every op as late as the period allows, so that stages start later."""
        room = self.room(0, 0, self.period)
        assert room is not None  # the schedule itself is the witness
        return ScheduleGraph(self.reduction, room.latest)


@dataclass(frozen=True)
class SliceWindows:
    """The times that a slice may use. earliest: starts of the ops before it; latest: starts of the ops after it;
    windows: first and last possible start of each op inside."""

    frame: ScheduleGraph
    begin: int
    end: int
    target: int
    earliest: Mapping[OpKey, int]
    latest: Mapping[OpKey, int]
    windows: Mapping[OpKey, tuple[int, int]]


class Slices:
    """Chooses the next slice. `size`, in ops, grows while slices are solved and shrinks when they are not."""

    SMALLEST, LARGEST = 60, 3_000

    def __init__(self, *, seed: int) -> None:
        self.size = 300
        self._random = random.Random(seed)

    def next(self, frame: ScheduleGraph) -> tuple[int, int]:
        """Returns begin and end in `frame.order`. The ends of a schedule are chosen as often as its middle."""
        count = len(frame.order)
        size = min(self.size, count)
        begin = self._random.randint(-size // 2, count - size // 2)
        return max(0, begin), min(count, begin + size)

    def answered(self) -> None:
        self.size = min(self.LARGEST, self.size * 9 // 8 + 1)

    def unanswered(self) -> None:
        self.size = max(self.SMALLEST, self.size * 3 // 4)


# A cumulative constraint adds up demand times ticks, in 64 bits.
MOST_ENERGY, MOST_ROOM = 1 << 62, 1 << 20


def rooms(problem: Problem, horizon: int) -> tuple[list[StageRoom], bool]:
    """Returns each stage's room in numbers that CP-SAT can add up over `horizon` ticks; and whether models that split
    every B admit every schedule that fits.

    Bytes are divided by some number and rounded down. That is exact if every combination of micro-batches before and
    after the end of their I fits in the new numbers if and only if it fitted in the old. If not, micro-batches are
    counted, as in Problem.limits. It is never exact where W keeps more than I needs: a whole B then needs less.
    """
    count = problem.job.pipelines * problem.job.micro_batches
    most = min(MOST_ROOM, max(1, MOST_ENERGY // (4 * count * count * max(1, horizon))))
    made, exact = [], True
    for room, limit in zip(problem.room, problem.limits, strict=True):
        if room.need == room.keep:
            fits, small = True, room if limit is None else StageRoom(limit, 1, 1)
        else:
            small = _smaller(room, max(1, -(-room.capacity // most)), count)
            fits = all(room.beside(ahead, count) == small.beside(ahead, count) for ahead in range(count + 1))
        exact = exact and fits and room.keep <= room.need
        made.append(small if fits or limit is None else StageRoom(limit, 1, 1))
    return made, exact


def _smaller(room: StageRoom, by: int, count: int) -> StageRoom:
    """Divides and rounds down, and chooses the least capacity that admits whatever fits in `room`."""
    need, keep = room.need // by, room.keep // by
    held = [ahead * need + kept * keep for ahead in range(count + 1) if (kept := room.beside(ahead, count)) >= 0]
    return StageRoom(max(held), need, keep)


class Held:
    """Collects when micro-batches hold memory, for one cumulative constraint of a model."""

    def __init__(self, model: cp_model.CpModel, horizon: int) -> None:
        self._model, self._horizon = model, horizon
        self._spans: list[cp_model.IntervalVar] = []
        self._demands: list[int] = []

    def take(
        self,
        room: StageRoom,
        forward: cp_model.LinearExprT,
        backward: cp_model.LinearExprT,
        release: cp_model.LinearExprT,
        where: cp_model.IntVar | None = None,
    ) -> None:
        """Adds a micro-batch, which takes memory from F's start to I's (or B's) end, and other memory until W's end.
        where: whether it counts; None: it does."""
        if room.need == room.keep:
            self._add(forward, release, room.need, where)
            return
        self._add(forward, backward, room.need, where)
        self._add(backward, release, room.keep, where)

    def _add(
        self, begin: cp_model.LinearExprT, end: cp_model.LinearExprT, demand: int, where: cp_model.IntVar | None
    ) -> None:
        if not demand:
            return
        size = self._model.new_int_var(0, self._horizon, "")
        if where is None:
            self._spans.append(self._model.new_interval_var(begin, size, end, ""))
        else:
            self._spans.append(self._model.new_optional_interval_var(begin, size, end, where, ""))
        self._demands.append(demand)

    def within(self, capacity: int) -> None:
        if sum(self._demands) > capacity:
            self._model.add_cumulative(self._spans, self._demands, capacity)


# -- CP-SAT models ------------------------------------------------------------------------------


class PeriodModel:
    """A model with the starts of some ops as variables. It minimizes the period, `lower` to `upper` ticks, O included.

    lengths: ticks of the ops. links: precedences. first: by stage, the start that its period is counted from.
    """

    def __init__(
        self, problem: Problem, lengths: Mapping[OpKey, int], links: Iterable[Link], lower: int, upper: int
    ) -> None:
        self.problem, self.lengths, self.model = problem, lengths, cp_model.CpModel()
        self.period = self.model.new_int_var(lower, upper, "period")
        # Every stage starts before stage 0 ends, and lasts no longer than a period.
        self.horizon = 2 * upper if problem.technique.staggers else upper
        self.starts = {key: self.model.new_int_var(problem.heads[key[2]], self.horizon, "") for key in lengths}
        self.first: list[cp_model.IntVar | int] = [
            self.model.new_int_var(head, upper, "") if s and problem.technique.staggers else 0
            for s, head in enumerate(problem.heads)
        ]
        for one, then, lag in links:
            self.model.add(self.starts[then] >= self.starts[one] + lag)
        self.model.minimize(self.period)

    def end(self, kind: str, index: int, stage: int) -> cp_model.LinearExpr:
        return self.starts[kind, index, stage] + self.lengths[kind, index, stage]

    def last_end(self, index: int, stage: int) -> cp_model.LinearExpr:
        """The end of the micro-batch's last op on the stage, when all of its memory is free."""
        return self.end(kinds_of(self.problem)[-1], index, stage)

    def _within(self, first: int, last: int, stage: int) -> None:
        """Requires that the F of micro-batch `first` and the last op of `last` lie within the stage's period."""
        if self.problem.technique.staggers:
            self.model.add(self.starts["F", first, stage] >= self.first[stage])
            step = self.problem.fastest[stage].optimizer
        else:
            step = self.problem.longest_optimizer
        self.model.add(self.last_end(last, stage) + step <= self.first[stage] + self.period)


def fastest_lengths(problem: Problem) -> dict[OpKey, int]:
    """Return the ticks of all ops, each on the fastest peer of its stage."""
    return {
        (kind, index, stage): length
        for stage, ticks in enumerate(problem.fastest)
        for kind, length in lengths_of(problem, ticks).items()
        for index in range(problem.job.pipelines * problem.job.micro_batches)
    }


class ScheduleModel(PeriodModel):
    """All ops of a reduction in one model. hint: a solution to start from."""

    def __init__(self, reduction: Reduction, lower: int, upper: int, hint: Starts | None = None) -> None:
        super().__init__(reduction.problem, reduction.lengths, reduction.links, lower, upper)
        self.reduction = reduction
        self.rooms, self.exact = rooms(self.problem, self.horizon)
        for kind, index, stage in self.starts:
            if kind == "F":
                self._within(index, index, stage)
        for worker, classes in reduction.by_worker().items():
            self._worker(worker.stage, classes)
        if hint is not None:
            self._hint(hint)

    def _worker(self, stage: int, classes: list[tuple[int, ...]]) -> None:
        """Adds the constraints of a worker: one op at a time, and no more in memory than fits."""
        guests = [i for c in classes for i in c]
        self.model.add_no_overlap(
            self.model.new_fixed_size_interval_var(self.starts[kind, i, stage], self.lengths[kind, i, stage], "")
            for i in guests
            for kind in kinds_of(self.problem)
        )
        room = self.rooms[stage]
        if len(guests) * max(room.need, room.keep) <= room.capacity:
            return
        if room.need == room.keep:  # the members of one class have an order: each waits for the one that frees its room
            for members in classes:
                for before, after in zip(members, members[room.capacity // room.need :], strict=False):
                    self.model.add(self.starts["F", after, stage] >= self.last_end(before, stage))
        if room.need != room.keep or len(classes) > 1:
            held = Held(self.model, self.horizon)
            for i in guests:
                held.take(room, self.starts["F", i, stage], self.end("I", i, stage), self.last_end(i, stage))
            held.within(room.capacity)

    def _hint(self, starts: Starts) -> None:
        first = [min(starts["F", i, s] for c in self.reduction.kept for i in c) for s in range(len(self.first))]
        for key, variable in self.starts.items():
            self.model.add_hint(variable, starts[key] - first[0])
        for variable, earliest in zip(self.first, first, strict=True):
            if not isinstance(variable, int):
                self.model.add_hint(variable, earliest - first[0])

    def read(self, value: cp_model.CpSolver | cp_model.CpSolverSolutionCallback) -> Starts:
        return {key: value.value(variable) for key, variable in self.starts.items()}


# -- free routes: any living peer may run any micro-batch of its stage --------------------------------

# The bound of this model holds for the problem as such, not only for one routing. Every op is in it once per
# peer, so it is for small grids.
#
# Micro-batches differ in nothing but their routes, and peers of a stage in nothing but what they are
# given, since transfers take as long from any peer to any other. So without loss of generality
# (rename micro-batches, then peers, stage by stage):
# - micro-batches start on stage 0 in the order of their index;
# - on each stage, peer q + 1 gets its first micro-batch after peer q has one (by index).


class RoutingModel(PeriodModel):
    """Times and routes are free. All peers must be equally fast, so jobs with speeds are excluded."""

    def __init__(self, problem: Problem, lower: int, upper: int) -> None:
        job = problem.job
        self.count = job.pipelines * job.micro_batches
        lengths = fastest_lengths(problem)
        super().__init__(problem, lengths, chains(problem, lengths), lower, upper)
        self.rooms, self.exact = rooms(problem, self.horizon)
        self.on: list[list[list[cp_model.IntVar]]] = []  # [stage][micro-batch][peer]
        for before, after in pairwise(range(self.count)):
            self.model.add(self.starts["F", after, 0] >= self.starts["F", before, 0])
        for stage in range(job.stages):
            for index in range(self.count):
                self._within(index, index, stage)
            self._stage(stage)

    @staticmethod
    def ops(problem: Problem) -> int:
        """Returns the size of the model: how many optional intervals it would need."""
        job = problem.job
        peers = sum(len(problem.living_peers(s)) for s in range(job.stages))
        return len(kinds_of(problem)) * job.pipelines * job.micro_batches * peers

    def _stage(self, stage: int) -> None:
        """Adds the routes of the stage; one op at a time per peer; the memory limit; the order of the peers."""
        model, ticks, room = self.model, self.problem.ticks[stage], self.rooms[stage]
        peers = self.problem.living_peers(stage)
        on = [[model.new_bool_var("") for _ in peers] for _ in range(self.count)]
        self.on.append(on)
        ops = [(key, length) for key, length in self.lengths.items() if key[2] == stage]
        held = [
            (self.starts["F", i, stage], self.end("I", i, stage), self.last_end(i, stage)) for i in range(self.count)
        ]
        most = self.count * max(room.need, room.keep)
        for row in on:
            model.add_exactly_one(row)
        for q in range(len(peers)):
            model.add_no_overlap(
                model.new_optional_fixed_size_interval_var(self.starts[key], length, on[key[1]][q], "")
                for key, length in ops
            )
            if most > room.capacity:
                mine = Held(model, self.horizon)
                for i in range(self.count):
                    mine.take(room, *held[i], on[i][q])
                mine.within(room.capacity)
            # What a peer runs fits between the stage's first start and the period's end.
            load = sum(on[i][q] for i in range(self.count)) * ticks.work
            if self.problem.technique.staggers:
                model.add(load + ticks.optimizer <= self.period)
            else:
                model.add(self.problem.heads[stage] + load + self.problem.longest_optimizer <= self.period)
            for i in range(self.count if q else 0):
                model.add(sum(on[j][q - 1] for j in range(i)) >= on[i][q])
        # Redundant constraints on all peers together.
        intervals = [model.new_fixed_size_interval_var(self.starts[key], length, "") for key, length in ops]
        model.add_cumulative(intervals, [1] * len(intervals), len(peers))
        if most > room.capacity * len(peers):
            together = Held(model, self.horizon)
            for times in held:
                together.take(room, *times)
            together.within(room.capacity * len(peers))

    def read(self, solver: cp_model.CpSolver) -> Schedule:
        """Returns the schedule of a solution.

        The home pipeline of each micro-batch is free too, and is chosen so that few are re-routed: each gets the
        pipeline that runs most of it, as long as that pipeline still has room.
        """
        job, problem = self.problem.job, self.problem
        routes = [
            [next(p for p, var in zip(problem.living_peers(s), row, strict=True) if solver.value(var)) for row in on]
            for s, on in enumerate(self.on)
        ]
        room = {p: list(range(job.micro_batches))[::-1] for p in range(job.pipelines)}
        homes: dict[int, MicroBatch] = {}
        wishes = sorted((-route.count(p), i, p) for i, route in enumerate(zip(*routes, strict=True)) for p in room)
        for _, i, p in wishes:
            if i not in homes and room[p]:
                homes[i] = (p, room[p].pop())
        starts = {key: solver.value(variable) for key, variable in self.starts.items()}
        return schedule_of(problem, starts, [homes[i] for i in range(self.count)], routes)


# -- a slice: is there an order of its ops that meets the target? ------------------------------------


class SliceModel:
    """A model without an objective: is there an order of the slice's ops that stays inside their windows?"""

    def __init__(self, room: SliceWindows) -> None:
        self.room = room
        self.model = cp_model.CpModel()
        frame = room.frame
        self._rooms, _ = rooms(frame.reduction.problem, 2 * room.target)
        self.starts = {key: self.model.new_int_var(low, high, "") for key, (low, high) in room.windows.items()}
        for one, then, lag in frame.reduction.links:
            if one in self.starts and then in self.starts:
                self.model.add(self.starts[then] >= self.starts[one] + lag)
        for worker, row in frame.rows.items():
            inside = [key for key in row if key in self.starts]
            if inside:
                self.model.add_no_overlap(
                    self.model.new_fixed_size_interval_var(self.starts[key], frame.lengths[key], "") for key in inside
                )
                self._memory(row, worker.stage)
        for key, start in self.starts.items():
            self.model.add_hint(start, frame.starts[key])

    def _memory(self, row: list[OpKey], stage: int) -> None:
        """Limits the memory of one worker during the slice. Before and after it the worker keeps the order of its ops,
        so its use of memory stays the same there; the later ops begin when all of its ops in the slice have ended."""
        windows, room = self.room, self._rooms[stage]
        held, last = Held(self.model, 2 * windows.target), kinds_of(windows.frame.reduction.problem)[-1]
        for kind, index, _ in row:
            forward, backward, release = ("F", index, stage), ("I", index, stage), (last, index, stage)
            if kind == "F" and forward not in windows.latest and release not in windows.earliest:
                held.take(room, self._start(forward), self._end(backward), self._end(release))
        held.within(room.capacity)

    def _start(self, key: OpKey) -> cp_model.LinearExprT:
        if key in self.starts:
            return self.starts[key]
        return self.room.earliest[key] if key in self.room.earliest else self.room.latest[key]

    def _end(self, key: OpKey) -> cp_model.LinearExprT:
        return self._start(key) + self.room.frame.lengths[key]

    def read(self, solver: cp_model.CpSolver) -> ScheduleGraph:
        """Returns the whole schedule with the slice as solved."""
        inside = {key: solver.value(start) for key, start in self.starts.items()}
        return ScheduleGraph(self.room.frame.reduction, {**self.room.earliest, **inside, **self.room.latest})


# -- the pooled relaxation: the peers of a stage as one pool ------------------------------------------

# Its optimum bounds the period for every routing.
#
# Take any valid schedule, with any routing, and let a stage have L living peers, each of which can
# hold C activations at most, A of them with an I that has not ended. Sort the stage's F starts, its I (or B)
# starts and its W starts each on their own, and call the k-th of each those of "micro-batch" k. Then
# - at most L ops run at once, since each peer runs one at a time; so the k-th F starts no sooner
#   than the (k - L)-th F has ended (as all last equally long), and likewise I's and W's;
# - the k-th F of stage s + 1 starts no sooner than the k-th F of stage s has ended and been sent,
#   for every F of stage s + 1 follows one of stage s by that much, and this survives sorting (see
#   reduction); so do I(s) after I(s + 1), I after F and W after I on one stage;
# - at most C L activations are held in the stage, so the (k + C L)-th F starts no sooner than the
#   k-th W has ended; and so, with A, than the k-th I;
# - first start and last end of the stage are what they were.
# So the times satisfy this model, whose optimum is therefore no larger than any schedule's period.
#
# The model ignores that F, I and W of a micro-batch share a worker, and that peers do not share memory. Where
# peers differ in speed, an op lasts as long as on the fastest of them; each statement above then holds for the
# slower ones too. In return all of its ops are ordered beforehand: there are no routes, and little to branch on.


class PooledModel(PeriodModel):
    """The pooled relaxation, whose optimum bounds the period for every routing."""

    def __init__(self, problem: Problem, lower: int, upper: int) -> None:
        lengths = fastest_lengths(problem)
        super().__init__(problem, lengths, chains(problem, lengths), lower, upper)
        self.count = problem.job.pipelines * problem.job.micro_batches
        for stage in range(problem.job.stages):
            self._pool(stage)
            self._within(0, self.count - 1, stage)

    @staticmethod
    def ops(problem: Problem) -> int:
        """Returns the size of the model: how many starts it has."""
        job = problem.job
        return len(kinds_of(problem)) * job.pipelines * job.micro_batches * job.stages

    def _pool(self, stage: int) -> None:
        """Adds the order of the stage's ops, and the capacity and memory of all its peers together."""
        add, peers = self.model.add, len(self.problem.living_peers(stage))
        intervals = []
        for kind, length in lengths_of(self.problem, self.problem.fastest[stage]).items():
            row = [self.starts[kind, k, stage] for k in range(self.count)]
            intervals += [self.model.new_fixed_size_interval_var(start, length, "") for start in row]
            for before, after in pairwise(row):
                add(after >= before)
            for before, after in zip(row, row[peers:], strict=False):
                add(after >= before + length)
        if peers == 1:
            self.model.add_no_overlap(intervals)
        else:
            self.model.add_cumulative(intervals, [1] * len(intervals), peers)
        ahead, held = self.problem.most_held[stage]
        for kind, most in ("I", None if ahead == held else ahead), (kinds_of(self.problem)[-1], held):
            later = range(self.count if most is None else most * peers, self.count)
            for k, after in enumerate(later):
                add(self.starts["F", after, stage] >= self.end(kind, k, stage))


# -- the CP-SAT solver --------------------------------------------------------------------------

# A model of up to WHOLE_OPS gets the whole time; one of up to SHARED_OPS a share of it.
WHOLE_OPS = 700
SHARED_OPS = 4_000
SHARE = 0.35
# The relaxation gets a share of the time before the schedule is improved, and another after.
POOLED_OPS = 2_500
EARLY, LATE = 0.25, 0.5
# The largest model with free routes, in which every op is there once per living peer.
ROUTED_OPS = 1_500
# The time limit of one slice, in seconds.
SLICE_SECONDS = 1.0
# CP-SAT adds up the times of a model's ops, and none of them is beyond twice the period.
MOST_TICKS = (1 << 62) // (2 * SHARED_OPS)
# After so many slices without a gain, one is re-arranged at the same period.
PATIENCE = 20


class CpSatSolver:
    """The solver of this module.

    workers: CP-SAT's threads. free_routes: whether routes become free at the end (step 3). Equal questions get equal
    searches, except that the time limit may cut them at different points.
    """

    name = "cp-sat"

    def __init__(self, *, workers: int = 2, free_routes: bool = True) -> None:
        self.workers = workers
        self.free_routes = free_routes

    def solve(self, problem: Problem, run: Run, *, warm_start: Schedule) -> Solution:
        if warm_start.period > MOST_TICKS:
            why = "CP-SAT takes no op times of so many digits; this is the plan that it was to improve"
            return Solution(warm_start, period_bound(problem), self.name, run.elapsed, why)
        search = _CpSatSolve(problem, warm_start, period_bound(problem), run, self.workers)
        message = search.go(free_routes=self.free_routes)
        return Solution(search.best, search.bound, self.name, run.elapsed, message)


@dataclass
class _CpSatSolve:
    """One solve: the best schedule so far, the bound, and the time left."""

    problem: Problem
    best: Schedule
    bound: int
    run: Run
    workers: int
    seed: int = field(init=False, default=0)
    exact: bool = field(init=False, default=True)  # does the model of given routes admit all that fits in memory?

    def go(self, *, free_routes: bool) -> str:
        """Improves `best` and `bound`; returns the message for the user."""
        self.tell(self.best.period, self.bound)
        if self.closed:
            return ""
        self._pooled(EARLY)
        reduction = Reduction.of(self.problem, routes_of(self.best))
        proven = False
        if len(reduction.lengths) <= SHARED_OPS and self.left > 0 and not self.closed:
            proven = self._whole(reduction, self.left if len(reduction.lengths) <= WHOLE_OPS else self.left * SHARE)
        if not proven and not self.closed:
            self._slices(reduction)
        if proven and not self.closed:
            self._pooled(LATE)
        if proven and free_routes and not self.closed:
            self._routes()
        return self._message(proven)

    # -- the state of the search -----------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.best.period <= self.bound

    @property
    def left(self) -> float:
        return self.run.left

    def tell(self, incumbent: int, bound: int) -> None:
        self.run.tell(CpSatSolver.name, incumbent, bound)

    def take(self, schedule: Schedule) -> None:
        if schedule.period < self.best.period and self._fits(schedule):
            self.best = schedule
            self.tell(self.best.period, self.bound)

    def _fits(self, schedule: Schedule) -> bool:
        """Checks the memory of a result: a W without duration may free memory at the tick at which I leaves it, and
        slices may move the two apart."""
        return self.problem.limits_are_exact or not schedule.over_capacity

    def raise_bound(self, bound: int) -> None:
        """Raises the bound, but not above the period of `best`: the new bound holds only for schedules shorter than
        that."""
        self.bound = max(self.bound, min(bound, self.best.period))
        self.tell(self.best.period, self.bound)

    # -- steps -----------------------------------------------------------------------------------

    def _run(
        self, model: ScheduleModel | SliceModel | RoutingModel | PooledModel, seconds: float, watch: Watcher | None
    ) -> CpSatOutcome:
        stop = self.run.cancelled and (lambda: self.run.stopped)
        return run(model.model, time_limit=seconds, workers=self.workers, seed=self.seed, watch=watch, cancelled=stop)

    def _whole(self, reduction: Reduction, seconds: float) -> bool:
        """Solves all ops in one model. Returns True when no better schedule exists for these routes."""
        model = ScheduleModel(reduction, self.bound, self.best.period, reduction.starts_of(self.best))
        self.exact = model.exact

        def watch(objective: int | None, _: int) -> None:
            if objective is not None:
                self.tell(min(objective, self.best.period), self.bound)

        outcome = self._run(model, seconds, watch)
        if outcome.solved:
            self.take(reduction.schedule(model.read(outcome.solver)))
        return outcome.proven

    def _slices(self, reduction: Reduction) -> None:
        """Improves slice after slice, until the time is up or the gap is closed."""
        if not self.left:
            return
        frame = self._adopt(ScheduleGraph(reduction, reduction.starts_of(self.best)))
        slices = Slices(seed=self.seed)
        vain = 0
        while self.left and not self.closed:
            sideways = vain >= PATIENCE
            vain = 0 if sideways else vain + 1
            room = frame.room(*slices.next(frame), self.best.period - (0 if sideways else 1))
            if room is None or not self.left:
                continue
            model = SliceModel(room)
            self.seed += 1  # another answer to the same question, when moving sideways
            outcome = self._run(model, min(SLICE_SECONDS, self.left), None)
            if not outcome.proven:
                slices.unanswered()
                continue
            slices.answered()
            if outcome.solved:
                frame = self._adopt(model.read(outcome.solver))

    def _adopt(self, frame: ScheduleGraph) -> ScheduleGraph:
        """Returns the frame with its stages started late, and takes it as the best schedule if it is better."""
        frame = frame.late()
        if frame.period < self.best.period:
            self.take(frame.reduction.schedule(frame.starts))
        return frame

    def _pooled(self, share: float) -> None:
        """Raises the bound by the relaxation, for a share of the time left."""
        if not self.left or PooledModel.ops(self.problem) > POOLED_OPS:
            return
        model = PooledModel(self.problem, self.bound, self.best.period)
        outcome = self._run(model, self.left * share, lambda _, bound: self.raise_bound(bound))
        self.raise_bound(outcome.bound)

    def _routes(self) -> None:
        """Frees the routes as well: finds a better schedule, or proves that there is none."""
        if not self.left or RoutingModel.ops(self.problem) > ROUTED_OPS or self.problem.job.speeds:
            return
        model = RoutingModel(self.problem, self.bound, self.best.period - 1)
        # Where more may fit than the model admits, it proves nothing.
        proves = model.exact

        def watch(objective: int | None, bound: int) -> None:
            if proves:
                self.raise_bound(bound)
            if objective is not None:
                self.tell(min(objective, self.best.period), self.bound)

        outcome = self._run(model, self.left, watch)
        if outcome.solved:
            self.take(model.read(outcome.solver))
        if proves:
            self.raise_bound(self.best.period if outcome.infeasible else outcome.bound)

    def _message(self, proven: bool) -> str:
        if self.closed:
            return ""
        if proven:
            return proven_for_routing(self.problem, self.bound, exact=self.exact)
        return (
            "stopped before the gap was closed" if self.run.stopped else "time limit reached before the gap was closed"
        )


# -- running a model so that the calling thread can watch and stop it ---------------------------------

_log = logging.getLogger(__name__)

# Seconds between two looks at `cancelled` while the solver has nothing to say.
POLL = 0.05

Watcher = Callable[[int | None, int], None]
"""Called in the calling thread with (objective of the incumbent, bound), each time one improves."""


@dataclass(frozen=True)
class CpSatOutcome:
    """status: CP-SAT's. objective: None without a solution. bound: of the objective, rounded up. solver: for reading
    values, if `solved`."""

    status: cp_model.CpSolverStatus
    objective: int | None
    bound: int
    solver: cp_model.CpSolver

    @property
    def solved(self) -> bool:
        return self.objective is not None

    @property
    def infeasible(self) -> bool:
        return bool(self.status == cp_model.INFEASIBLE)

    @property
    def proven(self) -> bool:
        """Optimal, or proven to have no solution."""
        return self.status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)


class _Incumbents(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    def __init__(self, events: queue.SimpleQueue[tuple[float | None, float] | None]) -> None:
        super().__init__()
        self._events = events

    def on_solution_callback(self) -> None:
        self._events.put((self.objective_value, self.best_objective_bound))


def run(
    model: cp_model.CpModel,
    *,
    time_limit: float,
    workers: int,
    seed: int,
    watch: Watcher | None = None,
    cancelled: Cancelled | None = None,
) -> CpSatOutcome:
    """Minimizes `model` for at most `time_limit` seconds.

    The search runs in a thread of its own, since CP-SAT does not hold the GIL: the calling thread polls
    `cancelled` and answers Ctrl-C meanwhile. Raises ValueError for a model that CP-SAT calls invalid, which is
    a mistake of ours.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.catch_sigint_signal = False
    events: queue.SimpleQueue[tuple[float | None, float] | None] = queue.SimpleQueue()
    solver.best_bound_callback = lambda bound: events.put((None, bound))
    status = cp_model.UNKNOWN
    proven = -math.inf
    stopped = False

    def work() -> None:
        nonlocal status, proven
        try:
            status = solver.solve(model, _Incumbents(events))
            proven = solver.best_objective_bound
        except Exception:
            # CP-SAT 9.15 now and then throws from within. The schedule that the caller has is still good.
            _log.warning("CP-SAT broke off its search", exc_info=True)
        finally:
            events.put(None)

    thread = threading.Thread(target=work, name="cp-sat", daemon=True)
    thread.start()
    deadline = time.monotonic() + time_limit
    try:
        best: float | None = None
        while True:
            try:
                event = events.get(timeout=POLL)
            except queue.Empty:
                event = (None, -math.inf)
            if event is None:
                break
            objective, bound = event
            if objective is not None:
                best = objective
            if watch and bound > -math.inf:
                watch(None if best is None else round(best), _whole(bound))
            stopped = stopped or bool(cancelled and cancelled())
            # During presolve CP-SAT checks its own time limit too seldom.
            if stopped or time.monotonic() > deadline:
                solver.stop_search()
    finally:
        while thread.is_alive():  # CP-SAT ignores a stop that comes before the search has begun
            solver.stop_search()
            thread.join(POLL)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT refuses the model: {model.validate()}")
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    objective_value = round(solver.objective_value) if found else None
    return CpSatOutcome(status, objective_value, 0 if math.isinf(proven) else _whole(proven), solver)


def _whole(bound: float) -> int:
    """Round up the bound of an integer objective, but for the noise of floating point."""
    return math.ceil(bound - 1e-6)

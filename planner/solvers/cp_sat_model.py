"""CP-SAT models: of a routed problem, of one whose routes are free, of a slice of a schedule, of a pool of peers.

Of a routed problem the variables are the starts of F, I and W (B where it isn't split). Staggered: first[s] is
the earliest start of stage s, and every op of the stage lies within first[s] .. first[s] + period - O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from ortools.sat.python import cp_model

from openrecycle.planner.jobs.job import Problem, Worker
from openrecycle.planner.plans.schedule import Op, Schedule
from openrecycle.planner.solvers.reduction import Reduction, StartTicks, whole_backwards

if TYPE_CHECKING:
    from openrecycle.planner.solvers.lns import OpKey, ScheduleGraph, SliceWindows


@dataclass
class ScheduleModel:
    """A model that looks for a period of `lower` to `upper` ticks, O included.

    hint: a schedule of the reduction to start from.
    """

    reduction: Reduction
    lower: int
    upper: int
    hint: StartTicks | None = None
    model: cp_model.CpModel = field(init=False, default_factory=cp_model.CpModel)

    def __post_init__(self) -> None:
        problem = self.reduction.problem
        job = problem.job
        self.splits = problem.technique.splits
        self.staggers = problem.technique.staggers
        self.fastest = problem.fastest
        self.longest = problem.longest_optimizer
        self.wire, self.wire_back = job.transfer_ticks, job.backward_transfer_ticks
        # Every stage starts before stage 0 ends, and lasts no longer than a period.
        self.horizon = 2 * self.upper if self.staggers else self.upper
        self.heads = problem.heads
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
        self.model.minimize(self.period)
        if self.hint is not None:
            self._hint(self.hint)

    # -- what is asked ---------------------------------------------------------------------------

    def duration(self, kind: str, index: int, stage: int) -> int:
        """Ticks on the worker that the micro-batch meets there."""
        ticks = self.reduction.problem.worker_ticks(Worker(self.reduction.routes[stage][index], stage))
        if kind == "F":
            return ticks.forward
        if kind == "W":
            return ticks.weight_backward
        return ticks.input_backward if self.splits else ticks.backward

    def end(self, kind: str, index: int, stage: int) -> cp_model.LinearExpr:
        return self.starts[kind, index, stage] + self.duration(kind, index, stage)

    def last_end(self, index: int, stage: int) -> cp_model.LinearExpr:
        """When the activation is free."""
        return self.end("W" if self.splits else "I", index, stage)

    # -- constraints -----------------------------------------------------------------------------

    def _class(self, members: tuple[int, ...]) -> None:
        """Chains of the class, its order (see reduction), and the period."""
        add, stages = self.model.add, len(self.fastest)
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
                    add(self.last_end(index, s) + self.fastest[s].optimizer <= self.first[s] + self.period)
                else:
                    add(self.last_end(index, s) + self.longest <= self.period)
            for s in range(stages - 1):
                add(self.starts["F", index, s + 1] >= self.end("F", index, s) + self.wire[s])
                add(self.starts["I", index, s] >= self.end("I", index, s + 1) + self.wire_back[s])
        for before, after in pairwise(members):
            for s in range(stages):
                for kind in kinds:
                    add(self.starts[kind, after, s] >= self.end(kind, before, s))

    def _workers(self) -> None:
        """One op at a time, and no more activations than fit."""
        kinds = "FIW" if self.splits else "FI"
        for worker, classes in self.reduction.by_worker().items():
            keys = [(kind, i, worker.stage) for c in classes for i in c for kind in kinds]
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(self.starts[k], self.duration(*k), "") for k in keys
            )
            self._memory(worker, classes)

    def _memory(self, worker: Worker, classes: list[tuple[int, ...]]) -> None:
        limit = self.reduction.problem.limits[worker.stage]
        guests = [i for c in classes for i in c]
        if limit is None or len(guests) <= limit:
            return
        for members in classes:  # alone, a class fills the limit with its next `limit` members
            for before, after in zip(members, members[limit:], strict=False):
                self.model.add(self.starts["F", after, worker.stage] >= self.last_end(before, worker.stage))
        if len(classes) > 1:
            intervals = [
                self.model.new_interval_var(
                    self.starts["F", i, worker.stage],
                    self.model.new_int_var(self.reduction.problem.worker_ticks(worker).work, self.horizon, ""),
                    self.last_end(i, worker.stage),
                    "",
                )
                for i in guests
            ]
            self.model.add_cumulative(intervals, [1] * len(intervals), limit)

    # -- hint and solution ------------------------------------------------------------------------

    def _hint(self, times: StartTicks) -> None:
        zero = min(times.forward[i][0] for c in self.reduction.kept for i in c)
        for key, variable in self.starts.items():
            self.model.add_hint(variable, _table(times, key[0])[key[1]][key[2]] - zero)
        for s, variable in enumerate(self.first):
            if not isinstance(variable, int):
                earliest = min(times.forward[i][s] for c in self.reduction.kept for i in c)
                self.model.add_hint(variable, earliest - zero)

    def read(self, value: cp_model.CpSolver | cp_model.CpSolverSolutionCallback) -> StartTicks:
        """The starts of a solution; those of micro-batches that were left out are 0."""
        count, stages = len(self.reduction.routes[0]), len(self.fastest)
        times = StartTicks(*([[0] * stages for _ in range(count)] for _ in range(3)))
        for (kind, index, stage), variable in self.starts.items():
            _table(times, kind)[index][stage] = value.value(variable)
        return times


def _table(times: StartTicks, kind: str) -> list[list[int]]:
    return times.forward if kind == "F" else times.backward if kind == "I" else times.weight


# -- routes are free: any living peer may run any micro-batch of its stage ---------------------------

# Its bound holds for the problem as such, not only for one routing. Every op is there once per peer,
# so it is for small grids.
#
# Micro-batches differ in nothing but their routes, and peers of a stage in nothing but what they are
# given, since transfers take as long from any peer to any other. So without loss of generality
# (rename micro-batches, then peers, stage by stage):
# - micro-batches start on stage 0 in the order of their index;
# - on each stage, peer q + 1 gets its first micro-batch after peer q has one (by index).


class RoutingModel:
    """Looks for a period of `lower` to `upper` ticks, O included, with free times and routes.

    Peers must be alike: for jobs without speeds.
    """

    def __init__(self, problem: Problem, lower: int, upper: int) -> None:
        self.problem = problem
        job = problem.job
        self.ticks = problem.ticks
        self.wire, self.wire_back = job.transfer_ticks, job.backward_transfer_ticks
        self.count = job.pipelines * job.micro_batches
        self.splits = problem.technique.splits
        self.staggers = problem.technique.staggers
        self.model = cp_model.CpModel()
        self.period = self.model.new_int_var(lower, upper, "period")
        # See ScheduleModel: a stage starts before stage 0 ends and lasts a period at most.
        self.horizon = 2 * upper if self.staggers else upper
        self.heads = problem.heads
        self.first: list[cp_model.IntVar | int] = [
            self.model.new_int_var(self.heads[s], upper, "") if s and self.staggers else 0 for s in range(job.stages)
        ]
        self.forward, self.backward, self.weight = ([self._row() for _ in range(self.count)] for _ in range(3))
        self.on: list[list[list[cp_model.IntVar]]] = []  # [stage][micro-batch][peer]
        for index in range(self.count):
            self._chain(index)
        for before, after in pairwise(range(self.count)):
            self.model.add(self.forward[after][0] >= self.forward[before][0])
        for stage in range(job.stages):
            self._stage(stage)
        self.model.minimize(self.period)

    @staticmethod
    def ops(problem: Problem) -> int:
        """Optional intervals that the model would need: its size."""
        job = problem.job
        kinds = 3 if problem.technique.splits else 2
        peers = sum(len(problem.living_peers(s)) for s in range(job.stages))
        return kinds * job.pipelines * job.micro_batches * peers

    def _row(self) -> list[cp_model.IntVar]:
        return [self.model.new_int_var(head, self.horizon, "") for head in self.heads]

    def _back(self, stage: int) -> int:
        """Duration of what the stage above waits for: I, or B where it isn't split."""
        return self.ticks[stage].input_backward if self.splits else self.ticks[stage].backward

    def _end(self, index: int, stage: int) -> cp_model.LinearExpr:
        if self.splits:
            return self.weight[index][stage] + self.ticks[stage].weight_backward
        return self.backward[index][stage] + self.ticks[stage].backward

    def _chain(self, index: int) -> None:
        add = self.model.add
        forward, backward, weight = self.forward[index], self.backward[index], self.weight[index]
        longest = max(t.optimizer for t in self.ticks)
        for s, ticks in enumerate(self.ticks):
            add(backward[s] >= forward[s] + ticks.forward)
            # Where B is not split, W stands for the end of its first part and nothing else.
            add(weight[s] >= backward[s] + ticks.input_backward)
            if not self.splits:
                add(weight[s] == backward[s] + ticks.input_backward)
            if self.staggers:
                add(forward[s] >= self.first[s])
                add(self._end(index, s) + ticks.optimizer <= self.first[s] + self.period)
            else:
                add(self._end(index, s) + longest <= self.period)
            if s:
                add(forward[s] >= forward[s - 1] + self.ticks[s - 1].forward + self.wire[s - 1])
                add(backward[s - 1] >= backward[s] + self._back(s) + self.wire_back[s - 1])

    def _stage(self, stage: int) -> None:
        """Routes of the stage; one op at a time per peer; memory; the peers' order."""
        model, ticks = self.model, self.ticks[stage]
        peers = self.problem.living_peers(stage)
        limit = self.problem.limits[stage]
        on = [[model.new_bool_var("") for _ in peers] for _ in range(self.count)]
        self.on.append(on)
        parts = [(self.forward, ticks.forward), (self.backward, self._back(stage))]
        if self.splits:
            parts.append((self.weight, ticks.weight_backward))
        held = [
            (self.forward[i][stage], model.new_int_var(ticks.work, self.horizon, ""), self._end(i, stage))
            for i in range(self.count)
        ]
        for row in on:
            model.add_exactly_one(row)
        for q in range(len(peers)):
            model.add_no_overlap(
                model.new_optional_fixed_size_interval_var(starts[i][stage], length, on[i][q], "")
                for starts, length in parts
                for i in range(self.count)
            )
            if limit is not None and limit < self.count:
                spans = [model.new_optional_interval_var(*held[i], on[i][q], "") for i in range(self.count)]
                model.add_cumulative(spans, [1] * self.count, limit)
            # What a peer runs fits between the stage's first start and the period's end.
            load = sum(on[i][q] for i in range(self.count)) * ticks.work
            if self.staggers:
                model.add(load + ticks.optimizer <= self.period)
            else:
                model.add(self.heads[stage] + load + max(t.optimizer for t in self.ticks) <= self.period)
            for i in range(self.count if q else 0):
                model.add(sum(on[j][q - 1] for j in range(i)) >= on[i][q])
        # Redundant: all peers together.
        model.add_cumulative(
            [
                model.new_fixed_size_interval_var(starts[i][stage], length, "")
                for starts, length in parts
                for i in range(self.count)
            ],
            [1] * (len(parts) * self.count),
            len(peers),
        )
        if limit is not None and limit * len(peers) < self.count:
            model.add_cumulative(
                [model.new_interval_var(*span, "") for span in held], [1] * self.count, limit * len(peers)
            )

    def read(self, solver: cp_model.CpSolver) -> Schedule:
        """The schedule of a solution.

        Which pipeline a micro-batch belongs to is free too, and chosen so that few are re-routed:
        each goes home to the pipeline that runs most of it, while that still takes any.
        """
        job, problem = self.problem.job, self.problem
        routes = [
            [
                next(p for q, p in enumerate(problem.living_peers(s)) if solver.value(self.on[s][i][q]))
                for s in range(job.stages)
            ]
            for i in range(self.count)
        ]
        room = {p: list(range(job.micro_batches))[::-1] for p in range(job.pipelines)}
        names: dict[int, tuple[int, int]] = {}
        wishes = sorted((-route.count(p), i, p) for i, route in enumerate(routes) for p in room)
        for _, i, p in wishes:
            if i not in names and room[p]:
                names[i] = (p, room[p].pop())
        ops = []
        for i, route in enumerate(routes):
            for s, ticks in enumerate(self.ticks):
                place = (*names[i], s, Worker(route[s], s))
                ops.append(Op("F", *place, solver.value(self.forward[i][s]), ticks.forward))
                back = solver.value(self.backward[i][s])
                if self.splits:
                    ops.append(Op("I", *place, back, ticks.input_backward))
                    ops.append(Op("W", *place, solver.value(self.weight[i][s]), ticks.weight_backward))
                else:
                    ops.append(Op("B", *place, back, ticks.backward))
        return Schedule.build(problem, whole_backwards(problem, ops))


# -- a slice: is there an order of its ops that meets the target? ------------------------------------


class SliceModel:
    """A feasibility question, to be answered within the windows of `room`."""

    def __init__(self, room: SliceWindows) -> None:
        self.room = room
        self.model = cp_model.CpModel()
        frame = room.frame
        self.starts = {key: self.model.new_int_var(low, high, "") for key, (low, high) in room.windows.items()}
        for one, then, lag in frame.links:
            if one in self.starts and then in self.starts:
                self.model.add(self.starts[then] >= self.starts[one] + lag)
        for worker, row in frame.rows.items():
            inside = [key for key in row if key in self.starts]
            if inside:
                self.model.add_no_overlap(
                    self.model.new_fixed_size_interval_var(self.starts[key], frame.length(key), "") for key in inside
                )
                self._memory(row, worker.stage)
        for key, start in self.starts.items():
            self.model.add_hint(start, frame.starts[key])

    def _memory(self, row: list[OpKey], stage: int) -> None:
        """At most `limit` activations at once, counting those that reach into the slice.

        An F after the slice waits for the release whose rank is `limit` less. Where that release
        is inside, its rank is open, so that F and all F's before it are counted too.
        """
        room, frame = self.room, self.room.frame
        limit = frame.limit(stage)
        forwards = [key for key in row if key[0] == "F"]
        if limit is None or len(forwards) <= limit:
            return
        last = frame.kinds[-1]
        releases = [key for key in row if key[0] == last]
        waiting = max(
            (rank for rank in range(limit, len(forwards)) if releases[rank - limit] in self.starts), default=-1
        )
        held = []
        for rank, forward in enumerate(forwards):
            release = (last, forward[1], stage)
            reaches = release not in room.earliest and (frame.place[forward] < room.end or rank <= waiting)
            if reaches:
                begin, end = self._start(forward), self._start(release) + frame.length(release)
                size = self.model.new_int_var(0, 2 * room.target, "")
                held.append(self.model.new_interval_var(begin, size, end, ""))
        if len(held) > limit:
            self.model.add_cumulative(held, [1] * len(held), limit)

    def _start(self, key: OpKey) -> cp_model.LinearExprT:
        if key in self.starts:
            return self.starts[key]
        return self.room.earliest[key] if key in self.room.earliest else self.room.latest[key]

    def read(self, solver: cp_model.CpSolver) -> ScheduleGraph:
        """The whole schedule with the slice as solved."""
        inside = {key: solver.value(start) for key, start in self.starts.items()}
        return self.room.frame.with_starts({**self.room.earliest, **inside, **self.room.latest})


# -- a relaxation: the peers of a stage as one pool --------------------------------------------------

# Its optimum bounds the period for every routing.
#
# Take any valid schedule, with any routing, and let a stage have L living peers, each of which can
# hold C activations at most, A of them with an I to end. Sort the stage's F starts, its I (or B)
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
# It forgets that F, I and W of a micro-batch share a worker, and that memory is not shared. Where
# peers differ in speed, an op lasts as long as on the fastest of them: each of the above holds all
# the more for one that takes longer. What it gains is that all of its ops are ordered beforehand: no
# routes, little to branch on.


class PooledModel:
    """Looks for a relaxed period of `lower` to `upper` ticks, O included."""

    def __init__(self, problem: Problem, lower: int, upper: int) -> None:
        self.problem = problem
        self.model = cp_model.CpModel()
        self.period = self.model.new_int_var(lower, upper, "period")
        job = problem.job
        self.count = job.pipelines * job.micro_batches
        self.kinds = "FIW" if problem.technique.splits else "FI"
        # See ScheduleModel: a stage starts before stage 0 ends and lasts a period at most.
        horizon = 2 * upper if problem.technique.staggers else upper
        self.starts: dict[tuple[str, int], list[cp_model.IntVar]] = {}
        for stage, head in enumerate(problem.heads):
            for kind in self.kinds:
                self.starts[kind, stage] = [self.model.new_int_var(head, horizon, "") for _ in range(self.count)]
            self._pool(stage)
            self._span(stage, head, upper)
            self._chain(stage)
        self.model.minimize(self.period)

    @staticmethod
    def ops(problem: Problem) -> int:
        """Starts in the model: its size."""
        job = problem.job
        return (3 if problem.technique.splits else 2) * job.pipelines * job.micro_batches * job.stages

    def _duration(self, kind: str, stage: int) -> int:
        ticks = self.problem.fastest[stage]
        if kind == "F":
            return ticks.forward
        if kind == "W":
            return ticks.weight_backward
        return ticks.input_backward if self.problem.technique.splits else ticks.backward

    def _pool(self, stage: int) -> None:
        """The order of the stage's ops, its peers and their memory together."""
        add = self.model.add
        peers = len(self.problem.living_peers(stage))
        intervals = []
        for kind in self.kinds:
            row, length = self.starts[kind, stage], self._duration(kind, stage)
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
        for kind, most in ("I", None if ahead == held else ahead), (self.kinds[-1], held):
            later = [] if most is None else self.starts["F", stage][most * peers :]
            for release, forward in zip(self.starts[kind, stage], later, strict=False):
                add(forward >= release + self._duration(kind, stage))

    def _span(self, stage: int, head: int, upper: int) -> None:
        """The stage within the period."""
        ticks = self.problem.fastest
        last = self.kinds[-1]
        end = self.starts[last, stage][-1] + self._duration(last, stage)
        if not self.problem.technique.staggers:
            self.model.add(end + self.problem.longest_optimizer <= self.period)
        elif stage == 0:
            self.model.add(end + ticks[0].optimizer <= self.period)
        else:
            first = self.model.new_int_var(head, upper, f"first{stage}")
            self.model.add(self.starts["F", stage][0] >= first)
            self.model.add(end + ticks[stage].optimizer <= first + self.period)

    def _chain(self, stage: int) -> None:
        """Backward after forward, W after I, and both after what the neighbour sends."""
        add, job = self.model.add, self.problem.job
        for k in range(self.count):
            add(self.starts["I", stage][k] >= self.starts["F", stage][k] + self._duration("F", stage))
            if "W" in self.kinds:
                add(self.starts["W", stage][k] >= self.starts["I", stage][k] + self._duration("I", stage))
            if stage:
                above = stage - 1
                sent = self.starts["F", above][k] + self._duration("F", above) + job.transfer_ticks[above]
                add(self.starts["F", stage][k] >= sent)
                back = self.starts["I", stage][k] + self._duration("I", stage) + job.backward_transfer_ticks[above]
                add(self.starts["I", above][k] >= back)

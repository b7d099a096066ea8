"""What is left of a routed problem once everything that is interchangeable has been taken out.

With the routing given, only a micro-batch's *route* (the worker of each stage) matters for time,
not its name or home. Micro-batches of one route form a class. Two reductions, both exact:

Order inside a class. There is an optimal schedule in which, on every stage, the F's of a class run
in one and the same order, and so do its I's (or B's) and its W's. Proof: take any schedule, and on
each stage sort the class's F starts, I starts and W starts each on their own; give the k-th of each
to the k-th micro-batch. All of them run on the same worker, so no op moves in time and nothing
overlaps, and the number of activations held (F's started less W's ended) stays as it was. Each
precedence "every b_j follows its a_j by d" survives sorting: at least k of the a's lie d before the
k-th smallest b, so the k-th smallest a does.

Pipelines that repeat others. If a class is alone on all of its workers and another class has at
least as many micro-batches, on workers as fast, the former can be left out and its ops given the times of the
latter's first micro-batches. Proof: those ops are a subset of what one worker runs without overlap
and within memory; they start no earlier and end no later than the stage does already, so neither
the period nor the makespan grows. Leaving ops out can't make an optimum worse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from openrecycle.planner.jobs.job import Problem, StageTicks, Worker
from openrecycle.planner.plans.routing import Routes, assign
from openrecycle.planner.plans.schedule import Op, Schedule


class StartTicks(NamedTuple):
    """Start ticks, each [micro-batch index][stage]; the index is pipeline x micro_batches + micro-batch.

    weight: start of W; where B is not split, the end of the first I ticks of B.
    """

    forward: list[list[int]]
    backward: list[list[int]]
    weight: list[list[int]]


@dataclass(frozen=True)
class Reduction:
    """A problem with its routing, by classes.

    kept: the classes to solve for, each a list of micro-batch indices in the order in which they
    are to run. copies: micro-batch index -> the kept one whose times it takes.
    """

    problem: Problem
    routes: Routes
    kept: tuple[tuple[int, ...], ...]
    copies: dict[int, int]

    @classmethod
    def of(cls, problem: Problem, routes: Routes | None = None) -> Reduction:
        """routes: as planner.plans.routing.assign gives them, which is the default."""
        routes = assign(problem) if routes is None else routes
        job = problem.job
        classes: dict[tuple[int, ...], list[int]] = defaultdict(list)
        # By micro-batch first, so that a class of several pipelines takes turns among them.
        for index in sorted(range(len(routes[0])), key=lambda i: (i % job.micro_batches, i)):
            classes[tuple(row[index] for row in routes)].append(index)
        users: dict[Worker, int] = defaultdict(int)
        for route in classes:
            for stage, pipeline in enumerate(route):
                users[Worker(pipeline, stage)] += 1
        alone = [r for r in classes if all(users[Worker(p, s)] == 1 for s, p in enumerate(r))]
        kept = {r: c for r, c in classes.items() if r not in set(alone)}
        copies: dict[int, int] = {}
        for route in sorted(alone, key=lambda r: (-len(classes[r]), r)):
            members = classes[route]
            donor = next(
                (c for r, c in kept.items() if len(c) >= len(members) and _ticks(problem, r) == _ticks(problem, route)),
                None,
            )
            if donor is None:
                kept[route] = members
            else:
                copies.update(zip(members, donor, strict=False))
        return cls(problem, routes, tuple(map(tuple, kept.values())), copies)

    @property
    def ops(self) -> int:
        """Compute ops to solve for."""
        kinds = 3 if self.problem.technique.splits else 2
        return kinds * self.problem.job.stages * sum(map(len, self.kept))

    def by_worker(self) -> dict[Worker, list[tuple[int, ...]]]:
        """The kept classes (their micro-batches) of each worker that runs any."""
        table: dict[Worker, list[tuple[int, ...]]] = defaultdict(list)
        for members in self.kept:
            for stage, row in enumerate(self.routes):
                table[Worker(row[members[0]], stage)].append(members)
        return dict(table)

    def times_of(self, schedule: Schedule) -> StartTicks | None:
        """`schedule` in the order described above; None when it is routed otherwise."""
        job = self.problem.job
        count = len(self.routes[0])
        times = StartTicks(*([[0] * job.stages for _ in range(count)] for _ in range(3)))
        for op in schedule.compute_ops():
            index = op.pipeline * job.micro_batches + op.micro_batch
            if self.routes[op.stage][index] != op.worker.pipeline:
                return None
            if op.kind == "F":
                times.forward[index][op.stage] = op.start
            elif op.kind == "W":
                times.weight[index][op.stage] = op.start
            else:
                times.backward[index][op.stage] = op.start
                if op.kind == "B":
                    times.weight[index][op.stage] = op.start + self.problem.worker_ticks(op.worker).input_backward
        self._sort(times)
        return times

    def _sort(self, times: StartTicks) -> None:
        """The k-th start of each kind and stage to the k-th micro-batch of each class.

        Between the classes of one worker, W's follow the order of their I's, which is no loss
        either: they are equally long, and nothing but memory, a count, follows them.
        """
        for stage in range(self.problem.job.stages):
            for members in self.kept:
                for table in (times.forward, times.backward):
                    for index, start in zip(members, sorted(table[i][stage] for i in members), strict=True):
                        table[index][stage] = start
        for worker, classes in self.by_worker().items():
            stage = worker.stage
            guests = sorted((i for c in classes for i in c), key=lambda i: times.backward[i][stage])
            for index, start in zip(guests, sorted(times.weight[i][stage] for i in guests), strict=True):
                times.weight[index][stage] = start

    def schedule(self, times: StartTicks) -> Schedule:
        """The whole problem's schedule, copies included. See `whole_backwards` for B."""
        return Schedule.build(self.problem, whole_backwards(self.problem, list(self._ops(times))))

    def _ops(self, times: StartTicks) -> Iterator[Op]:
        job, splits = self.problem.job, self.problem.technique.splits
        for index in range(len(self.routes[0])):
            source = self.copies.get(index, index)
            pipeline, micro_batch = divmod(index, job.micro_batches)
            for stage in range(job.stages):
                worker = Worker(self.routes[stage][index], stage)
                ticks = self.problem.worker_ticks(worker)
                place = (pipeline, micro_batch, stage, worker)
                yield Op("F", *place, times.forward[source][stage], ticks.forward)
                if splits:
                    yield Op("I", *place, times.backward[source][stage], ticks.input_backward)
                    yield Op("W", *place, times.weight[source][stage], ticks.weight_backward)
                else:
                    yield Op("B", *place, times.backward[source][stage], ticks.backward)


def _ticks(problem: Problem, route: tuple[int, ...]) -> list[StageTicks]:
    """Op times on each worker of a route."""
    return [problem.worker_ticks(Worker(p, s)) for s, p in enumerate(route)]


def whole_backwards(problem: Problem, ops: list[Op]) -> list[Op]:
    """The same times with B for I and W on each worker where the split gains nothing.

    That is a worker each of whose W's directly follows its own I, with no op upstream that starts
    before the W has ended and its gradient has been sent: so as few workers as possible split.
    """
    wire = problem.job.backward_transfer_ticks
    at = {(op.kind, op.pipeline, op.micro_batch, op.stage): op for op in ops}
    split = set()
    for op in ops:
        if op.kind != "I":
            continue
        weight = at["W", op.pipeline, op.micro_batch, op.stage]
        upstream = at.get(("I", op.pipeline, op.micro_batch, op.stage - 1))
        if weight.start != op.end or (upstream and upstream.start < weight.end + wire[op.stage - 1]):
            split.add(op.worker)
    whole = []
    for op in ops:
        if op.kind == "F" or op.worker in split:
            whole.append(op)
        elif op.kind == "I":
            duration = problem.worker_ticks(op.worker).backward
            whole.append(op._replace(kind="B", duration=duration))
        elif op.kind == "B":
            whole.append(op)
    return whole


def routes_of(schedule: Schedule) -> Routes:
    """Who runs what in `schedule`, in the form of planner.plans.routing.assign."""
    job = schedule.problem.job
    routes = [[0] * (job.pipelines * job.micro_batches) for _ in range(job.stages)]
    for op in schedule.compute_ops():
        if op.kind == "F":
            routes[op.stage][op.pipeline * job.micro_batches + op.micro_batch] = op.worker.pipeline
    return tuple(map(tuple, routes))


def proven_for_routing(problem: Problem, bound: int) -> str:
    """What to say of a schedule that is optimal for its routing, and perhaps not over all."""
    counted = "" if problem.limits_are_exact else " where each micro-batch takes its larger part all along"
    return (
        f"no better schedule exists for this routing{counted}; "
        f"over all routings the proven lower bound is {problem.job.units(bound)}"
    )

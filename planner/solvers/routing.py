"""Routing: which living peer runs which micro-batch at each stage; and `Reduction`, a smaller problem for given routes.

A micro-batch stays in its own pipeline wherever that worker lives (and is not much slower than its
peers). The others go round-robin to the living peers of the stage, micro-batch by micro-batch, so that
each peer's guests are spread over the iteration and peers' loads differ by at most one. Where peers are
of unequal speed each guest goes where the load in time stays least, so a slow worker takes fewer, and
these are spread over the iteration as well. A worker may be so slow that its own micro-batches alone would
make the period longer than its peers need it to be (see `least_load`); it sends the rest of them to its peers.

With the routing given, only a micro-batch's *route* (the worker of each stage) matters for time,
not its name or home. Micro-batches of one route form a class. `Reduction` removes what is interchangeable. It does so
in two ways, and the optimum stays the same:

Order inside a class. There is an optimal schedule in which, on every stage, the F's of a class run
in one and the same order, and so do its I's (or B's) and its W's. Proof: take any schedule, and on
each stage sort the class's F starts, I starts and W starts each on their own; give the k-th of each
to the k-th micro-batch. All of them run on the same worker, so no op moves in time and nothing
overlaps, and what is held, which follows from how many F's have started and I's and W's ended, stays as it was. Each
precedence "every b_j follows its a_j by d" survives sorting: at least k of the a's lie d before the
k-th smallest b, so the k-th smallest a does.

Pipelines that repeat others. If a class is alone on all of its workers and another class has at
least as many micro-batches, on workers as fast, the former can be left out and its ops given the times of the
latter's first micro-batches. Proof: those ops are a subset of what one worker runs without overlap
and within memory; they start no earlier and end no later than the stage does already, so neither
the period nor the makespan grows. Leaving ops out can't make an optimum worse.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle, pairwise

from openrecycle.planner.jobs.job import Problem, StageTicks, Worker
from openrecycle.planner.plans.schedule import MicroBatch, Op, Schedule, inputs

# -- which living peer runs which micro-batch at each stage -------------------------------------

Routes = tuple[tuple[int, ...], ...]


def assign(problem: Problem) -> Routes:
    """Choose the routes: assign(problem)[stage][pipeline * micro_batches + micro_batch] is the worker's pipeline."""
    job = problem.job
    longest = least_load(problem) if job.speeds else 0
    routes = []
    for stage in range(job.stages):
        keeps = dict.fromkeys(problem.living_peers(stage), job.micro_batches)
        if job.speeds:
            work = _work(problem, stage)
            keeps = {p: min(n, longest // work[p]) for p, n in keeps.items()}
        row = [p for p in range(job.pipelines) for _ in range(job.micro_batches)]
        away = {p: n for p in range(job.pipelines) if (n := job.micro_batches - keeps.get(p, 0))}
        hosts = _hosts(problem, stage, sum(away.values()), keeps)
        for micro_batch in range(job.micro_batches):
            for pipeline, n in away.items():
                # Those sent away are spread over the iteration: all of a dead worker's, some of a slow worker's.
                if (micro_batch + 1) * n // job.micro_batches > micro_batch * n // job.micro_batches:
                    row[pipeline * job.micro_batches + micro_batch] = next(hosts)
        routes.append(tuple(row))
    return tuple(routes)


def least_load(problem: Problem) -> int:
    """Return the fewest ticks in which every stage can do its F's, I's and W's, however its peers share them."""
    total = problem.job.pipelines * problem.job.micro_batches
    return max(_shared(list(_work(problem, s).values()), total) for s in range(problem.job.stages))


def _work(problem: Problem, stage: int) -> dict[int, int]:
    """Return the ticks of one micro-batch by living peer."""
    return {p: problem.worker_ticks(Worker(p, stage)).work for p in problem.living_peers(stage)}


def _shared(work: list[int], total: int) -> int:
    """Return the least time in which workers that need `work` ticks each can do `total` micro-batches."""
    return bisect_left(range(total * min(work)), True, key=lambda time: sum(time // ticks for ticks in work) >= total)


def _hosts(problem: Problem, stage: int, guests: int, keeps: dict[int, int]) -> Iterator[int]:
    """Yield the pipelines of the peers that take the stage's guests, in the order of the guests.

    keeps: how many of its own micro-batches each peer runs.
    """
    work = _work(problem, stage)
    if len(set(work.values())) == 1:
        return cycle(work)
    loads = [((keeps[p] + 1) * work[p], place, p) for place, p in enumerate(work)]
    heapq.heapify(loads)
    share = dict.fromkeys(work, 0)
    for _ in range(guests):
        load, place, p = loads[0]
        share[p] += 1
        heapq.heapreplace(loads, (load + work[p], place, p))
    # Peer p's k-th guest of n is due at (2 k + 1) / 2 n of the iteration.
    due = [((2 * k + 1) / (2 * n), place, p) for place, (p, n) in enumerate(share.items()) for k in range(n)]
    return (p for _, _, p in sorted(due))


# -- a routed problem without what is interchangeable -------------------------------------------


# (F, I or W; micro-batch; stage). Where B is not split, it is called I here. Micro-batches are numbered over all
# pipelines: pipeline * micro_batches + micro-batch.
OpKey = tuple[str, int, int]
Starts = Mapping[OpKey, int]  # ticks
# (first op, second op, ticks): the second starts at least so many ticks after the start of the first
Link = tuple[OpKey, OpKey, int]


@dataclass(frozen=True)
class Reduction:
    """A problem with its routing, reduced to the classes that have to be solved.

    kept: the classes to solve, each a list of micro-batch indices in the order in which they run.
    copies: for each micro-batch that is left out, the kept one whose times it takes.
    """

    problem: Problem
    routes: Routes
    kept: tuple[tuple[int, ...], ...]
    copies: dict[int, int]

    @classmethod
    def of(cls, problem: Problem, routes: Routes | None = None) -> Reduction:
        """Reduces `problem`. routes: as `assign` gives them, which is the default."""
        routes = assign(problem) if routes is None else routes
        job = problem.job
        classes: dict[tuple[int, ...], list[int]] = defaultdict(list)
        # Sorted by micro-batch first, so that the pipelines of a class take turns.
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

    @cached_property
    def lengths(self) -> dict[OpKey, int]:
        """Ticks of each op to solve for, on the worker of its route."""
        out: dict[OpKey, int] = {}
        for index in chain.from_iterable(self.kept):
            for stage, row in enumerate(self.routes):
                own = lengths_of(self.problem, self.problem.worker_ticks(Worker(row[index], stage)))
                out.update(((kind, index, stage), ticks) for kind, ticks in own.items())
        return out

    @cached_property
    def links(self) -> list[Link]:
        """What each op needs of its own micro-batch, and the order inside each class."""
        links = [*chains(self.problem, self.lengths)]
        for before, after in chain.from_iterable(map(pairwise, self.kept)):
            for stage in range(self.problem.job.stages):
                for kind in kinds_of(self.problem):
                    links.append(((kind, before, stage), (kind, after, stage), self.lengths[kind, before, stage]))
        return links

    def by_worker(self) -> dict[Worker, list[tuple[int, ...]]]:
        """Returns by worker the kept classes that it runs, as their micro-batches."""
        table: dict[Worker, list[tuple[int, ...]]] = defaultdict(list)
        for members in self.kept:
            for stage, row in enumerate(self.routes):
                table[Worker(row[members[0]], stage)].append(members)
        return dict(table)

    def starts_of(self, schedule: Schedule) -> Starts:
        """Reads the starts from a schedule with these routes, sorted inside each class as described above. Where B is
        whole, W starts after the first I ticks.

        Between the classes of one worker, W's follow the order of their I's. That loses nothing either: they last
        equally long, and only memory depends on them, by how many have ended.
        """
        found: dict[OpKey, int] = {}
        for op in schedule.compute_ops():
            index = op.pipeline * self.problem.job.micro_batches + op.micro_batch
            found["I" if op.kind == "B" else op.kind, index, op.stage] = op.start
            if op.kind == "B":
                found["W", index, op.stage] = op.start + self.problem.worker_ticks(op.worker).input_backward
        starts: dict[OpKey, int] = {}

        def give(kind: str, stage: int, members: Sequence[int]) -> None:
            """Gives the k-th start of these micro-batches to the k-th of them."""
            ascending = sorted(found[kind, i, stage] for i in members)
            starts.update(((kind, i, stage), start) for i, start in zip(members, ascending, strict=True))

        for members in self.kept:
            for stage in range(self.problem.job.stages):
                give("F", stage, members)
                give("I", stage, members)
        if self.problem.technique.splits:
            for (_, stage), classes in self.by_worker().items():
                backs = {i: starts["I", i, stage] for i in chain.from_iterable(classes)}
                give("W", stage, sorted(backs, key=backs.__getitem__))
        return starts

    def schedule(self, starts: Starts) -> Schedule:
        """Makes the schedule of the whole problem, copies included."""
        every = {key: starts[key] for key in self.lengths}
        for copy, source in self.copies.items():
            for stage in range(self.problem.job.stages):
                every.update(((kind, copy, stage), every[kind, source, stage]) for kind in kinds_of(self.problem))
        homes = [divmod(index, self.problem.job.micro_batches) for index in range(len(self.routes[0]))]
        return schedule_of(self.problem, every, homes, self.routes)


def kinds_of(problem: Problem) -> str:
    """The kinds of op to solve for; where B is not split, it is called I."""
    return "FIW" if problem.technique.splits else "FI"


def lengths_of(problem: Problem, ticks: StageTicks) -> dict[str, int]:
    """Return the ticks of each kind that `kinds_of` names."""
    return (
        dict(zip("FIW", ticks, strict=False)) if problem.technique.splits else {"F": ticks.forward, "I": ticks.backward}
    )


def chains(problem: Problem, lengths: Mapping[OpKey, int]) -> Iterator[Link]:
    """Yield what each op needs of its own micro-batch."""
    for kind, index, stage in lengths:
        for of, source, lag in inputs(kind, stage, problem.job):
            yield (of, index, source), (kind, index, stage), lengths[of, index, source] + lag


def schedule_of(
    problem: Problem, starts: Starts, homes: Sequence[MicroBatch], routes: Sequence[Sequence[int]]
) -> Schedule:
    """Make the schedule that a solver has found. homes: by micro-batch. See `_whole_backwards` for B."""
    ops = []
    for (kind, index, stage), start in starts.items():
        worker = Worker(routes[stage][index], stage)
        name = "B" if kind == "I" and not problem.technique.splits else kind
        length = problem.worker_ticks(worker).by_kind[name]
        ops.append(Op(name, *homes[index], stage, worker, start, length))
    return Schedule.build(problem, _whole_backwards(problem, ops))


def _ticks(problem: Problem, route: tuple[int, ...]) -> list[StageTicks]:
    """Return the op times on each worker of a route."""
    return [problem.worker_ticks(Worker(p, s)) for s, p in enumerate(route)]


def _whole_backwards(problem: Problem, ops: list[Op]) -> list[Op]:
    """Put B for I and W, at the same times, on each worker where the split gains nothing.

    On such a worker each W directly follows its own I, and no op upstream starts before the W has ended and the
    gradient has been sent. So as few workers as possible split.
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
    """Read the routes from a schedule, in the form of `assign`."""
    job = schedule.problem.job
    routes = [[0] * (job.pipelines * job.micro_batches) for _ in range(job.stages)]
    for op in schedule.compute_ops():
        if op.kind == "F":
            routes[op.stage][op.pipeline * job.micro_batches + op.micro_batch] = op.worker.pipeline
    return tuple(map(tuple, routes))


def proven_for_routing(problem: Problem, bound: int, *, exact: bool) -> str:
    """Return the message for a schedule that is optimal for its routing, and perhaps not over all routings. exact: the
    proof covers all schedules that fit in memory; else only those that keep to the problem's limits."""
    counted = "" if exact else " where each micro-batch takes its larger part all along"
    return (
        f"no better schedule exists for this routing{counted}; "
        f"over all routings the proven lower bound is {problem.job.units(bound)}"
    )

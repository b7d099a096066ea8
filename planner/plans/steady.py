"""How long an iteration takes when workers keep to a plan's order, whatever ops take by now.

A plan's times are a forecast; what workers keep to is the order of their ops. When ops take longer
than was planned, the order still runs, and this says how fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Problem
from openrecycle.planner.plans.schedule import Op, Schedule, inputs

_Node = int


def steady_period(schedule: Schedule, job: Job | None = None) -> float:
    """Ticks from one iteration to the next once they repeat, with the op times and transfers of `job`.

    Every op begins as soon as its worker and its inputs allow it, a stage's steps when its last peer
    has no W left, and each worker's next iteration after its own step. So many iterations are played
    through as it takes a delay to reach every stage and come back, twice; between the middle and the
    end their mean is taken. It is no longer than the schedule's period when the times are as planned.

    job: on the schedule's grid; None: that of the schedule. Raises InputError when the order has a
    worker wait for itself, as no valid schedule does.
    """
    problem = schedule.problem
    timed = Problem(job or problem.job, problem.failed, problem.technique, problem.memory)
    ops, waits, order = _graph(schedule, timed)
    ticks = [_ticks(timed, op) for op in ops]
    free = dict.fromkeys(schedule.ops, 0)
    rounds = 4 * timed.job.stages + 8
    last_ends = []
    for _ in range(rounds):
        ends = [0] * len(ops)
        for node in order:
            op = ops[node]
            begin = max(free[op.worker], max((ends[before] + delay for before, delay in waits[node]), default=0))
            free[op.worker] = ends[node] = begin + ticks[node]
        last_ends.append(max(free.values()))
    half = rounds // 2
    return (last_ends[-1] - last_ends[-1 - half]) / half


def _ticks(problem: Problem, op: Op) -> int:
    own = problem.worker_ticks(op.worker)
    times = {"F": own.forward, "I": own.input_backward, "W": own.weight_backward, "B": own.backward}
    return times[op.kind] if op.kind != "O" else own.optimizer


def _graph(schedule: Schedule, problem: Problem) -> tuple[list[Op], list[list[tuple[_Node, int]]], Sequence[_Node]]:
    """All ops; of each those that it waits for beside the one before it on its worker, with the delay;
    and an order in which none comes before one that it waits for."""
    job = problem.job
    ops: list[Op] = []
    previous: dict[_Node, _Node] = {}
    found: dict[tuple[str, int, int, int], _Node] = {}
    last: dict[int, list[_Node]] = {}
    for worker in problem.living_workers():
        row = [op for op in schedule.ops.get(worker, ()) if op.kind != "O"]
        for place, op in enumerate([*row, Op("O", worker.pipeline, -1, worker.stage, worker, 0, 0)]):
            if place:
                previous[len(ops)] = len(ops) - 1
            if op.kind != "O":
                found["I" if op.kind == "B" else op.kind, op.pipeline, op.micro_batch, op.stage] = len(ops)
            elif place:
                last.setdefault(worker.stage, []).append(len(ops) - 1)
            ops.append(op)
    waits: list[list[tuple[_Node, int]]] = []
    for op in ops:
        if op.kind == "O":
            waits.append([(before, 0) for before in last.get(op.stage, ())])
            continue
        key = (op.pipeline, op.micro_batch)
        waits.append([(found[kind, *key, stage], lag) for kind, stage, lag in inputs(op.kind, op.stage, job)])
    return ops, waits, _sorted(waits, previous)


def _sorted(waits: Sequence[Sequence[tuple[_Node, int]]], previous: dict[_Node, _Node]) -> list[_Node]:
    """Raises InputError where there is a cycle."""
    after: list[list[_Node]] = [[] for _ in waits]
    missing = [0] * len(waits)
    for node, befores in enumerate(waits):
        for before in {b for b, _ in befores} | ({previous[node]} if node in previous else set()):
            after[before].append(node)
            missing[node] += 1
    ready, out = deque(node for node, count in enumerate(missing) if not count), list[_Node]()
    while ready:
        node = ready.popleft()
        out.append(node)
        for later in after[node]:
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    if len(out) < len(waits):
        raise InputError("plan", "an order in which ops wait for each other", "one that can be run")
    return out

"""Two loops of their own that hear of a new plan at different times, and that are used wrongly.

Run as `python -m tests.agent.agreeing_loop RANK SHARED`; says, a JSON line each, what it met.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed

from openrecycle.agent.messages.protocol import Deployment
from openrecycle.agent.monitoring.heartbeat import Status
from openrecycle.agent.own_loops.own_loop import OwnLoop
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan

dist: Any = torch.distributed
JOB = Job.uniform(1, 2, 3)
HEARS_IN = (1, 3)
"""By rank: the iteration in which it hears of generation 2."""


def deployed(generation: int, job: Job, technique: Technique, living: tuple[str, ...]) -> tuple[Deployment, Plan]:
    plan = make_plan(Problem(job, frozenset(), technique, MemoryLimit("uniform")), solver="list")
    fields: dict[str, Any] = {"generation": generation, "plan_fingerprint": plan.fingerprint}
    return Deployment(**fields, living=living, failed=()), plan


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(rank: int, shared: str) -> None:
    both = ("W0_0", "W0_1")
    known = {
        1: deployed(1, JOB, Technique.ADAPTIVE, both),
        2: deployed(2, JOB, Technique.STAGGERED, both),
        3: deployed(3, JOB, Technique.STAGGERED, (both[0],)),
        4: deployed(4, Job.uniform(1, 2, 4), Technique.STAGGERED, both),
    }
    newest, status = [1], Status()
    loop = OwnLoop(Worker(0, rank), JOB, status, lambda: known[newest[0]], lambda _, s: time.sleep(s), lambda _: None)

    def enter(name: str) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{shared}-{name}", rank=rank, world_size=2)

    def run(iteration: int) -> list[str]:
        kinds = []
        for op in loop.begin(iteration):
            kinds.append(op.kind)
            if op.source:
                assert op.source == (both[1 - rank], 1 - rank)
                assert float(op.receive()) == 100 * iteration + 10 * op.micro_batch + (op.kind == "F")
            if op.destination:
                op.send(torch.tensor(100.0 * iteration + 10 * op.micro_batch + (op.kind == "F")))
            if op.kind == "O":
                assert op.peers == {both[rank]: 3}
                newest[0] = max(newest[0], 2 if iteration >= HEARS_IN[rank] else 1)
                assert op.reduce(measure=lambda: 0.1 + rank) == 0.1 + 1.1
        return kinds

    def wrong(name: str, iteration: int, act: Any = None) -> None:
        try:
            ops = loop.begin(iteration)
            if act is not None:
                act(ops)
        except Exception as error:
            say(wrong=name, error=type(error).__name__, sentence=str(error))

    wrong("no group", 0)
    enter("first")
    for iteration in range(6):
        kinds = run(iteration)
        say(iteration=iteration, generation=loop.generation, kinds=kinds)
    say(timed=sorted(status.times.take()))
    wrong("iteration", 9)
    loop.begin(6)
    wrong("twice", 6)
    enter("second")
    wrong("left", 6, lambda ops: (next(ops), next(ops)) and loop.begin(7))
    enter("third")
    run(6)
    newest[0] = 3
    say(ran=run(7))
    wrong("other workers", 8)
    wrong("lost", 8)
    newest[0] = 4
    enter("fourth")
    wrong("another grid", 8)
    newest[0] = 2
    enter("fifth")
    wrong("left out", 8, lambda ops: [op.receive() for op in ops if op.source])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

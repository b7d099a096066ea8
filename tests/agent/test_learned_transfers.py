"""Transfers of shapes that nobody declared: over real gloo groups, each worker in a thread, in any valid order."""

from __future__ import annotations

import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.own_loops.own_loop import LearnedTransfers
from openrecycle.agent.transport.group import Devices, GlooGroup
from openrecycle.agent.transport.transfers import GenerationGroups, Script
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.schedule import MicroBatch, Schedule
from tests.agent.test_ordered_transfers import random_schedule
from tests.conftest import examples

dist: Any = torch.distributed
ITERATIONS = 3
TIMEOUTS = Timeouts(transfer=30.0, group=40.0)


def lines_of(store: Any, me: Worker, living: list[Worker]) -> GenerationGroups:
    group = GlooGroup(store, "world", living.index(me), living, TIMEOUTS, Devices("127.0.0.1"))
    return GenerationGroups(me, group, group, None, {worker: i for i, worker in enumerate(living)})


def label(iteration: int, kind: str, key: MicroBatch, stage: int) -> list[torch.Tensor]:
    """What a stage sends of a micro-batch: as many tensors as its number says, of its own shape; the type by kind."""
    number = float(((iteration * 2 + "FI".index(kind)) * 10 + key[0]) * 10 + key[1])
    dtype = torch.float64 if kind == "F" else torch.float32
    return [torch.full((stage + 1, i + 1), number, dtype=dtype) for i in range(stage + 1)]


def live(schedule: Schedule, lines: GenerationGroups) -> None:
    script, me = Script.of(schedule, lines.me), lines.me
    transfers = LearnedTransfers(lines, schedule.problem.job)
    for iteration in range(ITERATIONS):
        transfers.begin(iteration, script)
        for op in script.ops:
            key = op.pipeline, op.micro_batch
            if op.kind not in "FIB":
                continue
            kind = "F" if op.kind == "F" else "I"
            source, to = (script.before, script.after) if kind == "F" else (script.after, script.before)
            if key in source:
                arrived = transfers.receive(kind, key)
                expected = label(iteration, kind, key, me.stage - 1 if kind == "F" else me.stage + 1)
                assert len(arrived) == len(expected)
                for got, wanted in zip(arrived.values(), expected, strict=True):
                    assert got.dtype == wanted.dtype and torch.equal(got, wanted)
            if key in to:
                transfers.send(kind, key, dict(enumerate(label(iteration, kind, key, me.stage))))
        transfers.let_go(iteration)
    transfers.let_go()


@given(seed=st.integers(0, 2**32 - 1), coupled=st.booleans())
@examples(30)
def test_every_message_arrives_where_it_is_wanted(seed: int, *, coupled: bool) -> None:
    draw = random.Random(seed)
    job = Job.uniform(draw.randint(1, 3), draw.randint(2, 4), draw.randint(1, 4))
    dead = {worker for worker in job.workers() if draw.random() < 0.25}
    for stage in range(job.stages):
        dead.discard(Worker(draw.randrange(job.pipelines), stage))
    schedule, store = random_schedule(seed, job, frozenset(dead), coupled=coupled), dist.HashStore()
    living = sorted(schedule.ops)
    with ThreadPoolExecutor(len(living)) as threads:
        formed = list(threads.map(lambda me: lines_of(store, me, living), living))
        list(threads.map(lambda lines: live(schedule, lines), formed))


def test_another_shape_than_before_is_refused() -> None:
    job, store = Job.uniform(1, 2, 2), dist.HashStore()
    living = list(job.workers())
    schedule = random_schedule(1, job, frozenset(), coupled=True)
    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(lambda me: lines_of(store, me, living), living)
    transfers = LearnedTransfers(first, job)
    transfers.begin(0, Script.of(schedule, first.me))
    transfers.send("F", (0, 0), {0: torch.zeros(2, 3)})
    for other in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(InputError) as caught:
            transfers.send("F", (0, 1), {0: other})
        assert "float32[2, 3]" in str(caught.value)


def test_an_output_is_let_go_when_its_gradient_is_there() -> None:
    """Not only after the iteration, when those of all its micro-batches are."""
    job, store = Job.uniform(1, 2, 2), dist.HashStore()
    living = list(job.workers())
    schedule = random_schedule(1, job, frozenset(), coupled=True)
    with ThreadPoolExecutor(2) as threads:
        lines = list(threads.map(lambda me: lines_of(store, me, living), living))
        first, second = (LearnedTransfers(mine, job) for mine in lines)
        for transfers, mine in zip((first, second), lines, strict=True):
            transfers.begin(0, Script.of(schedule, mine.me))
        keys = [(op.pipeline, op.micro_batch) for op in Script.of(schedule, lines[0].me).ops if op.kind == "F"]
        outputs = {key: torch.ones(3) for key in keys}
        kept = {key: weakref.ref(output) for key, output in outputs.items()}
        for key in keys:
            first.send("F", key, {0: outputs.pop(key)})

        def answer() -> None:
            for key in keys:
                second.send("I", key, second.receive("F", key))

        answered = threads.submit(answer)
        for key in keys:
            first.receive("I", key)
            assert kept[key]() is None
        answered.result()

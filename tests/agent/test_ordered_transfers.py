"""Messages without tags: whatever valid order ops run in, each receive gets the message it is for, and
nobody waits for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.transport.communicator import TaggedTransfers
from openrecycle.agent.transport.transfers import PREFETCH, Script
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.schedule import MicroBatch, Op, Schedule
from tests.agent.virtual_wires import Deadlock, Labelled, LabelledByOrder, Mispaired, Round, train
from tests.conftest import examples


def random_schedule(seed: int, job: Job, dead: frozenset[Worker], *, coupled: bool) -> Schedule:
    """Any order that the precedences allow, any living peer for each micro-batch: no planner's habits in it."""
    draw = random.Random(seed)
    keys = [(p, m) for p in range(job.pipelines) for m in range(job.micro_batches)]
    living = [w for w in job.workers() if w not in dead]
    where = {(k, s): draw.choice([w for w in living if w.stage == s]) for k in keys for s in range(job.stages)}
    done: set[tuple[str, MicroBatch, int]] = set()
    ops: dict[Worker, list[Op]] = {w: [] for w in living}
    waiting = [(kind, k, s) for k in keys for s in range(job.stages) for kind in ("FB" if coupled else "FIW")]
    last = job.stages - 1

    def able(op: tuple[str, MicroBatch, int]) -> bool:
        kind, key, stage = op
        if kind == "F":
            return stage == 0 or ("F", key, stage - 1) in done
        if kind == "W":
            return ("I", key, stage) in done
        return ("F", key, stage) in done and (stage == last or (kind, key, stage + 1) in done)

    while waiting:
        op = draw.choice([o for o in waiting if able(o)])
        waiting.remove(op)
        done.add(op)
        kind, key, stage = op
        ops[where[key, stage]].append(Op(kind, *key, stage, where[key, stage], len(done), 1))
    end = len(done) + 1
    problem = Problem(job, dead, Technique.ADAPTIVE if coupled else Technique.STAGGERED, MemoryLimit("none"))
    return Schedule(problem, {w: (*ops[w], Op("O", w.pipeline, -1, w.stage, w, end, 0)) for w in living})


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, list[Round]]:
    """A schedule, and rounds of it: whole ones, what a death leaves of one, and ones that turn out to be void."""
    job = Job(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    dead: set[Worker] = set()
    for worker in draw(st.lists(st.sampled_from(list(job.workers())), max_size=4, unique=True)):
        if sum(w.stage == worker.stage for w in dead) < job.pipelines - 1:
            dead.add(worker)
    schedule = random_schedule(draw(st.integers(0, 10**6)), job, frozenset(dead), coupled=draw(st.booleans()))
    rounds = []
    keys = [(p, m) for p in range(job.pipelines) for m in range(job.micro_batches)]
    for number in range(draw(st.integers(1, 3))):
        some = draw(st.none() | st.frozensets(st.sampled_from(keys))) if number == 0 else None
        void = {}
        if draw(st.booleans()):
            void = {w: draw(st.integers(0, len(schedule.ops[w]))) for w in sorted(schedule.ops)}
        rounds.append(Round(some, void, draw(st.frozensets(st.sampled_from(keys), max_size=2))))
    return schedule, rounds


def parts_of(schedule: Schedule, seed: int) -> dict[Worker, tuple[Worker, ...]]:
    """In some stages two workers swap what they do, or one does both."""
    draw, parts = random.Random(seed), dict[Worker, tuple[Worker, ...]]()
    for stage in range(schedule.problem.job.stages):
        living = [w for w in schedule.ops if w.stage == stage]
        if len(living) > 1:
            one, other = draw.sample(living, 2)
            parts |= draw.choice(({}, {one: (other,), other: (one,)}, {one: (), other: (other, one)}))
    return parts


@examples(60)
@given(run=runs(), width=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_every_receive_gets_its_message_and_nobody_waits_for_ever(
    run: tuple[Schedule, list[Round]], width: int, seed: int
) -> None:
    schedule, rounds = run
    job = schedule.problem.job
    parts = parts_of(schedule, seed)
    wires = train(schedule, rounds, width=width, seed=seed, runs=parts)
    per_key = (job.stages - 1) * (width + (width + 1) // 2)  # the second of three tensors has no gradient
    all_keys = frozenset((p, m) for p in range(job.pipelines) for m in range(job.micro_batches))
    expected = sum(len((all_keys if r.keys is None else r.keys) - r.left_out) for r in rounds) * per_key
    connections = 2 * sum(len(Script.of(schedule, w, parts).neighbours) for w in schedule.ops) // 2
    assert wires.messages == expected + connections and wires.tags <= {0}
    for stage in range(job.stages):
        busy = {
            w for w in schedule.ops if w.stage == stage and any(len(schedule.ops[p]) > 1 for p in parts.get(w, (w,)))
        }
        told = {Script.of(schedule, w, parts).alone for w in schedule.ops if w.stage == stage}
        assert told == (busy if len(busy) == 1 else {None}), "all peers say the same"


@pytest.mark.parametrize("failed", ["", "W1_1", "W0_0 W2_2", "W1_0 W1_1 W1_2"])
def test_plans_that_are_run(failed: str) -> None:
    """As the planner makes them; receives stay few."""
    job = Job(3, 3, 4)
    catalog = Catalog(job, Technique.STAGGERED, MemoryLimit("uniform"))
    plan, _ = catalog.plan_for({Worker.parse(name) for name in failed.split()})
    wires = train(plan.schedule(), [Round()] * 2, width=1, seed=1)
    assert wires.messages >= 2 * 2 * 2 * 12
    assert 1 < wires.most <= 2 * PREFETCH


@pytest.mark.parametrize("alone", [True, False])
def test_sums_are_copied_from_who_alone_has_any(alone: bool) -> None:
    """Of an iteration of which something is left, it need not be who runs that."""
    ours, other = Worker(0, 1), Worker(1, 1)
    schedule = random_schedule(1, Job(2, 2, 2), frozenset(), coupled=False)
    parts = {ours: (ours, other), other: ()} if alone else {}
    wires = train(schedule, [Round(), Round(frozenset({(0, 0)}))], width=1, seed=0, runs=parts)
    _, *found = [kinds[0] for kinds in wires.sums["stage1"]]  # with the first one they connect
    whole, left = found[:4], found[4:]
    assert whole == ["from 0" if alone else "sum"] * 3 + ["sum"], "three buckets, and who lacks state"
    assert left == ["sum"] * 4


class _Impatient(Labelled, TaggedTransfers):
    """Posts what it wants in its own order, as only tags allow."""


@pytest.mark.parametrize(
    ("kind", "connects", "fault"), [(_Impatient, True, Mispaired), (LabelledByOrder, False, Deadlock)]
)
def test_without_the_order_it_goes_wrong(kind: type[Labelled], connects: bool, fault: type[Exception]) -> None:
    """The wires notice: each half of the protocol is needed. Unless they connect first, workers do so when they have
    something to say, as NCCL does by itself."""
    found: list[type[BaseException]] = []
    for seed in range(20):
        schedule = random_schedule(seed, Job(3, 3, 3), frozenset(), coupled=False)
        try:
            train(schedule, [Round()], width=1, seed=seed, kind=kind, connects=connects)
        except AssertionError as error:
            found.append(type(error))
    assert found.count(fault) >= 3

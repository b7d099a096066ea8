"""Layers over stages: the bound over all partitions, the partitions that are chosen, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.job import (
    Job,
    LayerProfile,
    MemoryLimit,
    Over,
    Problem,
    StageProfile,
    Technique,
    Worker,
    balanced,
    joined,
)
from openrecycle.planner.jobs.words import gigabytes, layers_moved
from openrecycle.planner.layers.migration import CopyCost
from openrecycle.planner.layers.partition import best_relayout, lay_out, layer_bounds, staffed, with_stages
from openrecycle.planner.layers.room import LayerRoom
from openrecycle.planner.plans.bounds import Bound, period_bound
from openrecycle.planner.plans.packed import pack, unpack
from openrecycle.planner.plans.plan import JobDoc, Plan, job_doc
from openrecycle.planner.solvers.base import Run
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.golden import golden

TIMES = (0.5, 1.0, 1.25, 2.0, 3.0)
SPEEDS = (0.5, 0.75, 1.5)


@st.composite
def layered(draw: st.DrawFn, *, stages: int = 3, layers: int = 6, pipelines: int = 3, speeds: bool = True) -> Job:
    """Small jobs of uneven layers: zero-length ops and steps, transfers each their own, reductions, bytes, speeds."""
    n_stages, n_pipelines = draw(st.integers(1, stages)), draw(st.integers(1, pipelines))
    n_layers = draw(st.integers(n_stages, layers))
    time, more = st.sampled_from(TIMES), draw(st.booleans())

    def layer() -> LayerProfile:
        i, w = draw(st.tuples(st.sampled_from((0.0, *TIMES)), st.sampled_from((0.0, *TIMES))).filter(any))
        made = LayerProfile(draw(time), i, w, draw(st.sampled_from((0.0, 0.5, 2.0))))
        if not more:
            return made
        return replace(
            made,
            transfer=draw(st.sampled_from((0.0, 0.25, 1.0, 3.0))),
            backward_transfer=draw(st.sampled_from((None, 0.0, 0.5))),
            reductions=tuple(draw(time) for _ in range(n_pipelines)) if draw(st.booleans()) else (),
            activation_bytes=draw(st.integers(0, 9)),
            weight_backward_bytes=draw(st.integers(0, 9)),
            weight_bytes=draw(st.integers(0, 9)),
        )

    places = [Worker(p, s) for p in range(n_pipelines) for s in range(n_stages)]
    own = draw(st.dictionaries(st.sampled_from(places), st.sampled_from(SPEEDS), max_size=2)) if speeds else {}
    return Job(
        n_pipelines,
        n_stages,
        draw(st.integers(1, 5)),
        layers=tuple(layer() for _ in range(n_layers)),
        capacity_bytes=(draw(st.integers(25, 90)),) * n_stages,
        speeds=tuple(own.items()),
    )


def partitions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield tuple(b - a for a, b in pairwise(ends))


def shortest(job: Job, dead: frozenset[Worker], technique: Technique, memory: MemoryLimit) -> tuple[int, int] | None:
    """Over all partitions: the least proven bound, and the shortest of some plans; None: none has a plan."""
    bounds, periods = [], []
    for partition in partitions(len(job.layers), job.stages):
        try:
            problem = Problem(job.with_partition(partition), dead, technique, memory)
        except InfeasibleError:
            continue
        bounds.append(period_bound(problem))
        periods.append(ListScheduler(compiled=False).solve(problem, Run(0)).schedule.period)
    return (min(bounds), min(periods)) if bounds else None


def dead_of(draw: st.DataObject, job: Job) -> frozenset[Worker]:
    out: set[Worker] = set()
    for worker in draw.draw(st.lists(st.sampled_from(list(job.workers())), max_size=4, unique=True)):
        if sum(w.stage == worker.stage for w in out) < job.pipelines - 1:
            out.add(worker)
    return frozenset(out)


REROUTING = (Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED)
MEMORIES = ("1f1b", "uniform", "none", "1", "2", "bytes")


@examples(150)
@given(data=st.data(), job=layered(), technique=st.sampled_from(REROUTING), memory=st.sampled_from(MEMORIES))
def test_no_partition_beats_the_bound(data: st.DataObject, job: Job, technique: Technique, memory: str) -> None:
    dead, limit = dead_of(data, job), MemoryLimit(memory)
    best = shortest(job, dead, technique, limit)
    counts = tuple(job.pipelines - sum(w.stage == s for w in dead) for s in range(job.stages))
    bound = layer_bounds(job, technique, limit).least(counts)
    if best is None:
        assert bound is None
        return
    assert bound is not None and bound.ticks <= best[0] <= best[1]


@examples(100)
@given(data=st.data(), job=layered(), technique=st.sampled_from(REROUTING), memory=st.sampled_from(MEMORIES))
def test_the_layout_is_one_of_the_best_and_keeps_within_its_bound(
    data: st.DataObject, job: Job, technique: Technique, memory: str
) -> None:
    dead, limit = dead_of(data, job), MemoryLimit(memory)
    best = shortest(job, dead, technique, limit)
    if best is None:
        with pytest.raises(InfeasibleError):
            lay_out(job, dead, technique=technique, memory=limit)
        return
    found = lay_out(job, dead, technique=technique, memory=limit)
    assert found.bound.ticks <= period_bound(found.problem) <= found.period
    assert sum(found.partition) == len(job.layers) and found.problem.failed == dead
    assert found.moved == layers_moved(job.partition, found.partition)


@examples(60)
@given(
    job=layered(layers=5, pipelines=2, speeds=False),
    technique=st.sampled_from(REROUTING),
    memory=st.sampled_from(MEMORIES),
    data=st.data(),
)
def test_no_layout_of_so_many_workers_beats_the_bound(
    data: st.DataObject, job: Job, technique: Technique, memory: str
) -> None:
    limit = MemoryLimit(memory)
    workers = data.draw(st.integers(job.stages, job.pipelines * job.stages))
    known = []
    for counts in product(range(1, job.pipelines + 1), repeat=job.stages):
        if sum(counts) <= workers:
            dead = frozenset(Worker(p, s) for s, n in enumerate(counts) for p in range(job.pipelines - n))
            known.append(shortest(job, dead, technique, limit))
    periods = [best[1] for best in known if best is not None]
    bounds = [best[0] for best in known if best is not None]
    found = staffed(job, workers, technique=technique, memory=limit)
    if not periods:
        assert found is None
        return
    assert found is not None and found.bound.ticks <= min(bounds) <= min(periods)
    assert sum(found.counts) <= workers and min(found.counts) >= 1


def even(count: int = 44, **more: object) -> Job:
    return Job(3, 4, 6, layers=(LayerProfile(4, 4, 4),) * count, time_unit="ms", **more)  # type: ignore[arg-type]


def test_one_death_costs_its_share_where_memory_is_free() -> None:
    none = MemoryLimit("none")
    full = lay_out(even(), memory=none)
    assert full.partition == (11, 11, 11, 11) and full.moved == 0
    one = lay_out(even(), [Worker(1, 2)], memory=none)
    assert one.partition == (12, 12, 8, 12) and one.moved == 4
    assert full.period / one.period >= 0.89
    two = lay_out(even(), [Worker(1, 2), Worker(0, 1)], memory=none)
    assert full.period / two.period >= 0.80
    three = lay_out(even(), [Worker(1, 2), Worker(0, 1), Worker(2, 0)], memory=none)
    assert full.period / three.period >= 0.72


LAYER = 100_000_000
DEAD = [Worker(1, 2)]


def together(more: int) -> LayerRoom:
    """Twelve workers on one machine that has memory for so many layers more than the 11 of each."""
    has = 12 * (2 + 11) * LAYER + more
    return LayerRoom((2 * LAYER,) * 4, ((LAYER, LAYER),) * 44, (0,) * 44, (4,) * 4, ((has, (3,) * 4, ""),))


def test_layers_move_no_further_than_there_is_memory() -> None:
    """While they move a worker of stage 1 has 14 layers, one of stage 3 12 and the others what they had."""
    free = lay_out(even(), DEAD)
    assert free.partition == (11, 14, 7, 12)
    needed = 3 * (14 - 11) * LAYER + 3 * (12 - 11) * LAYER
    assert lay_out(even(), DEAD, room=together(needed)) == free
    less = lay_out(even(), DEAD, room=together(needed - 3 * LAYER))
    assert (
        less.partition == (11, 12, 9, 12) and free.period < less.period < lay_out(even(), DEAD, over="schedules").period
    )
    assert golden("layers-per-stage-cant-become") in less.refused
    full = lay_out(even(), DEAD, room=together(0))
    assert full.partition == (11, 11, 11, 11) and full.refused == less.refused.replace("16.5 GB", "15.6 GB")
    # In a job whose workers may come to take more than there is, nothing grows.
    assert together(-1).refusal((11, 11, 11, 11), (11, 11, 11, 11), (3, 3, 2, 3)) == ""


def test_each_worker_has_its_own_capacity() -> None:
    each = tuple((14 * LAYER, tuple(int(s == own) for s in range(4)), "") for own in range(4))
    found = lay_out(even(), DEAD, room=replace(together(0), places=each))
    assert found.partition == (11, 12, 9, 12)
    # The activations of 4 micro-batches leave no room for a twelfth layer.
    held = replace(together(0), places=each, activations=(LAYER // 100,) * 44, held=(4,) * 4)
    assert lay_out(even(), DEAD, room=held).partition == (11, 11, 11, 11)


def test_what_is_sharded_is_shared_by_those_who_live() -> None:
    """Two parts of n: one peer less, and each has more."""
    room = replace(together(0), layers=((0, 60),) * 44, beside=(0,) * 4)
    even_again = (11,) * 4
    assert [room.taken(even_again, even_again, (n,) * 4)[0] for n in (1, 2, 3, 4)] == [660, 660, 440, 330]


def test_activations_are_those_of_the_layers_that_run() -> None:
    """Between the last iteration with the old layers and the first with the new ones nothing is in flight."""
    room = LayerRoom((0,) * 2, ((1, 1),) * 4, (10,) * 4, (1,) * 2, ((44, (1, 1), ""),))
    assert room.refusal((2, 2), (2, 2), (1, 1)) == ""
    assert room.refusal((3, 1), (2, 2), (1, 1)), "a layer's state is there twice"
    assert replace(room, places=((45, (1, 1), ""),)).refusal((3, 1), (2, 2), (1, 1)) == ""


def test_a_stage_grows_no_further_than_it_could_go_back_to_a_checkpoint() -> None:
    """While layers move a worker has those that it had as well, and little of each: much of it is sharded."""
    room = LayerRoom((0,) * 2, ((1, 1),) * 4, (0,) * 4, (1,) * 2, ((8, (1, 0), ""), (8, (0, 1), "")), (4,) * 4)
    assert room.refusal((2, 2), (2, 2), (1, 1)) == "" == replace(room, resumed=()).refusal((3, 1), (2, 2), (1, 1))
    assert room.refusal((3, 1), (2, 2), (1, 1))
    assert room.furthest((2, 2), (1, 1), 1) == ((2, 3, 4, 4), (2, 3, 4, 4))
    assert replace(room, places=((12, (1, 0), ""), (8, (0, 1), ""))).refusal((3, 1), (2, 2), (1, 1)) == ""
    # Where there is too little already, only what gets larger is refused.
    little = replace(room, places=((7, (1, 0), ""), (20, (0, 1), "")))
    assert little.refusal((1, 3), (2, 2), (1, 1)) == "" != little.refusal((3, 1), (2, 2), (1, 1))


def test_workers_take_memory_on_the_host_that_they_are_on() -> None:
    """Two machines, on which a worker of each stage began."""
    places = ((9, (1, 1), "a"), (9, (1, 1), "b"), (4, (1, 0), ""))
    room = LayerRoom((0,) * 2, ((1, 1),) * 4, (0,) * 4, (1,) * 2, places)
    assert room.with_hosts([(0, "a"), (0, "b"), (1, "a"), (1, "b")]) == room
    moved = room.with_hosts([(0, "b"), (0, "b"), (1, "a"), (1, "b")])
    assert moved.places == ((9, (0, 1), "a"), (9, (2, 1), "b"), (4, (1, 0), ""))
    assert room.refusal((3, 1), (2, 2), (2, 2)) == ""
    assert replace(moved, places=((9, (0, 1), "a"), (7, (2, 1), "b"))).refusal((3, 1), (2, 2), (2, 2))
    # Nobody is left on the first.
    assert room.with_hosts([(0, "b"), (0, "b"), (1, "b"), (1, "b")]).places[0] == (9, (2, 2), "b")


@given(layered(speeds=False), st.data())
def test_a_partition_that_is_chosen_fits(job: Job, data: st.DataObject) -> None:
    sizes = st.integers(0, 9)
    by_stage = st.tuples(*[sizes] * job.stages)
    layers = data.draw(st.tuples(*[st.tuples(sizes, sizes).map(lambda p: (min(p), max(p)))] * len(job.layers)))
    resumed = data.draw(st.sampled_from([(), tuple(3 * most for _, most in layers)]))
    places = data.draw(st.lists(st.tuples(st.integers(0, 200), by_stage.filter(any), st.just("")), max_size=3))
    room = LayerRoom(
        data.draw(by_stage), layers, tuple(n for n, _ in layers), data.draw(by_stage), tuple(places), resumed
    )
    dead = data.draw(st.sets(st.sampled_from(list(job.workers())), max_size=2))
    present, living = (
        job.partition,
        tuple(sum(w not in dead for w in job.workers() if w.stage == s) for s in range(job.stages)),
    )
    try:
        free = lay_out(job, dead)
    except InfeasibleError:
        return
    found = lay_out(job, dead, room=room)
    refused = room.refusal(free.partition, present, living)
    assert found.refused == refused and room.refusal(found.partition, present, living) == ""
    assert found == free or refused


def test_fewer_layers_move_from_the_partition_in_force() -> None:
    """10 layers over 4 stages: six partitions are equally good by the bound, and the present one is kept."""
    job = Job(2, 4, 32, layers=(LayerProfile(),) * 10)
    for present in ((2, 3, 2, 3), (3, 2, 3, 2)):
        found = lay_out(job, memory=MemoryLimit("none"), present=present)
        assert max(found.partition) == 3
        bounds = layer_bounds(job, Technique.STAGGERED, MemoryLimit("none"))
        assert bounds.partition((2, 2, 2, 2), 10**6, present) == present


def test_a_stage_without_a_living_peer_is_staffed_anew() -> None:
    dead = [Worker(p, 1) for p in range(3)]
    with pytest.raises(InfeasibleError):
        lay_out(even(), dead)
    found = lay_out(even(), dead, over="layouts")
    assert min(found.counts) >= 1 and sum(found.counts) == 9 and found.migrations
    assert {m.takes.stage for m in found.migrations} == {1}
    assert found.over == "layouts" and found.bound.ticks <= found.period


def test_bytes_decide_who_holds_what() -> None:
    """The first layer is so heavy that it fills a worker."""
    heavy = LayerProfile(1, 1, 1, weight_bytes=90, activation_bytes=5, weight_backward_bytes=5)
    light = LayerProfile(1, 1, 1, weight_bytes=10, activation_bytes=5, weight_backward_bytes=5)
    job = Job(2, 2, 4, layers=(heavy, *[light] * 4), capacity_bytes=(100, 100))
    assert lay_out(job, memory=MemoryLimit("bytes")).partition == (1, 4)
    tight = replace(job, capacity_bytes=(95, 59), partition=(), home=(), profiles=(), transfers=())
    with pytest.raises(InfeasibleError):
        lay_out(tight, memory=MemoryLimit("bytes"))


def test_a_pipeline_of_another_depth_keeps_layers_and_micro_batches() -> None:
    job = even()
    fewer = with_stages(job, 3, 11)
    assert fewer is not None and fewer.layers == job.layers
    assert (fewer.stages, fewer.pipelines * fewer.micro_batches) == (3, 18) and fewer.pipelines >= 4
    found = staffed(fewer, 11, technique=Technique.STAGGERED, memory=MemoryLimit("none"))
    assert found is not None and sum(found.counts) == 11
    assert with_stages(job, 3, 2) is None and with_stages(Job.uniform(3, 4, 6), 3, 11) is None


# -- jobs and documents ---------------------------------------------------------------------------------


def test_profiles_follow_from_layers_and_partition() -> None:
    a, b = LayerProfile(0.1, 0.2, 0.3, transfer=0.5), LayerProfile(1, 2, 3, reductions=(0, 1), transfer=2)
    job = Job(2, 2, 2, layers=(a, a, b, a), partition=(3, 1))
    assert job.profiles == (StageProfile(1.2, 2.4, 3.6, reductions=(0, 1)), StageProfile(0.1, 0.2, 0.3))
    assert job.transfers == (2,) and job.ticks_per_unit == 10
    moved = job.with_partition((2, 2))
    assert moved.transfers == (0.5,) and moved.home == (3, 1) and moved.at_home == job
    assert moved.ticks_per_unit == 10 and hash(moved.at_home) == hash(job)
    assert joined(job.layers[:3]) == job.profiles[0]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("partition", {"partition": (1, 2)}),
        ("partition", {"partition": (4, 0)}),
        ("partition", {"partition": (1, 1, 2)}),
        ("home", {"home": (1, 1)}),
        ("profiles", {"profiles": (StageProfile(), StageProfile())}),
        ("transfers", {"transfers": (4,)}),
        ("layers[1].transfer", {"layers": (LayerProfile(), LayerProfile(transfer=-1))}),
        ("layers[0].reductions", {"layers": (LayerProfile(reductions=(1,)), LayerProfile())}),
        ("layers", {"layers": (LayerProfile(),)}),
    ],
)
def test_what_is_no_partition_is_refused(field: str, values: dict[str, object]) -> None:
    layers = (LayerProfile(2, 2, 2),) * 4
    with pytest.raises(InputError) as refused:
        Job(2, 2, 2, **{"layers": layers, **values})  # type: ignore[arg-type]
    assert refused.value.field == field


def test_a_job_without_layers_has_no_partition() -> None:
    with pytest.raises(InputError) as refused:
        Job(2, 2, 2, partition=(1, 1))
    assert refused.value.field == "partition"
    with pytest.raises(InputError):
        Job.uniform(2, 2, 2).with_partition((1, 1))
    with pytest.raises(InputError):
        lay_out(Job.uniform(2, 2, 2))


@examples(50)
@given(layered())
def test_the_document_of_a_job_has_its_layers(job: Job) -> None:
    document = job_doc(job)
    assert JobDoc.model_validate_json(document.model_dump_json()).job() == job
    body = document.model_dump(mode="json")
    del body["profiles"], body["transfers"]
    body.pop("backward_transfers", None)
    assert JobDoc.model_validate(body).job() == job


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_balanced_is_the_best_of_all(work: list[float], stages: int) -> None:
    found = balanced(work, stages)
    if stages > len(work):
        assert found is None
        return

    def largest(partition: tuple[int, ...]) -> float:
        at, out = 0, []
        for n in partition:
            out.append(sum(work[at : at + n]))
            at += n
        return max(out)

    assert found is not None
    assert largest(found) == pytest.approx(min(map(largest, partitions(len(work), stages))))


def test_layers_moved_counts_each_once() -> None:
    assert layers_moved((2, 2), (2, 2)) == 0
    assert layers_moved((1, 1, 2), (2, 1, 1)) == 2


# -- plans ----------------------------------------------------------------------------------------------


def planned(job: Job, *failed: Worker, over: Over = "partitions", memory: str = "uniform") -> Plan:
    layout = lay_out(job, failed, memory=MemoryLimit(memory), over=over)
    return make_plan(layout.problem, solver="list", look_ahead=False, layout=layout)


@examples(60)
@given(
    data=st.data(), job=layered(), technique=st.sampled_from(REROUTING), over=st.sampled_from(("partitions", "layouts"))
)
def test_a_plan_carries_the_bound_and_the_check_proves_it_again(
    data: st.DataObject, job: Job, technique: Technique, over: Over
) -> None:
    dead = dead_of(data, job)
    layout = lay_out(job, dead, technique=technique, memory=MemoryLimit("none"), over=over)
    plan = make_plan(layout.problem, solver="list", look_ahead=False, layout=layout)
    assert check(plan) == []
    assert plan.partition == layout.partition and plan.job == job_doc(job)
    assert plan.metrics.bound_over == over
    assert plan.metrics.lower_bound == job.units(layout.bound.ticks)
    assert Plan.from_json(plan.to_json()) == plan
    assert unpack(pack(plan)).to_json() == plan.to_json()


@examples(60)
@given(data=st.data(), job=layered(), technique=st.sampled_from(REROUTING), memory=st.sampled_from(MEMORIES))
def test_the_check_refuses_a_bound_that_is_not_proven_for_all_partitions(
    data: st.DataObject, job: Job, technique: Technique, memory: str
) -> None:
    """One tick more than the least over all partitions is too much, also where this plan's own bound is above it."""
    dead, limit = dead_of(data, job), MemoryLimit(memory)
    try:
        layout = lay_out(job, dead, technique=technique, memory=limit)
    except InfeasibleError:
        return
    if layout.period <= layout.bound.ticks:
        return
    wrong = replace(layout, bound=Bound(layout.bound.ticks + 1, ""))
    plan = make_plan(layout.problem, solver="list", look_ahead=False, layout=wrong)
    if plan.metrics.lower_bound == plan.metrics.period:
        return
    assert [v.rule for v in check(plan)] == ["unproven"]


def test_the_bound_over_all_workers_is_checked_too() -> None:
    plan = planned(even(), Worker(1, 2), Worker(0, 2), over="layouts", memory="none")
    assert check(plan) == []
    ticks = plan.metrics.lower_bound + 1
    metrics = plan.metrics.model_copy(update={"lower_bound": ticks, "gap": plan.metrics.period / ticks - 1})
    assert any(v.rule == "unproven" for v in check(plan.model_copy(update={"metrics": metrics})))


def test_the_partition_is_part_of_the_fingerprint() -> None:
    job, dead = even(), frozenset({Worker(1, 2)})
    plans = [
        make_plan(Problem(job.with_partition(p), dead), solver="list", look_ahead=False)
        for p in ((11, 11, 11, 11), (12, 12, 8, 12))
    ]
    assert plans[0].job == plans[1].job and plans[0].fingerprint != plans[1].fingerprint
    other = plans[0].model_copy(update={"partition": (12, 12, 8, 12)})
    assert check(other)
    assert "partition" not in json.loads(make_plan(Problem(Job.uniform(2, 2, 2)), solver="list").to_json())


def test_slowdowns_are_against_the_job_as_it_is_cut_without_failures() -> None:
    job = even()
    stay = make_plan(Problem(job, frozenset({Worker(1, 2)})), solver="list", look_ahead=False)
    moved = planned(job, Worker(1, 2))
    assert moved.metrics.period < stay.metrics.period
    assert (1 + moved.metrics.slowdown_vs_best) / (1 + stay.metrics.slowdown_vs_best) == pytest.approx(
        moved.metrics.period / stay.metrics.period
    )
    assert (1 + moved.metrics.slowdown_vs_1f1b) / (1 + stay.metrics.slowdown_vs_1f1b) == pytest.approx(
        moved.metrics.period / stay.metrics.period
    )


def test_a_bound_over_partitions_needs_layers() -> None:
    plan = make_plan(Problem(Job.uniform(2, 2, 2)), solver="list")
    metrics = plan.metrics.model_copy(update={"bound_over": "partitions"})
    assert any(v.rule == "metrics.bound_over" for v in check(plan.model_copy(update={"metrics": metrics})))


@pytest.mark.parametrize(("stages", "transfer"), [(171, 0.0), (12, 0.0), (4, 1_000_000.123456)], ids=str)
def test_what_is_too_large_to_choose_from_is_refused_at_once(stages: int, transfer: float) -> None:
    """It took 9 GB, or minutes that no time limit ended."""
    job = Job.uniform(2, stages, 100, durations={"transfer": transfer}, layers=512)
    with pytest.raises(InputError, match="layers: got 512"):
        lay_out(job, [Worker(0, 1)])
    given = lay_out(job, [Worker(0, 1)], over="schedules")
    assert given.partition == job.partition and given.bound.ticks > 0


def test_the_present_partition_is_tried_however_few_are() -> None:
    """On the largest grids three are."""
    first = [(3, 2, 1, 1), (1, 1, 2, 1), (1, 1, 2, 0), (2, 2, 0, 0), (2, 1, 3, 1), (2, 1, 0, 0)]
    times = [*first, (3, 1, 0, 0), (3, 1, 1, 1), (3, 1, 0, 0), (3, 1, 2, 0), (2, 3, 3, 1)]
    job = Job(3, 4, 6, layers=tuple(LayerProfile(*of) for of in times))
    for technique, memory in ((Technique.ADAPTIVE, "2"), (Technique.DECOUPLED, "1f1b")):
        made = staffed(job, 12, technique=technique, memory=MemoryLimit(memory), effort=1)
        assert made is not None
        assert made.period <= ListScheduler().solve(replace(made.problem, job=job)).schedule.period


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 kB"), (36_400, "36 kB"), (100_000, "0.1 MB"), (12_000_000, "12.0 MB"), (1.5e9, "1.5 GB")]
)
def test_sizes_are_told_in_the_unit_that_shows_them(size: int, text: str) -> None:
    assert gigabytes(size) == text


@pytest.mark.parametrize(
    ("job", "dead", "copies", "heals_in", "counts", "pause"),
    [
        (Job.uniform(3, 2, 4, layers=8), [(0, 1), (1, 1), (2, 1)], (20, 1), 1000.0, (1, 2), 1.0),
        (Job.uniform(3, 4, 4, layers=8), [(0, 0), (1, 0), (0, 1)], (1, 5, 1, 5), 20.0, (1, 1, 1, 0), 1.0),
    ],
)
def test_more_than_the_shortest_plan_by_the_bounds_is_weighed(
    job: Job,
    dead: list[tuple[int, int]],
    copies: tuple[int, ...],
    heals_in: float,
    counts: tuple[int, ...],
    pause: float,
) -> None:
    """A plan as short comes with fewer copies, or a shorter one with failures elsewhere than the bounds say."""
    found = best_relayout(
        job,
        [Worker(*place) for place in dead],
        technique=Technique.STAGGERED,
        memory=MemoryLimit("uniform"),
        cost=lambda _: CopyCost(copies, 1.0),
        heals_in=heals_in,
    )
    assert (found.counts, found.pause) == (counts, pause)
    assert sum(found.partition) == len(job.layers)

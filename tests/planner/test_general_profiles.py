"""What a measured job has beyond one duration per stage: directions, reductions, bytes, speeds."""

from __future__ import annotations

import itertools
import json
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.catalogs.catalog_build import targets
from openrecycle.planner.check import check
from openrecycle.planner.cli import app
from openrecycle.planner.jobs.errors import InfeasibleError, InputError, PlannerError
from openrecycle.planner.jobs.failures import patterns
from openrecycle.planner.jobs.job import Job, LayerProfile, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.layers.partition import layer_bounds
from openrecycle.planner.plans.baseline import reference_period
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.packed import CatalogQuestion
from openrecycle.planner.plans.plan import JobDoc, Plan, job_doc
from openrecycle.planner.plans.schedule import Op, Schedule
from openrecycle.planner.solvers.base import Run, Solution
from openrecycle.planner.solvers.cp_sat import CpSatSolver, PooledModel, rooms, run
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import make_plan, plan_of
from tests.conftest import examples, refuses
from tests.golden import golden
from tests.planner.problems import REROUTING, problems, route

HALF = ((Worker(0, 1), 0.5),)


def solved(problem: Problem) -> Schedule:
    schedule = ListScheduler().solve(problem).schedule
    assert check(schedule) == []
    return schedule


def test_gradients_may_take_longer_than_activations() -> None:
    """One micro-batch, two stages: F, 1 down, F, B of 2, 3 up, B of 2."""
    job = Job(1, 2, 1, transfers=(1.0,), backward_transfers=(3.0,))
    assert reference_period(job) == 1 + 1 + 1 + 2 + 3 + 2
    assert reference_period(replace(job, backward_transfers=(1.0,))) == 8
    assert Job(1, 2, 1, transfers=(1.0,)).backward_transfers == (1.0,)


def test_the_reduction_takes_as_long_as_the_living_peers_make_it() -> None:
    job = Job(3, 1, 2, profiles=(StageProfile(1, 1, 1, 2, reductions=(0, 5, 9)),))
    one_dead, two_dead = frozenset({Worker(0, 0)}), frozenset({Worker(0, 0), Worker(1, 0)})
    lengths = [solved(Problem(job, dead)).ops[Worker(2, 0)][-1].duration for dead in (frozenset(), one_dead, two_dead)]
    assert lengths == [2 + 9, 2 + 5, 2 + 0]


def test_one_pipeline_for_all_keeps_the_reduction_of_the_whole_stage() -> None:
    job = Job(3, 1, 2, profiles=(StageProfile(1, 1, 1, 2, reductions=(0, 5, 9)),))
    assert reference_period(job) == 2 * 3 + 11
    assert Problem(replace(job, pipelines=1)).ticks == Problem(job).ticks


def test_a_slow_worker_runs_longer_and_is_rerouted_less() -> None:
    job = Job(4, 2, 12, speeds=HALF)
    problem = Problem(job, frozenset({Worker(3, 1)}))
    guests = Counter(w for (s, p, _), w in route(problem).items() if (s, p) == (1, 3))
    assert guests == {1: 6, 2: 6}  # 12 of its own take the slow one as long as 24 would the others
    durations = {op.kind: op.duration for op in solved(problem).ops[Worker(0, 1)]}
    assert durations["F"] == 2


def test_guests_are_shared_by_finishing_time() -> None:
    job = Job(4, 1, 10, profiles=(StageProfile(1, 1, 2),), speeds=((Worker(1, 0), 0.8),))
    routes = route(Problem(job, frozenset({Worker(2, 0), Worker(3, 0)})))
    loads = Counter(routes.values())
    # 4 ticks against ceil(1.25) + ceil(1.25) + ceil(2.5) = 7: 26 x 4 = 104, and 15 x 7 would be 105.
    assert loads == {0: 26, 1: 14}


def test_a_slow_worker_is_in_the_bound_and_in_the_reference() -> None:
    job = Job(2, 1, 6, speeds=((Worker(1, 0), 0.5),))
    assert reference_period(job) == 6 * 6
    # It gets 4 of 12: 8 x 3 = 4 x 6 = 24.
    assert period_bound(Problem(job)) == 24 == solved(Problem(job)).period
    assert period_bound(Problem(replace(job, speeds=()))) == 18


def test_a_worker_too_slow_to_help_runs_nothing_and_the_stage_still_steps() -> None:
    job = Job(2, 2, 6, speeds=((Worker(1, 0), 0.02),))
    schedule = solved(Problem(job))
    assert [op.kind for op in schedule.ops[Worker(1, 0)]] == ["O"]
    assert schedule.period < 2 * 6 * 3 + 6


def test_a_slow_worker_keeps_its_own_where_another_stage_takes_as_long() -> None:
    """Sending them away would cost transfers and gain nothing."""
    profiles = (StageProfile(), StageProfile(2, 2, 2))
    routes = route(Problem(Job(2, 2, 6, profiles=profiles, speeds=((Worker(1, 0), 0.5),))))
    assert all(home == worker for (_, home, _), worker in routes.items())


def test_speeds_round_up_to_whole_ticks() -> None:
    problem = Problem(Job(1, 1, 1, speeds=((Worker(0, 0), 0.3),)))
    assert problem.worker_ticks(Worker(0, 0))[:3] == (4, 4, 4)  # 10/3


@pytest.mark.parametrize(("technique", "held"), [("adaptive", 5), ("staggered", 2)])
def test_memory_in_bytes_counts_what_fits_beside_the_weights(technique: str, held: int) -> None:
    profile = StageProfile(activation_bytes=10, weight_backward_bytes=20, weight_bytes=30, optimizer_bytes=20)
    job = Job(1, 1, 8, profiles=(profile,), capacity_bytes=(100,))
    problem = Problem(job, technique=Technique(technique), memory=MemoryLimit("bytes"))
    assert problem.limits == (held,)
    solved(problem)


def test_memory_that_holds_less_than_one_micro_batch_says_how_much() -> None:
    job = Job(1, 1, 2, profiles=(StageProfile(activation_bytes=10, weight_bytes=92),), capacity_bytes=(100,))
    with pytest.raises(InfeasibleError, match=golden("memory-holds-0-8-of")):
        Problem(job, memory=MemoryLimit("bytes"))
    with pytest.raises(InfeasibleError, match=golden("weights-and-optimizer-state-take")):
        Problem(replace(job, profiles=(StageProfile(weight_bytes=101),)), memory=MemoryLimit("bytes"))
    with pytest.raises(InputError, match="capacity_bytes"):
        Problem(replace(job, capacity_bytes=()), memory=MemoryLimit("bytes"))


# Of I only one micro-batch at a time fits, beside what W needs of another.
BARELY = Job(
    1,
    2,
    4,
    profiles=(StageProfile(1, 1, 1, activation_bytes=10, weight_backward_bytes=1),) * 2,
    capacity_bytes=(11, 11),
)


def test_the_bound_is_one_of_what_fits_in_bytes() -> None:
    """What a plan holds is the larger part of a micro-batch for a while only."""
    problem = Problem(BARELY, memory=MemoryLimit("bytes"))
    rows = (
        "F0@0 I0@3 F3@4 W0@5 I3@7 F2@8 W3@9 I2@11 F1@12 W2@14 I1@15 W1@16",
        "F0@1 I0@2 W0@3 F3@5 I3@6 W3@7 F2@9 I2@10 W2@11 F1@13 I1@14 W1@15",
    )
    ops = [
        Op(text[0], 0, int(text[1]), s, Worker(0, s), int(text[3:]), 1)
        for s, row in enumerate(rows)
        for text in row.split()
    ]
    schedule = Schedule.build(problem, ops)
    assert check(schedule) == [] and schedule.period == period_bound(problem) == 17
    for solver in ("list", "cp-sat"):
        plan = make_plan(problem, solver=solver, time_limit=20)
        assert check(plan) == [] and plan.metrics.lower_bound == 17 == plan.metrics.period


def in_bytes(grid: tuple[int, int, int], need: int, keep: int, capacity: int, dead: int) -> Problem:
    profile = StageProfile(activation_bytes=need, weight_backward_bytes=keep)
    job = Job(*grid, profiles=(profile,) * grid[1], capacity_bytes=(capacity,) * grid[1])
    return Problem(job, frozenset(Worker(p, 2) for p in range(dead)), memory=MemoryLimit("bytes"))


@pytest.mark.parametrize(
    ("problem", "by_number", "period"),
    [
        (in_bytes((3, 4, 6), 3, 3, 12, 1), 29, 29),
        (in_bytes((3, 4, 6), 3, 1, 12, 1), 29, 27),
        (in_bytes((3, 4, 6), 3, 2, 12, 1), 29, 28),
        (in_bytes((8, 8, 16), 33, 55, 440, 2), 70, 66),
    ],
)
def test_a_plan_by_bytes_is_made_of_what_fits(problem: Problem, by_number: int, period: int) -> None:
    """Of as many micro-batches as fit if each took its larger part all along, it would be longer."""
    limit = problem.limits[0]
    counted = replace(problem, memory=MemoryLimit(str(limit)))
    assert ListScheduler().solve(counted).schedule.period == by_number
    solution = ListScheduler().solve(problem)
    assert check(solution.schedule) == [] and solution.schedule.period == period


@examples(60)
@given(st.data())
def test_by_bytes_no_worker_locks_and_all_fits(data: st.DataObject) -> None:
    """The list scheduler and CP-SAT, where memory is short: of a little more than one micro-batch."""
    drawn = data.draw(
        problems(techniques=list(REROUTING), memories=["none"], pipelines=2, stages=3, micro_batches=3, speeds=False)
    )
    sizes = st.integers(0, 4)
    profiles = tuple(
        replace(p, activation_bytes=data.draw(sizes), weight_backward_bytes=data.draw(sizes))
        for p in drawn.job.profiles
    )
    capacity = tuple(
        max(1, p.fixed_bytes + p.micro_batch_bytes(splits=True) + data.draw(st.integers(0, 5))) for p in profiles
    )
    job = replace(drawn.job, profiles=profiles, capacity_bytes=capacity)
    problem = replace(drawn, job=job, memory=MemoryLimit("bytes"))
    made = ListScheduler().solve(problem)
    assert check(made.schedule) == [] and period_bound(problem) <= made.schedule.period
    better = CpSatSolver(workers=1).solve(problem, Run(0.1), warm_start=made.schedule)
    assert check(better.schedule) == []
    assert made.bound <= better.bound <= better.schedule.period <= made.schedule.period


@pytest.mark.parametrize(
    ("room", "exact"),
    [
        ((440, 55, 33), True),
        ((440, 33, 55), False),  # (a whole B needs less there)
        (((8 << 50) + 5, 2 << 50, 1 << 50), True),
        # Eight I's need eight bytes more, which 20 bits can't tell.
        ((16 << 56, (2 << 56) + 1, 1 << 56), False),
    ],
)
def test_models_say_whether_they_take_all_that_fits(room: tuple[int, int, int], exact: bool) -> None:
    capacity, need, keep = room
    found, proves = rooms(in_bytes((2, 2, 8), need, keep, capacity, 0), 100)
    assert proves == exact
    for ahead, kept in itertools.product(range(17), repeat=2):
        fits = ahead * need + kept * keep <= capacity
        small = ahead * found[0].need + kept * found[0].keep <= found[0].capacity
        assert small == fits or (small < fits and not exact)


@examples(90)
@given(
    problems(
        techniques=[Technique.DECOUPLED, Technique.STAGGERED],
        memories=["1", "none"],
        pipelines=2,
        stages=3,
        micro_batches=3,
        speeds=False,
    )
)
def test_no_bound_is_above_a_plan_that_fits_in_bytes(problem: Problem) -> None:
    schedule = ListScheduler().solve(problem).schedule
    room = [0] * problem.job.stages
    for worker, held in schedule.peak_bytes.items():
        room[worker.stage] = max(1, room[worker.stage], held)
    each = [p.fixed_bytes + p.micro_batch_bytes(splits=True) for p in problem.job.profiles]
    assume(all(map(operator.ge, room, each)))  # (a split that does not fit is refused, though nobody has to split)
    job = replace(problem.job, capacity_bytes=tuple(room))
    fitting = replace(problem, job=job, memory=MemoryLimit("bytes"))
    assert check(Schedule(fitting, schedule.ops)) == []
    assert period_bound(fitting) <= schedule.period
    assert run(PooledModel(fitting, 0, schedule.period).model, time_limit=30, workers=1, seed=0).solved


def test_a_bound_over_partitions_is_one_of_what_fits_in_bytes() -> None:
    layers = tuple(LayerProfile(**vars(profile)) for profile in BARELY.profiles)
    problem = Problem(replace(BARELY, layers=layers, partition=(1, 1)), memory=MemoryLimit("bytes"))
    least = layer_bounds(problem.job, problem.technique, problem.memory).least((1, 1))
    assert least is not None and least.ticks <= 17
    schedule = solved(problem)
    said = [
        check(plan_of(Solution(schedule, bound, "cp-sat", 0.0, over="partitions"), seconds=0.0))
        for bound in (least.ticks, 18)
    ]
    assert said[0] == [] and len(said[1]) == 1


def test_check_adds_up_the_bytes_itself() -> None:
    """Three activations of 10 at once beside 70 of weights are 100; with 99 the third is too many."""
    job = Job(1, 3, 3, profiles=(StageProfile(activation_bytes=10, weight_bytes=70),) * 3, capacity_bytes=(100,) * 3)
    schedule = solved(Problem(job, technique=Technique.ADAPTIVE, memory=MemoryLimit("bytes")))
    assert schedule.peak_activations[Worker(0, 0)] == 3
    tight = Problem(
        replace(job, capacity_bytes=(99, 100, 100)), technique=Technique.ADAPTIVE, memory=MemoryLimit("bytes")
    )
    found = check(Schedule(tight, schedule.ops))[0]
    assert found.rule == "memory" and "W0_0 holds 100 bytes of 99" in str(found)


def test_a_first_stage_without_input_gradient() -> None:
    first = StageProfile(1, 0, 2)
    job = Job(3, 3, 6, profiles=(first, StageProfile(), StageProfile()))
    for technique in (Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED):
        schedule = solved(Problem(job, frozenset({Worker(1, 0)}), technique))
        assert schedule.period >= period_bound(schedule.problem)


@examples(60)
@given(problems(pipelines=3, stages=3, micro_batches=4))
def test_documents_come_back_exactly(problem: Problem) -> None:
    plan = make_plan(problem, solver="list", look_ahead=False)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.problem() == problem
    assert check(again) == []


def test_documents_of_plain_jobs_say_nothing_new() -> None:
    document = json.loads(job_doc(Job.uniform(2, 2, 2)).model_dump_json())
    assert set(document) == {"pipelines", "stages", "micro_batches", "profiles", "transfers", "time_unit"}
    assert set(document["profiles"][0]) == {"forward", "input_backward", "weight_backward", "optimizer"}
    # Known from before these fields were there: old plans keep their fingerprints.
    assert (
        make_plan(Problem(Job.uniform(3, 4, 6)), solver="list", look_ahead=False).fingerprint
        == "8313b34531a46d4fd9b1e4840cd8e67b"
    )


def document(**changes: Any) -> dict[str, Any]:
    stage = {"forward": 1, "input_backward": 1, "weight_backward": 1, "optimizer": 1, "reductions": [0, 1.5]}
    stage |= {"activation_bytes": 10, "weight_backward_bytes": 5, "weight_bytes": 20, "optimizer_bytes": 40}
    base = {"pipelines": 2, "stages": 2, "micro_batches": 4, "profiles": [stage, stage], "transfers": [0.5]}
    base |= {"backward_transfers": [0.25], "capacity_bytes": 100, "speeds": {"W0_1": 0.5}}
    return base | changes


def test_the_command_line_takes_the_whole_profile(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(document()))
    out = tmp_path / "plan.json"
    arguments = [
        "plan",
        "--profile",
        str(tmp_path / "job.json"),
        "--memory",
        "bytes",
        "--solver",
        "list",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    plan = Plan.load(out)
    assert check(plan) == []
    assert plan.job == JobDoc.model_validate(document())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speeds": {"W0_9": 0.5}}, "speeds: got 'W0_9'"),
        ({"speeds": {"W0_1": 1000}}, "speeds.W0_1: got 1000"),
        ({"backward_transfers": [1, 2]}, "backward_transfers: got 2"),
        ({"capacity_bytes": [1, 2, 3]}, "capacity_bytes: got 3"),
        ({"capacity_bytes": 0}, r"capacity_bytes\[0\]: got 0"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        JobDoc.model_validate(document(**changes)).job()


def longer(stage: dict[str, Any]) -> dict[str, Any]:
    return stage | {"reductions": [1, 2, 3]}


def negative(stage: dict[str, Any]) -> dict[str, Any]:
    return stage | {"reductions": [-1, 2]}


@pytest.mark.parametrize("change", [longer, negative])
def test_wrong_reductions_are_named(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    profiles = [change(stage) for stage in document()["profiles"]]
    with pytest.raises((PlannerError, ValueError), match="reductions"):
        JobDoc.model_validate(document(profiles=profiles)).job()


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
def test_references_are_plans(name: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    sizes = ["--pipelines", "2", "--stages", "4", "--micro-batches", "6"]
    arguments = ["plan", *sizes, "--technique", "fault-free", "--reference", name, "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    plan = Plan.load(out)
    assert check(plan) == []
    assert plan.solver.name == name
    assert plan.metrics.period == {"1f1b": 27, "gpipe": 27, "zb-h1": 21, "zb-h2": 19}[name]


@pytest.mark.parametrize("extra", [["--fail", "W0_0"], ["--memory", "2"], ["--technique", "adaptive"]])
def test_a_reference_takes_no_failure_limit_or_technique(extra: list[str]) -> None:
    sizes = ["--pipelines", "2", "--stages", "4", "--micro-batches", "6", "--reference", "gpipe"]
    result = CliRunner().invoke(app, ["plan", *sizes, *extra])
    assert isinstance(result.exception, InputError)
    assert result.exception.field == extra[0]


def test_with_speeds_every_failure_set_is_its_own_pattern() -> None:
    job = Job(2, 2, 3, speeds=HALF)
    assert {frozenset({w}) for w in job.workers()} == set(patterns(job, 1))
    catalog = Catalog(job, Technique.STAGGERED, MemoryLimit("uniform"))
    for dead in patterns(job, 1):
        catalog.add(make_plan(catalog.problem(dead), solver="list", look_ahead=False))
    for worker in job.workers():
        plan = catalog.find({worker})
        assert plan is not None and plan.failed == (str(worker),)
        assert check(plan) == []


def test_with_speeds_there_is_no_plan_per_count() -> None:
    question = CatalogQuestion(Job(2, 2, 3, speeds=HALF), Technique.STAGGERED, MemoryLimit("uniform"))
    assert len(targets(question, 1)) == 5
    with refuses("--tolerance", 1):
        targets(question, 1, "count")


def test_a_healthy_plan_is_its_own_reference_with_a_slow_worker_too() -> None:
    """The slow worker is in the pipeline that a reference for like pipelines would leave out."""
    job = replace(Job(3, 4, 6), speeds=((Worker(2, 1), 0.5),))
    assert (
        make_plan(Problem(job, memory=MemoryLimit("uniform")), solver="list", look_ahead=False).metrics.slowdown_vs_best
        == 0
    )

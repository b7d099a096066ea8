"""Where failures should be, and how they get there: against brute force, and by properties."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from openrecycle.planner.cli import app
from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.failures import failures_per_stage
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.layers.migration import (
    BoundModel,
    CopyCost,
    LoadModel,
    MigrationPlan,
    best_distributions,
    best_migrations,
    candidates,
    check_copy_cost,
)
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from tests.conftest import examples, refuses
from tests.golden import golden
from tests.planner.problems import MEMORIES, REROUTING, jobs

GRID = Job.uniform(3, 4, 6)


def workers(*names: str) -> list[Worker]:
    return [Worker.parse(name) for name in names]


@st.composite
def models(draw: st.DrawFn) -> BoundModel:
    kind = draw(st.sampled_from((BoundModel, LoadModel)))
    job = draw(jobs(pipelines=4, stages=3, micro_batches=4))
    return kind(job, draw(st.sampled_from(REROUTING)), MemoryLimit(draw(st.sampled_from(MEMORIES))))


def every_distribution(job: Job, total: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(job.pipelines), repeat=job.stages) if sum(c) == total]


@examples(60)
@given(models())
def test_the_model_never_falls_with_the_count(model: BoundModel) -> None:
    for stage in range(model.job.stages):
        periods = [model.period(stage, count) for count in range(model.job.pipelines)]
        assert None not in periods
        assert periods == sorted(periods)  # type: ignore[type-var]
        assert model.period(stage, model.job.pipelines) is None


@examples(60)
@given(models())
def test_each_count_gets_the_shortest_period_of_all_distributions(model: BoundModel) -> None:
    job = model.job
    found = list(best_distributions(model, job.pipelines * job.stages))
    assert len(found) == job.stages * (job.pipelines - 1) + 1  # every stage keeps one worker
    for total, counts in enumerate(found):
        assert sum(counts) == total
        assert model.of(counts) == min(model.of(c) or 0 for c in every_distribution(job, total))
    for one, following in itertools.pairwise(found):
        assert all(a <= b for a, b in zip(one, following, strict=True))


@st.composite
def moves(draw: st.DrawFn) -> tuple[BoundModel, tuple[int, ...], CopyCost, float | None]:
    """A model, the present failures (stages without a living peer among them), a cost, a horizon."""
    model = draw(models())
    job = model.job
    most = job.stages * (job.pipelines - 1)
    counts = draw(
        st.tuples(*[st.integers(0, job.pipelines)] * job.stages).filter(lambda c: sum(c) <= most)  # type: ignore[arg-type]
    )
    size = st.sampled_from((0, 1, 3, 20))
    cost = CopyCost(tuple(draw(size) for _ in range(job.stages)), 2.0)
    return model, counts, cost, draw(st.sampled_from((None, 0.0, 5.0, 40.0, 1000.0)))


@examples(150)
@given(moves())
def test_no_distribution_beats_the_candidates(
    case: tuple[BoundModel, tuple[int, ...], CopyCost, float | None],
) -> None:
    model, present, cost, horizon = case

    def value(period: int, pause: float, moved: int) -> tuple[float, float, float]:
        done = 1 / period if horizon is None else max(0.0, horizon - pause) / period
        return (done, -pause, -moved)

    def brute(counts: tuple[int, ...]) -> tuple[float, float, float]:
        arriving = [max(0, now - after) for now, after in zip(present, counts, strict=True)]
        pause = max(cost.pause(s, n, model.job.pipelines - present[s]) if n else 0.0 for s, n in enumerate(arriving))
        period = model.of(counts)
        assert period is not None
        return value(period, pause, sum(n * cost.state_bytes[s] for s, n in enumerate(arriving)))

    found = candidates(model, present, cost)
    for candidate in found:
        assert sum(candidate.counts) == sum(present)
        assert brute(candidate.counts) == value(candidate.period, candidate.pause, candidate.moved)
    best = max(value(c.period, c.pause, c.moved) for c in found)
    assert best == max(map(brute, every_distribution(model.job, sum(present))))


def check_possible(job: Job, failed: frozenset[Worker], result: MigrationPlan) -> None:
    """Plays the migrations one by one: each takes an empty place, leaves a living one, copies from a living peer."""
    empty = set(failed)
    touched: set[Worker] = set()
    for migration in result.migrations:
        assert migration.worker not in empty
        assert migration.takes in empty
        assert migration.worker.stage != migration.takes.stage
        assert not {migration.worker, migration.takes} & touched  # nobody moves twice
        if migration.source is None:
            assert all(Worker(p, migration.takes.stage) in failed for p in range(job.pipelines))
        else:
            assert migration.source not in failed
            assert migration.source.stage == migration.takes.stage
        touched |= {migration.worker, migration.takes}
        empty.remove(migration.takes)
        empty.add(migration.worker)
    assert not {m.source for m in result.migrations} & {m.worker for m in result.migrations}
    assert result.failed == empty
    assert result.counts == failures_per_stage(empty, job)
    assert result.present == failures_per_stage(failed, job)


@examples(40)
@given(
    job=jobs(pipelines=3, stages=3, micro_batches=3),
    data=st.data(),
    memory=st.sampled_from(MEMORIES),
    technique=st.sampled_from(REROUTING),
    horizon=st.sampled_from((None, 0.0, 10.0, 500.0)),
    size=st.sampled_from((0, 4, 50)),
)
def test_never_worse_than_staying_and_always_possible(
    job: Job, data: st.DataObject, memory: str, technique: Technique, horizon: float | None, size: int
) -> None:
    most = job.stages * (job.pipelines - 1)
    failed = frozenset(data.draw(st.sets(st.sampled_from(list(job.workers())), max_size=most)))
    limit = MemoryLimit(memory)
    result = best_migrations(
        job, failed, technique=technique, memory=limit, cost=CopyCost((size,) * job.stages, 1.0), heals_in=horizon
    )
    check_possible(job, failed, result)
    after = ListScheduler().solve(Problem(job, result.failed, technique, limit)).schedule.period
    assert after == result.period
    assert result.pause >= 0
    assert (result.pause == 0) == (size == 0 or not result.migrations)
    if result.period_now is None:
        assert any(count == job.pipelines for count in result.present)
        return
    stay = ListScheduler().solve(Problem(job, failed, technique, limit)).schedule.period
    assert result.period_now == stay
    if horizon is None:
        assert result.period <= stay
    else:
        seconds = 1 / job.ticks_per_unit  # a slot counts as a second
        gained = max(0.0, horizon - result.pause) / (result.period * seconds) - horizon / (stay * seconds)
        assert result.iterations_gained == pytest.approx(gained)
        assert gained >= 0
    if not result.migrations:
        assert result.failed == failed


def test_two_failures_on_one_stage_are_parted() -> None:
    result = best_migrations(GRID, workers("W0_2", "W1_2"))
    assert (GRID.units(result.period_now or 0), GRID.units(result.period)) == (55, 29)
    assert len(result.migrations) == 1
    assert result.reason == golden("1-migration-shortens-the-period")


def test_a_job_that_heals_soon_is_left_alone() -> None:
    cost = CopyCost((10**9,) * 4, 1e8)
    soon = best_migrations(GRID, workers("W0_2", "W1_2"), cost=cost, heals_in=10)
    assert soon.migrations == ()
    assert soon.reason.startswith(golden("leave-the-2-failures-where-they"))
    assert "heals in 10 s" in soon.reason
    late = best_migrations(GRID, workers("W0_2", "W1_2"), cost=cost, heals_in=1000)
    assert len(late.migrations) == 1
    assert (late.pause, late.period) == (10.0, 29)
    assert late.iterations_gained == pytest.approx(990 / 29 - 1000 / 55)
    assert golden("gains-16-iterations-in-the") in late.reason
    # The same question in milliseconds: 55 ms an iteration, so that 10 s are worth the copy of a small state.
    ms = Job.uniform(3, 4, 6, time_unit="ms")
    assert best_migrations(ms, workers("W0_2", "W1_2"), cost=CopyCost((10**8,) * 4, 1e8), heals_in=10).migrations


def test_a_stage_without_peers_is_staffed_again_from_the_checkpoint() -> None:
    result = best_migrations(GRID, workers("W0_2", "W1_2", "W2_2"))
    assert result.period_now is None
    assert result.iterations_gained is None
    assert result.migrations and all(m.source is None and m.takes.stage == 2 for m in result.migrations)
    assert result.reason.startswith(golden("no-peer-lives-on-stage-2"))
    # Too little time for two loads one after the other: a single one is enough to train.
    one = best_migrations(GRID, workers("W0_2", "W1_2", "W2_2"), cost=CopyCost((10**9,) * 4, 1e9 / 4), heals_in=9)
    assert len(one.migrations) == 1


def test_nothing_failed() -> None:
    result = best_migrations(GRID, [])
    assert (result.migrations, result.reason) == ((), golden("nothing-has-failed"))


def test_a_slow_stage_gives_its_failure_away() -> None:
    profiles = (StageProfile(), StageProfile(3, 3, 3), StageProfile())
    job = Job(4, 3, 8, profiles=profiles)
    result = best_migrations(job, workers("W3_1"))
    assert result.counts[1] == 0
    assert [m.takes for m in result.migrations] == workers("W3_1")


def test_bad_input() -> None:
    with pytest.raises(InputError, match="W3_0"):
        best_migrations(GRID, [Worker(3, 0)])
    with pytest.raises(InputError, match=r"--heals-in: got -1"):
        best_migrations(GRID, [], heals_in=-1)
    with pytest.raises(InputError):
        best_migrations(GRID, [], heals_in=1e290)
    for unit in (0, 5e-324, 1e308):  # 5e-324 / 10 is 0
        with pytest.raises(InputError, match="--unit-seconds"):
            best_migrations(replace(GRID, transfers=(0.5,) * 3), [], unit_seconds=unit)
    with pytest.raises(InputError, match="--technique"):
        best_migrations(GRID, workers("W0_0"), technique=Technique.FAULT_FREE)
    with pytest.raises(InfeasibleError, match=golden("3-living-workers-cant-staff")):
        best_migrations(GRID, list(GRID.workers())[:9])
    with refuses("--state-bytes", 2):
        check_copy_cost(GRID, [1, 2], 1)
    for bandwidth in (0, 1e-308):
        with pytest.raises(InputError, match="--bandwidth"):
            check_copy_cost(GRID, [1], bandwidth)
    for state in (-1, 10**308):
        with pytest.raises(InputError, match="--state-bytes"):
            check_copy_cost(GRID, [state], 1)


ARGS = ["migrations", "--pipelines", "3", "--stages", "4", "--micro-batches", "6", "--fail", "W0_2,W1_2"]


def test_the_command() -> None:
    done = CliRunner().invoke(app, [*ARGS, "--state-bytes", "1e9", "--bandwidth", "1e8", "--heals-in", "1000"])
    assert done.exit_code == 0, done.output
    assert golden("1-migration-shortens-the-period") in done.output
    assert golden("takes-the-place-of-w0") in done.output
    assert "0/0/2/0 now" in done.output
    assert golden("one-slot-is-taken-to") in done.output
    done = CliRunner().invoke(app, [*ARGS, "--json"])
    document = json.loads(done.output)
    assert document["present"] == [0, 0, 2, 0]
    assert (document["period_now"], document["period"], document["pause"]) == (55, 29, 0)
    assert document["migrations"][0]["source"] == "W2_2"
    assert len(document["failed"]) == 2
    assert "'1_0'" in str(CliRunner().invoke(app, [*ARGS, "--state-bytes", "1_0"]).exception)
    done = CliRunner().invoke(app, [*ARGS, "--state-bytes", "1e9,much"])
    assert isinstance(done.exception, InputError)
    assert "--state-bytes: got 'much'" in str(done.exception)


@pytest.mark.parametrize("layers", [[], ["--partition", "auto"]])
def test_copies_cost_what_the_profile_says_unless_the_command_line_does(layers: list[str]) -> None:
    command = ["migrations", "--profile", "gpt-3-medium", "--fail", "W0_2,W1_2", "--memory", "none", "--json", *layers]
    assert json.loads(CliRunner().invoke(app, command).output)["pause"] > 0
    free = json.loads(CliRunner().invoke(app, [*command, "--state-bytes", "0"]).output)
    assert free["pause"] == 0 and free["migrations"]


def test_speeds_and_reductions_count_in_what_is_compared() -> None:
    """A stage whose step reduces slowly among many peers, and a slow worker's place that is filled."""
    slow = Worker(0, 3)
    profiles = tuple(StageProfile(reductions=(0, 3, 3)) if s == 1 else StageProfile() for s in range(4))
    job = Job(3, 4, 6, profiles=profiles, speeds=((slow, 0.5),))
    result = best_migrations(job, [slow, Worker(1, 3)])
    assert result.period == ListScheduler().solve(Problem(job, result.failed)).schedule.period
    assert slow in [m.takes for m in result.migrations]
    assert golden("as-fast-as-those-whose") in result.reason
    assert result.period_now == ListScheduler().solve(Problem(job, frozenset({slow, Worker(1, 3)}))).schedule.period

"""The advisor: predicts each option, and ranks first the one that trains most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.errors import InfeasibleError, InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, StageProfile, Technique, Worker
from openrecycle.planner.simulation.engine import RecoveryCosts
from openrecycle.planner.simulation.planned import PlannedJob
from openrecycle.planner.simulation.policy import Advice, Option, PolicyState, advise, best_option
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples
from tests.golden import golden

JOB = Job.uniform(3, 4, 6)
PLANNED = PlannedJob(JOB, samples=18, memory=MemoryLimit("none"))
COSTS = RecoveryCosts()
ONE = frozenset({Worker(1, 2)})


def test_the_worked_example_is_absorbed() -> None:
    """9 micro-batches on each of two peers instead of 6: as many further as there are bubbles."""
    advice = advise(PolicyState(ONE), PLANNED, COSTS, heals_in=3600)
    assert advice.load.endswith(golden("1f1bs-bubbles-have-room-for-the"))
    samples = [option.samples(3600, PLANNED.full.per_second) for option in advice.options]
    assert samples == pytest.approx(sorted(samples, reverse=True))


@pytest.mark.parametrize("rate", [60.083926340343865, 60.08392634034386, 60.0])
def test_of_options_that_are_worth_the_same_the_one_that_puts_nobody_out_is_best(rate: float) -> None:
    """Rates of two plans with one period, which differ in the last bit."""
    drop, stay = Option("drop the replica", 0.2, rate), Option("re-route", 0.2, min(rate, 60.08392634034386))
    for options in ([drop, stay], [stay, drop]):
        assert best_option(options, 3600, 120) == [stay, drop]
    more = Option("drop the replica", 0.2, rate * 1.001)
    assert best_option([stay, more], 3600, 120) == [more, stay]


def test_room_in_the_bubbles_is_not_called_speed_where_it_is_none() -> None:
    """At `uniform` memory the best plan known is 29 slots, and 1F1B's 27."""
    advice = advise(PolicyState(ONE), PlannedJob(JOB, samples=18), COSTS, heals_in=3600)
    (route,) = [o for o in advice.options if o.name == "re-route"]
    share = route.rate / (18 / 27)
    assert share < 0.99
    assert advice.load.endswith(golden("though-re-routing-reaches-of-its", f"{100 * share:.0f}"))


def test_a_migration_says_who_moves_and_is_planned_as_it_would_be() -> None:
    two = frozenset({Worker(0, 2), Worker(1, 2)})
    advice = advise(PolicyState(two), PLANNED, COSTS, heals_in=3600)
    options = {o.name: o for o in advice.options}
    moved = options["migrate and re-route"]
    assert moved.migrations and all(m.takes in two and m.source == Worker(2, 2) for m in moved.migrations)
    after = two - {m.takes for m in moved.migrations} | {m.worker for m in moved.migrations}
    plan = make_plan(
        Catalog(JOB, Technique.STAGGERED, MemoryLimit("none")).problem(after), solver="list", look_ahead=False
    )
    assert moved.rate == pytest.approx(18 / plan.metrics.period)
    assert moved.rate > options["re-route"].rate
    assert moved.pause == pytest.approx(COSTS.detect + COSTS.recover + COSTS.migrate)


def test_a_copy_that_takes_longer_than_the_repair_moves_nobody() -> None:
    two = frozenset({Worker(0, 2), Worker(1, 2)})
    advice = advise(PolicyState(two), PLANNED, RecoveryCosts(migrate=500), heals_in=400)
    assert "migrate and re-route" not in {o.name for o in advice.options}


def test_the_end_of_a_job_comes_as_late_as_it_trains() -> None:
    """Without two workers of a stage it takes twice as long as with all: a copy pays that would not by then."""
    two = frozenset({Worker(0, 2), Worker(1, 2)})

    def advised(left: float, heals_in: float = 1e6) -> Advice:
        return advise(PolicyState(two), PLANNED, RecoveryCosts(migrate=250), heals_in=heals_in, left=left)

    whole = 20 * PLANNED.full.seconds
    advice = advised(20)
    options = {o.name: o for o in advice.options}
    assert advice.horizon > 1.5 * whole and "migrate and re-route" in options
    assert options["re-route"].samples(advice.horizon, PLANNED.full.per_second) == pytest.approx(20 * 18)
    assert "migrate and re-route" not in {o.name for o in advised(20, heals_in=whole).options}
    assert advised(1e9).horizon == 1e6


def test_it_says_when_bubbles_run_out() -> None:
    two = frozenset({Worker(0, 2), Worker(1, 2)})
    advice = advise(PolicyState(two), PLANNED, COSTS, heals_in=3600)
    assert golden("bubbles-cant-absorb-the-load") in advice.load
    assert "room for 3" in advice.load


def test_a_short_outage_is_not_worth_a_long_pause() -> None:
    """A job with a slow restart but quick re-routing: what is chosen turns with the expected repair."""
    deep = PlannedJob(Job.uniform(4, 6, 12), samples=48)
    dead = frozenset({Worker(0, s) for s in range(6)} | {Worker(1, 0)})
    costs = RecoveryCosts(repartition=300)
    short = advise(PolicyState(dead), deep, costs, heals_in=60)
    long = advise(PolicyState(dead), deep, costs, heals_in=7 * 86400)
    assert short.options[0].pause < 10
    assert long.options[0].rate >= short.options[0].rate
    assert long.options[0].name == "re-partition"


def test_a_checkpoint_is_offered_where_there_is_one() -> None:
    plain = {o.name for o in advise(PolicyState(ONE), PLANNED, COSTS, heals_in=60).options}
    assert golden("restart-from-the-checkpoint") not in plain
    state = PolicyState(ONE, since_checkpoint=100)
    offered = {o.name: o for o in advise(state, PLANNED, COSTS, heals_in=60).options}
    assert offered[golden("restart-from-the-checkpoint")].redo == 100


def test_an_unstaffed_stage_is_migrated_to() -> None:
    column = frozenset(Worker(p, 2) for p in range(3))
    advice = advise(PolicyState(column, since_checkpoint=10), PLANNED, COSTS, heals_in=86400)
    names = {o.name for o in advice.options}
    assert "re-route" not in names and "migrate and re-route" in names
    assert golden("no-worker-of-stage-2") in advice.load


def test_nobody_lives() -> None:
    everyone = frozenset(JOB.workers())
    with pytest.raises(InfeasibleError, match="0 living workers"):
        advise(PolicyState(everyone), PLANNED, COSTS, heals_in=60)


def test_a_job_as_long_as_can_be_has_layers_too() -> None:
    """With six decimals, as an eighth of its op times has, it would be too long."""
    profile = StageProfile(123456789.123, 100000000.001, 100000000.999, 5000.0)
    job = Job(2, 2, 2, profiles=(profile,) * 2, time_unit="us")
    planned = PlannedJob(job, samples=4, memory=MemoryLimit("none"))
    assert planned.layered is not None
    advice = advise(PolicyState(frozenset({Worker(0, 0)})), planned, COSTS, heals_in=36000)
    assert {"re-route", "re-partition"} <= {option.name for option in advice.options}
    assert planned.templates(4) is not None


@pytest.mark.parametrize(
    ("state", "heals_in", "field"),
    [
        (PolicyState(ONE), 0, "heals_in"),
        (PolicyState(ONE), float("nan"), "heals_in"),
        (PolicyState(ONE, since_checkpoint=-1), 1, "since_checkpoint"),
        (PolicyState(frozenset({Worker(9, 9)})), 1, "failed"),
    ],
)
def test_bad_states(state: PolicyState, heals_in: float, field: str) -> None:
    with pytest.raises(InputError) as caught:
        advise(state, PLANNED, COSTS, heals_in=heals_in)
    assert caught.value.field == field


@given(
    st.lists(
        st.builds(Option, st.text(max_size=3), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e3)), min_size=1
    ),
    st.floats(1, 1e6),
    st.floats(0, 1e4),
)
def test_the_best_is_the_best(options: list[Option], horizon: float, before: float) -> None:
    ranked = best_option(options, horizon, before)
    assert sorted(ranked, key=id) == sorted(options, key=id)
    assert ranked[0].samples(horizon, before) == max(o.samples(horizon, before) for o in options)


@examples(25)
@given(st.sets(st.sampled_from(list(JOB.workers())), min_size=1, max_size=6), st.floats(10, 1e5))
def test_any_failures_get_advice(failed: set[Worker], heals_in: float) -> None:
    """While enough live; every option's rate is that of no more than a healthy job."""
    advice = advise(PolicyState(frozenset(failed)), PLANNED, COSTS, heals_in=heals_in)
    assert advice.options and all(0 < o.rate <= 1.001 * PLANNED.full.per_second for o in advice.options)

"""Measured iterations: who is asked for which one, and what is made of what the workers post."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.messages.protocol import MeasuredOps
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.observing import measured_iterations
from openrecycle.app.observing.as_run import as_plan, as_schedule
from openrecycle.app.observing.measured_iterations import MOST_MISSED, UNASKED_SECONDS, Measuring, assemble
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.db.store import Store
from openrecycle.planner.export.picture import Line, Rect, gantt
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.packed import packed
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule
from tests.golden import golden

pytestmark = pytest.mark.processes


def parts_of(
    schedule: Schedule,
    *,
    iteration: int,
    generation: int = 1,
    begin: int = 5_000_000,
    clocks: dict[str, tuple[str, int, int]] | None = None,
) -> list[MeasuredOps]:
    """What workers post who run exactly by `schedule`. clocks: name, offset and uncertainty of some of them."""
    scale = 1000 / schedule.problem.job.ticks_per_unit
    made = []
    for worker, ops in schedule.ops.items():
        clock, offset, uncertainty = (clocks or {}).get(str(worker), ("one", 0, 0))
        first = round(ops[0].start * scale)
        made.append(
            MeasuredOps(
                worker=str(worker),
                incarnation=f"{worker}-a",
                generation=generation,
                iteration=iteration,
                clock=clock,
                started_us=begin + first - offset,
                offset_us=offset,
                uncertainty_us=uncertainty,
                kinds="".join(op.kind for op in ops),
                pipelines=tuple(op.pipeline for op in ops),
                micro_batches=tuple(op.micro_batch for op in ops),
                starts_us=tuple(round(op.start * scale) - first for op in ops),
                durations_us=tuple(round(op.duration * scale) for op in ops),
            )
        )
    return made


def plan_of(here: ConsoleHere, job: JobHere) -> Plan:
    plan = here.console.queries.view(job.job_id).plan
    assert plan is not None
    return plan


class Asking:
    """A Measuring of its own, on a clock that the test turns, of a job that commits one iteration a second."""

    def __init__(self, here: ConsoleHere, job: JobHere) -> None:
        self.now, self.job, self.console = 1000.0, job, here.console
        self.live: LiveJob = here.console.jobs.find(job.job_id)
        self.measuring = Measuring(Store(here.database), here.console.plans.cache.plan, 1.0, clock=lambda: self.now)
        self.committed, self.generation = 0, 1

    def run(self, seconds: int) -> int | None:
        """That many iterations go by; returns which one is wanted then."""
        for _ in range(seconds):
            self.job.commit(self.committed, self.committed, self.generation)
            self.committed += 1
            self.now += 1.0
            self.measuring.consider(self.live)
        return self.measuring.wanted(self.live)

    def post(self, plan: Plan, iteration: int) -> list[str]:
        parts = parts_of(plan.schedule(), iteration=iteration, generation=self.generation)
        return [self.measuring.take(self.live, part) for part in parts]


@pytest.fixture
def asking(here: ConsoleHere) -> Asking:
    return Asking(here, JobHere(here.console, "measured", iterations=2000).register())


def test_an_iteration_ahead_is_asked_for_and_kept(here: ConsoleHere, asking: Asking) -> None:
    assert asking.run(1) is None, "how long iterations take is not known yet"
    wanted = asking.run(2)
    assert wanted is not None and wanted >= asking.committed + 3, "far enough for a heartbeat of everybody's"
    said = asking.post(plan_of(here, asking.job), wanted)
    assert said[0] == golden("1-of-12-workers-are") and said[-1] == f"iteration {wanted} is measured"
    assert asking.measuring.wanted(asking.live) is None
    newest = asking.measuring.newest(asking.live)
    assert newest is not None and (newest.iteration, newest.generation, newest.uncertainty_us) == (wanted, 1, 0)
    again = Measuring(Store(here.database), here.console.plans.cache.plan, 1.0)
    assert again.newest(asking.live) == newest, "it is in the database"


def without_forwards(part: MeasuredOps) -> MeasuredOps:
    if not part.worker.endswith("_0"):
        return part
    kept = [i for i, kind in enumerate(part.kinds) if kind != "F"]
    lists = ("pipelines", "micro_batches", "starts_us", "durations_us")
    columns = {name: tuple(getattr(part, name)[i] for i in kept) for name in lists}
    return part.model_copy(update=columns | {"kinds": "".join(part.kinds[i] for i in kept)})


def without_times(part: MeasuredOps) -> MeasuredOps:
    return part.model_copy(update=dict.fromkeys(("starts_us", "durations_us"), (0,) * len(part.kinds)))


@pytest.mark.parametrize("spoil", [without_forwards, without_times])
def test_an_iteration_that_no_job_can_have_run_is_not_kept(
    here: ConsoleHere, asking: Asking, spoil: Callable[[MeasuredOps], MeasuredOps]
) -> None:
    wanted = asking.run(3)
    assert wanted is not None
    schedule = plan_of(here, asking.job).schedule()
    said = [asking.measuring.take(asking.live, spoil(part)) for part in parts_of(schedule, iteration=wanted)]
    assert "not kept" in said[-1], said[-1]
    again = Measuring(Store(here.database), here.console.plans.cache.plan, 1.0)
    for measuring in (asking.measuring, again):
        assert measuring.iteration(asking.live) is None and measuring.newest(asking.live) is None
    wanted = asking.run(3)
    assert wanted is not None, "another one is asked for"
    asking.post(plan_of(here, asking.job), wanted)
    assert asking.measuring.iteration(asking.live) is not None


def test_without_its_plan_an_iteration_is_not_shown(here: ConsoleHere, asking: Asking) -> None:
    plan = plan_of(here, asking.job)
    wanted = asking.run(3)
    assert wanted is not None
    asking.post(plan, wanted)
    assert asking.measuring.iteration(asking.live) is not None
    here.damage(plan.fingerprint)
    assert asking.measuring.iteration(asking.live) is None
    # Other tests' jobs have the same plan. A damaged one is replaced when it is stored again.
    here.store.put_plan(asking.job.job_id, plan.fingerprint, packed(plan), plan.failed, False)
    assert asking.measuring.iteration(asking.live) is not None


def test_what_a_link_names_is_kept_and_the_rest_is_not(
    here: ConsoleHere, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, seen = plan_of(here, asking.job), []
    for look in (True, False, True, True):
        wanted = asking.run(int(UNASKED_SECONDS) + 3)
        assert wanted is not None
        asking.post(plan, wanted)
        asking.measuring.newest(asking.live, keep=look)
        seen.append(wanted)

    def there(measuring: Measuring) -> list[int]:
        found = {iteration: measuring.kept(asking.live, iteration) for iteration in seen}
        assert all(one.iteration == iteration for iteration, one in found.items() if one)
        return [iteration for iteration, one in found.items() if one]

    kept = [seen[0], seen[2], seen[3]]
    assert there(asking.measuring) == kept
    assert there(Measuring(Store(here.database), here.console.plans.cache.plan, 1.0)) == kept, (
        "a console that is started anew has them, too"
    )
    monkeypatch.setattr(measured_iterations, "MOST_KEPT", 2)
    asking.measuring.kept(asking.live, seen[0])
    wanted = asking.run(int(UNASKED_SECONDS) + 3)
    assert wanted is not None
    asking.post(plan, wanted)
    assert asking.measuring.kept(asking.live, seen[0]), "what was looked at last stays longest"
    assert asking.measuring.kept(asking.live, seen[2]) is None


def test_more_often_while_somebody_looks(here: ConsoleHere, asking: Asking) -> None:
    wanted = asking.run(3)
    assert wanted is not None
    asking.post(plan_of(here, asking.job), wanted)
    assert asking.run(20) is None, "nobody looks, nothing has changed"
    asking.measuring.newest(asking.live, watch=True)
    assert asking.run(3) is not None
    asking.post(plan_of(here, asking.job), asking.measuring.wanted(asking.live) or 0)
    asking.now += UNASKED_SECONDS
    assert asking.run(3) is not None, "once in a while also unasked"


def test_what_does_not_come_is_given_up_and_asked_for_further_ahead(asking: Asking) -> None:
    first = asking.run(3)
    assert first is not None
    lead = first - asking.committed
    while asking.run(1) == first:
        assert asking.committed < 100
    second = asking.measuring.wanted(asking.live)
    assert second is not None and second - asking.committed > lead
    asking.run(1000)
    assert asking.measuring.wanted(asking.live) is None, f"after {MOST_MISSED} it is left alone"


def test_only_what_is_asked_for_counts(here: ConsoleHere, asking: Asking) -> None:
    plan = plan_of(here, asking.job)
    wanted = asking.run(3)
    assert wanted is not None
    assert golden("not-asked-for") in asking.post(plan, wanted + 1)[0]
    part = parts_of(plan.schedule(), iteration=wanted)[0]
    bad: dict[str, dict[str, object]] = {
        "fenced": {"incarnation": "another"},
        "unknown_worker": {"worker": "W9_9"},
        "pipelines: got 3, expected below 3": {"pipelines": (3,) * len(part.kinds)},
        "micro_batches: got 6 for F, expected 0 to 5": {"micro_batches": (6,) * len(part.kinds)},
        "each op is expected once": {"micro_batches": (0,) * (len(part.kinds) - 1) + (-1,)},
    }
    for expected, change in bad.items():
        with pytest.raises(ConsoleError) as error:
            asking.measuring.take(asking.live, part.model_copy(update=change))
        assert expected in (error.value.code, error.value.detail) or expected in error.value.detail
    assert asking.measuring.newest(asking.live) is None


def test_a_change_of_members_makes_a_wish_void(here: ConsoleHere) -> None:
    job = JobHere(here.console, "changes", iterations=2000).register()
    asking = Asking(here, job)
    wanted = asking.run(3)
    assert wanted is not None
    plan = plan_of(here, job)
    job.die("W1_2").heal("W1_2", 2)
    asking.generation = 2
    asking.now += 1
    asking.measuring.consider(asking.live)
    again = asking.measuring.wanted(asking.live)
    for iteration in {wanted, again}:
        part = parts_of(plan.schedule(), iteration=iteration or 0)[0]
        assert golden("not-asked-for") in asking.measuring.take(asking.live, part), "of the generation before"
    assert again is not None, "the new generation is measured without anybody's asking"
    assert asking.post(plan_of(here, job), again)[-1] == f"iteration {again} is measured"
    newest = asking.measuring.newest(asking.live)
    assert newest is not None and newest.generation == 2 and "W1_2" not in newest.workers


def test_what_ran_exactly_by_plan_gives_the_plan_again(here: ConsoleHere) -> None:
    job = JobHere(here.console, "exact").register().commit(0, 5, 1)
    job.die("W1_2").heal("W1_2", 2)
    planned = plan_of(here, job)
    parts = {p.worker: p for p in parts_of(planned.schedule(), iteration=3, generation=2)}
    found = assemble(parts, planned.fingerprint, 1.0)
    schedule = as_schedule(found, planned)

    def times(of: Schedule) -> dict[Worker, list[tuple[str, int, int, float, float]]]:
        unit = of.problem.job.units
        return {
            w: [(o.kind, o.pipeline, o.micro_batch, unit(o.start), unit(o.end)) for o in ops]
            for w, ops in of.ops.items()
        }

    assert times(schedule) == times(planned.schedule())
    assert schedule.problem.failed == {Worker(1, 2)}
    plan = as_plan(schedule, planned)
    assert plan.metrics.period == planned.metrics.period
    assert plan.metrics.slowdown_vs_1f1b == pytest.approx(planned.metrics.slowdown_vs_1f1b)
    assert plan.metrics.gap == pytest.approx(planned.metrics.gap)
    numbers = planned.metrics.model_dump(exclude={"peak_activations", "bound_over"})
    assert plan.metrics.model_dump(include=numbers.keys()) == pytest.approx(numbers)
    assert plan.metrics.peak_activations == planned.metrics.peak_activations
    assert plan.solver.name == "measured"
    assert Plan.from_json(plan.to_json()) == plan


def test_the_fault_free_end_of_an_iteration_as_it_ran_is_that_of_its_plan(here: ConsoleHere) -> None:
    """Its own op times give another one, and the slowdown beside it would not be against the line in the picture."""
    planned = plan_of(here, JobHere(here.console, "slower").register())
    slower = [
        part.model_copy(
            update={
                "starts_us": tuple(3 * start // 2 for start in part.starts_us),
                "durations_us": tuple(3 * took // 2 for took in part.durations_us),
                "started_us": 3 * part.started_us // 2,
            }
        )
        for part in parts_of(planned.schedule(), iteration=3)
    ]
    found = assemble({part.worker: part for part in slower}, planned.fingerprint, 1.0)
    plan = as_plan(as_schedule(found, planned), planned)
    assert plan.metrics.slowdown_vs_1f1b == pytest.approx(1.5 * planned.metrics.period / planned.metrics.fault_free - 1)
    shapes = gantt(plan).shapes
    bars = [shape.x for shape in shapes if isinstance(shape, Rect) and shape.tooltip]
    line = next(shape for shape in shapes if isinstance(shape, Line) and shape.dash)
    latest = max(op.start for ops in plan.workers.values() for op in ops if op.duration)
    end = (line.start[0] - min(bars)) / (max(bars) - min(bars)) * latest
    assert end == pytest.approx(planned.metrics.fault_free)


def test_a_step_does_not_begin_before_the_last_peer_has_finished(here: ConsoleHere) -> None:
    """A worker that is early counts its wait for the others as part of its reduction."""
    planned = plan_of(here, JobHere(here.console, "early").register())
    parts = {p.worker: p for p in parts_of(planned.schedule(), iteration=3)}
    early = parts["W1_0"]
    ready = early.starts_us[-1]
    others = [parts[f"W{p}_0"] for p in (0, 2)]
    begin = early.starts_us[-2] + early.durations_us[-2]
    # Its step took from the end of its own last op, 30 ms before, until 5 ms after all were ready.
    parts["W1_0"] = early.model_copy(
        update={
            "starts_us": (*early.starts_us[:-2], early.starts_us[-2] - 30_000, begin - 30_000),
            "durations_us": (*early.durations_us[:-1], ready - begin + 35_000),
        }
    )
    schedule = as_schedule(assemble(parts, planned.fingerprint, 1.0), planned)
    step = schedule.ops[Worker(1, 0)][-1]
    last = max(schedule.ops[Worker(int(p.worker[1]), 0)][-2].end for p in others)
    unit = schedule.problem.job.units
    assert step.kind == "O" and step.start == last and unit(step.duration) == 5


def test_clocks_of_two_hosts_are_put_on_one(here: ConsoleHere) -> None:
    """Each clock's best reading counts for all of its workers, and what it leaves uncertain is said."""
    job = JobHere(here.console, "two hosts").register()
    planned = plan_of(here, job)
    far = {f"W{p}_{s}": ("far", 777_000 + 40 * p, 30 + 10 * p) for p in range(3) for s in (2, 3)}
    near = {f"W{p}_{s}": ("near", -5_000, 20) for p in range(3) for s in (0, 1)}
    parts = {p.worker: p for p in parts_of(planned.schedule(), iteration=3, clocks=far | near)}
    # Pipeline 0 has the true offset; those of the others are off, as slower round trips make them.
    for name, (_, offset, _) in far.items():
        parts[name] = parts[name].model_copy(update={"started_us": parts[name].started_us + offset - 777_000})
    found = assemble(parts, planned.fingerprint, 1.0)
    assert found.uncertainty_us == 50
    one_clock = assemble({p.worker: p for p in parts_of(planned.schedule(), iteration=3)}, planned.fingerprint, 1.0)
    assert found.workers == one_clock.workers


def test_the_real_period_beside_the_planned_one(here: ConsoleHere) -> None:
    job = JobHere(here.console, "paced", iterations=4000).register()
    console, live = here.console, here.console.jobs.find(job.job_id)
    done = 0

    def wanted() -> int | None:
        nonlocal done
        if live.state.committed < 3000:
            job.commit(done, done + 1, 1)
            done += 2
        return console.measuring.wanted(console.jobs.find(job.job_id))

    until(lambda: wanted() is not None, "the console's own clock asks for an iteration")
    iteration = wanted()
    assert iteration is not None
    planned = plan_of(here, job)
    for part in parts_of(planned.schedule(), iteration=iteration):
        console.measuring.take(live, part)
    found = console.measuring.iteration(live)
    assert found is not None and found.iteration == iteration
    assert found.planned_ms == planned.metrics.period == found.plan.metrics.period
    job.commit(done, iteration + 6, 1)
    found = console.measuring.iteration(live)
    assert found is not None and found.period_ms == 1000
    assert found.over_plan == pytest.approx(1000 / planned.metrics.period - 1)

"""ETTR and goodput: productive time / wall time, and the same weighted with throughput."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.messages.protocol import JobFinished
from openrecycle.app.advice.service import measured_costs
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.states import Condition
from openrecycle.app.jobs.throughput import (
    Account,
    Baseline,
    Wait,
    Waited,
    iteration_view,
    read_baseline,
    segments,
    unit_seconds,
)
from openrecycle.app.observing.goodput import BATCH, Accounts, WaitingTimes, figures
from openrecycle.db.store import Record, Store
from tests.golden import golden

pytestmark = pytest.mark.processes

PINNED = Baseline(18.0, "measured", 1, 20)


def account_of(*generations: list[float]) -> Account:
    """Seconds of the iterations of one generation after the other."""
    account, iteration = Account(), 0
    for generation, seconds in enumerate(generations, start=1):
        for took in seconds:
            account.add(iteration, took, generation)
            iteration += 1
    return account


def test_a_job_without_failures_is_all_productive(here: ConsoleHere) -> None:
    job = here.console.jobs.find(JobHere(here.console, "healthy", iterations=400).register().job_id)
    job.pin(PINNED)
    account = account_of([1.0] * 10)
    made = figures(account, job, begin=100.0, now=110.0)
    assert made.baseline == PINNED
    assert (made.ettr, made.goodput, made.wall, made.productive) == (1.0, 1.0, 10.0, 10.0)


def test_what_a_recovery_took_is_not_said_to_be_the_pace(here: ConsoleHere) -> None:
    """In the sentence above all else, of a generation that has had its first iteration alone."""
    driven = JobHere(here.console, "recovered").register().commit(0, 9, 1).die("W1_2")
    here.console.jobs.find(driven.job_id).pin(PINNED)
    driven.resume(2)
    assert "%" in _sentence(here, driven.commit(10, 11, 2)), "by now it is known"
    driven.die("W0_1").resume(3)
    assert "%" not in _sentence(here, driven.commit(12, 12, 3))


def _sentence(here: ConsoleHere, driven: JobHere) -> str:
    view = here.console.queries.view(driven.job_id)
    assert view.condition is Condition.DEGRADED
    return view.sentence


def test_what_a_failure_cost_is_not_productive(here: ConsoleHere) -> None:
    """10 s of which the first start took 2, and a recovery and its redone work 3; then at half the rate."""
    job = here.console.jobs.find(JobHere(here.console, "failed", iterations=400).register().job_id)
    job.pin(PINNED)
    account = account_of([3.0, 1.0, 1.0, 1.0], [5.0, 2.0, 2.0])
    made = figures(account, job, begin=100.0, now=115.0)
    assert made.productive == 4 * 1.0 + 3 * 2.0
    assert made.ettr == pytest.approx(10 / 15)
    assert made.goodput == pytest.approx(7 / 15), "7 iterations in 15 s, where 15 would have been"


@pytest.mark.parametrize(("predicted", "goodput"), [(36.0, 0.5), (18.0, 1.0), (6.0, None)])
def test_a_prediction_that_the_job_exceeds_is_no_fault_free_rate(
    here: ConsoleHere, predicted: float, goodput: float | None
) -> None:
    job = here.console.jobs.find(JobHere(here.console, "predicted", iterations=400).register().job_id)
    job.pin(Baseline(predicted, "planned", renew=0))
    made = figures(account_of([1.0] * 5), job, begin=100.0, now=105.0)
    assert (made.goodput, made.ettr) == (goodput, 1.0) and (made.fault_free is None) == (goodput is None)


def test_a_prediction_that_was_exceeded_does_not_come_back_when_the_job_slows_down(here: ConsoleHere) -> None:
    """Also not over a restart of the console. A worker is gone all the time, so that no rate is measured."""
    driven = JobHere(here.console, "slows down", iterations=5000).register()
    job = here.console.jobs.find(driven.job_id)
    job.pin(Baseline(9.0, "planned", renew=0))
    commit(here, driven, rows(0, 19, 1.0, living=11))
    until(lambda: job.baseline is not None and job.baseline.refuted, "it is refuted")
    commit(here, driven, rows(20, 100, 10.0, living=11))
    assert here.console.accounts.of(job).goodput is None
    again = ConsoleService(here.store)
    try:
        read = again.jobs.take_up(job.job_id)
        assert read is not None and again.accounts.of(read).goodput is None
    finally:
        again.close()


def test_a_short_iteration_at_the_start_refutes_no_prediction(here: ConsoleHere) -> None:
    """The first one counts as long as the others at most, so it is one alone that is quicker."""
    driven = JobHere(here.console, "short at first", iterations=5000).register()
    job = here.console.jobs.find(driven.job_id)
    job.pin(Baseline(18.0, "planned", renew=0))
    made = rows(0, 200, 1.01, living=11)
    made[0]["seconds"], made[1]["seconds"] = 1.4, 0.98
    accounts = Accounts(here.store)
    for some in (made[:2], made[2:]):
        commit(here, driven, some)
        accounts.consider(job)
    assert job.baseline is not None and not job.baseline.refuted
    assert accounts.of(job).goodput is not None


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_that_was_set_makes_no_job_better_or_worse_than_it_is(here: ConsoleHere, step: float) -> None:
    job = here.console.jobs.find(JobHere(here.console, "the clock was set", iterations=400).register().job_id)
    job.pin(PINNED)
    account = account_of([1.0] * 10)
    account.last_at = 110.0 + step
    made = figures(account, job, begin=100.0, now=112.0 + step)
    assert (made.ettr, made.goodput, made.wall, made.productive) == (10 / 12, 10 / 12, 12.0, 10.0)


def test_a_clock_that_was_put_back_makes_no_loop_of_its_own_better_than_it_is(here: ConsoleHere) -> None:
    """Its iterations have gaps between them, so what they took is the least that it can have been."""
    job = here.console.jobs.find(JobHere(here.console, "put back", iterations=400, own_loop=True).register().job_id)
    job.pin(PINNED)
    account = account_of([1.0] * 10)
    for account.last_at in (-3_500.0, 105.0):
        made = figures(account, job, begin=100.0, now=account.last_at)
        assert (made.ettr, made.goodput, made.wall, made.productive) == (1.0, 1.0, 10.0, 10.0)


def test_standing_still_counts_against_it(here: ConsoleHere) -> None:
    job = here.console.jobs.find(JobHere(here.console, "waits", iterations=400).register().job_id)
    account = account_of([1.0] * 5)
    assert figures(account, job, begin=100.0, now=120.0).ettr == 0.25


def test_the_first_iteration_of_a_new_generation_is_judged_by_the_generation_before(here: ConsoleHere) -> None:
    assert account_of([1.0, 1.0, 1.0], [9.0]).productive == 4.0
    assert account_of([9.0]).productive == 9.0, "nothing to compare it with yet"


def test_before_anything_is_known(here: ConsoleHere) -> None:
    console = here.console
    starting = console.accounts.of(console.jobs.find(JobHere(console, "starting").job_id))
    assert (starting.ettr, starting.goodput) == (None, None)
    job = console.jobs.find(JobHere(console, "no times", paced=False, durations={}).register().job_id)
    assert console.accounts.of(job).fault_free is None


def late() -> float:
    """So late that productive time is not cut to wall time."""
    return 1e10


def test_adding_up_in_the_database_gives_the_same(here: ConsoleHere) -> None:
    """However many iterations are new, and also after the console has been away."""
    rng = random.Random(7)
    driven = JobHere(here.console, "long", iterations=5000).register()
    job, store = here.console.jobs.find(driven.job_id), Store(here.database)
    rows, generation = [], 1
    for i in range(500):
        if rng.random() < 0.05:
            generation += 1
        living = 12 if generation % 2 else 11
        rows.append(
            {
                "iteration": i,
                "loss": 1.0,
                "loss_hex": (1.0).hex(),
                "seconds": rng.uniform(0.5, 2.0),
                "generation": generation,
                "living": living,
                "committed_at": 1000.0 + i,
            }
        )
    store.add_iterations(driven.job_id, rows)
    driven.commit(500, 500, generation)
    assert job.state.committed == 501
    one_by_one = Accounts(store, clock=late)
    expected = one_by_one.of(job)
    at_once = Accounts(store, batch=10, clock=late).of(job)
    assert at_once.productive == pytest.approx(expected.productive)
    driven.commit(501, 505, generation)
    more = one_by_one.of(job)
    assert more.productive > expected.productive
    assert Accounts(store, batch=10, clock=late).of(job).productive == pytest.approx(more.productive)


def feed(console: ConsoleService, job_id: str) -> list[str]:
    return [e["text"] for e in console.queries.events(job_id, 0, 1000) if "fault-free" in e["text"]]


def rows(
    first: int, last: int, seconds: float, *, generation: int = 1, living: int = 12, at: float = 0.0
) -> list[Record]:
    """Of the database, committed one after the other from `at` on."""
    return [
        {
            "iteration": i,
            "loss": 1.0,
            "loss_hex": (1.0).hex(),
            "seconds": seconds * (1 + 0.01 * (i % 3)),
            "generation": generation,
            "living": living,
            "committed_at": at + seconds * (i - first + 1),
            "skipped": [],
        }
        for i in range(first, last + 1)
    ]


def commit(here: ConsoleHere, job: JobHere, made: list[Record]) -> None:
    here.store.add_iterations(job.job_id, made)
    job.commit(made[-1]["iteration"], made[-1]["iteration"], 1)


def test_the_yardstick_is_pinned_and_no_slower_machine_moves_it(here: ConsoleHere) -> None:
    """Also not over a restart of the console."""
    console = here.console
    driven = JobHere(console, "pinned", iterations=5000, paced=False, durations={}).register()
    job = console.jobs.find(driven.job_id)
    assert console.accounts.of(job).fault_free is None
    commit(here, driven, rows(0, 40, 1.0))
    until(lambda: job.baseline is not None, "it is measured")
    pinned = job.baseline
    assert pinned is not None and pinned.samples_per_second == pytest.approx(18 / 1.01, rel=0.02)
    assert pinned.words == golden("measured-at-iterations-1-to") and len(feed(console, job.job_id)) == 1
    before = console.accounts.of(job).fault_free
    commit(here, driven, rows(41, 700, 2.0))
    time.sleep(0.6)  # two ticks of the console in which it could have been moved
    assert console.accounts.of(job).fault_free == before and len(feed(console, job.job_id)) == 1
    # An operator has it measured anew, and the feed says what it was.
    console.operators.measure_anew(job.job_id, "ada")
    assert console.accounts.of(job).fault_free == before, "until there is a new one"
    commit(here, driven, rows(701, 740, 2.0))
    until(lambda: job.baseline is not None and job.baseline.renew is None, "it is measured anew")
    assert job.baseline is not None and job.baseline.first > 700
    assert job.baseline.samples_per_second == pytest.approx(9 / 1.01, rel=0.02)
    assert "until now 17" in feed(console, job.job_id)[-1] and "ada" in feed(console, job.job_id)[-2]
    again = ConsoleService(here.store)
    try:
        read = again.jobs.take_up(job.job_id)
        assert read is not None and read.baseline == job.baseline
        assert again.accounts.of(read).fault_free == job.baseline.samples_per_second
    finally:
        again.close()


def test_a_quicker_fault_free_plan_moves_the_yardstick(here: ConsoleHere) -> None:
    """Its iterations come in a few at a time, with a look at each."""
    driven = JobHere(here.console, "re-planned", iterations=5000, paced=False, durations={}).register()
    job = here.console.jobs.find(driven.job_id)
    assert job.state.current is not None
    in_force, periods = job.state.current.plan_fingerprint, {"before": 150, job.state.current.plan_fingerprint: 100}

    def plan(fingerprint: str) -> Any:
        return SimpleNamespace(
            job=SimpleNamespace(time_unit="ms"), metrics=SimpleNamespace(period=periods[fingerprint])
        )

    accounts = Accounts(here.store, plan)
    commit(here, driven, rows(0, 9, 1.5))
    job.pin(Baseline(12.0, "measured", 1, 20, "before"))
    for first in range(10, 50, 2):
        commit(here, driven, rows(first, first + 1, 1.0))
        accounts.consider(job)
    assert job.baseline is not None and job.baseline.plan == in_force
    assert job.baseline.first >= 10
    assert job.baseline.samples_per_second == pytest.approx(18 / 1.01, rel=0.02)


def test_an_unsteady_start_is_no_yardstick(here: ConsoleHere) -> None:
    driven = JobHere(here.console, "unsteady", iterations=5000, paced=False, durations={}).register()
    job = here.console.jobs.find(driven.job_id)
    made = rows(0, 30, 1.0)
    for row in made[:15]:
        row["seconds"] = 1.0 + 2.0 * (row["iteration"] % 2)
    commit(here, driven, made)
    time.sleep(0.6)  # two ticks of the console in which it could have been pinned too early
    assert job.baseline is None
    commit(here, driven, rows(31, 60, 1.0))
    until(lambda: job.baseline is not None, "a stable window")
    assert job.baseline is not None and job.baseline.first >= 12


def test_micro_batches_that_are_left_out_were_not_trained(here: ConsoleHere) -> None:
    """An iteration of 18 micro-batches, of which nine are in no sum."""
    driven = JobHere(here.console, "left out", iterations=400, paced=False, durations={}).register()
    job = here.console.jobs.find(driven.job_id)
    job.pin(PINNED)
    made = rows(0, 99, 1.0)
    made[5]["skipped"] = list(range(9))
    commit(here, driven, made)
    view = iteration_view(made[5], job.spec)
    assert view.samples_per_second == 9 / view.seconds
    one_by_one = Accounts(here.store).of(job)
    at_once = Accounts(here.store, batch=10).of(job)
    for found in (one_by_one, at_once):
        assert found.goodput == pytest.approx((100 * 18 - 9) / (18 * found.wall))


@pytest.mark.parametrize("step", [0.0, 3600.0])
@pytest.mark.parametrize("held", [[("pause", 110.0)], [("pause", 104.0), ("resume", 5000.0)]])
def test_a_wait_after_the_last_commit_is_none_of_its_time(
    here: ConsoleHere, held: list[tuple[str, float]], step: float
) -> None:
    """A job that ended in a pause, or in one that began in its last iteration; also after its clock was set."""
    driven = JobHere(here.console, "ended in a pause", iterations=400).register()
    job = here.console.jobs.find(driven.job_id)
    job.pin(PINNED)
    account = account_of([1.0] * 10)
    account.last_at = 110.0 + step
    commit(here, driven, rows(0, 9, 1.0, at=100.0 + step))
    job.commands.held = [(what, at + step) for what, at in held]
    here.console.reports.finish(job.job_id, JobFinished(state="stopped"))
    made = figures(account, job, 100.0, 9000.0 + step, here.console.accounts.waiting.of(job))
    assert (made.waited, made.wall, made.ettr) == (0, 10, 1), "workers end what they are at before they stop"


@pytest.mark.parametrize("change", [{"first": "x"}, {"source": "said"}, {"samples_per_second": "many"}, {"plan": 5}])
def test_a_stored_baseline_is_taken_as_it_is_or_not_at_all(change: dict[str, object]) -> None:
    assert read_baseline(PINNED.to_json()) == PINNED and read_baseline("") is None
    assert read_baseline(json.dumps(json.loads(PINNED.to_json()) | change)) is None


def test_a_persons_time_is_no_cost_and_no_dip(here: ConsoleHere) -> None:
    """An operator pauses for a minute, and takes another to choose: both are shown apart."""
    console = here.console
    driven = JobHere(console, "people", iterations=400, paced=False, durations={}).register()
    job, now = console.jobs.find(driven.job_id), time.time()
    job.pin(Baseline(18.0, "measured", 1, 20))
    made = rows(0, 29, 1.0, at=now - 200)
    # Paused after iteration 19; resumed a minute later; iteration 20 has the pause in it.
    for row in made[20:]:
        row["committed_at"] += 60
    made[20]["seconds"] += 60
    job.commands.held = [("pause", made[19]["committed_at"] - 0.5), ("resume", made[19]["committed_at"] + 60)]
    commit(here, driven, made)
    view = console.queries.view(job.job_id)
    slowest = min(i.samples_per_second for i in view.iterations if i.iteration < 29)
    assert slowest > 17, "the pause is no dip"
    assert view.iterations[20].waited == pytest.approx(60, abs=1)
    made_of = figures(account_of([1.0] * 30), job, now - 200, now, console.accounts.waiting.of(job))
    assert made_of.waited == pytest.approx(60, abs=0.1) and made_of.wall == pytest.approx(200 - made_of.waited)
    assert console.accounts.of(job).waited == 0, "its first generation opened after the pause"
    # A choice of a minute that led to generation 2.
    job.choices = (Wait(now - 90, now - 30, 2),)
    recovery = {"worker": "W1_2", "generation": 2, "death_known": True, "at": now - 28, "resumed_ms": 61_000.0}
    recovery |= {"detected_ms": 20.0, "unblocked_ms": 60_200.0, "reformed_ms": 60_500.0}
    waited = console.accounts.waiting.of(job)
    steps = dict(segments(recovery, waited))
    assert sum(steps.values()) == pytest.approx(61_000), "they add up"
    assert steps[golden("waited-for-a-person")] == pytest.approx(60_000)
    assert max(t for words, t in steps.items() if "person" not in words) < 1000
    assert measured_costs([recovery], [], [], waited).recover < 1
    assert measured_costs([recovery], []).recover > 60, "what it would have been"


@pytest.mark.parametrize("resumed", [None, 1000.0])
def test_a_pause_begins_when_what_was_begun_before_it_is_done(here: ConsoleHere, resumed: float | None) -> None:
    """Asked for at 300 s; seven iterations of a minute each are committed by 420 s, and none after. What workers did
    until they stopped counts, and so does the time that it took."""
    driven = JobHere(here.console, "paused late", iterations=400, paced=False, durations={}).register()
    job, begin = here.console.jobs.find(driven.job_id), 10_000.0
    job.pin(Baseline(job.spec.samples / 60, "measured", 1, 20))
    minutes = [
        row | {"seconds": 60.0, "committed_at": begin + 60 * n} for n, row in enumerate(rows(0, 6, 60.0), start=1)
    ]
    here.store.add_iterations(job.job_id, minutes)
    job.commands.held = [("pause", begin + 300), *([("resume", begin + resumed)] if resumed else [])]
    waiting, now = here.console.accounts.waiting, resumed or 1000.0
    made = figures(account_of([60.0] * 7), job, begin, begin + now, waiting.of(job))
    assert (made.waited, made.wall, made.goodput, made.ettr) == (now - 420, 420, pytest.approx(1), 1)
    if resumed:
        after = {"iteration": 7, "seconds": resumed - 360, "committed_at": begin + resumed + 60}
        here.store.add_iterations(job.job_id, [minutes[0] | after])
        assert waiting.of(job).by_iteration == {7: resumed - 420}
        assert waiting.of(job).waits == (Wait(begin + 420, begin + resumed),)


class Overtaken(WaitingTimes):
    """The iteration with the pause in it is committed when the waits have been read, and before anything else is."""

    def __init__(self, store: Store, commit: Callable[[], None]) -> None:
        super().__init__(store)
        self._commit = commit

    def of(self, job: LiveJob) -> Waited:
        found = super().of(job)
        self._commit()
        return found


@pytest.mark.parametrize("batch", [BATCH, 1])
def test_an_iteration_that_is_committed_meanwhile_is_counted_with_its_pause(here: ConsoleHere, batch: int) -> None:
    driven = JobHere(here.console, "overtaken", iterations=400).register()
    job, now = here.console.jobs.find(driven.job_id), time.time()
    made = rows(0, 5, 1.0, at=now - 200)
    made[5]["seconds"] += 60
    made[5]["committed_at"] += 60
    commit(here, driven, made[:5])
    job.commands.held = [("pause", made[4]["committed_at"]), ("resume", made[4]["committed_at"] + 60)]
    accounts = Accounts(here.store, batch=batch, clock=late)
    plain = accounts.waiting
    accounts.waiting = Overtaken(here.store, lambda: commit(here, driven, made[5:]))
    before = accounts.of(job)
    accounts.waiting = plain
    assert job.state.committed == 6
    made_of = accounts.of(job)
    assert made_of.productive - before.productive == pytest.approx(made[5]["seconds"] - 60)


def test_a_slot_is_as_long_as_iterations_say_but_for_the_first_of_a_generation() -> None:
    took = [90.0, 2.0, 2.0, 60.0, 4.5, 4.5]
    rows = [{"iteration": i, "generation": 1 + i // 3, "seconds": seconds} for i, seconds in enumerate(took)]
    assert unit_seconds(rows, {1: 20.0, 2: 45.0}) == pytest.approx(0.1)
    assert unit_seconds(rows[:1], {1: 20.0}) is None and unit_seconds(rows, {}) is None

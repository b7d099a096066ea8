"""The advisor's recommendation on a job with workers out: what it says, on what grounds, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import update
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.coordination.generations import out
from openrecycle.agent.coordination.membership import Candidate
from openrecycle.agent.messages.protocol import FailureReport, Restart
from openrecycle.app.advice.recommendation import (
    AdviceRequest,
    Recommendation,
    advisor,
    decide,
    read_recommendation,
    recommendation_document,
)
from openrecycle.app.advice.service import (
    REPAIR_SECONDS,
    START_SECONDS,
    STARTS,
    copy_times,
    measured_costs,
    move_times,
    start_times,
)
from openrecycle.app.jobs.live_job import changes, repair_times
from openrecycle.app.jobs.states import PlannedRestart, ProcessState
from openrecycle.db.models import GenerationRow
from openrecycle.db.store import Record
from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.jobs.words import MIGRATE, REROUTE, STAND_BY
from openrecycle.planner.layers.room import LayerRoom
from openrecycle.planner.plans.packed import from_text
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.simulation.engine import RecoveryCosts
from openrecycle.planner.simulation.planned import Rate
from openrecycle.planner.simulation.policy import REPARTITION, Advice, Option, best_option
from tests.golden import golden

pytestmark = pytest.mark.processes

HOUR = 3600.0
FULL = Rate(1.0, 10.0)


def advice(*options: Option, horizon: float = HOUR) -> Advice:
    return Advice(tuple(best_option(options, horizon, 10.0)), horizon, "")


# -- the decision: pure -------------------------------------------------------------------------


STAY = Candidate(REROUTE, ("W1_2",), rate=5.0)
MOVE = Candidate(MIGRATE, ("W2_1",), (("W2_1", "W1_2"),))


def test_re_routing_that_is_best_needs_no_operator() -> None:
    recommendation = decide(
        advice(Option("re-route", 1, 9.0), Option("re-partition", 20, 8.0)), ["W1_2"], FULL, "Basis."
    )
    assert (recommendation.way, recommendation.advised) == ("re-route", "re-route")
    assert recommendation.reason.startswith(golden("with-w1-2-empty-the-best"))
    assert recommendation.reason.endswith("Basis.") and "re-partition" not in recommendation.reason
    assert not recommendation.calls_for_an_operator


def test_what_can_not_be_done_is_never_called_best() -> None:
    recommendation = decide(
        advice(Option("re-route", 0, 5.0), Option("re-partition", 0, 8.0)), ["W1_2"], FULL, "", [STAY]
    )
    assert (recommendation.way, recommendation.advised) == (
        "re-route",
        "re-route",
    ) and not recommendation.calls_for_an_operator
    assert golden("the-best-option-is-re-route") in recommendation.reason
    assert "re-partition" not in recommendation.reason


@pytest.mark.parametrize(
    ("automatic", "way", "words"),
    [(True, MIGRATE, golden("and-this-job-does-so")), (False, REROUTE, golden("and-an-operator-may-choose"))],
)
def test_a_clearly_better_move_is_made(automatic: bool, way: str, words: str) -> None:
    options = (Option(REROUTE, 0, 5.0), Option(MIGRATE, 5, 8.0))
    recommendation = decide(advice(*options), ["W1_2"], FULL, "", [MOVE, STAY], automatic=automatic)
    assert (recommendation.way, recommendation.advised, recommendation.better) == (way, MIGRATE, MIGRATE)
    assert recommendation.calls_for_an_operator == (not automatic)
    assert golden("it-trains-60-more-than", words) in recommendation.reason


def test_the_best_of_what_can_be_done_is_ranked_first() -> None:
    options = (Option(REROUTE, 0, 5.0), Option(MIGRATE, 0, 8.0), Option("re-partition", 0, 9.0))
    recommendation = decide(advice(*options), ["W1_2"], FULL, "", [MOVE, STAY], automatic=True)
    assert (recommendation.way, recommendation.advised, recommendation.better) == (MIGRATE, MIGRATE, MIGRATE)
    assert golden("the-best-option-is-migrate-and") in recommendation.reason
    assert "next is re-route" in recommendation.reason and REPARTITION not in recommendation.reason


def test_a_job_that_may_not_move_is_not_told_to() -> None:
    options = (Option(REROUTE, 0, 5.0), Option(MIGRATE, 0, 8.0))
    recommendation = decide(advice(*options), ["W1_2"], FULL, "", [STAY])
    assert (recommendation.way, recommendation.advised, recommendation.better) == (REROUTE, REROUTE, "")
    assert MIGRATE not in recommendation.reason


def test_a_way_that_is_hardly_better_is_not_worth_it() -> None:
    recommendation = decide(
        advice(Option("re-route", 0, 8.0), Option("migrate and re-route", 0, 8.3)), ["W1_2"], FULL, "", [MOVE]
    )
    assert not recommendation.better
    assert not recommendation.calls_for_an_operator
    assert recommendation.reason.endswith(golden("the-job-re-routes-which-trains"))


def test_where_re_routing_trains_nothing_another_way_that_can_be_taken_is_better() -> None:
    stood_by = Candidate(STAND_BY, ("W0_0", "W0_1"), rate=1.0)
    options = (Option("re-route", 2 * HOUR, 5.0), Option("re-partition", 0, 3.0))
    recommendation = decide(advice(*options), ["W0_0"], FULL, "", [stood_by, STAY])
    assert recommendation.advised == STAND_BY and golden("the-best-option-is-stand-by") in recommendation.reason


# -- the grounds --------------------------------------------------------------------------------


def recovery(detected: float, reformed: float, *, known: bool = True) -> dict[str, object]:
    marks = {"detected_ms": detected, "unblocked_ms": detected, "reformed_ms": reformed, "resumed_ms": reformed + 50}
    return {**marks, "generation": 2, "at": 1000.0, "death_known": known}


def test_costs_are_measured_where_there_is_history() -> None:
    rows = [recovery(100, 300), recovery(200, 1200), recovery(0, 400, known=False)]
    known = measured_costs(rows, [60.0, 120.0], [0.5, 3.0])
    assert (known.detect, known.recover, known.copy, known.repair) == pytest.approx((0.15, 0.4, 1.75, 90.0))
    assert known.basis == (golden("recovery-costs-are-as-in-3"))


def test_a_copy_takes_from_the_last_that_left_to_the_last_that_is_ready() -> None:
    generations = [
        {"generation": 1, "joining": [], "restore": False},
        {"generation": 2, "joining": ["W0_0"], "restore": False},
        {"generation": 3, "joining": ["W0_0"], "restore": True},
        {"generation": 4, "joining": ["W0_0"], "restore": False},
    ]
    said = [(2, "adopted", 10.0), (2, "adopted", 12.0), (2, "formed", 12.5), (2, "formed", 13.0), (4, "adopted", 20.0)]
    rows = [{"generation": e, "state": state, "at": at} for e, state, at in said]
    assert copy_times(generations, rows) == [1.0]


def test_without_history_defaults_are_said_to_be_assumed() -> None:
    due = measured_costs([], [60.0], due=20.0)
    assert due.repair == 20.0 + START_SECONDS and golden("the-restart-that-is-due") in due.basis
    assert golden("of-its-start-60-s-assumed") in due.basis
    due = measured_costs([], [60.0], due=20.0, starts=[4.0, 9.0, 5.0])
    assert due.repair == 25.0 and golden("of-its-start-as-in-3") in due.basis
    known = measured_costs([], [])
    assumed = RecoveryCosts()
    assert (known.detect, known.recover, known.copy) == (assumed.detect, assumed.recover, assumed.migrate)
    assert known.repair == REPAIR_SECONDS
    assert known.basis == golden("recovery-costs-are-assumed-the")


def ran(name: str, *held: tuple[str, float], restart: PlannedRestart | None = None) -> ProcessState:
    return ProcessState(name, "node-a", 1, held, restart=restart)


def test_a_start_takes_from_when_its_launcher_began_it_until_it_has_registered() -> None:
    """No generation is asked: one may wait until somebody unfreezes the plan."""
    processes = [
        ran("a", ("W0_0", 0.0), restart=PlannedRestart(1, 3, 30.0)),
        ran("b", ("W1_0", 0.0), restart=PlannedRestart(1, 3, 65.0)),  # a person was there before
        ran("c", ("W1_1", 0.0), restart=PlannedRestart(4, 3, 80.0)),  # and again here: nobody starts it by itself
        ran("d", ("W0_1", 0.0)),
        ran("e", ("W0_0", 36.0), restart=PlannedRestart(2, 3, 99.0)),  # whose successor is not there yet
        ran("f", ("W1_0", 60.0)),
        ran("g", ("W1_1", 90.0)),
        ran("h", ("W2_0", 0.0), ("W2_1", 10.0), restart=PlannedRestart(1, 3, 41.0)),  # which had moved
        ran("i", ("W2_1", 45.0)),
    ]
    assert start_times(processes) == [4.0, 6.0]


def test_the_newest_starts_count() -> None:
    """Each of a worker's starts takes a second longer than the one before."""
    processes = [
        ran(f"{n}", ("W0_0", 1000.0 * n + n), restart=PlannedRestart(1, 3, 1000.0 * (n + 1))) for n in range(STARTS + 6)
    ]
    assert start_times(processes) == [float(n) for n in reversed(range(6, STARTS + 6))]


def test_repairs_are_what_came_back_between_generations() -> None:
    generations = [
        {"opened_at": 100.0, "failed": [], "moves": []},
        {"opened_at": 110.0, "failed": ["W0_1"], "moves": []},
        {"opened_at": 130.0, "failed": ["W0_1", "W1_0"], "moves": []},
        {"opened_at": 150.0, "failed": ["W1_0"], "moves": []},
    ]
    assert changes(generations, 100.0) == [
        (10.0, "W0_1", "failed"),
        (30.0, "W1_0", "failed"),
        (50.0, "W0_1", "joined"),
    ]
    assert repair_times(changes(generations)) == [40.0]
    # The clock was put back. What comes after it takes its time.
    generations[3]["opened_at"] = 105.0
    generations += [
        {"opened_at": 107.0, "failed": ["W0_1", "W1_0"], "moves": []},
        {"opened_at": 116.0, "failed": ["W1_0"], "moves": []},
    ]
    assert changes(generations, 100.0)[2:] == [
        (30.0, "W0_1", "joined"),
        (32.0, "W0_1", "failed"),
        (41.0, "W0_1", "joined"),
    ]
    assert repair_times(changes(generations)) == [20.0, 9.0]


def test_a_repair_during_which_the_clock_was_put_back_is_none_of_nothing() -> None:
    clock = [100.0, 4000.0, 130.0]
    out: list[list[str]] = [[], ["W0_1"], []]
    generations = [{"opened_at": at, "failed": failed, "moves": []} for at, failed in zip(clock, out, strict=True)]
    assert repair_times(changes(generations)) == []


def test_a_worker_that_moves_is_no_repair() -> None:
    """W0_1 fails, W2_0 takes its place, told twice; who fills W2_0 in the end ends the failure of W0_1."""
    move = [["W2_0", "W0_1"]]
    generations = [
        {"opened_at": 0.0, "failed": ["W0_1"], "moves": []},
        {"opened_at": 5.0, "failed": ["W2_0"], "moves": move},
        {"opened_at": 6.0, "failed": ["W2_0", "W1_0"], "moves": move},
        {"opened_at": 60.0, "failed": ["W1_0"], "moves": []},
    ]
    assert changes(generations) == [(0.0, "W0_1", "failed"), (6.0, "W1_0", "failed"), (60.0, "W0_1", "joined")]
    assert repair_times(changes(generations)) == [60.0]


# -- in the child process -----------------------------------------------------------------------


def request(**given: object) -> AdviceRequest:
    values = {
        "job": job_doc(Job.uniform(3, 4, 6, durations={"F": 40.0, "I": 40.0, "W": 40.0}, time_unit="ms")),
        "failed": ("W0_2", "W1_2"),
        "technique": "staggered",
        "memory": "uniform",
        "samples": 18.0,
        "unit_seconds": None,
        "detect": 0.1,
        "recover": 0.2,
        "copy": 1.0,
        "heals_in": HOUR,
        "since_checkpoint": None,
        "basis": "Basis.",
    }
    return AdviceRequest(**(values | given))  # type: ignore[arg-type]


def ask(timeout: float = 60.0, **given: object) -> tuple[Recommendation | None, str]:
    """The answer of a real advising process."""
    maker, answers = advisor(timeout), list[tuple[Recommendation | None, str]]()
    maker.start(child=False)
    try:
        maker.submit("job", request(**given), lambda recommendation, why: answers.append((recommendation, why)))
        until(lambda: bool(answers), "the advice comes")
    finally:
        maker.close()
    return answers[0]


def test_the_process_says_when_bubbles_can_not_absorb_the_load() -> None:
    recommendation, why = ask()
    assert recommendation is not None, why
    assert golden("the-bubbles-cant-absorb-the-load") in recommendation.reason
    assert recommendation.reason.startswith(golden("with-w0-2-w1-2"))
    assert [c.name for c in recommendation.candidates] == [REROUTE, STAND_BY] and not recommendation.better


def test_the_process_makes_the_plans_of_all_ways_that_the_job_can_take() -> None:
    recommendation, why = ask(migrate=True)
    assert recommendation is not None, why
    best, stay, stood_by = recommendation.candidates
    assert (best.name, stay.name, stood_by.name) == (MIGRATE, REROUTE, STAND_BY) and recommendation.better == MIGRATE
    ((source, to),) = best.moves
    assert to in ("W0_2", "W1_2") and source.endswith(("_0", "_1", "_3")) and best.failed != stay.failed
    assert stay.failed == ("W0_2", "W1_2")
    assert stood_by.failed == tuple(f"W{p}_{s}" for p in (0, 1) for s in range(4))
    plans = {plan.fingerprint: plan for plan in map(from_text, recommendation.plans)}
    for way in recommendation.candidates:
        assert plans[way.plan].failed == way.failed and check(plans[way.plan]) == []
        assert way.rate == pytest.approx(18 / (plans[way.plan].metrics.period / 1000))
        assert way.slowdown_vs_1f1b == pytest.approx(plans[way.plan].metrics.slowdown_vs_1f1b)
    assert best.samples > stay.samples > stood_by.samples
    assert golden("takes-the-place-of", source, to) in best.text
    assert stood_by.text.startswith(golden("pipelines-0-1-stand-by"))


@pytest.mark.parametrize(
    ("grid", "failed"),
    [
        ((3, 2, 4), ("W0_0", "W1_0")),
        ((3, 4, 6), ("W0_2", "W1_2")),
        ((4, 3, 4), ("W0_0", "W1_0", "W2_0")),
        ((4, 3, 4), ("W0_1", "W1_1", "W2_1", "W0_2")),
    ],
)
def test_who_has_moved_stays(grid: tuple[int, int, int], failed: tuple[str, ...]) -> None:
    """The advice on the job as the move leaves it moves nobody: what moves next is another failure or return."""
    job = job_doc(Job.uniform(*grid, durations={"F": 40.0, "I": 40.0, "W": 40.0}, time_unit="ms"))

    def better(out: tuple[str, ...]) -> Candidate | None:
        asked = request(job=job, failed=out, migrate=True)
        recommendation = read_recommendation(recommendation_document(asked))
        return next((c for c in recommendation.candidates if c.name == recommendation.better), None)

    moved = better(failed)
    assert moved is not None
    assert better(moved.failed) is None


LAYERED = job_doc(Job.uniform(3, 4, 6, durations={"F": 4.0, "I": 4.0, "W": 4.0}, time_unit="ms", layers=44))


def recommend(**given: object) -> Recommendation:
    asked = request(**({"job": LAYERED, "failed": ("W1_2",), "relayout": "auto", "partition": (11,) * 4} | given))
    return read_recommendation(recommendation_document(asked))


@pytest.mark.parametrize(("left", "better"), [(20, MIGRATE), (None, MIGRATE), (2, "")])
def test_advice_to_the_end_of_a_job_reckons_with_the_time_that_it_takes(left: int | None, better: str) -> None:
    """20 iterations of 0.76 s with all workers, and of more than 2 s without these two."""
    asked = request(migrate=True, left=left, copy=12.0)
    assert read_recommendation(recommendation_document(asked)).better == better


def test_layers_that_may_move_do_so_where_that_pays_within_the_hour() -> None:
    recommendation = recommend()
    best = recommendation.candidates[0]
    assert (best.name, recommendation.better, recommendation.way) == (REPARTITION, REPARTITION, REPARTITION)
    assert best.failed == ("W1_2",) and sum(best.partition) == 44 and best.partition != (11,) * 4
    plan = next(p for p in map(from_text, recommendation.plans) if p.fingerprint == best.plan)
    assert plan.partition == best.partition and plan.metrics.bound_over == "partitions" and check(plan) == []
    assert best.share > 0.88, "of 11/12"
    after = recommend(partition=best.partition)
    assert after.better == "" and all(c.name != REPARTITION for c in after.candidates), "they stay there"


@pytest.mark.parametrize(
    ("given", "better"),
    [
        ({"relayout": "never"}, ""),
        ({"automatic": False}, REPARTITION),
        ({"move": 4000.0}, ""),  # seconds of training lost, of the hour to the repair
        ({"left": 400, "automatic": False}, REPARTITION),
        ({"left": 4}, ""),
        ({"left": 4, "relayout": "always", "automatic": False}, REPARTITION),
        ({"left": 1, "relayout": "always"}, ""),
    ],
)
def test_layers_stay_where_they_may_not_move_or_it_costs_more(given: dict[str, object], better: str) -> None:
    recommendation = recommend(**given)
    assert recommendation.better == better and recommendation.way == REROUTE


def test_layers_move_no_further_than_there_is_memory() -> None:
    """Each worker has 11 layers, of 1 GB each."""
    one = 10**9

    def with_room(layers: int, **given: object) -> Recommendation:
        places = ((layers * one, (3, 3, 3, 3), ""),)
        return recommend(room=LayerRoom((0,) * 4, ((one, one),) * 44, (0,) * 44, (0,) * 4, places), **given)

    full = with_room(12 * 11)
    assert (full.better, full.way) == ("", REROUTE) and golden("layers-stay-for-want-of-memory") in full.reason
    some = with_room(12 * 11 + 6)
    assert some.better == REPARTITION and some.candidates[0].partition == (11, 12, 9, 12)
    assert with_room(12 * 14).candidates[0].partition == (11, 14, 7, 12)
    back = with_room(12 * 11, failed=(), partition=(11, 14, 7, 12))
    assert back.better == "" and golden("layers-stay-where-they-are-back") in back.reason


def test_layers_go_back_when_all_workers_are_there() -> None:
    recommendation = recommend(failed=(), partition=(11, 14, 7, 12))
    (back,) = [c for c in recommendation.candidates if c.name == REPARTITION]
    assert recommendation.better == REPARTITION and back.partition == (11,) * 4 and back.failed == ()
    assert back.share == pytest.approx(1.0)


def test_what_moved_layers_cost_is_measured() -> None:
    generations = [
        {"generation": 1, "moved_at": None},
        {"generation": 2, "moved_at": None},
        {"generation": 3, "moved_at": 22},
    ]
    took = {10: 2.0, 11: 1.5, 12: 1.5, 20: 1.6, 21: 1.5, 22: 1.2, 23: 1.0, 24: 1.0}
    rows = [{"iteration": i, "generation": 2 if i < 20 else 3, "seconds": s} for i, s in took.items()]
    assert move_times(generations, rows) == [pytest.approx(0.1 + 0.2)]


def test_advice_that_takes_too_long_is_given_up() -> None:
    recommendation, why = ask(job=job_doc(Job.uniform(32, 32, 64)), failed=("W1_2",), timeout=0.5)
    assert recommendation is None
    assert golden("was-not-done-after") in why


def test_what_can_not_be_advised_is_a_sentence() -> None:
    recommendation, why = ask(heals_in=0.0)
    assert recommendation is None
    assert why.startswith("heals_in: got 0.0,")


# -- in a console -------------------------------------------------------------------------------


def advised(job: JobHere) -> list[str]:
    return [e["text"] for e in job.console.queries.events(job.job_id, 0, 500) if e["kind"] == "plan"]


def test_each_new_set_of_failures_is_advised_once(here: ConsoleHere, tmp_path: Path) -> None:
    console = here.console
    job = JobHere(console, "advised job").register().commit(0, 9, 1)
    assert console.queries.view(job.job_id).advice is None
    # While the survivors have not all resumed there is no advice, however long that takes.
    job.die("W1_2")
    until(lambda: console.queries.view(job.job_id).generation == 2, "generation 2 opens")
    assert out(console.jobs.find(job.job_id).state) is None
    job.heal("W1_2", 2)
    until(lambda: console.queries.view(job.job_id).advice is not None, "the advice comes")
    first = console.queries.view(job.job_id).advice
    assert first is not None
    assert first.startswith(golden("with-w1-2-empty-the"))
    assert golden("1f1bs-bubbles-have-room-for") in first
    assert advised(job) == [first], "it is in the feed before it can be seen elsewhere"

    job.commit(10, 12, 2).die("W0_2")
    job.resume(3)
    assert console.queries.view(job.job_id).advice != first
    until(lambda: console.queries.view(job.job_id).advice is not None, "the second advice comes")
    second = console.queries.view(job.job_id).advice
    assert second is not None
    assert advised(job) == [first, second]
    assert golden("the-bubbles-cant-absorb-the") in second
    assert golden("recovery-costs-are-as-in") in second


def test_advice_that_comes_during_another_recovery_is_asked_for_again(
    here: ConsoleHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Callable[[Recommendation | None, str], None]]()
    monkeypatch.setattr(here.console.advising.queue, "submit", lambda owner, request, done: asked.append(done))
    job = JobHere(here.console, "again").register().commit(0, 9, 1).die("W1_2")
    job.resume(2)
    until(lambda: len(asked) == 1, "advice is asked for")
    broken = FailureReport(worker="W0_1", incarnation="W0_0-a", cause="transfer", reporter="W0_0", generation=2)
    here.console.reports.failures(job.job_id, [broken])
    until(lambda: job.console.queries.view(job.job_id).generation == 3, "all connect anew")
    asked[0](Recommendation("re-route", "re-route", "too late"), "")
    assert here.console.queries.view(job.job_id).advice is None
    job.resume(3)
    until(lambda: len(asked) == 2, "advice is asked for again")
    asked[1](Recommendation("re-route", "re-route", "in time"), "")
    assert here.console.queries.view(job.job_id).advice == "in time"
    assert advised(job) == ["in time"]


def test_no_advice_is_in_the_feed_after_the_generation_that_settles_it(
    here: ConsoleHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Callable[[Recommendation | None, str], None]]()
    monkeypatch.setattr(here.console.advising.queue, "submit", lambda owner, request, done: asked.append(done))
    job = JobHere(here.console, "settled").register().commit(0, 9, 1).die("W1_2")
    job.resume(2)
    until(lambda: len(asked) == 1, "advice is asked for")
    live, read = here.console.jobs.find(job.job_id), here.store.events

    def come_back() -> None:
        """The worker returns if nobody holds the job."""
        if live.lock.acquire(blocking=False):
            job.back("W1_2")
            live.lock.release()

    def events(*given: Any, **named: Any) -> list[Record]:
        monkeypatch.setattr(here.store, "events", read)
        launcher = Thread(target=come_back)
        launcher.start()
        launcher.join()
        return read(*given, **named)

    monkeypatch.setattr(here.store, "events", events)
    asked[0](Recommendation("re-route", "re-route", "the one who is out"), "")
    if "W1_2" not in job.living:
        job.back("W1_2")
    until(lambda: live.state.generation == 3, "the worker joins")
    kinds = [e["kind"] for e in here.console.queries.events(job.job_id, 0, 500)]
    assert [kind for kind in kinds if kind in ("plan", "generation")] == [
        "generation",
        "generation",
        "plan",
        "generation",
    ]
    assert here.console.queries.view(job.job_id).advice is None


def test_a_repair_takes_no_longer_than_a_restart_that_is_due(
    here: ConsoleHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is known that nobody starts it again, the job is advised anew."""
    asked = list[AdviceRequest]()
    monkeypatch.setattr(here.console.advising.queue, "submit", lambda owner, request, done: asked.append(request))
    job = JobHere(here.console, "due").register().commit(0, 9, 1).die("W1_2")

    def say(restart: Restart) -> None:
        gone = FailureReport(worker="W1_2", incarnation="W1_2-a", cause="exit", reporter="launcher", restart=restart)
        here.console.reports.failures(job.job_id, [gone])

    say(Restart(number=3, most=3, seconds=500.0))
    job.resume(2)
    until(lambda: asked, "advice is asked for")
    assert START_SECONDS < asked[-1].heals_in <= 500 + START_SECONDS
    say(Restart(number=4, most=3))
    until(lambda: asked[-1].heals_in == REPAIR_SECONDS, "advice is asked for again")


@pytest.mark.chaos
def test_a_console_that_restarts_advises_again_and_does_not_repeat_itself(tmp_path: Path) -> None:
    before = ConsoleHere(tmp_path)
    try:
        job = JobHere(before.console, "restart").register().commit(0, 9, 1).die("W1_2").heal("W1_2", 2)
        until(lambda: len(advised(job)) == 1, "the advice is in the feed")
    finally:
        before.close()
    after = ConsoleHere(tmp_path)
    try:
        until(lambda: after.console.queries.view(job.job_id).advice is not None, "the advice comes again")
        job.console = after.console
        assert len(advised(job)) == 1
    finally:
        after.close()


def test_a_job_in_slots_is_advised_once_an_iteration_was_timed(here: ConsoleHere) -> None:
    """Seconds per slot are what its iterations took: 1 s each here, so 18 samples per second fault-free."""
    job = JobHere(here.console, "slots", durations={}, paced=False).register()
    job.die("W1_2").resume(2)
    assert here.console.queries.view(job.job_id).advice is None
    job.commit(0, 4, 2)
    until(lambda: here.console.queries.view(job.job_id).advice is not None, "the advice comes")
    # Five iterations of 1.1 s with the failure: re-routing trains 18 samples in each.
    assert "16.36 samples/s" in (here.console.queries.view(job.job_id).advice or "")


def test_who_lived_in_each_generation_is_not_read_for_advice(here: ConsoleHere) -> None:
    """Of thousands of workers, in hundreds of generations, it would be hundreds of megabytes in the ticker."""
    console = here.console
    job = JobHere(console, "long ago").register().commit(0, 9, 1)
    with here.database.write() as session:
        old = update(GenerationRow).where(GenerationRow.job_id == job.job_id, GenerationRow.generation == 1)
        session.execute(old.values(living="too long to be read"))
    job.die("W1_2").heal("W1_2", 2)
    until(lambda: len(advised(job)) == 1, "the advice comes")
    assert [row[1:] for row in console.queries.past_failures(job.job_id)[0]] == [("W1_2", "failed")]
    assert sorted(n for ran in console.sources.generations_by_plan(job.job_id).values() for n in ran) == [1, 2]

"""Simulations of the Simulate page: real child processes, and the charts made of them."""

from __future__ import annotations

import os
import time

import pytest
from ui_console import ConsoleHere, JobHere

from openrecycle.app.charts.theme import DARK, LIGHT
from openrecycle.app.plans.simulations import (
    GONE,
    HISTORY,
    SWEEP,
    Simulation,
    SimulationRequest,
    Simulations,
    parse_request,
    run,
)
from openrecycle.app.ui.simulate import policy_words, sensitivity, thinned, throughput_over_time
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.profiles import analytic_job, model_shape
from openrecycle.planner.simulation import traces as simulated_traces
from openrecycle.planner.simulation.traces import public_traces, scaled
from tests.golden import golden

pytestmark = pytest.mark.processes

PAGE = "a page"
SMALL = {"model": "gpt-3-medium", "pipelines": 3, "stages": 2, "micro_batches": 4, "hours": 24.0, "mtbf": 30.0}


def wait(simulation: Simulation) -> Simulation:
    deadline = time.monotonic() + 120
    while not simulation.done:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return simulation


def test_a_simulation_runs_in_its_own_process_and_is_kept() -> None:
    simulations = Simulations()
    request = parse_request(**SMALL, policies=("ours", "recycle", "drop-replica"))
    made = wait(simulations.get(request, PAGE))
    assert made.error == "" and made.asked is not None and made.asked.process.pid != os.getpid()
    assert [row["policy"] for row in made.rows] == ["ours", "recycle", "drop-replica"]
    assert made.rows[0]["trace_samples_per_second"] >= max(r["trace_samples_per_second"] for r in made.rows) * 0.999
    assert made.mtbf == [30.0 * factor for factor in SWEEP]
    assert made.steps == (4, 4)
    assert simulations.get(parse_request(**SMALL, policies=("ours", "recycle", "drop-replica")), PAGE) is made
    # The same in this process: the child adds nothing of its own.
    assert [m["row"] for m in run(request) if "row" in m] == made.rows
    simulations.close()


def test_where_one_policy_becomes_better_than_another_comes_as_figures() -> None:
    simulations = Simulations()
    made = wait(simulations.get(parse_request(**SMALL, policies=("recycle", "spares")), PAGE))
    (crossing,) = made.crossings
    assert {crossing.before, crossing.after} == set(made.rates) and made.mtbf[0] < crossing.hours < made.mtbf[-1]
    rates = zip(made.mtbf, made.rates[crossing.before], made.rates[crossing.after], strict=True)
    assert all((earlier > later) == (mtbf < crossing.hours) for mtbf, earlier, later in rates if earlier != later)
    simulations.close()


def test_a_cancelled_simulation_ends_its_process() -> None:
    simulations = Simulations()
    request = parse_request(model="gpt-145.6b", pipelines=32, stages=16, micro_batches=64, policies=("ours",))
    running = simulations.get(request, PAGE)
    simulations.cancel(request, PAGE)
    assert wait(running).error == golden("the-simulation-was-ended-before")
    assert running.asked is not None
    assert running.asked.ended(30)
    simulations.close()


def test_what_two_pages_show_ends_when_neither_does() -> None:
    simulations = Simulations()
    request = parse_request(model="gpt-145.6b", pipelines=32, stages=16, micro_batches=64, policies=("ours",))
    running = simulations.get(request, PAGE)
    assert simulations.get(request, "another page") is simulations.get(request, PAGE) is running
    simulations.cancel(request, PAGE)
    assert not running.done
    simulations.cancel(request, "another page")
    assert running.done
    simulations.close()


def test_what_a_page_shows_that_is_gone_ends_and_what_one_looks_at_goes_on() -> None:
    """A page that is loaded again or closed says nothing."""
    simulations = Simulations()
    request = parse_request(model="gpt-145.6b", pipelines=32, stages=16, micro_batches=64, policies=("ours",))
    running = simulations.get(request, "gone")
    running.watched["gone"] -= GONE + 1
    simulations.get(request, "loaded again")
    simulations.end_unwatched()
    assert not running.done
    running.watched["loaded again"] -= GONE + 1
    simulations.end_unwatched()
    assert running.done
    simulations.close()


def test_of_a_sweep_what_has_too_many_failures_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_traces, "MOST_FAILURES", 6 * 24 / 30 * 4)
    messages = list(run(parse_request(**SMALL, policies=("fault-free",))))
    (swept,) = (m for m in messages if "mtbf" in m)
    assert swept["mtbf"] == [30.0 * factor for factor in SWEEP[2:]]


def test_a_slot_is_as_long_as_is_said() -> None:
    """With other lengths of a slot, iterations are longer, while failures and pauses stay as they are."""
    asked = SimulationRequest(job=job_doc(Job.uniform(2, 2, 4)), hours=24.0, policies=("fault-free",), seed=1)
    rates = []
    for seconds in (None, 1.0, 0.25):
        (row,) = (m["row"] for m in run(asked.model_copy(update={"unit_seconds": seconds})) if "row" in m)
        rates.append(row["fault_free_samples_per_second"])
    assert rates[0] == rates[1] and rates[2] == pytest.approx(4 * rates[1])


def test_a_policy_that_the_job_can_not_have_leaves_the_others() -> None:
    """A job of 40 stages has too many layers to choose a partition of."""
    asked = SimulationRequest(job=job_doc(Job.uniform(2, 40, 2)), hours=1.0, policies=("repartition", "drop-replica"))
    messages = list(run(asked))
    assert [m["row"]["policy"] for m in messages if "row" in m] == ["drop-replica"]
    assert [list(m["refused"]) for m in messages if "refused" in m] == [["repartition"]]
    with pytest.raises(InputError) as refused:
        list(run(asked.model_copy(update={"policies": ("repartition",)})))
    assert refused.value.field == "policies"


def test_one_that_is_not_wanted_any_more_leaves_its_process_to_the_next() -> None:
    simulations = Simulations()
    simulations.prepare()
    first, second = (parse_request(**SMALL, repair=hours, policies=("ours", "recycle")) for hours in (4.0, 2.0))
    begun = simulations.get(first, PAGE)
    simulations.cancel(first, PAGE)
    made = wait(simulations.get(second, PAGE))
    assert wait(begun).error == golden("the-simulation-was-ended-before")
    assert begun.asked is not None and made.asked is not None and made.asked.process.pid == begun.asked.process.pid
    # What was planned for the one before changes nothing.
    assert [m["row"] for m in run(second) if "row" in m] == made.rows
    again = wait(simulations.get(first, PAGE))
    assert [m["row"] for m in run(first) if "row" in m] == again.rows and made.error == again.error == ""
    simulations.close()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mtbf": 0.0}, "mtbf: got 0.0"),
        ({"pipelines": 0}, "pipelines: got 0"),
        ({"hours": float("nan")}, "hours: got nan"),
        ({"stages": 600}, "stages: got 600,"),
    ],
)
def test_requests_name_the_field_that_is_wrong(values: dict[str, float], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        parse_request(**values)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (SimulationRequest(policies=("magic",)), "policies: got magic"),
        (SimulationRequest(model="gpt-9"), "gpt-9"),
        (SimulationRequest(trace="nowhere/else"), "trace: got nowhere/else"),
        (SimulationRequest(pipelines=1024, stages=32), "at most 4096 workers"),
        (SimulationRequest(job=job_doc(Job.uniform(1024, 32, 1))), "at most 4096 workers"),
    ],
)
def test_a_child_answers_what_can_not_be_simulated_with_a_sentence(request_: SimulationRequest, words: str) -> None:
    simulations = Simulations()
    assert words in wait(simulations.get(request_, PAGE)).error.replace("'", "")
    simulations.close()


def test_public_traces_fit_a_job_of_any_size() -> None:
    traces = public_traces()
    assert {"recycle/gcp-6h", "bamboo/p3-trace", "oobleck/1h"} <= set(traces)
    trace = traces["recycle/gcp-6h"]
    assert scaled(trace, trace.most) is trace
    doubled = scaled(trace, 2 * trace.most)
    assert doubled.counts == tuple((at, 2 * n) for at, n in trace.counts)
    fewer = dict(scaled(trace, 7).counts)
    assert fewer and all(
        fewer.get(at, round(7 * n / trace.most)) == round(7 * n / trace.most) for at, n in trace.counts
    )


def test_a_jobs_own_history_is_simulated(tmp_path_factory: pytest.TempPathFactory) -> None:
    here = ConsoleHere(tmp_path_factory.mktemp("history"))
    job = JobHere(here.console, "with a past").register().commit(0, 9, 1).die("W1_2").heal("W1_2", 2).commit(10, 15, 2)
    rows, seconds = here.console.queries.past_failures(job.job_id)
    assert [(worker, what) for _, worker, what in rows] == [("W1_2", "failed")]
    assert seconds >= rows[0][0] and seconds % 10 == 0
    grid = job_doc(analytic_job(model_shape("gpt-3-medium"), 3, 4, 6))
    request = parse_request(job=grid, trace=HISTORY, history=rows, history_seconds=seconds, policies=("recycle",))
    messages = list(run(request))
    assert messages[1]["row"]["failures"] == 1
    assert [n for _, n in messages[0]["living"]][:2] == [12, 11]
    here.close()


@pytest.mark.parametrize(
    ("lost", "pipelines"), [(("W0_1", "W0_2"), 2), (("W0_1", "W2_2"), 1), (("W0_0", "W1_0", "W2_0"), 0)]
)
def test_dropping_replicas_knows_which_pipelines_a_jobs_failures_were_in(lost: tuple[str, ...], pipelines: int) -> None:
    request = parse_request(
        job=job_doc(Job.uniform(3, 4, 6)),
        trace=HISTORY,
        history=tuple((10.0, worker, "failed") for worker in lost),
        history_seconds=3600.0,
        policies=("drop-replica",),
    )
    _, played = run(request)
    whole, *_, left = [rate for _, rate in played["curve"]]
    assert left == pytest.approx(whole * pipelines / 3)


def test_short_pauses_count_by_their_share_of_time() -> None:
    steady = [(0.0, 10.0), (50.0, 5.0), (100.0, 5.0)]
    assert thinned(steady, 10) == steady
    paused = [(0.0, 10.0), (50.0, 0.0), (51.0, 10.0), (100.0, 10.0)]
    points = thinned(paused, 10)
    assert len(points) == 11 and points[5] == (50.0, pytest.approx(9.0))
    assert sum(rate * 10 for _, rate in points[:-1]) == pytest.approx(990.0)


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_every_policy_has_a_line_of_its_own(colours: object) -> None:
    request = parse_request(**SMALL, policies=("ours", "recycle", "spares", "oobleck", "repartition"))
    messages = list(run(request))
    curves = {m["row"]["policy"]: m["curve"] for m in messages if "row" in m}
    figure = throughput_over_time(curves, messages[0]["living"], colours, revision="x")  # type: ignore[arg-type]
    lines = [(trace.line.color, trace.line.dash) for trace in figure.data if trace.showlegend is not False]
    assert len(set(lines)) == len(lines) == 5
    swept = sensitivity(messages[-1]["mtbf"], messages[-1]["rates"], colours, 30.0)  # type: ignore[arg-type]
    assert [trace.name for trace in swept.data] == [policy_words(name) for name in curves]

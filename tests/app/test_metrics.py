"""What Prometheus reads: of a real console process, parsed and checked as its own tools would."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from console_server import Agents, ConsoleServer, ForkedConsole
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from ui_console import ConsoleHere, JobHere, until

from openrecycle.agent.messages.protocol import Iteration, JobSpec
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.jobs.throughput import recent_rate
from openrecycle.app.observing import metrics
from openrecycle.app.observing.metrics import Distribution, quantiles, route_of
from openrecycle.db.store import Store
from tests.databases import sqlite_in

pytestmark = pytest.mark.processes

UNITS = ("_seconds", "_bytes", "_ratio", "_total", "_info", "_per_second")
BARE = {"jobs", "job_workers", "job_generation", "job_plans_ahead", "job_plans_ahead_wanted"}
# Of Python and the process: prometheus_client's own.
OTHERS = ("python_", "process_")


# None of the agents here may be suspected for the machine's load.
OPTIONS = ("--api-only", "--suspect", "40", "--dead", "90")


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    server = ForkedConsole(f"sqlite:///{tmp_path_factory.mktemp('metrics') / 'console.db'}", *OPTIONS)
    yield server
    server.close()


@pytest.fixture(scope="module")
def job(console: ConsoleServer) -> Agents:
    """3 x 4; twenty-one iterations of 0.2 s, W1_2 dead since then and the others recovered."""
    agents = Agents(console, samples_per_micro_batch=8)
    agents.register_all()
    agents.resume(agents.names, 1)
    for name in agents.names:
        assert agents.heartbeat(name).status_code == 200
    rows = [
        {"iteration": i, "loss": 1.0, "loss_hex": "0x1p+0", "seconds": 0.2, "generation": 1, "living": 12}
        for i in range(21)
    ]
    assert console.post(agents.path("/iterations"), {"iterations": rows}).status_code == 204
    until(lambda: agents.job()["fault_free_source"] is not None, "what it is measured by is known")
    agents.exit("W1_2")
    agents.deployment(after=1)
    agents.resume([name for name in agents.names if name != "W1_2"], 2)
    times = {"detected_ms": 4, "unblocked_ms": 20, "reformed_ms": 60, "resumed_ms": 450}
    assert console.post(agents.path("/recoveries"), {"worker": "W1_2", "generation": 2, **times}).status_code == 204
    return agents


def scrape(server: ConsoleServer, accept: str = "") -> requests.Response:
    answer = requests.get(f"{server.root}/metrics", headers={"Accept": accept}, timeout=30)
    assert answer.status_code == 200
    return answer


def families(server: ConsoleServer) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(scrape(server).text)}


def value(server: ConsoleServer, sample: str, **labels: str) -> float | None:
    for family in families(server).values():
        for found in family.samples:
            if found.name == f"openrecycle_{sample}" and labels.items() <= found.labels.items():
                return found.value
    return None


def test_names_and_types_keep_to_the_conventions(console: ConsoleServer, job: Agents) -> None:
    seen = families(console)
    ours = {name: family for name, family in seen.items() if not name.startswith(OTHERS)}
    assert len(ours) > 20
    for name, family in ours.items():
        assert re.fullmatch(r"openrecycle_[a-z0-9_]+", name)
        assert family.documentation.endswith((".", "always 1.")), name
        assert family.type in ("counter", "gauge", "histogram"), name
        bare = name.removeprefix("openrecycle_")
        # Base units, said at the end; the parser takes `_total` off the names of counters.
        assert name.endswith(UNITS) or family.type == "counter" or bare in BARE, name
        assert not re.search(r"milli|percent|minutes|kilo|mega", name), name
        for sample in family.samples:
            assert (
                not {"le", "quantile"} & sample.labels.keys()
                or family.type == "histogram"
                or "quantile" in sample.labels
            )
            assert not re.fullmatch(r"W\d+_\d+", " ".join(sample.labels.values())), "no series per worker"
    keys = [(s.name, tuple(sorted(s.labels.items()))) for f in seen.values() for s in f.samples]
    assert len(keys) == len(set(keys))


def test_histograms_add_up(console: ConsoleServer, job: Agents) -> None:
    histograms = [family for family in families(console).values() if family.type == "histogram"]
    assert len(histograms) >= 6
    for family in histograms:
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        counts: dict[tuple[tuple[str, str], ...], float] = {}
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            if sample.name.endswith("_bucket"):
                series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith("_count"):
                counts[labels] = sample.value
        for labels, buckets in series.items():
            assert [le for le, _ in buckets] == sorted(le for le, _ in buckets)
            assert [n for _, n in buckets] == sorted(n for _, n in buckets)
            assert buckets[-1] == (math.inf, counts[labels])


def test_a_job_is_told_as_it_is(console: ConsoleServer, job: Agents) -> None:
    of = {"job": job.job_id}
    assert value(console, "job_workers", state="running", **of) == 11
    assert value(console, "job_workers", state="failed", **of) == 1
    assert value(console, "job_generation", **of) == 2
    assert value(console, "job_iteration_duration_seconds_count", **of) == 21
    assert value(console, "job_iteration_duration_seconds_sum", **of) == pytest.approx(4.2)
    assert value(console, "job_iteration_duration_seconds_bucket", le="0.1", **of) == 0
    assert value(console, "job_iteration_duration_seconds_bucket", le="0.25", **of) == 21
    assert value(console, "job_samples_total", **of) == 21 * 3 * 6 * 8
    assert value(console, "job_samples_per_second", **of) == pytest.approx(3 * 6 * 8 / 0.2)
    assert value(console, "job_throughput_ratio", **of) == pytest.approx(1)
    assert value(console, "job_recoveries_total", **of) == 1
    assert value(console, "job_detection_duration_seconds_sum", **of) == pytest.approx(0.004)
    assert value(console, "job_recovery_duration_seconds_bucket", le="0.5", **of) == 1
    assert value(console, "job_recovery_duration_seconds_bucket", le="0.25", **of) == 0
    ages = [value(console, "job_heartbeat_age_seconds", quantile=q, **of) for q in ("0.5", "0.99", "1")]
    assert all(age is not None and age >= 0 for age in ages)


def test_goodput_is_that_of_the_rest_of_the_console(console: ConsoleServer, job: Agents) -> None:
    for name in ("goodput", "ettr"):
        before = job.job()[name]
        told = value(console, f"job_{name}_ratio", job=job.job_id)
        after = job.job()[name]
        # Both fall as time passes without a commit.
        assert told is not None and after <= told <= before


def test_requests_are_counted_by_route(console: ConsoleServer, job: Agents) -> None:
    for path in ("/jobs/none", "/jobs/another"):
        assert console.get(path).status_code == 404
    assert value(console, "http_requests_total", method="GET", route="/api/v1/jobs/{job_id}", status="4xx") == 2
    for path in ("/nothing", "/jobs/none/nothing", "/jobs/none/none/none/none"):
        console.get(path)
    requests.get(f"{console.root}/made-up", timeout=10)
    assert value(console, "http_requests_total", route="/api/v1/jobs/{job_id}/heartbeats", status="2xx") == 12
    assert value(console, "http_request_duration_seconds_count", route="/api/v1/jobs/{job_id}/heartbeats") == 12
    routes = {
        sample.labels["route"] for f in families(console).values() for sample in f.samples if "route" in sample.labels
    }
    assert {"other", "pages", "/metrics"} <= routes
    assert not any("none" in route or "nothing" in route or "made-up" in route for route in routes)


def test_the_process_and_its_plans(console: ConsoleServer, job: Agents) -> None:
    seen = families(console)
    assert seen["process_resident_memory_bytes"].samples[0].value > 1e6
    assert "openrecycle_plan_solve_duration_seconds" in seen
    assert value(console, "jobs", state="finished") == 0


def test_open_metrics_for_those_who_ask(console: ConsoleServer, job: Agents) -> None:
    answer = scrape(console, "application/openmetrics-text; version=1.0.0")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    odd = "application/openmetrics-text; version=1.x"
    for accept in ("", odd, "text/plain; version=a.b"):
        assert scrape(console, accept).headers["Content-Type"].startswith("text/plain")


def test_a_restarted_console_begins_anew(tmp_path: Path) -> None:
    database = sqlite_in(tmp_path)

    def committed(console: ConsoleService, job_id: str, number: int) -> None:
        row = Iteration(iteration=number, loss=1.0, loss_hex="0x1p+0", seconds=0.2, generation=1, living=4)
        console.reports.committed(job_id, [row])

    def counted(console: ConsoleService) -> float | None:
        return console.metrics.registry.get_sample_value(
            "openrecycle_job_iteration_duration_seconds_count", {"job": job_id}
        )

    first = ConsoleService(Store(database), tolerance=0)
    job_id = first.jobs.create(JobSpec(name="n", pipelines=2, stages=2, micro_batches=2, iterations=9))[0].job_id
    for number in range(3):
        committed(first, job_id, number)
    assert counted(first) == 3
    first.close()
    second = ConsoleService(Store(database), tolerance=0)
    try:
        second.start()
        assert counted(second) == 0
        committed(second, job_id, 3)
        assert counted(second) == 1
        with pytest.raises(SQLAlchemyError), database.read() as session:
            session.execute(text("select nothing"))
        errors = {"error": "OperationalError"}
        assert second.metrics.registry.get_sample_value("openrecycle_database_errors_total", errors) == 1
    finally:
        second.close()
        database.close()


def test_throughput_is_none_of_the_past(here: ConsoleHere) -> None:
    """An alert on it is heard for a job in which nothing runs."""

    def told(name: str, job: JobHere) -> float | None:
        return here.console.metrics.registry.get_sample_value(f"openrecycle_job_{name}", {"job": job.job_id})

    job = JobHere(here.console, "paused", iterations=400).register().commit(0, 3, 1).beat(4, 1)
    assert told("samples_per_second", job) == pytest.approx(18)
    until(lambda: bool(told("throughput_ratio", job)), "what it would do without faults is known")
    here.console.operators.pause(job.job_id, "ada")
    assert told("samples_per_second", job) == pytest.approx(18), "they end what they are at"
    job.beat(5, 1, "paused")
    until(lambda: told("samples_per_second", job) == 0, "all have stopped")
    assert told("throughput_ratio", job) == 0
    here.console.operators.resume(job.job_id, "ada")
    assert told("samples_per_second", job) == pytest.approx(18)
    job.finish()
    assert told("samples_per_second", job) is None and told("throughput_ratio", job) is None
    changed = JobHere(here.console, "changed").register().commit(0, 5, 1)
    until(lambda: bool(told("throughput_ratio", changed)), "what it would do without faults is known")
    changed.die("W1_2").resume(2)
    changed.commit(6, 6, 2)
    assert told("samples_per_second", changed), "and the recovery is in the time of that iteration"
    assert told("throughput_ratio", changed) is None
    changed.commit(7, 9, 2)
    rate, fault_free = told("samples_per_second", changed), told("fault_free_samples_per_second", changed)
    assert rate and fault_free and told("throughput_ratio", changed) == pytest.approx(rate / fault_free)
    halted = JobHere(here.console, "halted", pipelines=1, stages=2, micro_batches=2).register().commit(0, 3, 1)
    halted.die("W0_1")
    until(lambda: told("samples_per_second", halted) == 0, "nobody is left of a stage")


def test_quantiles_are_values_that_occur() -> None:
    assert quantiles([], (0.5, 1.0)) == []
    assert quantiles([3.0, 1.0, 2.0], (0.0, 0.5, 1.0)) == [1.0, 2.0, 3.0]


def test_bounds_belong_to_the_bucket_below() -> None:
    seconds = Distribution((1.0, 2.0))
    for each in (0.5, 1.0, 1.5, 2.0, 9.0):
        seconds.add(each)
    assert seconds.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert seconds.total == 14.0


def test_a_path_that_somebody_made_up_is_no_label() -> None:
    assert route_of("/api/v1/jobs/x/heartbeats") == "other"
    assert route_of("/_stcore/stream") == "pages"
    assert recent_rate(()) is None


def test_jobs_that_run_are_shown_before_those_that_are_over() -> None:
    def job(name: str, over: bool) -> object:
        return SimpleNamespace(job_id=name, state=SimpleNamespace(over=over), created_at=float(name[1:]))

    def shown(*jobs: object) -> list[str]:
        return [job.job_id for job in metrics.shown_jobs(jobs, 4)]  # type: ignore[arg-type, attr-defined]

    over = [job(f"o{n}", True) for n in range(3)]
    assert shown(*over, job("l3", False), job("l4", False)) == ["l3", "l4", "o1", "o2"]
    assert shown(*over, *(job(f"l{n}", False) for n in range(3, 8))) == ["l4", "l5", "l6", "l7"]

"""Metrics for Prometheus. `Metrics` counts requests, solvers and database errors as they come; `JobMetrics` reads jobs
from their state and history when Prometheus asks.

Labels are jobs, states and quantiles, never workers, so that a job of thousands of workers makes no more series than a
small one. Goodput, ETTR and throughput are those of app.observing, as the pages show them.
"""

from __future__ import annotations

import collections
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import structlog
from fastapi.routing import APIRoute
from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openrecycle.agent.messages.protocol import API, JobState
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.states import RoleState
from openrecycle.app.jobs.throughput import (
    NOTHING,
    RECENT,
    Figures,
    Waited,
    iteration_view,
    pace,
    recent_rate,
    share_of,
)
from openrecycle.app.runtime.errors import unavailable
from openrecycle.db.store import Store
from openrecycle.planner.plans.plan import Plan

log = structlog.get_logger()

PREFIX = "openrecycle"
# Bounds of the histograms: seconds, seconds, and gaps as fractions.
LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SOLVES = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
GAPS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, of no use here


class Metrics:
    """The registry, and the metrics that are counted as they come. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.requests = Counter(
            f"{PREFIX}_http_requests",
            "Requests answered, by what the path stands for and the class of the status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.latency = Histogram(
            f"{PREFIX}_http_request_duration_seconds",
            "From a request to the end of its answer. Long-polls take as long as they wait.",
            ("method", "route"),
            buckets=LATENCIES,
            registry=self.registry,
        )
        self.database_errors = Counter(
            f"{PREFIX}_database_errors", "Errors of the database or its driver.", ("error",), registry=self.registry
        )
        self.solve_seconds = Histogram(
            f"{PREFIX}_plan_solve_duration_seconds",
            "What solvers took for the plans that were made.",
            ("solver",),
            buckets=SOLVES,
            registry=self.registry,
        )
        self.gap = Histogram(
            f"{PREFIX}_plan_gap_ratio",
            "Period / proven lower bound - 1 of the plans that were made.",
            ("solver",),
            buckets=GAPS,
            registry=self.registry,
        )

    def plan_made(self, plan: Plan) -> None:
        """Counts a plan that a solver has made here."""
        solver = plan.solver.name.partition(" ")[0].partition("+")[0][:40] or "unknown"
        self.solve_seconds.labels(solver).observe(plan.solver.seconds)
        self.gap.labels(solver).observe(plan.metrics.gap)

    def watch(self, engine: Engine) -> Callable[[], None]:
        """Counts the engine's errors from now on. Returns a function that ends this."""

        def failed(context: object) -> None:
            error = getattr(context, "sqlalchemy_exception", None) or getattr(context, "original_exception", None)
            self.database_errors.labels(type(error).__name__).inc()

        event.listen(engine, "handle_error", failed)
        return lambda: event.remove(engine, "handle_error", failed)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Returns the exposition and its media type, in the format that an Accept header asks for. Reads the
        database."""
        try:
            encoder, media_type = choose_encoder(accept)
        except (TypeError, ValueError):  # the header has a version that is not a number
            encoder, media_type = choose_encoder("")
        return encoder(self.registry), media_type


def quantiles(values: Iterable[float], wanted: Iterable[float]) -> list[float]:
    """Returns quantiles by nearest rank; [] for no values."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in wanted] if ordered else []


# The key in the scope for a list of one, in which NamedRoutes returns the route's name to Metering.
_NAMED = "openrecycle.route"
_PLAIN = frozenset({"/healthz", "/readyz", "/metrics", "/login"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metering:
    """ASGI middleware that counts requests. The label `route` is a path with the names of its parameters, or `pages`,
    or `other`, never text that a client made up."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        named = scope[_NAMED] = [""]
        try:
            await self.app(scope, receive, watched)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            route = named[0] or route_of(scope["path"])
            self.metrics.requests.labels(method, route, f"{status // 100}xx").inc()
            self.metrics.latency.labels(method, route).observe(time.perf_counter() - began)


class NamedRoutes:
    """ASGI middleware around FastAPI that tells Metering which route a request has taken. Middleware in between may
    copy the scope, but the list in it stays the same."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        finally:
            route = scope.get("route")
            if isinstance(route, APIRoute) and _NAMED in scope:
                scope[_NAMED][0] = API + str(route.path)


def route_of(path: str) -> str:
    """Returns the route's name for a request that FastAPI has not seen, or has no route for."""
    if path in _PLAIN:
        return path
    return "other" if path.startswith("/api") else "pages"


# How many of the newest jobs that are over have metrics, and how many jobs in all.
OVER_SHOWN = 10
JOBS_SHOWN = 200
ITERATION_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
RECOVERY_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
AGE_QUANTILES = (0.5, 0.99, 1.0)
# One collection reads at most this many iterations at a time, and this many times; the next one goes on from there.
READ_AT_ONCE, READS = 5_000, 20


@dataclass
class Distribution:
    """A histogram: counts by upper bound (the last one is infinity), and the sum of the values."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        out, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            out.append((bound, float(running)))
        return out


@dataclass
class _CommittedIterations:
    """The iterations of a job that were committed since the console began to watch it. through: the last one. skipped:
    micro-batches that were left out of their sums."""

    through: int
    skipped: int = 0
    seconds: Distribution = field(default_factory=lambda: Distribution(ITERATION_SECONDS))


class JobMetrics(Collector):
    """Collects the metrics of jobs. Thread-safe. plan: finds a plan by its fingerprint. figures: goodput and others of
    a job. past: the states of jobs that are over and not among `jobs`. waited: how long a job has waited for people,
    which counts in no throughput and no recovery."""

    def __init__(
        self,
        jobs: Callable[[], Sequence[LiveJob]],
        store: Store,
        plan: Callable[[str], Plan | None],
        figures: Callable[[LiveJob], Figures],
        past: Callable[[], Sequence[JobState]] = tuple,
        waited: Callable[[LiveJob], Waited] = lambda job: NOTHING,
    ) -> None:
        self._waited = waited
        self._past = past
        self._jobs, self._store, self._plan, self._figures = jobs, store, plan, figures
        self._seen: WeakKeyDictionary[LiveJob, _CommittedIterations] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def begin(self, job: LiveJob) -> None:
        """Begins to count a job's iterations. Those that it has committed already do not count, since counters begin
        with the process."""
        self._seen[job] = _CommittedIterations(job.state.committed - 1)

    def describe(self) -> list[Metric]:
        """Returns nothing; otherwise the registry would collect, and read the database, to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        with self._lock:
            jobs = list(self._jobs())
            families.count([*(job.state.job_state for job in jobs), *self._past()])
            for job in shown_jobs(jobs):
                try:
                    self._add(families, job)
                except SQLAlchemyError as error:
                    log.warning("the metrics of a job can't be read", job=job.job_id, reason=str(unavailable(error)))
        yield from families.all

    def _add(self, out: _Families, job: LiveJob) -> None:
        key, state, spec = job.job_id, job.state, job.spec
        out.info.add_metric([key, spec.name, spec.technique, spec.memory], 1)
        roles = job.worker_states()
        states = roles.count()
        for worker_state in RoleState:
            out.workers.add_metric([key, worker_state.value], states[worker_state])
        now = time.monotonic()
        ages = [max(0.0, now - at) for member in roles.alive() if (at := job.last_heard(member)) is not None]
        for q, age in zip(AGE_QUANTILES, quantiles(ages, AGE_QUANTILES), strict=False):
            out.heartbeat_age.add_metric([key, f"{q:g}"], age)
        out.generation.add_metric([key], state.generation)
        out.plans_ahead.add_metric([key], job.plans.ahead.made)
        out.plans_wanted.add_metric([key], job.plans.ahead.wanted)
        self._add_iterations(out, job, waits_for_operator=roles.waits_for_operator)
        self._add_recoveries(out, job)
        plan = self._plan(state.current.plan_fingerprint) if state.current else None
        if plan is not None:
            out.plan_gap.add_metric([key], plan.metrics.gap)
            out.plan_slowdown.add_metric([key], plan.metrics.slowdown_vs_1f1b)

    def _add_iterations(self, out: _Families, job: LiveJob, *, waits_for_operator: bool) -> None:
        key, spec = job.job_id, job.spec
        seen = self._seen.setdefault(job, _CommittedIterations(-1))
        for _ in range(READS):
            if seen.through >= job.state.committed - 1:
                break
            rows = self._store.iterations(key, after=seen.through, limit=READ_AT_ONCE)
            for row in rows:
                seen.seconds.add(row["seconds"])
                seen.skipped += len(row["skipped"])
                seen.through = row["iteration"]
            if not rows:
                break
        buckets = seen.seconds.buckets()
        out.iteration.add_metric([key], buckets, seen.seconds.total)
        left_out = seen.skipped * spec.samples_per_micro_batch
        out.samples.add_metric([key], buckets[-1][1] * spec.samples - left_out)
        figures, waited = self._figures(job), self._waited(job)
        rate: float | None = 0.0
        settled: float | None = 0.0
        if job.state.over:
            rate = settled = None
        elif not waits_for_operator:
            rows = self._store.iterations(key, limit=RECENT, newest=True)
            newest = [iteration_view(row, spec, waited) for row in rows]
            rate, settled = recent_rate(newest), pace(newest)
        _add_known(out.rate, key, rate)
        _add_known(out.fault_free, key, figures.fault_free)
        _add_known(out.share, key, share_of(settled, figures))
        _add_known(out.goodput, key, figures.goodput)
        _add_known(out.ettr, key, figures.ettr)

    def _add_recoveries(self, out: _Families, job: LiveJob) -> None:
        key, waited = job.job_id, self._waited(job)
        rows = self._store.recoveries(key)
        for family, column in ((out.detection, "detected_ms"), (out.recovery, "resumed_ms")):
            seconds = Distribution(RECOVERY_SECONDS)
            for row in rows:
                people = sum(waited.in_recovery(row)) if family is out.recovery else 0.0
                seconds.add(max(0.0, row[column] / 1000 - people))
            family.add_metric([key], seconds.buckets(), seconds.total)
        out.recoveries.add_metric([key], len(rows))


class _Families:
    """The metric families of one collection, empty at first."""

    def __init__(self) -> None:
        self.all: list[Metric] = []
        job = ("job",)
        self.jobs = self._gauge("jobs", "Jobs by state.", ("state",))
        self.info = self._gauge("job_info", "What a job is called and plans with; always 1.", (*job, *_INFO))
        self.workers = self._gauge("job_workers", "Workers of the grid by state.", (*job, "state"))
        self.heartbeat_age = self._gauge(
            "job_heartbeat_age_seconds", "Quantiles of the time since a living worker was heard.", (*job, "quantile")
        )
        self.generation = self._gauge("job_generation", "Number of the newest membership generation.", job)
        self.plans_ahead = self._gauge("job_plans_ahead", "Plans that are made ahead of failures.", job)
        self.plans_wanted = self._gauge("job_plans_ahead_wanted", "Plans that are to be made ahead.", job)
        self.iteration = self._histogram(
            "job_iteration_duration_seconds", "Iterations committed since the console began, from commit to commit."
        )
        self.samples = CounterMetricFamily(
            f"{PREFIX}_job_samples", "Samples in iterations committed since the console began.", labels=job
        )
        self.all.append(self.samples)
        self.rate = self._gauge(
            "job_samples_per_second",
            "Throughput of the newest iterations of the generation; 0 while it is halted or waits for a person.",
            job,
        )
        self.fault_free = self._gauge(
            "job_fault_free_samples_per_second", "Throughput with all workers, measured or else planned.", job
        )
        self.share = self._gauge("job_throughput_ratio", "Throughput / fault-free throughput.", job)
        self.goodput = self._gauge("job_goodput_ratio", "Samples that count / (fault-free rate x wall time).", job)
        self.ettr = self._gauge("job_ettr_ratio", "Productive time / wall time so far.", job)
        self.recoveries = CounterMetricFamily(
            f"{PREFIX}_job_recoveries", "Deaths of workers after which training went on.", labels=job
        )
        self.all.append(self.recoveries)
        self.detection = self._histogram(
            "job_detection_duration_seconds", "From the death of a worker until it was seen."
        )
        self.recovery = self._histogram(
            "job_recovery_duration_seconds", "From the death of a worker until the redone iteration was committed."
        )
        self.plan_gap = self._gauge("job_plan_gap_ratio", "Of the plan in force: period / proven bound - 1.", job)
        self.plan_slowdown = self._gauge(
            "job_plan_slowdown_ratio", "Of the plan in force: period / that of fault-free 1F1B - 1.", job
        )

    def count(self, jobs: Sequence[JobState]) -> None:
        states = collections.Counter(jobs)
        for state in JobState:
            self.jobs.add_metric([state.value], states[state])

    def _gauge(self, name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
        self.all.append(family)
        return family

    def _histogram(self, name: str, text: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"{PREFIX}_{name}", text, labels=("job",))
        self.all.append(family)
        return family


_INFO = ("name", "technique", "memory")


def shown_jobs(jobs: Sequence[LiveJob], most: int = JOBS_SHOWN) -> list[LiveJob]:
    """Returns the jobs that have metrics: those that run, then as many of those that are over as there is room for."""
    live = [job for job in jobs if not job.state.over][-most:]
    over = sorted((job for job in jobs if job.state.over), key=lambda job: -job.created_at)
    return [*live, *over[: min(OVER_SHOWN, most - len(live))][::-1]]


def _add_known(family: GaugeMetricFamily, key: str, value: float | None) -> None:
    if value is not None:
        family.add_metric([key], value)

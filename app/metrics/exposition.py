"""All metrics of one console, and their text.

prometheus_client, with a registry of the console's own: its global one would be shared by two consoles in
one process, as tests have them. What is known of jobs is read when it is asked for (app.metrics.jobs);
what happens in between is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from sqlalchemy import event
from sqlalchemy.engine import Engine

from openrecycle.planner.plans.plan import Plan

PREFIX = "openrecycle"
# Seconds.
LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SOLVES = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
GAPS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, of no use here


class Metrics:
    """Thread-safe."""

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
            "From a request to the end of its answer. Long-polls and event streams take as long as they wait.",
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
        """A solver has made it here."""
        solver = plan.solver.name.partition(" ")[0].partition("+")[0][:40] or "unknown"
        self.solve_seconds.labels(solver).observe(plan.solver.seconds)
        self.gap.labels(solver).observe(plan.metrics.gap)

    def watch(self, engine: Engine) -> Callable[[], None]:
        """Counts the engine's errors from now on, until what is returned is called."""

        def failed(context: object) -> None:
            error = getattr(context, "sqlalchemy_exception", None) or getattr(context, "original_exception", None)
            self.database_errors.labels(type(error).__name__).inc()

        event.listen(engine, "handle_error", failed)
        return lambda: event.remove(engine, "handle_error", failed)

    def text(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its media type, in the format that an Accept header asks for. Reads the database."""
        encoder, media_type = choose_encoder(accept)
        return encoder(self.registry), media_type


def quantiles(values: Iterable[float], wanted: Iterable[float]) -> list[float]:
    """By nearest rank; of no values, nothing."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in wanted] if ordered else []

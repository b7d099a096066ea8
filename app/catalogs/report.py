"""What a catalog holds, by number of failures: what the Catalog page and the API say of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from openrecycle.app.catalogs.plans_needed import PlansNeeded
from openrecycle.db.store import Record
from openrecycle.planner.catalogs.catalog_build import LISTED
from openrecycle.planner.catalogs.catalog_store import PLANNER_VERSION, CatalogInfo, plan_name
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.packed import CatalogQuestion, Header
from openrecycle.planner.plans.plan import job_doc


@dataclass(frozen=True)
class PlanLine:
    """One stored plan. period, bound: in the job's time unit. peak: activations, most on one worker.

    peak_bytes: the most that one worker may hold, were each of its activations always at its larger part;
    None where the profile does not say.

    dead: by stage, the pipelines whose worker has failed.
    """

    name: str
    dead: tuple[tuple[int, ...], ...]
    period: float
    bound: float
    gap: float
    optimal: bool
    peak: int | None
    solver: str
    peak_bytes: int | None = None

    def failed(self, most: int | None = None) -> tuple[str, ...]:
        """The failed workers, or the first so many of them."""
        if most is None:
            return tuple(map(str, sorted(self._workers())))
        return tuple(map(str, islice(self._workers(), most)))

    def words(self, most: int = 6) -> str:
        """`W0_1, W0_2`, and how many more."""
        count = sum(map(len, self.dead))
        return ", ".join(self.failed(most)) + (f" and {count - most:,} more" if count > most else "")

    def _workers(self) -> Iterator[Worker]:
        return (Worker(pipeline, stage) for stage, row in enumerate(self.dead) for pipeline in row)


@dataclass(frozen=True)
class CountLine:
    """All that is planned for one number of failures. wanted: plans that the tolerance asks for,
    0 beyond it: what is there then was made for a job that lost workers.

    plans: the longest period first, which is the one that a tolerance has to reckon with.
    linear: the period that a job would have whose throughput falls as its workers do.
    """

    failures: int
    wanted: int
    there: int
    plans: tuple[PlanLine, ...]
    linear: float | None

    @property
    def worst(self) -> PlanLine | None:
        return self.plans[0] if self.plans else None

    @property
    def best(self) -> PlanLine | None:
        return self.plans[-1] if self.plans else None

    @property
    def gap(self) -> float | None:
        return max((plan.gap for plan in self.plans), default=None)

    @property
    def peak(self) -> int | None:
        known = [plan.peak for plan in self.plans if plan.peak is not None]
        return max(known, default=None)

    @property
    def peak_bytes(self) -> int | None:
        return max((plan.peak_bytes for plan in self.plans if plan.peak_bytes is not None), default=None)


@dataclass(frozen=True)
class CatalogReport:
    """by_pattern: every failure pattern has a plan of its own; else one per number of failures, for the
    stages where they cost least. limit: activations that the fullest worker may hold. reference: the
    period of fault-free 1F1B.
    """

    question: CatalogQuestion
    fingerprint: str
    tolerance: int
    lines: tuple[CountLine, ...]
    by_pattern: bool
    limit: int | None
    reference: float

    @property
    def wanted(self) -> int:
        return sum(line.wanted for line in self.lines)

    @property
    def there(self) -> int:
        """Of the wanted ones."""
        return sum(line.there for line in self.lines)

    @property
    def missing(self) -> int:
        return self.wanted - self.there

    @property
    def plans(self) -> int:
        return sum(len(line.plans) for line in self.lines)

    @property
    def covered(self) -> int | None:
        """Up to how many failures nothing is missing; None: not even the fault-free plan is there."""
        whole = None
        for line in self.lines:
            if not line.wanted or line.there < line.wanted:
                break
            whole = line.failures
        return whole


@dataclass(frozen=True)
class CatalogSummary:
    """One stored catalog. created_at: POSIX seconds. current: made by this version of the planner."""

    fingerprint: str
    info: CatalogInfo
    plans: int
    failures: int
    bytes: int
    created_at: float

    @property
    def current(self) -> bool:
        return self.info.planner_version == PLANNER_VERSION


def report(
    question: CatalogQuestion, needed: PlansNeeded, fingerprint: str, headers: Mapping[str, Header]
) -> CatalogReport:
    """headers: of the stored plans, by name."""
    job, tolerance = question.job, needed.tolerance
    by_count: dict[int, list[PlanLine]] = defaultdict(list)
    for name, header in headers.items():
        by_count[header.failures].append(_line(name, header, question))
    patterns = needed.listed(tolerance, LISTED)
    wanted: dict[int, list[str]] = defaultdict(list)
    if patterns is not None:
        for pattern in patterns:
            wanted[len(pattern)].append(plan_name(pattern))
    fault_free = min((plan.period for plan in by_count[0]), default=None)
    lines = []
    for count in range(max([tolerance, *by_count]) + 1):
        plans = tuple(sorted(by_count[count], key=lambda plan: (-plan.period, plan.name)))
        if count > tolerance:
            asked = there = 0
        elif patterns is None:
            asked, there = 1, min(1, len(plans))
        else:
            asked = len(wanted[count])
            there = sum(name in headers for name in wanted[count])
        workers = job.pipelines * job.stages
        linear = fault_free * workers / (workers - count) if fault_free is not None else None
        lines.append(CountLine(count, asked, there, plans, linear))
    limits = [limit for limit in question.memory.limits(job, question.technique) if limit is not None]
    return CatalogReport(
        question,
        fingerprint,
        tolerance,
        tuple(lines),
        patterns is not None,
        max(limits, default=None),
        needed.reference,
    )


def whole_counts(found: CatalogReport, steps: int = 8) -> CatalogReport:
    """Only numbers of failures that are asked for and whose plans are all there, and of many such numbers an eighth at
    a time.

    What is drawn of a catalog that is being filled would else change with each plan; and of a number of which a
    running job has planned what is next, the longest plan says nothing.
    """
    asked = [line for line in found.lines if line.wanted]
    whole = [line.failures for line in asked if line.there >= line.wanted]
    step = max(1, len(asked) // steps)
    drawn = set(whole if len(whole) == len(asked) else whole[: len(whole) // step * step])
    lines = (line if line.failures in drawn else replace(line, plans=()) for line in found.lines)
    return replace(found, lines=tuple(lines))


def summary(row: Record) -> CatalogSummary | None:
    """Of a row of Store.catalogs; None for one that can't be read."""
    try:
        info = CatalogInfo.from_json(row["info"], source=row["fingerprint"])
    except PlannerError:
        return None
    return CatalogSummary(row["fingerprint"], info, row["plans"], row["failures"], int(row["bytes"]), row["created_at"])


def stale(question: CatalogQuestion, catalogs: Sequence[CatalogSummary]) -> list[tuple[CatalogSummary, str]]:
    """Catalogs of the same grid that don't answer this question any more, and why not."""
    own = CatalogInfo.of(question)
    out = []
    for catalog in catalogs:
        info = catalog.info
        same = (info.job.pipelines, info.job.stages, info.job.micro_batches, info.technique, info.memory)
        if catalog.fingerprint == own.fingerprint or same != (
            question.job.pipelines,
            question.job.stages,
            question.job.micro_batches,
            question.technique,
            question.memory.text,
        ):
            continue
        reasons = []
        if not catalog.current:
            reasons.append(f"made by version {info.planner_version} of the planner, now {PLANNER_VERSION}")
        if info.job != job_doc(question.job):
            reasons.append("other op times")
        out.append((catalog, "; ".join(reasons)))
    return out


def _line(name: str, header: Header, question: CatalogQuestion) -> PlanLine:
    metrics, splits = header.metrics, question.technique.splits
    held = [
        profile.fixed_bytes + peak * profile.micro_batch_bytes(splits=splits)
        for profile, peak in zip(question.job.profiles, header.peaks, strict=False)
    ]
    return PlanLine(
        name,
        header.failed,
        metrics.period,
        metrics.lower_bound,
        metrics.gap,
        header.solver.status == "optimal",
        max(header.peaks, default=None),
        header.solver.name,
        max(held, default=0) or None,
    )

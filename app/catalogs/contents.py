"""Which plans a catalog should have, which it has, and the child process that fills it. Imports no database.

The child that fills a catalog gets the question and the plans that are stored already, and sends each new plan as soon
as it is made. The console stores them as they come, so that none is lost when the child is ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from openrecycle.app.runtime.processes import Channel
from openrecycle.planner.catalogs.catalog import PLANNER_VERSION, CatalogInfo, MappedBlobs, StoredCatalog
from openrecycle.planner.catalogs.catalog_build import LISTED, fill, make_engine, most_failures, targets
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.failures import parse_workers, patterns
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.plans.packed import CatalogQuestion, Effort, Header, plan_name
from openrecycle.planner.plans.plan import Plan, PlanError, job_doc

# The most failure patterns that are planned one by one; no more are listed.
MOST = 512


@dataclass(frozen=True)
class PlansNeeded:
    """The failure patterns that plans are needed for. patterns: canonical failure sets that leave every stage a living
    worker, fewest failures first: all of up to `tolerance` failures, or the first MOST + 1."""

    tolerance: int
    patterns: tuple[frozenset[Worker], ...]

    def listed(self, tolerance: int, most: int) -> list[frozenset[Worker]] | None:
        """Returns all patterns of up to `tolerance` failures; None if there are more than `most` (at most MOST)."""
        found = [pattern for pattern in self.patterns if len(pattern) <= tolerance]
        return found if len(found) <= most else None


def needed(question: CatalogQuestion, tolerance: int) -> PlansNeeded:
    """Lists the patterns of up to `tolerance` failures. Takes milliseconds for any shape of the job; a third of a
    second
    for 1,024 failures in one stage."""
    job, tolerance = question.job, min(tolerance, most_failures(question))
    every = chain.from_iterable(patterns(job, count) for count in range(tolerance + 1))
    return PlansNeeded(tolerance, tuple(islice(every, MOST + 1)))


@dataclass(frozen=True)
class PlanLine:
    """One stored plan, as reports show it. dead: by stage, the pipelines whose worker has failed. period, bound: in the
    job's time unit. peak: the most activations on one worker.

    peak_bytes: the most bytes that one worker would hold if all its activations had their largest size all the time; if
    the memory limit is by bytes, at most the worker's capacity. None if the profile has no sizes.
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

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(map(str, sorted(self._workers())))

    def words(self, most: int = 6) -> str:
        """Returns the failed workers in words: `W0_1, W0_2`, and how many more."""
        count = sum(map(len, self.dead))
        named = ", ".join(map(str, islice(self._workers(), most)))
        return named + (f" and {count - most:,} more" if count > most else "")

    def _workers(self) -> Iterator[Worker]:
        return (Worker(pipeline, stage) for stage, row in enumerate(self.dead) for pipeline in row)


@dataclass(frozen=True)
class CountLine:
    """All plans for one number of failures. wanted: how many plans the tolerance asks for; 0 beyond it, where plans
    were made for jobs that lost workers. there: how many of the wanted ones exist.

    plans: the longest period first, since that is the worst case. linear: the period if throughput fell in proportion
    to the number of workers.
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
class Located:
    """A stored plan that fits certain failures. info: its catalog's, as JSON. stored: its bytes as the catalog has
    them, under `name`. origin: where it is from, in words."""

    info: str
    failed: tuple[str, ...]
    name: str
    stored: bytes
    origin: str

    def plan(self) -> Plan:
        """Returns the plan with its pipelines renamed to fit the failures. Raises PlannerError."""
        catalog = StoredCatalog(CatalogInfo.from_json(self.info), MappedBlobs({self.name: self.stored}))
        found = catalog.find(parse_workers(self.failed))
        if found is None:
            raise PlanError(f"plan {self.name} is not for these failures")
        return found.plan


@dataclass(frozen=True)
class CatalogReport:
    """The plans of a catalog by number of failures. by_pattern: every failure pattern has a plan of its own; else there
    is one per number of failures, for the stages where they cost least. limit: the most activations that any worker may
    hold. reference: the period of fault-free 1F1B, which stored plans are compared with; None: there are no plans.
    """

    question: CatalogQuestion
    fingerprint: str
    tolerance: int
    lines: tuple[CountLine, ...]
    by_pattern: bool
    limit: int | None
    reference: float | None

    @property
    def wanted(self) -> int:
        return sum(line.wanted for line in self.lines)

    @property
    def there(self) -> int:
        """How many of the wanted plans exist."""
        return sum(line.there for line in self.lines)

    @property
    def missing(self) -> int:
        return self.wanted - self.there

    @property
    def plans(self) -> int:
        return sum(len(line.plans) for line in self.lines)

    @property
    def covered(self) -> int | None:
        """The number of failures up to which no plan is missing; None: not even the fault-free plan exists."""
        whole = None
        for line in self.lines:
            if not line.wanted or line.there < line.wanted:
                break
            whole = line.failures
        return whole


@dataclass(frozen=True)
class CatalogSummary:
    """A stored catalog. created_at: POSIX seconds. current: it was made by this version of the planner."""

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
    """Makes the report on a catalog. headers: those of the stored plans, by name."""
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
    limits = [limit for _, limit in question.memory.most(job, question.technique) if limit is not None]
    return CatalogReport(
        question,
        fingerprint,
        tolerance,
        tuple(lines),
        patterns is not None,
        max(limits, default=None),
        next((_reference(header, job) for header in headers.values()), None),
    )


def _reference(header: Header, job: Job) -> float:
    """Returns the period of fault-free 1F1B, from a plan's comparison with it: to compute it takes seconds for
    thousands of stages. It is rounded to ticks, so that every plan gives the same value."""
    return round(header.metrics.fault_free * job.ticks_per_unit) / job.ticks_per_unit


def whole_counts(found: CatalogReport) -> CatalogReport:
    """Reduces a report to the numbers of failures that the tolerance asks for and whose plans are all there; while a
    catalog is being filled, these grow in steps of an eighth.

    Otherwise the chart of such a catalog would change with each plan. And beyond the tolerance a running job has only
    made plans for its own next failures, so that the longest of these plans says nothing.
    """
    asked = [line for line in found.lines if line.wanted]
    whole = [line.failures for line in asked if line.there >= line.wanted]
    step = max(1, len(asked) // 8)
    drawn = set(whole if len(whole) == len(asked) else whole[: len(whole) // step * step])
    lines = (line if line.failures in drawn else replace(line, plans=()) for line in found.lines)
    return replace(found, lines=tuple(lines))


def summary(row: Mapping[str, Any]) -> CatalogSummary | None:
    """Reads a row of Store.catalogs; None if it can't be read."""
    try:
        info = CatalogInfo.from_json(row["info"], source=row["fingerprint"])
    except PlannerError:
        return None
    return CatalogSummary(row["fingerprint"], info, row["plans"], row["failures"], int(row["bytes"]), row["created_at"])


def stale(question: CatalogQuestion, catalogs: Sequence[CatalogSummary]) -> list[tuple[CatalogSummary, str]]:
    """Returns the catalogs of the same grid that don't answer this question (any more), and why not."""
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
    metrics, splits, job = header.metrics, question.technique.splits, question.job
    job = job.with_partition(header.partition) if header.partition else job
    held = [
        profile.fixed_bytes + peak * profile.micro_batch_bytes(splits=splits)
        for profile, peak in zip(job.profiles, header.peaks, strict=False)
    ]
    if question.memory.text == "bytes":
        held = list(map(min, held, job.capacity_bytes))
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


# The most ops of a plan here. Larger plans take seconds each, and are made by the command line.
MAX_OPS = 3_200_000
MAX_TOLERANCE = 1024


@dataclass(frozen=True)
class CatalogRequest:
    """What is planned ahead: the question, and for how many failures with how much effort.

    solver: `list` takes milliseconds a plan, the others up to time_limit seconds.
    """

    question: CatalogQuestion
    tolerance: int = 2
    solver: str = "list"
    time_limit: float = 10.0

    def check(self) -> None:
        """Raises InputError for more than the console plans, or more failures than the job can have."""
        job = self.question.job
        if job.ops > MAX_OPS:
            raise InputError("ops of one plan", job.ops, f"at most {MAX_OPS:,} here; `openrecycle catalog` takes more")
        most = most_failures(self.question)
        if self.tolerance > most:
            reroutes = self.question.technique.reroutes
            why = "each stage needs a living worker" if reroutes else "fault-free plans take no failure"
            raise InputError("tolerance", self.tolerance, f"a number of failures from 0 to {most}, as {why}")

    @property
    def effort(self) -> Effort:
        return Effort(solver=self.solver, time_limit=None if self.solver == "list" else self.time_limit)


# -- the process -----------------------------------------------------------------------------


class _Sending(MappedBlobs):
    """A catalog's plans in the child: the stored ones, and new ones, each of which is also sent to the console."""

    def __init__(self, channel: Channel, blobs: dict[str, bytes]) -> None:
        super().__init__(blobs)
        self._channel = channel

    def put(self, name: str, blob: bytes) -> None:
        super().put(name, blob)
        self._channel.say(name.encode() + b"\0" + blob)


def serve_filling(channel: Channel, request: CatalogRequest, stored: dict[str, bytes], processes: int) -> None:
    """Fills a catalog, in the child: sends its progress as objects, and plans (see `read_stored`)."""
    question = request.question
    channel.say({"done": 0, "total": 0})
    filled = fill(
        question,
        targets(question, request.tolerance),
        _Sending(channel, stored),
        engine=make_engine(processes),
        effort=request.effort,
        on_progress=lambda done, total: channel.say({"done": done, "total": total}),
    )
    channel.say({"planned": filled.planned})


def read_stored(message: bytes) -> tuple[str, bytes]:
    """Returns the name of a plan that the child sends, and the plan as it is stored."""
    name, _, blob = message.partition(b"\0")
    return name.decode(), blob

"""What a catalog is to hold, what it holds, and how it is filled: pure, or run in a child process.

The child that fills a catalog gets the question and what is stored of it already, and sends each plan as it is made;
who reads its messages stores them, so that nothing is lost when it is ended.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openrecycle.app.runtime.errors import first_wrong
from openrecycle.app.runtime.processes import Channel, unexpected
from openrecycle.planner.catalogs.catalog import PLANNER_VERSION, CatalogInfo, MappedBlobs
from openrecycle.planner.catalogs.catalog_build import LISTED, fill, make_engine, targets
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.failures import patterns
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker, count_ops
from openrecycle.planner.plans.packed import CatalogQuestion, Effort, Header, plan_name
from openrecycle.planner.plans.plan import INTEGER, PRINTABLE, JobDoc, job_doc
from openrecycle.planner.solvers.portfolio import SOLVERS

# Patterns that are looked for: no more are ever planned one by one.
MOST = 512


@dataclass(frozen=True)
class PlansNeeded:
    """patterns: canonical failure sets that leave every stage a living peer, fewest failures first: all of up to
    `tolerance` failures, or the first MOST + 1."""

    tolerance: int
    patterns: tuple[frozenset[Worker], ...]

    def listed(self, tolerance: int, most: int) -> list[frozenset[Worker]] | None:
        """All of up to `tolerance` failures, unless there are more than `most` (at most MOST)."""
        found = [pattern for pattern in self.patterns if len(pattern) <= tolerance]
        return found if len(found) <= most else None


def most_failures(question: CatalogQuestion) -> int:
    """How many failures leave each stage a living worker."""
    return question.job.stages * (question.job.pipelines - 1) if question.technique.reroutes else 0


def needed(question: CatalogQuestion, tolerance: int) -> PlansNeeded:
    """Takes milliseconds, whatever the job's shape is; of 1,024 failures in one stage a third of a second."""
    job, tolerance = question.job, min(tolerance, most_failures(question))
    every = chain.from_iterable(patterns(job, count) for count in range(tolerance + 1))
    return PlansNeeded(tolerance, tuple(islice(every, MOST + 1)))


@dataclass(frozen=True)
class PlanLine:
    """One stored plan. period, bound: in the job's time unit. peak: activations, most on one worker.

    peak_bytes: the most that one worker may hold, were each of its activations always at its larger part, but no more
    than it has where plans are by bytes; None where the profile does not say.

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

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(map(str, sorted(self._workers())))

    def words(self, most: int = 6) -> str:
        """`W0_1, W0_2`, and how many more."""
        count = sum(map(len, self.dead))
        named = ", ".join(map(str, islice(self._workers(), most)))
        return named + (f" and {count - most:,} more" if count > most else "")

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
    period of fault-free 1F1B, which the stored plans are compared with; None: there are none.
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
    """Worked out anew it takes seconds for thousands of stages. In whole ticks, as every plan says the same one."""
    metrics = header.metrics
    return round(metrics.period / (1 + metrics.slowdown_vs_1f1b) * job.ticks_per_unit) / job.ticks_per_unit


def whole_counts(found: CatalogReport) -> CatalogReport:
    """Only numbers of failures that are asked for and whose plans are all there, and of many such numbers an eighth at
    a time.

    What is drawn of a catalog that is being filled would else change with each plan; and of a number of which a
    running job has planned what is next, the longest plan says nothing.
    """
    asked = [line for line in found.lines if line.wanted]
    whole = [line.failures for line in asked if line.there >= line.wanted]
    step = max(1, len(asked) // 8)
    drawn = set(whole if len(whole) == len(asked) else whole[: len(whole) // step * step])
    lines = (line if line.failures in drawn else replace(line, plans=()) for line in found.lines)
    return replace(found, lines=tuple(lines))


def summary(row: Mapping[str, Any]) -> CatalogSummary | None:
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


# As many workers as a job may have. Plans of more ops take seconds each: the command line makes those, and
# `openrecycle catalog` may use a cluster.
MAX_WORKERS = 16_384
MAX_OPS = 3_200_000
MAX_TOLERANCE = 1024

Duration = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]


class CatalogRequest(BaseModel):
    """What is planned ahead: the question, and for how many failures with how much effort.

    job: replaces the grid and the durations (of F, I, W, O and transfer, in time_unit) by a job's
    own. solver: `list` takes milliseconds a plan, the others up to time_limit seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: JobDoc | None = None
    pipelines: Annotated[int, Field(ge=1, le=MAX_WORKERS), INTEGER] = 3
    stages: Annotated[int, Field(ge=1, le=MAX_WORKERS), INTEGER] = 4
    micro_batches: Annotated[int, Field(ge=1, le=4096), INTEGER] = 6
    durations: dict[Literal["F", "I", "W", "O", "transfer"], Duration] = Field(default_factory=dict)
    time_unit: Annotated[str, Field(min_length=1, max_length=20, pattern=PRINTABLE)] = "slot"
    technique: str = Technique.STAGGERED.value
    memory: Annotated[str, Field(max_length=20)] = "uniform"
    tolerance: Annotated[int, Field(ge=0, le=MAX_TOLERANCE), INTEGER] = 2
    solver: str = "list"
    time_limit: Annotated[float, Field(strict=True, gt=0, le=600, allow_inf_nan=False)] = 10.0

    @cached_property
    def question(self) -> CatalogQuestion:
        """Raises InputError, also for what is too large for the console."""
        grid = self.job or self
        workers = grid.pipelines * grid.stages
        ops = count_ops(grid.pipelines, grid.stages, grid.micro_batches)
        if not 0 < workers <= MAX_WORKERS:
            raise InputError("pipelines x stages", workers, f"1 to {MAX_WORKERS:,} workers here; {ELSEWHERE}")
        if ops > MAX_OPS:
            raise InputError("ops of one plan", ops, f"at most {MAX_OPS:,} here; {ELSEWHERE}")
        if self.solver not in SOLVERS:
            raise InputError("solver", self.solver, "one of " + ", ".join(SOLVERS))
        times: Mapping[str, float] = {str(kind): value for kind, value in self.durations.items()}
        if self.job is not None:
            job = self.job.job()
        else:
            job = Job.uniform(
                self.pipelines, self.stages, self.micro_batches, durations=times, time_unit=self.time_unit
            )
        technique = Technique.of(self.technique, field="technique")
        question = CatalogQuestion(job, technique, MemoryLimit.parse(self.memory, field="memory"))
        question.problem(frozenset())  # refuses a limit that not even the full grid can keep
        most = most_failures(question)
        if self.tolerance > most:
            why = "each stage needs a living worker" if technique.reroutes else "fault-free plans take no failure"
            raise InputError("tolerance", self.tolerance, f"a number of failures from 0 to {most}, as {why}")
        return question

    @property
    def effort(self) -> Effort:
        return Effort(solver=self.solver, time_limit=None if self.solver == "list" else self.time_limit)


ELSEWHERE = "`openrecycle catalog` takes more"


def parse_request(**values: Any) -> CatalogRequest:
    """Raises InputError naming the field."""
    try:
        request = CatalogRequest(**values)
    except ValidationError as error:
        raise first_wrong(error) from None
    _ = request.question
    return request


# -- the process -----------------------------------------------------------------------------


class _Sending(MappedBlobs):
    """A catalog's plans: the stored ones, and new ones, which are sent."""

    def __init__(self, channel: Channel, blobs: dict[str, bytes]) -> None:
        super().__init__(blobs)
        self._channel = channel

    def put(self, name: str, blob: bytes) -> None:
        super().put(name, blob)
        self._channel.say(name.encode() + b"\0" + blob)


def serve_filling(channel: Channel, request: CatalogRequest, stored: dict[str, bytes], processes: int) -> None:
    """In the child: progress and plans; then the end. See `read_message`."""
    try:
        question = request.question
        _say(channel, done=0, total=0)
        filled = fill(
            question,
            targets(question, request.tolerance),
            _Sending(channel, stored),
            engine=make_engine(processes),
            effort=request.effort,
            on_progress=lambda done, total: _say(channel, done=done, total=total),
        )
        _say(channel, finished=filled.finished, planned=filled.planned)
    except PlannerError as error:
        _say(channel, error=str(error))
    except Exception as error:
        _say(channel, error=unexpected(error))


def read_message(data: bytes) -> dict[str, Any] | tuple[str, bytes]:
    """What `serve` says: progress and the end, or (name, stored plan)."""
    if data[:1] == b"{":
        message: dict[str, Any] = json.loads(data)
        return message
    name, _, blob = data.partition(b"\0")
    return name.decode(), blob


def _say(channel: Channel, **message: Any) -> None:
    channel.say(json.dumps(message).encode())


def share_of_cores() -> int:
    """How many processes plan: half of the cores, as training may run on this machine too."""
    return max(1, (os.cpu_count() or 1) // 2)

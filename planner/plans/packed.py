"""The packed form of a plan, for pipes, databases and catalogs: a header that can be read alone, and the schedule.

    magic | header length (4 bytes) | header (JSON, deflated) | payload (deflated) | SHA-256 of all before

The payload is arrays of how long each op waits beyond its precedence (see `_waits`). Most waits are 0 and repeat from
one micro-batch to the next, so they deflate well; pipelines with equal rows share one. A plan that does not fit these
arrays is kept as its JSON. Either way the plan comes back exactly, in less than a second for 8,192 workers. The header
says which problem the plan is for, except in a catalog, whose plans all have the same.

The process that makes a plan also packs it; others pass the bytes on as they are (`packed`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openrecycle.planner.jobs.failures import by_stage, workers_in
from openrecycle.planner.jobs.job import MAX_LAYERS, Job, MemoryLimit, Over, Problem, Technique, Worker
from openrecycle.planner.plans.plan import (
    INTEGER,
    JobDoc,
    MetricsDoc,
    Plan,
    PlanError,
    SolverDoc,
    first_problem,
    read_model,
)
from openrecycle.planner.plans.schedule import B, F, I, Ints, O, OpArrays, OpsByWorker, Schedule, W, op_times

MAGIC = b"ORP1"
DIGEST = hashlib.sha256().digest_size
# Checked before more memory is taken: a header lists the failed workers and little else.
MAX_HEADER = 64 << 20
MAX_JSON = 4 << 30

Grid = tuple[int, int, int]


def foreign_header(grid: Grid) -> int:
    """Returns the same for a plan of this grid that another host has sent: to read one of 8 MiB takes seconds, and
    hundreds of times the memory of what was sent. It has profiles, each with an all-reduce by the number of peers, and
    speeds of workers."""
    pipelines, stages, _ = grid
    profiles = (MAX_LAYERS + stages) * (512 + 24 * pipelines)
    return min((64 << 10) + profiles + 64 * pipelines * stages, 8 << 20)


class Effort(BaseModel):
    """The solver and time limit that a plan was asked for with; they tell whether it needs to be made again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    solver: str
    time_limit: float | None = None


class RequestedPlan(BaseModel):
    """What a plan is for, except for its failures. Documents that state it inherit these fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: JobDoc
    technique: Technique
    memory: str

    @property
    def question(self) -> CatalogQuestion:
        """Makes the question. Raises PlannerError when the document describes no job."""
        return CatalogQuestion(self.job.job(), self.technique, MemoryLimit.parse(self.memory, field="memory"))


_Int = Annotated[int, INTEGER]


def merit(metrics: MetricsDoc) -> tuple[float, float]:
    """Sort key: of two plans of one problem the larger is kept, which is the shorter, and then the better proven."""
    return -metrics.period, metrics.lower_bound


class Header(BaseModel):
    """The header of a packed plan. failed: by stage, the pipelines whose worker is dead. metrics: without
    peak_activations.

    partition: of the plan, where its job has layers.
    rows: by pipeline, the index of its row among the stored ones. types: of the columns (`_pack`).
    peaks: by stage, the most activations that one of its workers holds. asked: None in a catalog.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    failed: tuple[tuple[_Int, ...], ...]
    partition: Annotated[tuple[_Int, ...], Field(exclude_if=lambda value: not value)] = ()
    metrics: MetricsDoc
    solver: SolverDoc
    effort: Effort
    form: Literal["columns", "json"]
    rows: tuple[_Int, ...] = ()
    types: tuple[Literal["i1", "i2", "i4", "i8"], ...] = ()
    fingerprint: str | None = Field(default=None, max_length=64)
    peaks: tuple[_Int, ...] = ()
    asked: Annotated[RequestedPlan | None, Field(exclude_if=lambda value: value is None)] = None

    @property
    def failures(self) -> int:
        return sum(map(len, self.failed))

    @property
    def merit(self) -> tuple[float, float]:
        return merit(self.metrics)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of failures per stage."""
        return tuple(map(len, self.failed))

    @property
    def workers(self) -> frozenset[Worker]:
        return workers_in(self.failed)


@dataclass(frozen=True)
class CatalogQuestion:
    """What all plans of one catalog share. over: with `partitions`, each plan has the best partition of its own."""

    job: Job
    technique: Technique
    memory: MemoryLimit
    over: Over = "schedules"

    def problem(self, failed: frozenset[Worker]) -> Problem:
        return Problem(self.job, failed, self.technique, self.memory)

    def fits(self, partition: tuple[int, ...]) -> bool:
        """May a plan with this partition be in the catalog? Catalogs written by earlier versions may have others."""
        return self.over != "schedules" or partition in ((), self.job.partition)


def plan_name(pattern: frozenset[Worker]) -> str:
    """Return the name of a catalog's plan for these failures."""
    text = ",".join(map(str, sorted(pattern)))
    return f"{name_prefix(len(pattern))}{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def name_prefix(failures: int) -> str:
    return f"{failures:06d}-"


def pack(plan: Plan, effort: Effort | None = None) -> bytes:
    """Pack a plan. effort: given for a plan of a catalog, which states the problem itself, and whose fingerprints are
    computed when somebody asks for one; None: the plan stands alone. Raises PlannerError when its problem is not valid.
    """
    alone = effort is None
    effort = effort or Effort(solver=plan.solver.name)
    schedule = plan.schedule()
    problem, job = schedule.problem, schedule.problem.job
    asked = RequestedPlan(job=plan.job, technique=plan.technique, memory=plan.memory) if alone else None
    items = _items(schedule)
    if items is None or _with_peaks(schedule, plan.metrics) != plan.metrics:
        plan = plan if plan.fingerprint else plan.hashed()  # only its JSON can hold it
        header = _header(problem, plan.metrics, plan.solver, effort, "json")
        header = header.model_copy(update={"asked": asked, "fingerprint": plan.fingerprint})
        return _sealed(header, zlib.compress(plan.to_json().encode(), 6))
    waits = _waits(problem, items).reshape(4, job.stages, job.pipelines, job.micro_batches)
    found: dict[bytes, int] = {}
    rows = [found.setdefault(waits[:, :, p].tobytes(), len(found)) for p in range(job.pipelines)]
    distinct = waits[:, :, [rows.index(k) for k in range(len(found))]]
    types, data = _pack([*distinct, items.split, items.durations, items.step])
    header = _header(problem, plan.metrics, plan.solver, effort, "columns", tuple(rows), types)
    fingerprint = plan.fingerprint if alone else None
    return _sealed(header.model_copy(update={"asked": asked, "fingerprint": fingerprint}), zlib.compress(data, 6))


def with_effort(blob: bytes, effort: Effort) -> bytes:
    """Replace the effort of a stored plan, since a new search made none better. Raises PlanError for a damaged blob."""
    header, deflated = _opened(blob, "plan")
    return _sealed(header.model_copy(update={"effort": effort}), deflated)


def check_whole(blob: bytes, *, source: str = "plan") -> bytes:
    """Return the blob without its digest. Raises PlanError when that shows that the blob is damaged. To read the header
    of a plan for thousands of workers takes thirty times as long."""
    if blob[: len(MAGIC)] != MAGIC or len(blob) < len(MAGIC) + 4 + DIGEST:
        raise PlanError(f"{source} is not a stored plan (it does not begin with {MAGIC.decode()})")
    body, digest = blob[:-DIGEST], blob[-DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise PlanError(f"{source} is damaged (its checksum differs); make it again to replace it")
    return body


def decode_header(blob: bytes, *, source: str = "plan") -> Header:
    """Read the header alone. Raises PlanError when the blob is damaged."""
    return _opened(blob, source)[0]


def unpack(
    data: bytes,
    question: CatalogQuestion | None = None,
    *,
    source: str = "plan",
    hashed: bool = True,
    grid: Grid | None = None,
) -> Plan:
    """Unpack a plan. question: that of its catalog; None: the plan stands alone. hashed: False to leave out the
    fingerprint, whose computation takes as long as all else. grid: see `from_text`. Raises PlanError when the data is
    damaged."""
    header, found = _read(data, question, source, grid)
    if isinstance(found, Plan):
        plan = found
    else:
        metrics, known = _with_peaks(found, header.metrics), header.fingerprint or ""
        plan = Plan.of(found, metrics=metrics, solver=header.solver, fingerprint=known)
    if question is None:
        plan.workers.packed = data
    return plan.hashed() if hashed and not plan.fingerprint else plan


def unpack_named(data: bytes, fingerprint: str) -> Plan:
    """Unpack the plan that is kept under this fingerprint. Raises PlanError when the data is damaged, or another
    plan's."""
    plan = unpack(data, source=f"plan {fingerprint}")
    if plan.fingerprint != fingerprint:
        raise PlanError(f"plan {fingerprint} is damaged: what is kept of it is plan {plan.fingerprint}")
    return plan


def _read(
    data: bytes, question: CatalogQuestion | None, source: str, grid: Grid | None = None
) -> tuple[Header, Schedule | Plan]:
    """Return the header and the schedule, or the plan where the payload is its JSON."""
    header, payload = _opened(data, source, MAX_HEADER if grid is None else foreign_header(grid))
    asked = question or header.asked
    if asked is None:
        raise PlanError(f"{source} is a plan of a catalog, and does not say what it is for")
    if grid is not None:
        job = asked.job
        if (job.pipelines, job.stages, job.micro_batches) != grid:
            raise PlanError(f"{source} is for another grid")
        if header.form == "json":  # no valid plan is
            raise PlanError(f"{source} does not run all ops of its job, each as long as the job says")
    try:
        if header.form == "json":
            return header, Plan.from_json(_inflate(payload, MAX_JSON), source=source)
        return header, _schedule(header, payload, asked.question if isinstance(asked, RequestedPlan) else asked)
    except PlanError:
        raise
    except (ValueError, zlib.error) as error:
        what = "a stored plan" if question is None else "a plan of this catalog"
        raise PlanError(f"{source} is not {what}: {error}") from None


def _with_peaks(schedule: Schedule, metrics: MetricsDoc) -> MetricsDoc:
    """Add the peak activations of all workers, which the header does not have."""
    counts = {str(worker): count for worker, count in schedule.peak_activations.items()}
    return metrics.model_copy(update={"peak_activations": counts})


def _schedule(header: Header, data: bytes, question: CatalogQuestion) -> Schedule:
    """Read the arrays. Raises ValueError when they do not answer the question, zlib.error when they are damaged."""
    job = question.job
    stages, pipelines, count = job.stages, job.pipelines, job.micro_batches
    if len(header.rows) != pipelines or len(header.failed) != stages or not {*header.rows} <= {*range(pipelines)}:
        raise ValueError("another grid")
    rows = max(header.rows) + 1
    shapes = [(stages, rows, count)] * 4 + [(stages, pipelines), (4, stages, pipelines), (stages,)]
    if header.partition:
        job = job.with_partition(header.partition)
    problem = Problem(job, header.workers, question.technique, question.memory)
    *waits, split, durations, step = _unpack(data, header.types, shapes)
    full = np.stack(waits)[:, :, list(header.rows)].reshape(4, stages, pipelines * count)
    items = _from_waits(problem, full, split, durations, step)
    return Schedule(problem, OpsByWorker(problem.living_workers(), lambda: OpArrays.of_items(problem, *items)))


# -- for pipes, databases and messages -------------------------------------------------------


def packed(plan: Plan) -> bytes:
    """Return the packed form of a plan that stands alone, which is made once. Raises PlannerError when its problem is
    not valid."""
    plan.workers.packed = plan.workers.packed or pack(plan)
    return plan.workers.packed


def to_text(plan: Plan) -> str:
    """Return the packed form for messages in JSON. Raises PlannerError when its problem is not valid."""
    return base64.b64encode(packed(plan)).decode()


def from_text(text: str, *, grid: Grid | None = None) -> Plan:
    """Read `to_text`. grid: the pipelines, stages and micro-batches that the plan must be for, where another host has
    sent it: they bound how much memory it takes to read. Raises PlanError."""
    return unpack(_decoded(text), grid=grid)


def schedule_from_text(text: str) -> Schedule:
    """Read only the schedule of a plan, which is much faster. Raises PlanError."""
    _, found = _read(_decoded(text), None, "plan")
    return found.schedule() if isinstance(found, Plan) else found


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise PlanError("plan is not a stored plan: it is no base64") from None


# -- columns ---------------------------------------------------------------------------------


class Items(NamedTuple):
    """A schedule by micro-batch and stage; see OpArrays.of_items."""

    route: Ints
    starts: Ints
    split: Ints
    durations: Ints
    step: Ints

    def each(self, kind: int) -> Ints:
        """[S, n]: how long each item's F, I or W takes on its worker."""
        return np.take_along_axis(self.durations[kind], self.route, 1)

    def backward(self) -> Ints:
        """[S, n]: how long I, or B where it is not split, takes."""
        whole = np.take_along_axis(self.split, self.route, 1) == 0
        return self.each(I) + np.where(whole, self.each(W), 0)


def _items(schedule: Schedule) -> Items | None:
    """Return the schedule as Items; None if it is not exactly that, say with two durations of F on one worker, or
    without some op."""
    problem, arrays = schedule.problem, schedule.arrays
    job, living = problem.job, problem.living_workers()
    n = job.pipelines * job.micro_batches
    if any(column.dtype == object for column in arrays.columns) or list(schedule.ops) != living or not len(arrays.kind):
        return None
    stage, item = arrays.stage, arrays.pipeline * job.micro_batches + arrays.micro_batch
    if stage.min() < 0 or stage.max() >= job.stages or item.min() < -1 or item.max() >= n:
        return None
    worker = stage * job.pipelines + np.array([worker.pipeline for worker in living], np.int64)[arrays.row]
    route, starts = np.full(job.stages * n, -1, np.int64), np.full((3, job.stages * n), -1, np.int64)
    split, durations = np.zeros(job.stages * job.pipelines, np.int64), op_times(problem).reshape(4, -1)
    steps, weight = np.zeros(job.stages, np.int64), durations[W].copy()
    for kind in (F, I, W, B, O):
        at = np.flatnonzero(arrays.kind == kind)
        by, start, duration = worker[at], arrays.start[at], arrays.duration[at]
        if kind == O:
            steps[stage[at]], durations[3, by] = start, duration
            continue
        cell = stage[at] * n + item[at]
        if kind == F:
            route[cell] = by % job.pipelines
        elif kind == W:
            split[by] = 1
        elif kind == B:
            duration = duration - weight[by]
            starts[W, cell] = start + duration
        durations[I if kind == B else kind, by] = duration
        starts[I if kind == B else kind, cell] = start
    if route.min() < 0:
        return None
    whole, of_workers = (job.stages, n), (job.stages, job.pipelines)
    found = Items(
        route.reshape(whole),
        starts.reshape(3, *whole),
        split.reshape(of_workers),
        durations.reshape(4, *of_workers),
        steps,
    )
    again = OpArrays.of_items(problem, *found)
    same = np.array_equal(again.bounds, arrays.bounds) and all(map(np.array_equal, again.columns, arrays.columns))
    return found if same else None


def _waits(problem: Problem, items: Items) -> Ints:
    """[4, S, n]: the worker's pipeline minus the item's own, and how long F, I and W wait after what they need.

    F needs the F of the stage above and its transfer; I the I (or B) of the stage below and its transfer or, on the
    last stage, F; W needs I.
    """
    job = problem.job
    home = np.repeat(np.arange(job.pipelines), job.micro_batches)
    forward, backward, weight = items.starts
    wire, wire_back = (np.array(t, np.int64)[:, None] for t in (job.transfer_ticks, job.backward_transfer_ticks))
    out = np.empty((4, *items.route.shape), np.int64)
    out[0] = items.route - home
    out[1] = forward
    out[1][1:] -= forward[:-1] + items.each(F)[:-1] + wire
    out[2] = backward
    out[2][:-1] -= backward[1:] + items.backward()[1:] + wire_back
    out[2][-1] -= forward[-1] + items.each(F)[-1]
    out[3] = weight - backward - items.each(I)
    return out


def _from_waits(problem: Problem, waits: Ints, split: Ints, durations: Ints, step: Ints) -> Items:
    job = problem.job
    home = np.repeat(np.arange(job.pipelines), job.micro_batches)
    route = waits[0] + home
    if route.size and (route.min() < 0 or route.max() >= job.pipelines):
        raise ValueError("it names a worker that the grid does not have")
    items = Items(route, waits[1:].copy(), split, durations, step)
    forward, backward, weight = items.starts
    length, back = items.each(F), items.backward()
    for s in range(1, job.stages):
        forward[s] += forward[s - 1] + length[s - 1] + job.transfer_ticks[s - 1]
    backward[-1] += forward[-1] + length[-1]
    for s in reversed(range(job.stages - 1)):
        backward[s] += backward[s + 1] + back[s + 1] + job.backward_transfer_ticks[s]
    weight += backward + items.each(I)
    return items


_TYPES: tuple[Literal["i1", "i2", "i4", "i8"], ...] = ("i1", "i2", "i4", "i8")


def _pack(columns: Sequence[Ints]) -> tuple[tuple[Literal["i1", "i2", "i4", "i8"], ...], bytes]:
    """Store each column in the smallest type that holds it. Bytes of equal significance stand together, since the high
    ones are mostly equal."""
    types, parts = [], []
    for column in columns:
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        kind = next(t for t in _TYPES if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
        types.append(kind)
        parts.append(np.ascontiguousarray(column, "<" + kind).view(np.uint8).reshape(column.size, -1).T.tobytes())
    return tuple(types), b"".join(parts)


def _unpack(data: bytes, types: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Ints]:
    """The inverse of `_pack`. Raises ValueError when the sizes don't fit, zlib.error when the data is damaged."""
    if len(types) != len(shapes):
        raise ValueError("columns are missing")
    sizes = [int(np.prod(shape)) * np.dtype(t).itemsize for t, shape in zip(types, shapes, strict=True)]
    raw = _inflate(data, sum(sizes))
    if len(raw) != sum(sizes):
        raise ValueError("columns are cut short")
    out, at = [], 0
    for kind, shape, size in zip(types, shapes, sizes, strict=True):
        planes: NDArray[Any] = np.frombuffer(raw, np.uint8, size, at).reshape(np.dtype(kind).itemsize, -1)
        out.append(np.ascontiguousarray(planes.T).view("<" + kind).reshape(shape).astype(np.int64))
        at += size
    return out


# -- the envelope ----------------------------------------------------------------------------


def _header(
    problem: Problem,
    metrics: MetricsDoc,
    solver: SolverDoc,
    effort: Effort,
    form: Literal["columns", "json"],
    rows: tuple[int, ...] = (),
    types: tuple[Literal["i1", "i2", "i4", "i8"], ...] = (),
) -> Header:
    peaks = [0] * problem.job.stages
    for worker, held in metrics.peaks(problem.job):
        peaks[worker.stage] = max(peaks[worker.stage], held)
    return Header(
        failed=by_stage(problem.failed, problem.job),
        partition=problem.job.partition,
        metrics=metrics.model_copy(update={"peak_activations": {}}),
        solver=solver,
        effort=effort,
        form=form,
        rows=rows,
        types=types,
        peaks=tuple(peaks) if metrics.peak_activations else (),
    )


def _sealed(header: Header, deflated: bytes) -> bytes:
    text = zlib.compress(header.model_dump_json().encode(), 6)
    body = MAGIC + struct.pack("<I", len(text)) + text + deflated
    return body + hashlib.sha256(body).digest()


def _opened(blob: bytes, source: str, most: int = MAX_HEADER) -> tuple[Header, bytes]:
    """Check the digest, and return the header, which has at most `most` bytes, and the deflated payload."""
    body, begin = check_whole(blob, source=source), len(MAGIC) + 4
    (length,) = struct.unpack("<I", body[len(MAGIC) : begin])
    try:
        header = read_model(Header, _inflate(body[begin : begin + length], most))
    except ValidationError as error:
        raise PlanError(f"{source} is not a stored plan: {first_problem(error)}") from None
    except (zlib.error, ValueError, json.JSONDecodeError) as error:
        raise PlanError(f"{source} is not a stored plan: {error}") from None
    return header, body[begin + length :]


def _inflate(data: bytes, most: int) -> bytes:
    """Inflate. Raises ValueError beyond `most` bytes, zlib.error when the data is damaged."""
    inflater = zlib.decompressobj()
    out = inflater.decompress(data, max(1, most))
    if inflater.unconsumed_tail or (not inflater.eof and inflater.decompress(b"", 1)):
        raise ValueError(f"more than {most:,} bytes")
    return out

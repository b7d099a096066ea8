"""The packed form of a plan, for pipes, databases and catalogs: a header to list it by, and its schedule deflated.

    magic | header length (4 bytes) | header (JSON, deflated) | payload (deflated) | SHA-256 of all before

Arrays hold how long each op waits beyond its precedence (see `_waits`), which is mostly nothing and alike from one
micro-batch to the next; pipelines with equal rows share one. A plan that no arrays can hold is kept as its JSON.
Either way the plan comes back exactly, without a second's work for 8,192 workers, whose document is of 16 MB. The
header says what the plan is for, but in a catalog, whose plans all answer one question.

Whoever makes a large plan also writes its document, which the others hand on deflated as it is (`Packed`).
"""

from __future__ import annotations

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

from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Over, Problem, Technique, Worker
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
from openrecycle.planner.plans.plan_arrays import SMALL_OPS, Columns, F, I, Ints, NotColumnar, columns_of, problem_of

MAGIC = b"ORP1"
DIGEST = hashlib.sha256().digest_size
# Read back before more memory is taken: a header lists the failed workers and little else.
MAX_HEADER = 64 << 20
MAX_JSON = 4 << 30
# As small as by the usual 6, in half the time.
_LEVEL = 5


class Effort(BaseModel):
    """What was asked for: enough to know whether a plan needs to be made again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    solver: str
    time_limit: float | None = None


class RequestedPlan(BaseModel):
    """What a plan is for, beside its failures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: JobDoc
    technique: Technique
    memory: str

    def question(self) -> CatalogQuestion:
        """Raises PlannerError when it describes no job."""
        return CatalogQuestion(self.job.job(), self.technique, MemoryLimit.parse(self.memory, field="memory"))


_Int = Annotated[int, INTEGER]


class Header(BaseModel):
    """failed: by stage, the pipelines whose worker is dead. metrics: without peak_activations.

    partition: of the plan, where its job has layers.
    rows: for each pipeline, which of the stored rows is its own. types: of the columns (`_pack`).
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
    def counts(self) -> tuple[int, ...]:
        """Failures per stage."""
        return tuple(map(len, self.failed))

    @property
    def workers(self) -> frozenset[Worker]:
        return frozenset(Worker(p, s) for s, row in enumerate(self.failed) for p in row)


@dataclass(frozen=True)
class CatalogQuestion:
    """What all plans of one catalog have in common. over: with `partitions`, each has the best one of its own."""

    job: Job
    technique: Technique
    memory: MemoryLimit
    over: Over = "schedules"

    def problem(self, failed: frozenset[Worker]) -> Problem:
        return Problem(self.job, failed, self.technique, self.memory)


def encode_columns(
    columns: Columns,
    metrics: MetricsDoc,
    solver: SolverDoc,
    effort: Effort,
    *,
    asked: RequestedPlan | None = None,
    fingerprint: str | None = None,
) -> bytes:
    """asked, fingerprint: of a plan that stands by itself, not in a catalog."""
    job = columns.problem.job
    count = job.micro_batches
    waits = _waits(columns).reshape(4, job.stages, job.pipelines, count)
    found: dict[bytes, int] = {}
    rows = [found.setdefault(waits[:, :, p].tobytes(), len(found)) for p in range(job.pipelines)]
    distinct = waits[:, :, [rows.index(k) for k in range(len(found))]]
    types, data = _pack([*distinct, columns.split, columns.durations, columns.step])
    header = _header(columns.problem, metrics, solver, effort, "columns", tuple(rows), types)
    return _sealed(header.model_copy(update={"asked": asked, "fingerprint": fingerprint}), data)


def encode_plan(plan: Plan, effort: Effort, *, alone: bool = False) -> bytes:
    """Any plan; alone: not for a catalog. Raises PlannerError when its problem is none."""
    problem = plan.problem()
    asked = RequestedPlan(job=plan.job, technique=plan.technique, memory=plan.memory) if alone else None
    fingerprint = plan.fingerprint if alone else None
    try:
        columns = columns_of(plan)
        if plan.in_arrays or columns.plan(plan.metrics, plan.solver, fingerprint=fingerprint) == plan:
            return encode_columns(columns, plan.metrics, plan.solver, effort, asked=asked, fingerprint=fingerprint)
    except (NotColumnar, KeyError, IndexError, ValueError):
        pass  # a document that only its JSON can hold
    header = _header(problem, plan.metrics, plan.solver, effort, "json")
    header = header.model_copy(update={"asked": asked, "fingerprint": plan.fingerprint})
    return _sealed(header, plan.to_json().encode())


def pack(plan: Plan) -> bytes:
    """A plan by itself, as `unpack` reads it. Raises PlannerError when its problem is none."""
    return encode_plan(plan, Effort(solver=plan.solver.name), alone=True)


def unpack(data: bytes, *, source: str = "plan") -> Plan:
    """The plan that was packed by itself: in arrays where they hold it. Raises PlanError when the data is damaged."""
    header, payload = _opened(data, source)
    if header.asked is None or header.fingerprint is None:
        raise PlanError(f"{source} is a plan of a catalog, and does not say what it is for")
    if header.form == "json":
        return Plan.from_json(_inflate(payload, MAX_JSON), source=source)
    try:
        columns = _columns(header, payload, header.asked.question(), source)
    except PlannerError as error:
        raise PlanError(f"{source} is not a stored plan: {error}") from None
    return columns.plan(header.metrics, header.solver, fingerprint=header.fingerprint, stored=(data, b""))


def decode_header(blob: bytes, *, source: str = "plan") -> Header:
    """Raises PlanError when the blob is damaged."""
    return _opened(blob, source)[0]


def decode_columns(blob: bytes, question: CatalogQuestion, *, source: str = "plan") -> tuple[Columns, Header] | None:
    """None when the plan is kept as JSON. Raises PlanError when the blob is damaged."""
    header, data = _opened(blob, source)
    return None if header.form == "json" else (_columns(header, data, question, source), header)


def _columns(header: Header, data: bytes, question: CatalogQuestion, source: str) -> Columns:
    job = question.job
    stages, pipelines, count = job.stages, job.pipelines, job.micro_batches
    rows = max(header.rows, default=-1) + 1
    shapes = [(stages, rows, count)] * 4 + [(stages, pipelines), (4, stages, pipelines), (stages,)]
    try:
        if header.partition:
            job = job.with_partition(header.partition)
        problem = problem_of(job, header.failed, question.technique, question.memory)
        if len(header.rows) != pipelines or len(header.failed) != stages:
            raise ValueError("another grid")
        *waits, split, durations, step = _unpack(data, header.types, shapes)
    except (ValueError, PlannerError, zlib.error) as error:
        raise PlanError(f"{source} is not a plan of this catalog: {error}") from None
    full = np.stack(waits)[:, :, list(header.rows)].reshape(4, stages, pipelines * count)
    return _from_waits(problem, full, split, durations, step)


def decode_plan(blob: bytes, question: CatalogQuestion, *, source: str = "plan") -> Plan:
    """Raises PlanError when the blob is damaged."""
    found = decode_columns(blob, question, source=source)
    if found is not None:
        columns, header = found
        return columns.plan(header.metrics, header.solver).model_copy()
    header, data = _opened(blob, source)
    return Plan.from_json(_inflate(data, MAX_JSON), source=source)


# -- from solvers, over pipes ----------------------------------------------------------------


class Packed(NamedTuple):
    """A plan to be stored. columns: its packed form. document: its JSON, deflated."""

    columns: bytes
    document: bytes


def to_bytes(plan: Plan) -> bytes:
    """The packed form and the deflated document, which `from_bytes` reads."""
    columns, document = packed(plan)
    return struct.pack("<I", len(columns)) + columns + document


def from_bytes(data: bytes, *, source: str = "plan") -> Plan:
    """Raises PlanError. Of a plan in arrays the document is not looked at, and handed on by `packed`; of a small one
    the plan is made, with its ops."""
    if len(data) < 4:
        raise PlanError(f"{source} is not a plan: it has {len(data)} bytes")
    end = 4 + int(struct.unpack("<I", data[:4])[0])
    plan = unpack(data[4:end], source=source)
    if not plan.in_arrays:
        return plan
    if plan.op_count <= SMALL_OPS:
        return plan.model_copy()
    plan.in_arrays.stored = data[4:end], data[end:]
    return plan


def packed(plan: Plan) -> Packed:
    """All that is to be stored of it."""
    columns, document = plan.in_arrays.stored if plan.in_arrays else (b"", b"")
    return Packed(columns or pack(plan), document or zlib.compress(plan.to_json().encode(), _LEVEL))


def storable(plan: Plan) -> str | Packed:
    """What db.store takes of a plan."""
    return packed(plan) if plan.in_arrays else plan.to_json()


# -- columns ---------------------------------------------------------------------------------


def _waits(columns: Columns) -> Ints:
    """[4, S, n]: the worker's pipeline less the item's own, and how long F, I and W wait.

    F for the F above and its transfer, I for the I (or B) below and its transfer, on the last
    stage for F, and W for I.
    """
    job = columns.problem.job
    home = np.repeat(np.arange(job.pipelines), job.micro_batches)
    forward, backward, weight = (columns.starts[k] for k in range(3))
    wire, wire_back = (np.array(t, np.int64)[:, None] for t in (job.transfer_ticks, job.backward_transfer_ticks))
    out = np.empty((4, *columns.route.shape), np.int64)
    out[0] = columns.route - home
    out[1] = forward
    out[1][1:] -= forward[:-1] + columns.duration(F)[:-1] + wire
    out[2] = backward
    out[2][:-1] -= backward[1:] + columns.backward()[1:] + wire_back
    out[2][-1] -= forward[-1] + columns.duration(F)[-1]
    out[3] = weight - backward - columns.duration(I)
    return out


def _from_waits(problem: Problem, waits: Ints, split: Ints, durations: Ints, step: Ints) -> Columns:
    job = problem.job
    home = np.repeat(np.arange(job.pipelines), job.micro_batches)
    route = waits[0] + home
    if route.size and (route.min() < 0 or route.max() >= job.pipelines):
        raise PlanError("the stored plan names a worker that the grid does not have")
    starts = waits[1:].copy()
    columns = Columns(problem, route, starts, split, durations, step)
    forward, backward, weight = starts
    length, back = columns.duration(F), columns.backward()
    for s in range(1, job.stages):
        forward[s] += forward[s - 1] + length[s - 1] + job.transfer_ticks[s - 1]
    backward[-1] += forward[-1] + length[-1]
    for s in reversed(range(job.stages - 1)):
        backward[s] += backward[s + 1] + back[s + 1] + job.backward_transfer_ticks[s]
    weight += backward + columns.duration(I)
    return columns


_TYPES: tuple[Literal["i1", "i2", "i4", "i8"], ...] = ("i1", "i2", "i4", "i8")


def _pack(columns: Sequence[Ints]) -> tuple[tuple[Literal["i1", "i2", "i4", "i8"], ...], bytes]:
    """Each in the smallest type that holds it, its bytes by significance: high ones are mostly equal."""
    types, parts = [], []
    for column in columns:
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        kind = next(t for t in _TYPES if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
        types.append(kind)
        parts.append(np.ascontiguousarray(column, "<" + kind).view(np.uint8).reshape(column.size, -1).T.tobytes())
    return tuple(types), b"".join(parts)


def _unpack(data: bytes, types: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Ints]:
    """Raises ValueError when the sizes don't fit, zlib.error when the data is damaged."""
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
    failed: list[list[int]] = [[] for _ in range(problem.job.stages)]
    for worker in sorted(problem.failed):
        failed[worker.stage].append(worker.pipeline)
    peaks = [0] * problem.job.stages
    for name, held in metrics.peak_activations.items():
        stage = Worker.parse(name).stage
        peaks[stage] = max(peaks[stage], held)
    return Header(
        failed=tuple(map(tuple, failed)),
        partition=problem.job.partition,
        metrics=metrics.model_copy(update={"peak_activations": {}}),
        solver=solver,
        effort=effort,
        form=form,
        rows=rows,
        types=types,
        peaks=tuple(peaks) if metrics.peak_activations else (),
    )


def _sealed(header: Header, data: bytes) -> bytes:
    text = zlib.compress(header.model_dump_json().encode(), 6)
    body = MAGIC + struct.pack("<I", len(text)) + text + zlib.compress(data, 6)
    return body + hashlib.sha256(body).digest()


def _opened(blob: bytes, source: str) -> tuple[Header, bytes]:
    """The header and the deflated payload."""
    begin = len(MAGIC) + 4
    if blob[: len(MAGIC)] != MAGIC or len(blob) < begin + DIGEST:
        raise PlanError(f"{source} is not a stored plan (it does not begin with {MAGIC.decode()})")
    body, digest = blob[:-DIGEST], blob[-DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise PlanError(f"{source} is damaged (its checksum differs); make the catalog again to replace it")
    (length,) = struct.unpack("<I", body[len(MAGIC) : begin])
    try:
        header = read_model(Header, _inflate(body[begin : begin + length], MAX_HEADER))
    except ValidationError as error:
        raise PlanError(f"{source} is not a stored plan: {first_problem(error)}") from None
    except (zlib.error, ValueError, json.JSONDecodeError) as error:
        raise PlanError(f"{source} is not a stored plan: {error}") from None
    return header, body[begin + length :]


def _inflate(data: bytes, most: int) -> bytes:
    """Raises ValueError beyond `most` bytes, zlib.error when the data is damaged."""
    inflater = zlib.decompressobj()
    out = inflater.decompress(data, max(1, most))
    if inflater.unconsumed_tail or (not inflater.eof and inflater.decompress(b"", 1)):
        raise ValueError(f"more than {most:,} bytes")
    return out

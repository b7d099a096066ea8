"""Plans and schedules that stay in columns: their ops become objects only where somebody looks at them.

A plan of 2,048 workers has 400,000 ops. As documents they take 300 MB and seconds to read, of which a
page that draws all of them needs nothing but arrays. Needs numpy (see planner.plan_columns).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from planner import plan_text
from planner.errors import PlannerError
from planner.job import MemoryLimit, Technique, Worker
from planner.op_rows import Ints, OpRows
from planner.plan import JobDoc, MetricsDoc, OpDoc, Plan, PlanError, SolverDoc, first_problem
from planner.plan_codec import Effort, Question, decode_columns, decode_header, encode_columns, encode_plan
from planner.plan_columns import KINDS, Columns, O
from planner.schedule import Op, Schedule


class ColumnarSchedule(Schedule):
    """A Schedule whose ops are made worker by worker, on demand; what is read off all of them comes from arrays."""

    columns: Columns
    rows: OpRows

    def __init__(self, columns: Columns) -> None:
        rows = columns.rows()
        super().__init__(columns.problem, _Ops(columns, rows))
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "rows", rows)
        living = columns.problem.living_workers()
        peaks, busy, moved = columns.peaks(), columns.busy_by_worker(), columns.rerouted()
        ends = columns.step[:, None] + columns.durations[O]
        # The values that the base class would compute from all ops; tested equal.
        self.__dict__.update(
            period=columns.period(),
            makespan=columns.makespan(),
            ends={w: int(ends[w.stage, w.pipeline]) for w in living},
            _busy={w: int(busy[w.stage, w.pipeline]) for w in living},
            peak_activations={w: int(peaks[w.stage, w.pipeline]) for w in living},
            rerouted_forwards={w: int(moved[w.stage, w.pipeline]) for w in living},
            op_counts={w: rows.count(w) + 1 for w in living},
            helpers=frozenset(w for w in living if moved[w.stage, w.pipeline]),
        )

    @cached_property
    def peak_bytes(self) -> dict[Worker, int]:
        peaks = self.columns.peak_bytes()
        return {w: int(peaks[w.stage, w.pipeline]) for w in self.ops}

    def arrays(self, worker: Worker) -> tuple[Ints, Ints, list[str]]:
        """Starts and ends (ticks) and kinds of one living worker's ops, O last, without making them."""
        part, columns = self.rows.of(worker), self.columns
        start, last = self.rows.start[part], columns.step[worker.stage]
        ends = np.append(start + self.rows.duration[part], last + columns.durations[O, worker.stage, worker.pipeline])
        return np.append(start, last), ends, [*(KINDS[k] for k in self.rows.kind[part].tolist()), "O"]


def worker_arrays(schedule: Schedule, worker: Worker) -> tuple[Ints, Ints, list[str]]:
    """Starts and ends (ticks) and kinds of one living worker's ops, by start, of any schedule."""
    if isinstance(schedule, ColumnarSchedule):
        return schedule.arrays(worker)
    ops = schedule.ops[worker]
    starts, ends = (np.array([getattr(op, name) for op in ops], np.int64) for name in ("start", "end"))
    return starts, ends, [op.kind for op in ops]


class _Ops(Mapping[Worker, tuple[Op, ...]]):
    """The ops of each living worker, made when they are looked up."""

    def __init__(self, columns: Columns, rows: OpRows) -> None:
        self._columns, self._rows = columns, rows
        self._living = dict.fromkeys(columns.problem.living_workers())
        self._made: dict[Worker, tuple[Op, ...]] = {}

    def __getitem__(self, worker: Worker) -> tuple[Op, ...]:
        made = self._made.get(worker)
        if made is None:
            if worker not in self._living:
                raise KeyError(worker)
            made = self._made[worker] = tuple(self._row(worker))
        return made

    def __contains__(self, worker: object) -> bool:
        return worker in self._living

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._living)

    def __len__(self) -> int:
        return len(self._living)

    def _row(self, worker: Worker) -> Iterator[Op]:
        part, rows, stage = self._rows.of(worker), self._rows, worker.stage
        columns = (rows.kind, rows.home, rows.micro_batch, rows.start, rows.duration)
        for kind, home, number, start, duration in zip(*(c[part].tolist() for c in columns), strict=True):
            yield Op(KINDS[kind], home, number, stage, worker, start, duration)
        step = int(self._columns.step[stage])
        length = int(self._columns.durations[O, stage, worker.pipeline])
        yield Op("O", worker.pipeline, -1, stage, worker, step, length)


class ColumnarPlan(Plan):
    """A Plan in columns. `workers` is made when it is asked for, and kept."""

    _columns: Columns = PrivateAttr()
    _stored: tuple[bytes, bytes] = PrivateAttr(default=(b"", b""))

    @classmethod
    def made(cls, columns: Columns, metrics: MetricsDoc, solver: SolverDoc, fingerprint: str) -> ColumnarPlan:
        """metrics: `peak_activations` is filled in from the columns. fingerprint: that of the same plan's document."""
        plan = cls.model_construct(**columns.head(metrics, solver), fingerprint=fingerprint)
        plan._columns = columns
        plan._stored = b"", b""
        return plan

    def came_with(self, columns: bytes, document: bytes) -> None:
        """Keeps what planner.packed is to hand on as it is."""
        self._stored = columns, document

    @property
    def stored(self) -> tuple[bytes, bytes]:
        """Its columns as `pack` makes them and its deflated document; empty where it came without."""
        return self._stored

    def __getattr__(self, name: str) -> Any:
        if name != "workers":
            return super().__getattr__(name)  # type: ignore[misc]
        made: dict[str, tuple[OpDoc, ...]] = self._columns.documents()
        self.__dict__["workers"] = made
        self.__pydantic_fields_set__.add("workers")
        return made

    @classmethod
    def of_columns(cls, columns: Columns, metrics: MetricsDoc, solver: SolverDoc) -> ColumnarPlan:
        """As `made`; the fingerprint is computed."""
        return cls.made(columns, metrics, solver, plan_text.fingerprint(columns))

    @property
    def columns(self) -> Columns:
        return self._columns

    def renamed(self, names: Sequence[int]) -> ColumnarPlan:
        workers = [range(self.job.pipelines)] * self.job.stages
        return ColumnarPlan.of_columns(self._columns.renamed(names, workers), self.metrics, self.solver)

    def to_json(self) -> str:
        return plan_text.document(self._columns, self)

    def compute_fingerprint(self) -> str:
        return plan_text.fingerprint(self._columns)

    @property
    def op_count(self) -> int:
        return self._columns.op_count()

    def schedule(self) -> Schedule:
        return ColumnarSchedule(self._columns)

    def rerouted(self) -> dict[str, int]:
        moved = self._columns.rerouted()
        return {str(w): int(moved[w.stage, w.pipeline]) for w in self._columns.problem.living_workers()}

    def model_copy(self, **options: Any) -> Plan:  # type: ignore[override]
        """A plain Plan: what is changed in the copy is not in the columns."""
        return self.plain().model_copy(**options)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return self.plain().model_dump(**options)

    def model_dump_json(self, **options: Any) -> str:
        return self.plain().model_dump_json(**options)

    def plain(self) -> Plan:
        """The same as a document with all its ops."""
        return Plan.model_construct(**{name: getattr(self, name) for name in Plan.model_fields})

    def __eq__(self, other: object) -> bool:
        other = other.plain() if isinstance(other, ColumnarPlan) else other
        return self.plain() == other


# -- stored ----------------------------------------------------------------------------------


class _Head(BaseModel):
    """What the stored form of planner.plan_codec leaves to its catalog."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: JobDoc
    technique: Technique
    memory: str
    fingerprint: Annotated[str, Field(max_length=64)]


def pack(plan: Plan) -> bytes | None:
    """A plan by itself, in columns; None for one that columns can't hold."""
    effort = Effort(solver="list")
    if isinstance(plan, ColumnarPlan):
        blob = encode_columns(plan.columns, plan.metrics, plan.solver, effort)
    else:
        blob = encode_plan(plan, effort)
        if decode_header(blob).form != "columns":
            return None
    head = _Head(job=plan.job, technique=plan.technique, memory=plan.memory, fingerprint=plan.fingerprint)
    text = zlib.compress(head.model_dump_json().encode())
    return struct.pack("<I", len(text)) + text + blob


def unpack(data: bytes, *, source: str = "plan") -> ColumnarPlan:
    """The plan that was packed. Raises PlanError when the data is damaged."""
    try:
        (length,) = struct.unpack("<I", data[:4])
        head = _Head.model_validate_json(zlib.decompress(data[4 : 4 + length]))
        question = Question(head.job.job(), head.technique, MemoryLimit.parse(head.memory, field="memory"))
        found = decode_columns(data[4 + length :], question, source=source)
    except ValidationError as error:
        raise PlanError(f"{source} is not a stored plan: {first_problem(error)}") from None
    except (zlib.error, struct.error, PlannerError) as error:
        raise PlanError(f"{source} is not a stored plan: {error}") from None
    if found is None:
        raise PlanError(f"{source} is not stored in columns")
    columns, header = found
    return ColumnarPlan.made(columns, header.metrics, header.solver, head.fingerprint)

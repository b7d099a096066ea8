"""The Plan document: versioned JSON with a published schema and a fingerprint. Also how documents from people are read.

A Plan is a solved schedule together with what a reader needs to trust it: the problem, the metrics, the proven bound,
and the name of the solver. Times are in the job's own time unit. A file that a user names may be anything: a device, a
pipe, or far too large; `read_whole` is careful with it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress, islice, starmap
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StrictFloat,
    StrictInt,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.failures import parse_workers
from openrecycle.planner.jobs.job import (
    SIZES,
    TIMES,
    Job,
    LayerProfile,
    MemoryLimit,
    Over,
    Problem,
    StageProfile,
    Technique,
    Worker,
    check_sizes,
    count_ops,
)
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.plans.schedule import (
    KINDS,
    Ints,
    Numbers,
    O,
    OpArrays,
    OpsByWorker,
    Schedule,
    bounds_of,
    renamed,
    whole,
)

# The largest files that are read. A plan takes about 100 bytes an op; a job, a trace or a token takes far less.
PLAN_BYTES, OTHER_BYTES = 1 << 30, 1 << 26


# -- reading a file that somebody names on the command line -------------------------------------


def read_whole(path: str | Path, *, most: int = OTHER_BYTES) -> bytes:
    """Read a whole file of at most `most` bytes. Pipes and terminals are read to their end; other devices are refused,
    since they have none. Raises OSError."""
    with Path(path).open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not file.isatty()):
            raise OSError(errno.EINVAL, "it is a device")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return data


# -- the Plan document --------------------------------------------------------------------------

SCHEMA_VERSION: Literal[1] = 1
Model = TypeVar("Model", bound=BaseModel)


# Times are bounded: a whole number may be too large for a float, and would pass for finite.
def _no_text_or_truth(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("a valid integer")
    return value


INTEGER = BeforeValidator(_no_text_or_truth)
"""For an int as JSON Schema defines it: 3.0 is one, "3" and true are none. In an annotation it has to stand
behind the field's limits, which the schema loses otherwise."""
Time = Annotated[
    StrictInt | Annotated[StrictFloat, Field(allow_inf_nan=False)],
    Field(ge=0, le=1e18),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1e18}),  # else the schema loses the limits
]
WorkerName = Annotated[str, Field(pattern=r"^W[0-9]{1,6}_[0-9]{1,6}$")]
Bytes = Annotated[int, Field(ge=0), INTEGER]
Speed = Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)]
# An optional field is left out where it is empty. So documents of jobs without it, and their fingerprints, stay what
# they were before the field existed.
_WHERE_GIVEN = Field(exclude_if=lambda value: not value)


_AT_A_TIME = 256
# Longer documents are read worker by worker, and all are written worker by worker: pydantic and json let no other
# thread run meanwhile, and 2,048 workers at once take seconds.
AT_ONCE = 1_000_000
# Plans come from other people's files and are printed on terminals, so control characters are refused.
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"


class PlanError(PlannerError):
    """A plan file that can't be read as a plan. The sentence names the field and what is wrong."""


class DocumentModel(BaseModel):
    """Part of a document: fields that it does not know are refused, and none is changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _some_at_a_time(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validates a dictionary in pieces and stops at the first piece that has errors: pydantic would format thousands of
    errors at once, and no other thread runs meanwhile."""
    if not isinstance(value, dict) or len(value) <= _AT_A_TIME:
        return validate(value)
    entries, found = iter(value.items()), dict[Any, Any]()
    while some := dict(islice(entries, _AT_A_TIME)):
        found |= validate(some)
    return found


class StageDoc(DocumentModel):
    """Op times of one stage, in `time_unit`, and what it keeps in memory; see planner.jobs.job.StageProfile."""

    forward: Time
    input_backward: Time
    weight_backward: Time
    optimizer: Time
    reductions: Annotated[tuple[Time, ...], _WHERE_GIVEN, Field(fail_fast=True)] = ()
    activation_bytes: Annotated[Bytes, _WHERE_GIVEN] = 0
    weight_backward_bytes: Annotated[Bytes, _WHERE_GIVEN] = 0
    weight_bytes: Annotated[Bytes, _WHERE_GIVEN] = 0
    optimizer_bytes: Annotated[Bytes, _WHERE_GIVEN] = 0


class LayerDoc(StageDoc):
    """Op times and memory of one layer, and transfers if a stage ends behind it; see planner.jobs.job.LayerProfile."""

    transfer: Annotated[Time, _WHERE_GIVEN] = 0
    backward_transfer: Annotated[Time | None, Field(exclude_if=lambda value: value is None)] = None


# Job refuses sizes below 1 with an error message of its own.
_Size = Annotated[int, INTEGER, Field(json_schema_extra={"minimum": 1})]


class JobDoc(DocumentModel):
    """A job; see planner.jobs.job.Job. `capacity_bytes`: one number for all workers, or one per stage.

    partition: layers per stage without failures; a plan has its own. With `layers`, profiles and transfers follow from
    layers and partition, and may be left out.
    """

    pipelines: _Size
    stages: _Size
    micro_batches: _Size
    profiles: Annotated[tuple[StageDoc, ...], Field(fail_fast=True)]
    transfers: Annotated[tuple[Time, ...], Field(fail_fast=True)]
    time_unit: Annotated[str, Field(max_length=20, pattern=PRINTABLE)] = "slot"
    backward_transfers: Annotated[tuple[Time, ...], _WHERE_GIVEN, Field(fail_fast=True)] = ()
    capacity_bytes: Annotated[Bytes | Annotated[tuple[Bytes, ...], Field(fail_fast=True)], _WHERE_GIVEN] = ()
    speeds: Annotated[dict[WorkerName, Speed], _WHERE_GIVEN, WrapValidator(_some_at_a_time)] = Field(
        default_factory=dict
    )
    layers: Annotated[tuple[LayerDoc, ...], _WHERE_GIVEN, Field(fail_fast=True)] = ()
    partition: Annotated[tuple[_Size, ...], _WHERE_GIVEN, Field(fail_fast=True)] = ()

    @model_validator(mode="before")
    @classmethod
    def _of_layers(cls, data: Any) -> Any:
        """Lets a document with layers leave out what follows from them."""
        if isinstance(data, Mapping) and data.get("layers"):
            return {"profiles": (), "transfers": (), **data}
        return data

    @property
    def ops(self) -> int:
        """Ops of an iteration; see `count_ops`."""
        return count_ops(self.pipelines, self.stages, self.micro_batches)

    def job(self) -> Job:
        """Makes the Job. Raises InputError when the document describes none."""
        check_sizes(self.pipelines, self.stages, self.micro_batches)  # before a capacity per stage is made
        capacity, speeds = self.capacity_bytes, {Worker.parse(w, field="speeds"): s for w, s in self.speeds.items()}
        layers: dict[LayerDoc, LayerProfile] = {}  # equal ones are one object
        for layer in self.layers:
            if layer not in layers:
                layers[layer] = LayerProfile(**layer.model_dump())
        made = Job(
            self.pipelines,
            self.stages,
            self.micro_batches,
            profiles=tuple(StageProfile(**p.model_dump()) for p in self.profiles),
            transfers=tuple(self.transfers),
            time_unit=self.time_unit,
            backward_transfers=self.backward_transfers,
            capacity_bytes=(capacity,) * self.stages if isinstance(capacity, int) else capacity,
            speeds=tuple(speeds.items()),
            layers=tuple(layers[layer] for layer in self.layers),
            partition=self.partition,
        )
        for worker in speeds:
            made.check_worker(worker, field="speeds")
        of: Sequence[StageDoc] = self.layers or self.profiles
        for s, profile in enumerate(of):
            if len(profile.reductions) > self.pipelines:
                raise InputError(
                    f"{'layers' if self.layers else 'profiles'}[{s}].reductions",
                    len(profile.reductions),
                    f"one for each number of living peers, {self.pipelines} in all",
                )
        return made


class OpDoc(DocumentModel):
    """`micro_batch` counts from 0 inside its home `pipeline`; null for O, which belongs to none."""

    kind: Literal["F", "I", "W", "B", "O"]
    pipeline: Annotated[int, INTEGER]
    micro_batch: Annotated[int | None, INTEGER]
    stage: Annotated[int, INTEGER]
    start: Time
    duration: Time


class PlannedOps(Mapping[str, tuple[OpDoc, ...]]):
    """The ops of a plan in arrays, by worker. An OpDoc is made whenever an op is looked at, and is not kept.

    arrays: as in OpArrays, except that start and duration are the document's numbers. These are int64 where all are
    whole; float64 where some have fractions (a whole one is then written without a fraction); and Python's own numbers
    where the document has a number such as 1.0, or one with more digits than these types hold. A micro-batch of -1
    means null, and is O's; in a document where they do not go together, micro-batches are Python's own values.
    packed: the plan's packed form, kept to be passed on unchanged; empty until it is made (planner.plans.packed).
    schedule: the schedule that the plan was made of, if it was.
    """

    __slots__ = ("arrays", "names", "packed", "schedule")

    def __init__(self, names: Iterable[str], arrays: OpArrays) -> None:
        self.names = {name: row for row, name in enumerate(names)}
        self.arrays = arrays
        self.packed = b""
        self.schedule: Schedule | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        # A wrong document may have a million wrong entries: validation stops at the first.
        documents = handler.generate_schema(dict[WorkerName, _OpDocs])
        as_documents = core_schema.plain_serializer_function_ser_schema(dict, return_schema=documents)
        return core_schema.no_info_after_validator_function(cls.of, documents, serialization=as_documents)

    @classmethod
    def of(cls, workers: Mapping[str, Sequence[OpDoc]]) -> PlannedOps:
        if isinstance(workers, PlannedOps):
            return workers
        ops = [op for ops in workers.values() for op in ops]
        return cls.of_columns(workers, map(len, workers.values()), _columns(ops))

    @classmethod
    def of_columns(cls, names: Iterable[str], counts: Iterable[int], columns: Sequence[list[Any]]) -> PlannedOps:
        """counts: ops of each worker. columns: one list per field of OpDoc, with the document's own numbers, as 1 and
        1.0 are written differently."""
        kinds, pipelines, micro_batches, stages, starts, durations = columns
        kind = whole([*map(KINDS.index, kinds)])
        numbers = kind, whole(pipelines), _micro_batches(micro_batches, kind), whole(stages)
        return cls(names, OpArrays(bounds_of(counts), *numbers, _times(starts), _times(durations)))

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> PlannedOps:
        job, arrays = schedule.problem.job, schedule.arrays
        workers = sorted(schedule.ops)
        if workers != list(schedule.ops):
            arrays = arrays.rows([row for _, row in sorted(zip(schedule.ops, range(len(workers)), strict=True))])
        numbers = np.where(arrays.kind == O, -1, arrays.micro_batch)
        if (numbers[arrays.kind != O] < 0).any():  # no valid schedule has that
            numbers = np.where(arrays.kind == O, np.array(None), arrays.micro_batch)
        start, duration = _units(job, arrays.start), _units(job, arrays.duration)
        made = cls(map(str, workers), replace(arrays, micro_batch=numbers, start=start, duration=duration))
        made.schedule = schedule
        return made

    def canonical(self) -> Iterator[tuple[str, str]]:
        """Yields (worker's name, its ops) in the form from which the fingerprint is computed."""
        for name, columns in self._texts(sorted(self.names)):
            ops = [
                f'{{"duration":{d},"kind":"{kind}","micro_batch":{m},"pipeline":{p},"stage":{s},"start":{a}}}'
                for kind, p, m, s, a, d in zip(*columns, strict=True)
            ]
            yield name, f"[{','.join(ops)}]"

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yields (worker's name, its ops) as the Plan document has them."""
        for name, columns in self._texts(self.names):
            ops = [
                f'{{"kind":"{kind}","pipeline":{p},"micro_batch":{m},"stage":{s},"start":{a},"duration":{d}}}'
                for kind, p, m, s, a, d in zip(*columns, strict=True)
            ]
            yield name, f"[{','.join(ops)}]"

    def _texts(self, names: Iterable[str]) -> Iterator[tuple[str, list[list[str]]]]:
        """Yields (worker's name, its columns as text)."""
        (kinds, *columns), known = self._columns(slice(None)), _Texts()
        ops = [kinds]
        for column, array in zip(columns, self.arrays.columns[1:], strict=True):
            text = _text if array.dtype == object else known.__getitem__
            ops.append(list(map(text, column)))
        bounds = self.arrays.bounds.tolist()
        for name in names:
            begin, end = bounds[self.names[name] : self.names[name] + 2]
            yield name, [column[begin:end] for column in ops]

    def _columns(self, part: slice) -> list[list[Any]]:
        """The columns in the form that `of_columns` takes."""
        kind, pipeline, micro_batch, stage, start, duration = (column[part] for column in self.arrays.columns)
        if micro_batch.dtype != object:
            null = micro_batch < 0
            micro_batch = micro_batch.astype(object)
            micro_batch[null] = None
        plain = (_LETTERS[kind], pipeline, micro_batch, stage)
        return [*(column.tolist() for column in plain), _numbers(start), _numbers(duration)]

    def __getitem__(self, name: str) -> tuple[OpDoc, ...]:
        columns = self._columns(self.arrays.part(self.names[name]))
        return tuple(starmap(_op_doc, zip(*columns, strict=True)))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlannedOps) or list(self.names) != list(other.names):
            return isinstance(other, Mapping) and dict(self) == dict(other)
        return np.array_equal(self.arrays.bounds, other.arrays.bounds) and all(
            map(np.array_equal, self.arrays.columns, other.arrays.columns)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(dict(self))


def _text(number: int | float | None) -> str:
    return "null" if number is None else repr(number)


class _Texts(dict[int | float | None, str]):
    """The text of each number, kept since a plan repeats them: to write one float takes as long as the rest of its op.
    Whole numbers must be ints here: 1.0 would be found as 1."""

    def __missing__(self, number: int | float | None) -> str:
        if len(self) >= _MOST_TEXTS:
            self.clear()
        text = self[number] = _text(number)
        return text


_OpDocs = Annotated[tuple[OpDoc, ...], Field(fail_fast=True)]
_FIELDS = tuple(OpDoc.model_fields)
_VALUES = attrgetter(*_FIELDS)
_LETTERS = np.array([*KINDS], object)
_MOST_TEXTS = 1 << 16
_EXACT = 1 << 53  # whole numbers from here on are not all floats


def _columns(ops: Sequence[OpDoc]) -> Sequence[list[Any]]:
    return list(map(list, zip(*map(_VALUES, ops), strict=True))) or [[] for _ in _FIELDS]


def _micro_batches(values: list[int | None], kind: Ints) -> Numbers:
    numbers = whole([-1 if m is None else m for m in values])
    if (
        numbers.dtype == object
        or ((numbers < 0) != (kind == O)).any()
        or values.count(None) < np.count_nonzero(kind == O)
    ):
        return np.array(values, object)
    return numbers


def _times(values: list[int | float]) -> Numbers:
    """Makes an array of a document's times, in the smallest type that keeps their spelling; see PlannedOps."""
    if set(map(type, values)) <= {int}:
        return whole(values)
    floats = np.array(values, float)
    whole_ones = compress(values, (floats == np.floor(floats)).tolist())
    if np.abs(floats).max() < _EXACT and set(map(type, whole_ones)) <= {int}:
        return floats
    return np.array(values, object)


def _numbers(times: Numbers) -> list[int | float]:
    """Returns times as the document has them: whole numbers as ints, but for those that it spells otherwise."""
    if times.dtype == float:
        is_whole = times == np.floor(times)
        fractions, times = times, times.astype(object)
        times[is_whole] = fractions[is_whole].astype(np.int64)
    numbers: list[int | float] = times.tolist()
    return numbers


def _units(job: Job, ticks: Numbers) -> Numbers:
    """Applies Job.units to each."""
    scale = job.ticks_per_unit
    if ticks.dtype == object or np.abs(ticks).max(initial=0) >= _EXACT:
        return _times([job.units(t) for t in ticks.tolist()])
    return ticks if scale == 1 else ticks / scale


def _ticks(job: Job, times: Numbers) -> Numbers:
    """Converts times to the nearest ticks."""
    scale = job.ticks_per_unit
    if times.dtype != object and float(np.abs(times).max(initial=0)) * scale < 1 << 62:
        return times * scale if times.dtype != float else np.rint(times * scale).astype(np.int64)
    return whole([round(v * scale) for v in times.tolist()])


class MetricsDoc(DocumentModel):
    """Numbers of a plan, defined in planner.plans.schedule; `gap` and the slowdowns are fractions (0.08 = +8 %).

    bound_over: see planner.jobs.job.Over. The slowdowns are against the job with its partition without failures.
    """

    makespan: Time
    period: Time
    lower_bound: Time
    bound_over: Annotated[Over, Field(exclude_if=lambda value: value == "schedules")] = "schedules"
    gap: StrictFloat
    bubble_fraction: StrictFloat
    slowdown_vs_1f1b: StrictFloat
    # Against solvers.list_scheduler.best_fault_free, or against this plan itself where it is shorter: a plan around
    # failures is also a plan without them.
    slowdown_vs_best: StrictFloat
    peak_activations: dict[WorkerName, Annotated[int, INTEGER]]

    @property
    def fault_free(self) -> float:
        """The period of fault-free 1F1B, which `slowdown_vs_1f1b` is against."""
        return self.period / (1 + self.slowdown_vs_1f1b)


# Solvers whose search may prove a higher bound than planner.plans.bounds. The proof is not in the document.
PROVERS = ("cp-sat",)

# The solver's name of a document that no solver made: not a plan, but an iteration as it was measured.
MEASURED = "measured"


class SolverDoc(DocumentModel):
    """status: `optimal` when the bound equals the period, else `feasible`."""

    name: Annotated[str, Field(max_length=80, pattern=PRINTABLE)]
    status: Literal["optimal", "feasible"]
    seconds: StrictFloat
    message: Annotated[str, Field(max_length=2000, pattern=PRINTABLE)] = ""


class Plan(DocumentModel):
    """A solved schedule with its problem, metrics and proven bound. `fingerprint` is a hash of the problem and the ops;
    equal plans share it."""

    schema_version: Annotated[Literal[1], INTEGER] = SCHEMA_VERSION
    job: JobDoc
    failed: Annotated[tuple[WorkerName, ...], Field(fail_fast=True)]
    # Layers per stage in this plan; empty where the job has no layers.
    partition: Annotated[tuple[_Size, ...], _WHERE_GIVEN, Field(fail_fast=True)] = ()
    technique: Technique
    memory: str
    workers: PlannedOps
    metrics: MetricsDoc
    solver: SolverDoc
    fingerprint: Annotated[str, Field(max_length=64, pattern=PRINTABLE)]

    # -- from and to the planner's objects ---------------------------------------------------

    @classmethod
    def of(cls, schedule: Schedule, *, metrics: MetricsDoc, solver: SolverDoc, fingerprint: str | None = None) -> Plan:
        """fingerprint: the fingerprint where it is known already; "" to leave it out for now."""
        problem = schedule.problem
        body: dict[str, Any] = {
            "job": job_doc(problem.job),
            "failed": tuple(str(w) for w in sorted(problem.failed)),
            "partition": problem.job.partition,
            "technique": problem.technique,
            "memory": problem.memory.text,
            "workers": PlannedOps.of_schedule(schedule),
            "schema_version": SCHEMA_VERSION,
        }
        plan = cls.model_construct(metrics=metrics, solver=solver, fingerprint=fingerprint or "", **body)
        return plan.hashed() if fingerprint is None else plan

    def compute_fingerprint(self) -> str:
        """SHA-256 over the canonical JSON of the problem and the ops (the solver is left out)."""
        body: dict[str, Any] = {
            "failed": list(self.failed),
            "job": self.job.model_dump(mode="json"),
            "memory": self.memory,
            "schema_version": self.schema_version,
            "technique": self.technique.value,
        }
        if self.partition:
            body["partition"] = list(self.partition)
        head = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(f'{head[:-1]},"workers":{{'.encode())
        # `workers` is the last key of all. It is hashed worker by worker, for the reason that `AT_ONCE` gives.
        for i, (name, ops) in enumerate(self.workers.canonical()):
            digest.update(f'{"," if i else ""}"{name}":{ops}'.encode())
        digest.update(b"}}")
        return digest.hexdigest()[:32]

    def problem(self) -> Problem:
        """Makes the Problem. Raises PlannerError when the document describes no job."""
        failed = parse_workers(self.failed)
        job = self.job.job()
        if self.partition:
            job = job.with_partition(self.partition)
        return Problem(job, failed, self.technique, MemoryLimit.parse(self.memory, field="memory"))

    @property
    def op_count(self) -> int:
        return len(self.workers.arrays.kind)

    def rerouted(self) -> dict[str, int]:
        """Returns by worker how many forwards of other pipelines' micro-batches it runs per iteration."""
        return {str(worker): count for worker, count in self.schedule().rerouted_forwards.items()}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copies the plan, without the schedule that its ops were made from, and its packed form."""
        workers = PlannedOps.of((update or {}).get("workers", self.workers))
        update = {**(update or {}), "workers": PlannedOps(workers, workers.arrays)}
        return super().model_copy(update=update, deep=deep)

    def schedule(self) -> Schedule:
        """Returns the schedule in ticks. It is not checked: planner.check does that."""
        if self.workers.schedule is not None:
            return self.workers.schedule
        problem, arrays = self.problem(), self.workers.arrays
        rows = {Worker.parse(name, field="workers"): row for row, name in enumerate(self.workers)}
        if len(rows) < len(self.workers):  # a worker is there in two spellings
            arrays = arrays.rows(list(rows.values()))
        if arrays.micro_batch.dtype == object:
            arrays = replace(arrays, micro_batch=whole([-1 if m is None else m for m in arrays.micro_batch.tolist()]))
        times = {name: _ticks(problem.job, getattr(arrays, name)) for name in ("start", "duration")}
        made = replace(arrays, **times)
        return Schedule(problem, OpsByWorker(rows, lambda: made))

    # -- JSON --------------------------------------------------------------------------------

    def is_written_as(self, other: Plan) -> bool:
        """Says whether both have the same `to_json`: equal plans may not, as 1.0 equals 1. Their ops' times must be in
        arrays of numpy's numbers."""
        return self.workers == other.workers and self._without_ops() == other._without_ops()

    def _without_ops(self) -> str:
        return Plan.model_construct(**{**self.__dict__, "workers": {}}).model_dump_json()

    def to_json(self) -> str:
        before, empty, after = self._without_ops().partition(_NO_WORKERS)
        workers = ",".join(f'"{name}":{ops}' for name, ops in self.workers.documents())
        return f"{before}{empty[:-1]}{workers}}}{after}"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "plan", at_once: int = AT_ONCE) -> Plan:
        """Reads a plan. at_once: a longer text (in characters) is read worker by worker. Raises PlanError naming the
        first field that is wrong."""
        try:
            read = cls._piecemeal(text) if len(text) > at_once else None
            if read is None:
                read = cls.model_validate_json(text)
                refuse_duplicates(text)
            return read
        except DuplicateKey as error:
            raise PlanError(f"{source} is not a plan: {error}") from None
        except ValidationError as error:
            raise PlanError(f"{source} is not a plan: {first_problem(error)}") from None

    @classmethod
    def _piecemeal(cls, text: str | bytes) -> Plan | None:
        """Reads a document that is laid out as by `to_json`; returns None for any other, valid or not."""
        try:
            text = text if isinstance(text, str) else text.decode()
            begin = text.index(_NO_WORKERS[:-1]) + len(_NO_WORKERS) - 1
            names, counts, columns, at = [], [], [list[Any]() for _ in _FIELDS], begin
            while found := _WORKER.match(text, at):
                ops, at = _OPS.validate_json(found[2]), found.end()
                if "\\" in found[2] or any(found[2].count(key) != len(ops) for key in _OP_KEYS):
                    return None  # some key is there twice, or written with escapes
                names.append(found[1])
                counts.append(len(ops))
                for column, more in zip(columns, _columns(ops), strict=True):  # (pydantic's objects are freed at once)
                    column += more
            if len(set(names)) != len(names):
                return None
            plan = cls.model_validate_json(text[:begin] + text[at:])
            refuse_duplicates(text[:begin] + text[at:])
        except ValueError:
            return None
        if plan.workers:  # `workers` is there twice
            return None
        return plan.model_copy(update={"workers": PlannedOps.of_columns(names, counts, columns)})

    def renamed(self, names: Sequence[int], workers: Sequence[Sequence[int]] = ()) -> Plan:
        """Renames each pipeline p to names[p]: workers change places, and micro-batches their homes. Then the part of
        pipeline p on stage s goes to workers[s][p]. The fingerprint is computed anew. Returns the plan itself where
        nothing changes."""
        if not workers and list(names) == sorted(names):
            return self if self.fingerprint else self.hashed()
        peaks, every = self.metrics.peak_activations, {*self.workers, *self.failed, *self.metrics.peak_activations}
        places = {name: renamed(Worker.parse(name), names, workers) for name in every}

        def in_order(of: Iterable[str]) -> list[str]:
            return sorted(of, key=places.__getitem__)

        moved = in_order(
            {places[name]: name for name in self.workers}.values()
        )  # (one that is there in two spellings: once)
        parts = [places[name].pipeline for name in moved] if workers else []
        arrays = self.workers.arrays.renamed(names, [self.workers.names[name] for name in moved], parts)
        counted = {str(places[name]): peaks[name] for name in in_order(peaks)}
        changes: dict[str, Any] = {
            "failed": tuple(str(places[name]) for name in in_order(self.failed)),
            "workers": PlannedOps((str(places[name]) for name in moved), arrays),
            "metrics": self.metrics.model_copy(update={"peak_activations": counted}),
        }
        return Plan.model_construct(**{**self.__dict__, **changes}).hashed()

    def hashed(self) -> Plan:
        """Computes the fingerprint of a plan that has just been made, and returns the plan."""
        self.__dict__["fingerprint"] = self.compute_fingerprint()
        return self

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan from a file. Raises PlanError when the file can't be read."""
        try:
            data = read_whole(path, most=PLAN_BYTES)
        except OSError as error:
            raise PlanError(f"{path} can't be read: {error.strerror or error}") from None
        return cls.from_json(data, source=str(path))


_OPS: TypeAdapter[tuple[OpDoc, ...]] = TypeAdapter(_OpDocs)
_NO_WORKERS = '"workers":{}'
_WORKER = re.compile(r'"(W[0-9]{1,6}_[0-9]{1,6})":(\[[^\[\]]*\])(?:,(?=")|(?=\}))')


_OP_KEYS = tuple(f'"{name}"' for name in _FIELDS)


class DuplicateKey(PlannerError):
    """An object of a JSON document has a key twice, so that two readers may read two documents."""


def refuse_duplicates(text: str | bytes) -> None:
    """Raises DuplicateKey for valid JSON in which an object has a key twice."""
    json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DuplicateKey(f"the key {twice[:80]!r} is there twice in one object")


def read_json(text: str | bytes) -> Any:
    """Parse JSON that a person, a file or another host gave.

    Raises ValueError with a readable message, also where an object has a key twice or the nesting is too deep.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _unique(pairs)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except DuplicateKey as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_model(model: type[Model], text: str | bytes) -> Model:
    """As model.model_validate_json, for what a person, a file or another host gave. Raises ValidationError also where
    an object has a key twice."""
    read = model.model_validate_json(text)
    try:
        refuse_duplicates(text)
    except (DuplicateKey, ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, DuplicateKey) else "it is nested too deeply, or holds a number too long"
        problem = PydanticCustomError("strict_json", "{why}", {"why": why})
        line = InitErrorDetails(type=problem, loc=(), input=None)
        raise ValidationError.from_exception_data(model.__name__, [line]) from None
    return read


def job_doc(job: Job) -> JobDoc:
    """Make the document of a job, with its home partition: a plan states its own."""
    job = job.at_home
    one_capacity = len(set(job.capacity_bytes)) == 1
    stages = {id(profile): profile for profile in job.profiles}  # thousands of stages often have one and the same
    docs = {key: StageDoc(**_fields_of(profile)) for key, profile in stages.items()}
    return JobDoc(
        pipelines=job.pipelines,
        stages=job.stages,
        micro_batches=job.micro_batches,
        profiles=tuple(docs[id(profile)] for profile in job.profiles),
        transfers=_plain_all(job.transfers),
        time_unit=job.time_unit,
        backward_transfers=() if job.backward_transfers == job.transfers else _plain_all(job.backward_transfers),
        capacity_bytes=job.capacity_bytes[0] if one_capacity else job.capacity_bytes,
        speeds={str(worker): speed for worker, speed in job.speeds},
        layers=tuple(map(layer_doc, job.layers)),
        partition=job.home,
    )


def layer_doc(layer: LayerProfile) -> LayerDoc:
    back = None if layer.backward_transfer is None else _plain(layer.backward_transfer)
    return LayerDoc(**_fields_of(layer), transfer=_plain(layer.transfer), backward_transfer=back)


def _fields_of(profile: StageProfile) -> dict[str, Any]:
    times = {name: _plain(getattr(profile, name)) for name in TIMES}
    sizes = {name: getattr(profile, name) for name in SIZES}
    return {**times, "reductions": _plain_all(profile.reductions), **sizes}


def first_problem(error: ValidationError) -> str:
    """Make one sentence of pydantic's error: field, value and what was expected."""
    first = error.errors(include_url=False)[0]
    where = printable(".".join(map(str, first["loc"]))[:200]) or "the document"
    value = repr(first.get("input"))
    shown = value if len(value) <= 80 else value[:77] + "..."
    more = len(error.errors()) - 1
    return f"{where}: {first['msg']} (got {shown})" + (f", and {more} more" if more else "")


_SET = set(_FIELDS)  # shared by all: OpDoc is frozen, and copying one copies the set


def _op_doc(
    kind: str, pipeline: int, micro_batch: int | None, stage: int, start: int | float, duration: int | float
) -> OpDoc:
    """OpDoc.model_construct, eight times as fast: a plan has up to 10^6 ops."""
    op = OpDoc.__new__(OpDoc)
    values = {
        "kind": kind,
        "pipeline": pipeline,
        "micro_batch": micro_batch,
        "stage": stage,
        "start": start,
        "duration": duration,
    }
    object.__setattr__(op, "__dict__", values)
    object.__setattr__(op, "__pydantic_fields_set__", _SET)
    object.__setattr__(op, "__pydantic_extra__", None)
    object.__setattr__(op, "__pydantic_private__", None)
    return op


def _plain_all(values: Iterable[float]) -> tuple[float | int, ...]:
    return tuple(map(_plain, values))


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value

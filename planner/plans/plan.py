"""The Plan document: versioned JSON with a published schema and a fingerprint. Also how documents from people are read.

A Plan is a solved schedule together with what a reader needs to trust it: the problem, the metrics, the proven bound,
and the name of the solver. It holds its ops once, as a Schedule in ticks. The document, whose times are in the job's
own time unit, and the fingerprint are written from the Schedule, in one way: a document that is read may have 1.0 for 1
or its workers in another order, and is the same plan. A file that a user names may be anything: a device, a pipe, or
far too large; `read_whole` is careful with it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    StrictFloat,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from openrecycle.planner.jobs.errors import InputError, PlannerError
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
    O,
    OpArrays,
    OpsByWorker,
    Schedule,
    bounds_of,
    renamed,
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
T = TypeVar("T")


def _no_text_or_truth(value: object) -> object:
    if isinstance(value, bool | str):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


INTEGER = BeforeValidator(_no_text_or_truth)
"""For an int as JSON Schema defines it: 3.0 is one, "3" and true are none. In an annotation it has to stand
behind the field's limits, which the schema loses otherwise."""
Finite = Annotated[StrictFloat, Field(allow_inf_nan=False)]
# Bounded, since a whole number may be too large for a float, and would pass for finite. A union that pydantic makes of
# the annotation says of any other value that it is no integer, and checks the bounds in Python.
_TIMES = core_schema.union_schema(
    [
        core_schema.int_schema(strict=True, ge=0, le=10**18),
        core_schema.float_schema(strict=True, ge=0, le=10**18, allow_inf_nan=False),
    ],
    mode="left_to_right",
    custom_error_type="time",
    custom_error_message="Input should be a number from 0 to 1e18",
)
Time = Annotated[
    int | float,
    GetPydanticSchema(lambda source, handler: _TIMES),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1e18}),
]
WorkerName = Annotated[str, Field(pattern=r"^W[0-9]{1,6}_[0-9]{1,6}$")]
Bytes = Annotated[int, Field(ge=0), INTEGER]
Speed = Annotated[Finite, Field(gt=0)]
# An optional field is left out where it is empty. So documents of jobs without it, and their fingerprints, stay what
# they were before the field existed.
_WHERE_GIVEN = Field(exclude_if=lambda value: not value)


_AT_A_TIME = 256
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
        if len(speeds) < len(self.speeds):
            raise InputError("speeds", f"{len(self.speeds):,} speeds of {len(speeds):,} workers", "each worker once")
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


Kind = Literal["F", "I", "W", "B", "O"]
_MOST_INDEX = 1 << 62
_Index = Annotated[int, Field(ge=-_MOST_INDEX, le=_MOST_INDEX), INTEGER]


class OpDoc(DocumentModel):
    """`micro_batch` counts from 0 inside its home `pipeline`; null for O, which belongs to none."""

    kind: Kind
    pipeline: _Index
    micro_batch: _Index | None
    stage: _Index
    start: Time
    duration: Time


class PlannedOps(Mapping[str, tuple[OpDoc, ...]]):
    """A plan's schedule as people read it: by worker the ops, with times in the job's time unit. An OpDoc is made
    whenever an op is looked at, and is not kept.

    packed: the plan's packed form, kept to be passed on unchanged; empty until it is made (planner.plans.packed).
    """

    __slots__ = ("_workers", "packed", "schedule")

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.packed = b""
        self._workers = {str(worker): worker for worker in schedule.ops}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        documents = handler.generate_schema(dict[WorkerName, tuple[OpDoc, ...]])
        as_documents = core_schema.plain_serializer_function_ser_schema(dict, return_schema=documents)
        return core_schema.json_or_python_schema(
            documents, core_schema.is_instance_schema(cls), serialization=as_documents
        )

    def texts(self, names: Iterable[str], fields: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yields (worker's name, its ops in JSON with the fields in this order). It is the one way in which a time is
        written: a whole number as an integer, any other as the shortest float.

        It goes worker by worker, since 2,048 workers at once take long, and no other thread would run meanwhile."""
        arrays, units = self.schedule.arrays, self.schedule.problem.job.units
        write: dict[str, Callable[[int], str]] = {
            "kind": lambda kind: f'"{KINDS[kind]}"',
            "micro_batch": lambda number: "null" if number == _NULL else repr(number),
            "start": lambda ticks: repr(units(ticks)),
            "duration": lambda ticks: repr(units(ticks)),
        }
        last = len(fields) - 1
        texts = [
            _Texts(f'{"," if i else "{"}"{field}":', write.get(field, repr), "}" if i == last else "").__getitem__
            for i, field in enumerate(fields)
        ]
        for name in names:
            part = self.schedule.part(self._workers[name])
            columns = {field: column[part] for field, column in zip(_FIELDS, arrays.columns, strict=True)}
            columns["micro_batch"] = np.where(columns["kind"] == O, _NULL, columns["micro_batch"])
            ops = zip(*(map(text, columns[f].tolist()) for text, f in zip(texts, fields, strict=True)), strict=True)
            yield name, f"[{','.join(map(''.join, ops))}]"

    def __getitem__(self, name: str) -> tuple[OpDoc, ...]:
        units, part = self.schedule.problem.job.units, self.schedule.part(self._workers[name])
        kinds, *numbers, starts, durations = (column[part].tolist() for column in self.schedule.arrays.columns)
        pipelines, micro_batches, stages = numbers
        kind = [KINDS[k] for k in kinds]
        micro_batch = [None if k == O else m for k, m in zip(kinds, micro_batches, strict=True)]
        rows = zip(kind, pipelines, micro_batch, stages, map(units, starts), map(units, durations), strict=True)
        return tuple(_op_doc(dict(zip(_FIELDS, row, strict=True))) for row in rows)

    def __contains__(self, name: object) -> bool:
        return name in self._workers

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlannedOps):
            return isinstance(other, Mapping) and dict(self) == dict(other)
        one, two = self.schedule, other.schedule
        return one is two or (
            list(one.ops) == list(two.ops)
            and one.problem.job.ticks_per_unit == two.problem.job.ticks_per_unit
            and np.array_equal(one.arrays.bounds, two.arrays.bounds)
            and all(map(np.array_equal, one.arrays.columns, two.arrays.columns))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(dict(self))


def _op_doc(values: dict[str, Any]) -> OpDoc:
    """OpDoc.model_construct, several times as fast: a plan has up to 10^6 ops."""
    op = OpDoc.__new__(OpDoc)
    object.__setattr__(op, "__dict__", values)
    object.__setattr__(op, "__pydantic_fields_set__", _KEYS)
    object.__setattr__(op, "__pydantic_extra__", None)
    object.__setattr__(op, "__pydantic_private__", None)
    return op


class _Texts(dict[int, str]):
    """The text of each number, kept since a plan repeats them: to write one float takes as long as the rest of its op.
    before, after: what stands beside each number."""

    def __init__(self, before: str, write: Callable[[int], str], after: str) -> None:
        self._before, self._write, self._after = before, write, after

    def __missing__(self, number: int) -> str:
        if len(self) >= _MOST_TEXTS:
            self.clear()
        text = self[number] = f"{self._before}{self._write(number)}{self._after}"
        return text


_FIELDS = tuple(OpDoc.model_fields)
_INDEX = {kind: k for k, kind in enumerate(KINDS)}
_NULL = -_MOST_INDEX - 1
_MOST_TEXTS = 1 << 16
_EXACT = 1 << 53  # from here on, floats do not tell ticks apart


# -- reading ops --------------------------------------------------------------------------------

_KEYS, _VALUES = set(_FIELDS), itemgetter(*_FIELDS)
_Column = Annotated[list[T], Field(fail_fast=True)]  # a wrong document may have a million wrong ops
_COLUMNS = TypeAdapter(  # in the order of OpDoc's fields
    tuple[_Column[Kind], _Column[_Index], _Column[_Index | None], _Column[_Index], _Column[Time], _Column[Time]]
)


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """Makes an object of a plan's JSON: of an op a tuple of its fields, which takes half as much as a dictionary."""
    read = _unique(pairs)
    return _VALUES(read) if read.keys() == _KEYS else read


def _dumped(document: Any) -> bytes:
    """Writes a small part of a document for pydantic. Raises PlanError."""
    try:
        return json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:  # json reads a level more than it writes
        raise PlanError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise PlanError(f"it has {error.object[error.start]!a} in a text, half of a pair of surrogates") from None


def _columns(name: str, ops: Any, scale: int) -> list[Ints]:
    """Checks the ops of one worker and returns their columns; see OpArrays. scale: ticks per unit. Raises PlanError."""
    if not isinstance(ops, list):
        raise PlanError(f"workers.{name}: expected a list of ops")
    ops = [_VALUES(op) if type(op) is dict and op.keys() == _KEYS else op for op in ops]
    for i, op in enumerate(ops):
        if type(op) is not tuple:
            try:
                OpDoc.model_validate_json(_dumped(op))
            except ValidationError as error:  # always: some field is missing, or another is there
                where = ".".join(map(str, ("workers", name, i, *error.errors()[0]["loc"])))
                raise PlanError(first_problem(error, where)) from None
    try:
        columns = _COLUMNS.validate_python([*zip(*ops, strict=True)] or [()] * len(_FIELDS))
    except ValidationError as error:
        field, at = error.errors()[0]["loc"][:2]
        raise PlanError(first_problem(error, f"workers.{name}.{at}.{_FIELDS[int(field)]}")) from None
    kind, pipeline, micro_batch, stage, *times = columns
    if odd := [i for i, m in enumerate(micro_batch) if (m is None) != (kind[i] == "O")]:
        expected = "null for O, and a number for all others"
        raise InputError(f"workers.{name}.{odd[0]}.micro_batch", micro_batch[odd[0]], expected)
    numbers = [_INDEX[k] for k in kind], pipeline, [-1 if m is None else m for m in micro_batch], stage
    made = [np.array(column, np.int64) for column in numbers]
    for what, column in zip(("start", "duration"), times, strict=True):
        units = np.array(column, float)
        ticks = np.rint(units * scale)
        if (odd := (ticks >= _EXACT) | (ticks / scale != units)).any():
            i = int(odd.argmax())
            expected = f"a multiple of {1 / scale:g}, as the job's durations are, and fewer than 2^53 of them"
            raise InputError(f"workers.{name}.{i}.{what}", column[i], expected)
        made.append(ticks.astype(np.int64))
    return made


class MetricsDoc(DocumentModel):
    """Numbers of a plan, defined in planner.plans.schedule; `gap` and the slowdowns are fractions (0.08 = +8 %).

    bound_over: see planner.jobs.job.Over. The slowdowns are against the job with its partition without failures.
    """

    makespan: Time
    period: Time
    lower_bound: Time
    bound_over: Annotated[Over, Field(exclude_if=lambda value: value == "schedules")] = "schedules"
    gap: Finite
    bubble_fraction: Finite
    slowdown_vs_1f1b: Finite
    # Against solvers.list_scheduler.best_fault_free, or against this plan itself where it is shorter: a plan around
    # failures is also a plan without them.
    slowdown_vs_best: Finite
    peak_activations: Annotated[dict[WorkerName, Annotated[int, INTEGER]], WrapValidator(_some_at_a_time)]

    @classmethod
    def of(
        cls, schedule: Schedule, *, bound: float, reference: float, best: float, over: Over = "schedules"
    ) -> MetricsDoc:
        """Computes the numbers of a schedule. bound, of all that `over` says; reference and best, the periods that the
        slowdowns are against: all in ticks."""
        job, period = schedule.problem.job, schedule.period
        return cls(
            makespan=job.units(schedule.makespan),
            period=job.units(period),
            lower_bound=job.units(bound),
            bound_over=over,
            gap=period / bound - 1,
            bubble_fraction=schedule.bubble_fraction,
            slowdown_vs_1f1b=period / reference - 1,
            slowdown_vs_best=period / best - 1,
            peak_activations={str(w): n for w, n in sorted(schedule.peak_activations.items())},
        )

    @property
    def fault_free(self) -> float:
        """The period of fault-free 1F1B, which `slowdown_vs_1f1b` is against."""
        return self.period / (1 + self.slowdown_vs_1f1b)

    def peaks(self, job: Job) -> Iterator[tuple[Worker, int]]:
        """Yields `peak_activations`. Raises InputError for a worker that the job does not have."""
        field = "metrics.peak_activations"
        for name, held in self.peak_activations.items():
            yield job.check_worker(Worker.parse(name, field=field), field=field), held


# Solvers whose search may prove a higher bound than planner.plans.bounds. The proof is not in the document.
PROVERS = ("cp-sat",)

# The solver's name of a document that no solver made: not a plan, but an iteration as it was measured.
MEASURED = "measured"


class SolverDoc(DocumentModel):
    """status: `optimal` when the bound equals the period, else `feasible`."""

    name: Annotated[str, Field(max_length=80, pattern=PRINTABLE)]
    status: Literal["optimal", "feasible"]
    seconds: Finite
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
        problem, workers = schedule.problem, sorted(schedule.ops)
        if workers != list(schedule.ops):
            rows = [row for _, row in sorted(zip(schedule.ops, range(len(workers)), strict=True))]
            arrays = schedule.arrays.rows(rows)
            schedule = replace(schedule, ops=OpsByWorker(workers, lambda: arrays))
        body: dict[str, Any] = {
            "job": job_doc(problem.job),
            "failed": tuple(str(w) for w in sorted(problem.failed)),
            "partition": problem.job.partition,
            "technique": problem.technique,
            "memory": problem.memory.text,
            "workers": PlannedOps(schedule),
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
        # `workers` is the last key of all.
        for i, (name, ops) in enumerate(self.workers.texts(sorted(self.workers), sorted(_FIELDS))):
            digest.update(f'{"," if i else ""}"{name}":{ops}'.encode())
        digest.update(b"}}")
        return digest.hexdigest()[:32]

    def schedule(self) -> Schedule:
        """Returns the schedule that the plan is made of, in ticks. planner.check says whether it is valid."""
        return self.workers.schedule

    def problem(self) -> Problem:
        return self.schedule().problem

    @property
    def op_count(self) -> int:
        return len(self.schedule().arrays.kind)

    def rerouted(self) -> dict[str, int]:
        """Returns by worker how many forwards of other pipelines' micro-batches it runs per iteration."""
        return {str(worker): count for worker, count in self.schedule().rerouted_forwards.items()}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Plan:
        """Copies the plan. Other ops or another problem are read as those of a document. Raises PlanError."""
        said = {**self.__dict__, **(update or {})}
        if not (update or {}).keys() <= _BESIDE_THE_OPS:
            return Plan.from_json(Plan.model_construct(**said).model_dump_json())
        return Plan.of(self.schedule(), **{name: said[name] for name in _BESIDE_THE_OPS})

    # -- JSON --------------------------------------------------------------------------------

    def to_json(self) -> str:
        rest = Plan.model_construct(**{**self.__dict__, "workers": {}}).model_dump_json()
        before, empty, after = rest.partition('"workers":{}')
        workers = ",".join(f'"{name}":{ops}' for name, ops in self.workers.texts(self.workers, _FIELDS))
        return f"{before}{empty[:-1]}{workers}}}{after}"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "plan") -> Plan:
        """Reads a plan. A worker has one spelling, a time is a whole number of ticks, and there are enough ops for the
        job. Raises PlanError naming the first field that is wrong."""
        try:
            document = read_json(text if isinstance(text, str) else text.decode(), _object)
        except ValueError as error:
            raise PlanError(f"{source} is not a plan: {error}") from None
        try:
            return cls.from_document(document)
        except PlannerError as error:
            raise PlanError(f"{source} is not a plan: {error}") from None

    @classmethod
    def from_document(cls, document: Any) -> Plan:
        """Reads what the JSON of a plan is in Python. The ops are taken out of it: there are 400,000 in a plan of 2,048
        workers. They are validated worker by worker, since pydantic lets no other thread run meanwhile. Raises
        PlannerError, which begins with the field."""
        workers: Any = document.get("workers") if isinstance(document, dict) else None
        rest = {**document, "workers": {}} if isinstance(workers, dict) else document
        try:
            said = cls.model_validate_json(_dumped(rest))  # refuses a document without workers
        except ValidationError as error:
            raise PlanError(first_problem(error)) from None
        grid = said.job.pipelines, said.job.stages
        check_sizes(*grid, said.job.micro_batches)
        if len(workers) > (most := math.prod(grid)):  # before each is read: a row takes time even if it is empty
            raise InputError("workers", f"{len(workers):,} rows", f"at most {most:,}, one for each worker of the job")
        found: int = sum(len(ops) for ops in workers.values() if isinstance(ops, list))
        if found < (least := 2 * said.job.ops // 3):  # a small document may claim a job that would take all memory
            raise InputError("workers", f"{found:,} ops", f"at least {least:,}, an F and a B of all micro-batches")
        failed = [_worker(name, "failed") for name in said.failed]
        if len(set(failed)) < len(failed):
            raise PlanError("failed: a worker is there twice")
        job = said.job.job()
        job = job.with_partition(said.partition) if said.partition else job
        memory = MemoryLimit.parse(said.memory, field="memory")
        problem = Problem(job, frozenset(failed), said.technique, memory)
        places = [_worker(name, "workers") for name in workers]
        columns = [_columns(name, workers.pop(name), job.ticks_per_unit) for name in list(workers)]
        bounds = bounds_of(len(kinds) for kinds, *_ in columns)
        arrays = OpArrays(bounds, *map(np.concatenate, zip(*columns, strict=True)))
        schedule = Schedule(problem, OpsByWorker(places, lambda: arrays))
        return cls.of(schedule, metrics=said.metrics, solver=said.solver, fingerprint=said.fingerprint)

    def renamed(self, names: Sequence[int], workers: Sequence[Sequence[int]] = ()) -> Plan:
        """Renames each pipeline p to names[p]: workers change places, and micro-batches their homes. Then the part of
        pipeline p on stage s goes to workers[s][p]. The fingerprint is computed anew. Returns the plan itself where
        nothing changes. Raises InputError for a job whose workers differ in speed, and for a plan with workers or ops
        that its grid does not have."""
        if not workers and list(names) == sorted(names):
            return self if self.fingerprint else self.hashed()
        schedule = self.schedule().renamed(names, workers)
        peaks = {renamed(worker, names, workers): n for worker, n in self.metrics.peaks(schedule.problem.job)}
        counted = {"peak_activations": {str(worker): peaks[worker] for worker in sorted(peaks)}}
        return Plan.of(schedule, metrics=self.metrics.model_copy(update=counted), solver=self.solver)

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


_BESIDE_THE_OPS = {"metrics", "solver", "fingerprint"}


def _worker(name: str, field: str) -> Worker:
    """Reads a worker in its one spelling. Raises InputError."""
    worker = Worker.parse(name, field=field)
    if str(worker) != name:
        raise InputError(field, name, f"{worker}, as it is spelt")
    return worker


class DuplicateKey(PlannerError):
    """An object of a JSON document has a key twice, so that two readers may read two documents."""


def refuse_duplicates(text: str | bytes) -> None:
    """Raises DuplicateKey for valid JSON in which an object has a key twice."""
    json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs) and None)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DuplicateKey(f"the key {twice[:80]!r} is there twice in one object")
    return read


def read_json(text: str | bytes, made: Callable[[list[tuple[str, Any]]], Any] = _unique) -> Any:
    """Parse JSON that a person, a file or another host gave. made: makes an object of its pairs.

    Raises ValueError with a readable message, also where an object has a key twice or the nesting is too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=made)
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


def first_problem(error: ValidationError, where: str = "") -> str:
    """Make one sentence of pydantic's error: field, value and what was expected. where: other words for the field."""
    first = error.errors(include_url=False)[0]
    where = printable((where or ".".join(map(str, first["loc"])))[:200]) or "the document"
    value = repr(first.get("input"))
    shown = value if len(value) <= 80 else value[:77] + "..."
    more = len(error.errors()) - 1
    return f"{where}: {first['msg']} (got {shown})" + (f", and {more} more" if more else "")


def _plain_all(values: Iterable[float]) -> tuple[float | int, ...]:
    return tuple(map(_plain, values))


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value

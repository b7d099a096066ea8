"""The Plan document: versioned JSON with a published schema and a fingerprint.

A Plan is a schedule that has been solved, with what a reader needs to trust it: the problem, the
metrics, the proven bound, and who solved it. Times are in the job's own time unit.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, starmap
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, overload

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
    WrapSerializer,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.files import PLAN_BYTES, read_whole
from openrecycle.planner.jobs.job import Job, LayerProfile, MemoryLimit, Over, Problem, StageProfile, Technique, Worker
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.plans.schedule import Op, Schedule

SCHEMA_VERSION: Literal[1] = 1
Model = TypeVar("Model", bound=BaseModel)


# Bounded: a whole number may be too large for a float, and would pass for finite.
def _no_text_or_truth(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("a valid integer")
    return value


INTEGER = BeforeValidator(_no_text_or_truth)
"""For an int as JSON Schema has it: 3.0 is one, "3" and true are none. After the field's limits, which the schema loses
otherwise."""
Time = Annotated[
    StrictInt | Annotated[StrictFloat, Field(allow_inf_nan=False)],
    Field(ge=0, le=1e18),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1e18}),  # else the schema loses the limits
]
WorkerName = Annotated[str, Field(pattern=r"^W[0-9]{1,6}_[0-9]{1,6}$")]
Bytes = Annotated[int, Field(ge=0), INTEGER]
Speed = Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)]
# What a document need not say is left out where it says nothing, so that documents, and with them
# fingerprints, of jobs without it stay what they were.
_WHERE_GIVEN = Field(exclude_if=lambda value: not value)


_AT_A_TIME = 256
# Plans come from files of others and are printed on terminals: no control characters.
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"


class PlanError(PlannerError):
    """A plan file that can't be read as a plan. The sentence names the field and what is wrong."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _some_at_a_time(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Thousands of wrong entries would each be put into words while no other thread runs: the first ones are said."""
    if not isinstance(value, dict) or len(value) <= _AT_A_TIME:
        return validate(value)
    entries, found = iter(value.items()), dict[Any, Any]()
    while some := dict(islice(entries, _AT_A_TIME)):
        found |= validate(some)
    return found


class StageDoc(_Model):
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
    """The same of one layer, and what is sent if a stage ends behind it; see planner.jobs.job.LayerProfile."""

    transfer: Annotated[Time, _WHERE_GIVEN] = 0
    backward_transfer: Annotated[Time | None, Field(exclude_if=lambda value: value is None)] = None


# What is less is refused by Job, in its own words.
_Size = Annotated[int, INTEGER, Field(json_schema_extra={"minimum": 1})]


class JobDoc(_Model):
    """See planner.jobs.job.Job. `capacity_bytes`: one number for all workers, or one per stage.

    partition: layers per stage without failures; a plan has its own. With `layers`, profiles and transfers follow from
    both, and may be left out.
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
        """What follows from layers need not be said."""
        if isinstance(data, Mapping) and data.get("layers"):
            return {"profiles": (), "transfers": (), **data}
        return data

    def job(self) -> Job:
        """Raises InputError when the document describes no job."""
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


class OpDoc(_Model):
    """`micro_batch` counts from 0 inside its home `pipeline`; null for O, which belongs to none."""

    kind: Literal["F", "I", "W", "B", "O"]
    pipeline: Annotated[int, INTEGER]
    micro_batch: Annotated[int | None, INTEGER]
    stage: Annotated[int, INTEGER]
    start: Time
    duration: Time


class OpColumns(NamedTuple):
    """Ops of one worker, as OpDoc has them. Lists: a document's numbers may be of any size, and 1 is not 1.0 in it."""

    kinds: list[str]
    pipelines: list[int]
    micro_batches: list[int | None]
    stages: list[int]
    starts: list[int | float]
    durations: list[int | float]

    @classmethod
    def of(cls, ops: Iterable[OpDoc]) -> OpColumns:
        rows = list(map(_VALUES, ops))
        return cls(*map(list, zip(*rows, strict=True))) if rows else cls([], [], [], [], [], [])

    def canonical(self) -> str:
        """As the fingerprint is computed from them."""
        return "[" + ",".join([
            f'{{"duration":{d!r},"kind":"{kind}","micro_batch":{"null" if m is None else m},'
            f'"pipeline":{p},"stage":{s},"start":{a!r}}}'
            for kind, p, m, s, a, d in zip(*self, strict=True)
        ]) + "]"  # fmt: skip

    def document(self) -> str:
        """As the Plan document has them."""
        return "[" + ",".join([
            f'{{"kind":"{kind}","pipeline":{p},"micro_batch":{"null" if m is None else m},'
            f'"stage":{s},"start":{a!r},"duration":{d!r}}}'
            for kind, p, m, s, a, d in zip(*self, strict=True)
        ]) + "]"  # fmt: skip


_VALUES = attrgetter("kind", "pipeline", "micro_batch", "stage", "start", "duration")


class Ops(Sequence[OpDoc]):
    """The ops of one worker. They are kept in columns: an OpDoc is made of what is looked at, and not kept."""

    __slots__ = ("columns",)

    def __init__(self, columns: OpColumns) -> None:
        self.columns = columns

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        # A wrong document may have a million wrong entries: the first is said.
        documents = handler.generate_schema(Annotated[tuple[OpDoc, ...], Field(fail_fast=True)])
        as_documents = core_schema.plain_serializer_function_ser_schema(tuple, return_schema=documents)
        return core_schema.no_info_after_validator_function(cls.of, documents, serialization=as_documents)

    @classmethod
    def of(cls, ops: Sequence[OpDoc]) -> Ops:
        return ops if isinstance(ops, Ops) else cls(OpColumns.of(ops))

    def __len__(self) -> int:
        return len(self.columns.kinds)

    @overload
    def __getitem__(self, at: int) -> OpDoc: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[OpDoc, ...]: ...

    def __getitem__(self, at: int | slice) -> OpDoc | tuple[OpDoc, ...]:
        columns: tuple[list[Any], ...] = self.columns
        if isinstance(at, slice):
            return tuple(Ops(OpColumns(*(column[at] for column in columns))))
        return _op_doc(*(column[at] for column in columns))

    def __iter__(self) -> Iterator[OpDoc]:
        return starmap(_op_doc, zip(*self.columns, strict=True))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ops):
            return self.columns == other.columns
        return tuple(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


class InArrays(Mapping[str, Ops]):
    """All workers of a plan in the arrays of planner.plans.plan_arrays, which need numpy, and hold no plan that is
    wrong in its shape. As a mapping, they are those of the document."""

    op_count: int
    stored: tuple[bytes, bytes]
    """The plan's packed form and its deflated document, to be handed on as they came; empty where it came without."""

    @abstractmethod
    def schedule(self) -> Schedule: ...

    @abstractmethod
    def renamed(self, names: Sequence[int]) -> InArrays:
        """Raises InputError where workers are not alike."""

    @abstractmethod
    def rerouted(self) -> dict[str, int]: ...


class MetricsDoc(_Model):
    """All as defined in planner.plans.schedule; `gap` and the slowdowns are fractions (0.08 = +8 %).

    bound_over: see planner.jobs.job.Over. The slowdowns are against the job as it is cut without failures.
    """

    makespan: Time
    period: Time
    lower_bound: Time
    bound_over: Annotated[Over, Field(exclude_if=lambda value: value == "schedules")] = "schedules"
    gap: StrictFloat
    bubble_fraction: StrictFloat
    slowdown_vs_1f1b: StrictFloat
    # Against planner.solvers.fault_free.best_fault_free; against this very plan where it is shorter than that, since
    # a plan around failures is one without them too.
    slowdown_vs_best: StrictFloat
    peak_activations: dict[WorkerName, Annotated[int, INTEGER]]


# Solvers whose search may prove a bound above those of planner.plans.bounds. The proof is not in the document.
PROVERS = ("cp-sat", "milp")

# A solver's name where none made it: no plan, but an iteration as it ran.
MEASURED = "measured"


class SolverDoc(_Model):
    """status: `optimal` when the bound equals the period, else `feasible`."""

    name: Annotated[str, Field(max_length=80, pattern=PRINTABLE)]
    status: Literal["optimal", "feasible"]
    seconds: StrictFloat
    message: Annotated[str, Field(max_length=2000, pattern=PRINTABLE)] = ""


class Plan(_Model):
    """See the module. `fingerprint` is a hash of the problem and the ops; equal plans share it."""

    schema_version: Annotated[Literal[1], INTEGER] = SCHEMA_VERSION
    job: JobDoc
    failed: Annotated[tuple[WorkerName, ...], Field(fail_fast=True)]
    # Layers per stage in this plan; empty where the job has no layers.
    partition: Annotated[tuple[_Size, ...], _WHERE_GIVEN, Field(fail_fast=True)] = ()
    technique: Technique
    memory: str
    workers: Annotated[dict[WorkerName, Ops], WrapSerializer(lambda workers, write: write(dict(workers)))]
    metrics: MetricsDoc
    solver: SolverDoc
    fingerprint: str

    # -- from and to the planner's objects ---------------------------------------------------

    @classmethod
    def of(cls, schedule: Schedule, *, metrics: MetricsDoc, solver: SolverDoc) -> Plan:
        problem = schedule.problem
        body: dict[str, Any] = {
            "job": job_doc(problem.job),
            "failed": tuple(str(w) for w in sorted(problem.failed)),
            "partition": problem.job.partition,
            "technique": problem.technique,
            "memory": problem.memory.text,
            "workers": {str(w): Ops(_columns(problem.job, ops)) for w, ops in sorted(schedule.ops.items())},
            "schema_version": SCHEMA_VERSION,
        }
        return cls.model_construct(metrics=metrics, solver=solver, fingerprint="", **body).hashed()

    def compute_fingerprint(self) -> str:
        """SHA-256 over the canonical JSON of the problem and the ops (not of who solved it)."""
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
        # `workers` is the last key of all; worker by worker, for the reason that `_PIECEMEAL` gives.
        written = sorted((name, ops.canonical()) for name, ops in self.op_columns())
        for i, (name, ops) in enumerate(written):
            digest.update(f'{"," if i else ""}"{name}":{ops}'.encode())
        digest.update(b"}}")
        return digest.hexdigest()[:32]

    def op_columns(self) -> Iterator[tuple[str, OpColumns]]:
        """The ops of each worker, in columns."""
        for name, ops in self.workers.items():
            yield name, Ops.of(ops).columns

    def problem(self) -> Problem:
        """Raises PlannerError when the document describes no job."""
        failed = frozenset(Worker.parse(name, field="failed") for name in self.failed)
        job = self.job.job()
        if self.partition:
            job = job.with_partition(self.partition)
        return Problem(job, failed, self.technique, MemoryLimit.parse(self.memory, field="memory"))

    @property
    def in_arrays(self) -> InArrays | None:
        """Its workers, where they are in arrays."""
        return self.workers if isinstance(self.workers, InArrays) else None

    @property
    def op_count(self) -> int:
        return self.in_arrays.op_count if self.in_arrays else sum(map(len, self.workers.values()))

    def rerouted(self) -> dict[str, int]:
        """worker -> forwards of other pipelines' micro-batches, per iteration."""
        if self.in_arrays:
            return self.in_arrays.rerouted()
        moved = {}
        for name, ops in self.op_columns():
            own = int(name[1:].partition("_")[0])
            moved[name] = sum(k == "F" and p != own for k, p in zip(ops.kinds, ops.pipelines, strict=True))
        return moved

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Without arrays: they would not know of what is changed."""
        workers: dict[str, Any] = {"workers": dict(self.workers)} if self.in_arrays else {}
        return super().model_copy(update={**workers, **(update or {})}, deep=deep)

    def schedule(self) -> Schedule:
        """The schedule in ticks. It is not checked: planner.check does that."""
        if self.in_arrays:
            return self.in_arrays.schedule()
        problem = self.problem()
        scale = problem.job.ticks_per_unit
        ops = {}
        for name, columns in self.op_columns():
            worker = Worker.parse(name, field="workers")
            ops[worker] = tuple(
                Op(kind, p, -1 if m is None else m, s, worker, round(start * scale), round(duration * scale))
                for kind, p, m, s, start, duration in zip(*columns, strict=True)
            )
        return Schedule(problem, ops)

    # -- JSON --------------------------------------------------------------------------------

    def to_json(self) -> str:
        head = Plan.model_construct(**{**self.__dict__, "workers": {}}).model_dump_json()
        before, empty, after = head.partition(_NO_WORKERS)
        workers = ",".join(f'"{name}":{ops.document()}' for name, ops in self.op_columns())
        return f"{before}{empty[:-1]}{workers}}}{after}"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "plan") -> Plan:
        """Raises PlanError naming the first field that is wrong."""
        try:
            read = cls._piecemeal(text) if len(text) > _PIECEMEAL else None
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
        """Reads a document that is laid out as `to_json` does; None for any other, valid or not."""
        try:
            text = text if isinstance(text, str) else text.decode()
            begin = text.index(_NO_WORKERS[:-1]) + len(_NO_WORKERS) - 1
            workers, at, count = {}, begin, 0
            while found := _WORKER.match(text, at):
                ops = workers[found[1]] = _OPS.validate_json(found[2])  # (an Ops: what pydantic makes goes at once)
                at, count = found.end(), count + 1
                if "\\" in found[2] or any(found[2].count(key) != len(ops) for key in _OP_KEYS):
                    return None  # some key is there twice, or spelt in another way
            if len(workers) != count:
                return None
            plan = cls.model_validate_json(text[:begin] + text[at:])
            refuse_duplicates(text[:begin] + text[at:])
        except ValueError:
            return None
        if plan.workers:  # `workers` is there twice
            return None
        return plan.model_copy(update={"workers": workers})

    def renamed(self, names: Sequence[int]) -> Plan:
        """With each pipeline p called names[p]: workers change places, and micro-batches their homes. All else of the
        ops is shared; the fingerprint is computed anew."""

        def worker(name: str) -> str:
            old = Worker.parse(name)
            return str(Worker(names[old.pipeline], old.stage))

        def in_order(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(sorted(names, key=Worker.parse))

        workers: Mapping[str, Ops]
        if self.in_arrays:
            workers = self.in_arrays.renamed(names)
        else:
            moved = {
                worker(name): Ops(columns._replace(pipelines=[names[p] for p in columns.pipelines]))
                for name, columns in self.op_columns()
            }
            workers = {name: moved[name] for name in in_order(moved)}
        peaks = {worker(name): n for name, n in self.metrics.peak_activations.items()}
        counted = {name: peaks[name] for name in in_order(peaks)}
        changes: dict[str, Any] = {
            "failed": in_order(map(worker, self.failed)),
            "workers": workers,
            "metrics": self.metrics.model_copy(update={"peak_activations": counted}),
        }
        return Plan.model_construct(**{**self.__dict__, **changes}).hashed()

    def hashed(self) -> Plan:
        """Itself, just made, once its fingerprint has been computed."""
        self.__dict__["fingerprint"] = self.compute_fingerprint()
        return self

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Raises PlanError when the file can't be read."""
        try:
            data = read_whole(path, most=PLAN_BYTES)
        except OSError as error:
            raise PlanError(f"{path} can't be read: {error.strerror or error}") from None
        return cls.from_json(data, source=str(path))


_OPS = TypeAdapter(Ops)
# Longer documents are read worker by worker, and all are written so: pydantic and json let no other
# thread run meanwhile, which for 2,048 workers at once takes seconds.
_PIECEMEAL = 1_000_000
_NO_WORKERS = '"workers":{}'
_WORKER = re.compile(r'"(W[0-9]{1,6}_[0-9]{1,6})":(\[[^\[\]]*\])(?:,(?=")|(?=\}))')


_OP_KEYS = tuple(f'"{name}"' for name in OpDoc.model_fields)


class DuplicateKey(PlannerError):
    """An object of a JSON document has a key twice, so that two readers may read two documents."""


def refuse_duplicates(text: str | bytes) -> None:
    """Raises DuplicateKey for a document (valid JSON) in which an object has a key twice."""
    json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DuplicateKey(f"the key {twice[:80]!r} is there twice in one object")


def read_json(text: str | bytes) -> Any:
    """A document that a person, a file or another host gave.

    Raises ValueError, in words, also for a key that is in one object twice, and for what is nested too deeply.
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
    """As model.model_validate_json, for what a person, a file or another host gave: ValidationError also for a key
    that is in one object twice."""
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
    """Of the job as it is cut without failures."""
    job = job.at_home
    one_capacity = len(set(job.capacity_bytes)) == 1
    stages = {id(profile): profile for profile in job.profiles}  # thousands of stages often have one and the same
    docs = {key: _stage_doc(profile) for key, profile in stages.items()}
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


def _stage_doc(profile: StageProfile) -> StageDoc:
    return StageDoc(**_fields_of(profile))


def layer_doc(layer: LayerProfile) -> LayerDoc:
    back = None if layer.backward_transfer is None else _plain(layer.backward_transfer)
    return LayerDoc(**_fields_of(layer), transfer=_plain(layer.transfer), backward_transfer=back)


def _fields_of(profile: StageProfile) -> dict[str, Any]:
    return {
        "forward": _plain(profile.forward),
        "input_backward": _plain(profile.input_backward),
        "weight_backward": _plain(profile.weight_backward),
        "optimizer": _plain(profile.optimizer),
        "reductions": _plain_all(profile.reductions),
        "activation_bytes": profile.activation_bytes,
        "weight_backward_bytes": profile.weight_backward_bytes,
        "weight_bytes": profile.weight_bytes,
        "optimizer_bytes": profile.optimizer_bytes,
    }


def first_problem(error: ValidationError) -> str:
    """One sentence out of pydantic's error: field, value and what was expected."""
    first = error.errors(include_url=False)[0]
    where = printable(".".join(map(str, first["loc"]))[:200]) or "the document"
    value = repr(first.get("input"))
    shown = value if len(value) <= 80 else value[:77] + "..."
    more = len(error.errors()) - 1
    return f"{where}: {first['msg']} (got {shown})" + (f", and {more} more" if more else "")


def _columns(job: Job, ops: Sequence[Op]) -> OpColumns:
    """As a document has them."""
    return OpColumns(
        [op.kind for op in ops],
        [op.pipeline for op in ops],
        [None if op.kind == "O" else op.micro_batch for op in ops],
        [op.stage for op in ops],
        [job.units(op.start) for op in ops],
        [job.units(op.duration) for op in ops],
    )


_FIELDS = set(OpDoc.model_fields)  # shared by all: OpDoc is frozen, and a copy of one copies it


def _op_doc(
    kind: str, pipeline: int, micro_batch: int | None, stage: int, start: int | float, duration: int | float
) -> OpDoc:
    """OpDoc.model_construct, eight times as fast: a plan has up to 10^6 of them."""
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
    object.__setattr__(op, "__pydantic_fields_set__", _FIELDS)
    object.__setattr__(op, "__pydantic_extra__", None)
    object.__setattr__(op, "__pydantic_private__", None)
    return op


def _plain_all(values: Iterable[float]) -> tuple[float | int, ...]:
    return tuple(map(_plain, values))


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value

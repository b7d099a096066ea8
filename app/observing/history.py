"""A job's history as a zip file: exported, checked and imported; and the deletion of jobs.

    manifest.json            a list of the other files, each with its bytes and SHA-256; tables with their rows
    tables/<table>.jsonl     a row per line, in the order of the table's key, without the job's id
    plans/<fingerprint>.json the Plan documents that the job has or has run

The type of each column comes from the table's definition; `_STRICTER` has what people or the console rely on beyond it.
app/docs/store.md describes the format for users.

A file may be damaged, or made to do harm, so every byte is checked before anything is stored. It is read as a stream,
in little memory, and no name in it is ever used for a file. A checked file becomes a job in small steps, so that the
console can work in between.

A running console exports in a child process, and deletes in the background (`Histories`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import os
import re
import socket
import stat
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Literal, Protocol

import orjson
import structlog
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
)
from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, LargeBinary, String, Text
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.membership import LEAST_CHOICE_TIMEOUT, MOST_CHOICE_TIMEOUT, PRESENT, Mode
from openrecycle.agent.messages.protocol import (
    RANKS,
    Identifier,
    JobSpec,
    LossHex,
    Milliseconds,
    Name,
    NodeNumber,
    OpKind,
    RankNumber,
    WorkerName,
    WorkerState,
)
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.states import RoleState
from openrecycle.app.observing.as_run import IterationAsRun
from openrecycle.app.runtime.errors import ConsoleError, named, storing, unavailable, unknown_job
from openrecycle.app.runtime.processes import Channel, Children, Seldom
from openrecycle.db.access import audit_row
from openrecycle.db.heartbeats import GROUP, BlockError, unpack
from openrecycle.db.job_rows import DELETING, IMPORTING, MODELS, OVER, HiddenJob, JobRows, Record, table
from openrecycle.db.session import Database
from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import MAX_LAYERS
from openrecycle.planner.plans.packed import pack, unpack_named
from openrecycle.planner.plans.plan import INTEGER, Plan, read_model
from openrecycle.scratch import scratch

RowRecord = dict[str, Any]

# -- a row of each table as a line of JSON ------------------------------------------------------

# Columns that are not exported: numbers that only mean something beside other jobs, consoles or launchers, and the key
# under which requests find the job again.
LEFT_OUT = {
    "job": ("idempotency_key", "lead_term", "lead_node"),
    "worker_state": ("id",),
    "heartbeat": ("id",),
    "audit": ("id",),
}
# Not exported either: an import may give the job another id.
JOB_COLUMN = "job_id"
MOST_TEXT = 2**20


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("text without NUL")
    return text


Fingerprint = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Workers = list[WorkerName]
# POSIX seconds, limited to dates that a calendar can show.
Moment = Annotated[float, Field(strict=True, ge=0, le=1e11, allow_inf_nan=False)]


InARow = Annotated[int, Field(ge=1, le=2**53)]
Number = Annotated[int, Field(ge=0, le=2**53)]
Text255 = Annotated[str, StringConstraints(max_length=255), AfterValidator(_no_nul)]


class RestartLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: InARow
    most: InARow
    at: Moment
    node: NodeNumber | None = None


class ProcessLine(BaseModel):
    """A ProcessState, as app.jobs.live_job.process_rows has it."""

    model_config = ConfigDict(extra="forbid")

    incarnation: Identifier
    host: Text255
    pid: Number
    held: Annotated[list[tuple[WorkerName, Moment]], Field(min_length=1)]
    ended: Literal["", "failed", "drained"] = ""
    detail: Annotated[str, StringConstraints(max_length=MOST_TEXT), AfterValidator(_no_nul)] = ""
    ranks: Annotated[list[Number], Field(max_length=RANKS)] = []
    spare: Annotated[list[RankNumber], Field(max_length=RANKS)] = []
    made_of: Annotated[list[tuple[Identifier, RankNumber]], Field(max_length=RANKS)] = []
    restart: RestartLine | None = None
    stands_by: bool = False


Place = Annotated[str, StringConstraints(pattern=r"^(W[0-9]{1,6}_[0-9]{1,6})?$")]
_STRICTER: dict[str, Any] = {
    "job.id": Identifier,
    "job.name": Name,
    "job.spec": JobSpec,
    "job.state": Literal["starting", "running", "recovering", "halted", "finished", "stopped"],
    "job.mode": Mode,
    "job.waits": list[tuple[Moment, Moment | None, Annotated[int, Field(ge=0, le=2**53)]]],
    "job.choice_timeout": Annotated[float, Field(ge=LEAST_CHOICE_TIMEOUT, le=MOST_CHOICE_TIMEOUT)],
    "worker.name": WorkerName,
    "worker.state": WorkerState,
    "worker.incarnation": Identifier | None,
    "worker.retired": list[Identifier],
    "worker.processes": list[ProcessLine],
    "worker.let_go": tuple[Text255, bool, Workers] | None,
    "worker.phase": Literal["", "starting", "waiting", "forming", "training", "paused", "draining"],
    "worker.op_milliseconds": dict[OpKind, Milliseconds],
    "job_plan.fingerprint": Fingerprint,
    "job_plan.failed": Workers,
    "generation.generation": Annotated[int, Field(ge=1, le=2**53)],
    "generation.plan_fingerprint": Fingerprint,
    "generation.living": Workers,
    "generation.failed": Workers,
    "generation.joining": Workers,
    "generation.moves": list[tuple[WorkerName, WorkerName]],
    "acknowledgement.worker": WorkerName,
    "acknowledgement.state": Literal["adopted", "formed", "resumed"],
    "generation.interim_plan": Fingerprint | Literal[""],
    "generation.interim_failed": Workers,
    "generation.partition": Annotated[list[Annotated[int, Field(ge=1, le=MAX_LAYERS)]], Field(max_length=MAX_LAYERS)],
    "generation.moved_at": Annotated[int, Field(ge=0, le=2**53)] | None,
    "generation.let_go": list[tuple[WorkerName, bool]],
    "generation.lost": Workers,
    "event.severity": Literal["info", "warning", "error"],
    "event.kind": Literal["worker", "failure", "generation", "recovery", "plan", "job", "console", "operator", "step"],
    "event.worker": WorkerName | None,
    "event.count": Annotated[int, Field(ge=1, le=2**31 - 1)],
    "event.seq": Annotated[int, Field(ge=1, le=2**53)],
    "iteration.iteration": Annotated[int, Field(ge=0, le=2**53)],
    "iteration.seconds": Annotated[float, Field(ge=0, le=1e9)],
    "iteration.living": Annotated[int, Field(ge=0, le=2**31 - 1)],
    "iteration.skipped": list[Annotated[int, Field(ge=0, le=2**53)]],
    "iteration.loss_hex": LossHex,
    "recovery.worker": WorkerName,
    "measured_iteration.document": IterationAsRun,
    "worker_state.worker": WorkerName,
    "worker_state.state": RoleState,
    "command.kind": Literal["kill", "restart", "pause", "resume"],
    "command.worker": Place,
    "heartbeat.level": Literal[1, 60, 3600],
}


@dataclass(frozen=True)
class TableFormat:
    """The file of one table: the model of its lines, and its key; both without the job's id.

    key: the columns by which lines rise strictly; () if lines may be in any order. single: there is one line at most.
    """

    name: str
    line: type[BaseModel]
    key: tuple[str, ...]
    single: bool
    _write: dict[str, Callable[[Any], Any]]
    _read: dict[str, Callable[[Any], Any]]

    def to_line(self, row: RowRecord) -> RowRecord:
        """Converts a row of the database to plain data for JSON."""
        return {
            name: self._write[name](row[name]) if name in self._write else row[name] for name in self.line.model_fields
        }

    def to_row(self, line: BaseModel) -> RowRecord:
        """Converts a line to a row, without the columns that are not exported."""
        return {name: self._read[name](value) if name in self._read else value for name, value in line}


@cache
def format_of(name: str) -> TableFormat:
    columns = [c for c in table(name).columns if c.name != JOB_COLUMN and c.name not in LEFT_OUT.get(name, ())]
    fields: dict[str, Any] = {}
    write: dict[str, Callable[[Any], Any]] = {}
    read: dict[str, Callable[[Any], Any]] = {}
    for column in columns:
        stricter = _STRICTER.get(f"{name}.{column.name}")
        kind = stricter if stricter is not None else _type(column)
        fields[column.name] = (kind, ...)
        if isinstance(column.type, LargeBinary):
            write[column.name], read[column.name] = _encoded, base64.b64decode
        if isinstance(stricter, type) and issubclass(stricter, BaseModel):
            deflate = isinstance(column.type, LargeBinary)
            write[column.name] = _inflated_json if deflate else json.loads
            read[column.name] = _deflated_json if deflate else BaseModel.model_dump_json
        elif isinstance(column.type, Text) and stricter is not None:
            write[column.name], read[column.name] = json.loads, _dumped
    model = create_model(
        name, __config__=ConfigDict(extra="forbid", protected_namespaces=(), use_enum_values=True), **fields
    )
    key = tuple(c.name for c in table(name).primary_key.columns if c.name != JOB_COLUMN)
    return TableFormat(name, model, () if key == ("id",) else key, not key, write, read)


def _type(column: Column[Any]) -> Any:
    kind: Any
    if isinstance(column.type, LargeBinary):
        kind = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]*={0,2}$", strict=True)]
    elif isinstance(column.type, Text):
        kind = Annotated[str, StringConstraints(max_length=MOST_TEXT, strict=True), AfterValidator(_no_nul)]
    elif isinstance(column.type, String):
        kind = Annotated[str, StringConstraints(max_length=column.type.length, strict=True), AfterValidator(_no_nul)]
    elif isinstance(column.type, Boolean):
        kind = Annotated[bool, Field(strict=True)]
    elif isinstance(column.type, BigInteger):
        kind = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
    elif isinstance(column.type, Integer):
        kind = Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)]
    else:
        assert isinstance(column.type, Double), column
        time = column.name == "at" or column.name.endswith("_at")
        kind = Moment if time else Annotated[float, Field(strict=True, allow_inf_nan=False)]
    return kind | None if column.nullable else kind


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _dumped(value: Any) -> str:
    return json.dumps(value, default=lambda model: model.model_dump(exclude_unset=True))


def _inflated_json(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


def _deflated_json(document: BaseModel) -> bytes:
    return zlib.compress(document.model_dump_json().encode())


# -- a job's history as a zip file --------------------------------------------------------------

MANIFEST = "manifest.json"
# The audit log is exported for reading, but never imported: it belongs to the console that wrote it.
EXPORTED = ("job", *MODELS, "audit")

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=2**50, strict=True)]


class Entry(BaseModel):
    """bytes, sha256: of the unpacked file."""

    model_config = ConfigDict(extra="forbid")

    bytes: Size
    sha256: Sha256


class TableEntry(Entry):
    rows: Size


class Manifest(BaseModel):
    """job: its id where it was exported. exported_at: POSIX seconds."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["openrecycle-history"]
    version: Annotated[Literal[1], INTEGER]
    job: str
    exported_at: float
    tables: dict[str, TableEntry]
    plans: dict[Fingerprint, Entry]


def table_file(name: str) -> str:
    return f"tables/{name}.jsonl"


def plan_file(fingerprint: str) -> str:
    return f"plans/{fingerprint}.json"


def export(database: Database, job_id: str, out: Path, *, audit: bool = True) -> Manifest | None:
    """Writes a job's history to `out`, which exists only once it is whole. Returns None if there is no such job. audit:
    includes the lines of the audit log about the job.

    Takes little memory for any history, since rows are written as they are read. Raises OSError, SQLAlchemyError, and
    HistoryError for a stored plan that is damaged.
    """
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with JobRows(database).snapshot() as snapshot:
            job = snapshot.job(job_id)
            if job is None:
                return None
            with zipfile.ZipFile(part, "x", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
                tables, plans = {}, {}
                for name in EXPORTED:
                    form = format_of(name)
                    rows = [job] if name == "job" else snapshot.rows(name, job_id)
                    if name == "audit" and not audit:
                        rows = []
                    lines = (orjson.dumps(form.to_line(row)) + b"\n" for row in rows)
                    digest, size, count = _write(archive, table_file(name), lines)
                    tables[name] = TableEntry(bytes=size, sha256=digest, rows=count)
                for fingerprint in snapshot.fingerprints(job_id):
                    try:
                        document = unpack_named(snapshot.plan(fingerprint), fingerprint).to_json()
                    except PlannerError as error:
                        raise HistoryError(str(error)) from None
                    digest, size, _ = _write(archive, plan_file(fingerprint), [document.encode()])
                    plans[fingerprint] = Entry(bytes=size, sha256=digest)
                manifest = Manifest(
                    format="openrecycle-history",
                    version=1,
                    job=job_id,
                    exported_at=time.time(),
                    tables=tables,
                    plans=plans,
                )
                archive.writestr(MANIFEST, manifest.model_dump_json(indent=1))
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return manifest


def _write(archive: zipfile.ZipFile, name: str, chunks: Iterable[bytes]) -> tuple[str, int, int]:
    """Writes a file into the zip; returns (SHA-256, bytes, chunks)."""
    digest, size, count = hashlib.sha256(), 0, 0
    with archive.open(name, "w", force_zip64=True) as handle:
        for chunk in chunks:
            handle.write(chunk)
            digest.update(chunk)
            size, count = size + len(chunk), count + 1
    return digest.hexdigest(), size, count


MOST_MANIFEST = 8 * 2**20
MOST_DIRECTORY = 16 * 2**20
"""The most bytes of the zip's directory, which is read as a whole."""
MOST_LINE = 64 * 2**20
MOST_PLAN = 256 * 2**20
MOST_UNPACKED = 64 * 2**30
# Bytes of packed plans that are kept between the check of a file and its import: packed, one of 2,048 workers has some
# kilobytes. To parse one takes as long as all else that is done with it, so only those beyond this are parsed again.
MOST_KEPT = 64 * 2**20
# How many times larger a file may unpack, if it has RATIO_FROM bytes or more. A job's JSON lines are packed to a tenth,
# seldom to a hundredth.
MOST_RATIO, RATIO_FROM = 200, 2**20

_WORKER_COLUMNS = {
    "acknowledgement": ("worker",),
    "event": ("worker",),
    "recovery": ("worker",),
    "worker_state": ("worker",),
    "command": ("worker",),
    "job_plan": ("failed",),
    "generation": ("living", "failed", "joining", "moves", "interim_failed", "let_go", "lost"),
}


class HistoryError(Exception):
    """Raised when a file is refused. `str(error)` is one sentence."""


class History:
    """An opened history file; a context manager. Call `check` before anything is stored from it. Raises
    HistoryError."""

    def __init__(self, path: Path) -> None:
        self._packed, self._room = dict[str, bytes](), MOST_KEPT
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise HistoryError(f"file: {path} can't be read: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # a device may have no end
                raise HistoryError(f"file: {path} is no regular file, expected the history of a job")
            self._zip = _opened(self._file)
            self.manifest = self._manifest()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> History:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._zip.close()
        self._file.close()

    def check(self) -> None:
        """Checks everything: sizes, sums, types, order, and whether the tables agree."""
        job = next(self.lines("job"), None)
        if self.manifest.tables["job"].rows != 1 or job is None:
            raise HistoryError(f"{table_file('job')}: expected one row")
        spec: JobSpec = job.spec  # type: ignore[attr-defined]
        try:
            spec.job()
        except PlannerError as error:
            raise HistoryError(f"{table_file('job')}: spec: {error}") from None
        grid = {f"W{p}_{s}" for p in range(spec.pipelines) for s in range(spec.stages)}
        workers = sum(1 for _ in self._checked("worker", spec, grid))
        if workers != len(grid):
            raise HistoryError(f"{table_file('worker')}: got {workers} rows, expected {len(grid)}, one per worker")
        for name in EXPORTED:
            if name != "worker":
                for _ in self._checked(name, spec, grid):
                    pass
        for fingerprint in self.manifest.plans:
            self._check_plan(fingerprint, spec)

    def lines(self, name: str) -> Iterator[BaseModel]:
        """Yields the rows of a table."""
        form, where = format_of(name), table_file(name)
        entry = self.manifest.tables[name]
        with self._open(where) as handle:
            reader = _Summed(handle, entry, where)
            number = 0
            while text := reader.line():
                number += 1
                try:
                    yield read_model(form.line, text)
                except ValidationError as error:
                    raise HistoryError(f"{where}, line {number}: {_first(error)}") from None
            reader.done()
        if number != entry.rows:
            raise HistoryError(f"{where}: got {number} rows, expected {entry.rows}, as the manifest says")

    def plan(self, fingerprint: str) -> str:
        """Returns a Plan document."""
        where, entry = plan_file(fingerprint), self.manifest.plans[fingerprint]
        if entry.bytes > MOST_PLAN:
            raise HistoryError(f"{where}: got {entry.bytes:,} bytes, expected at most {MOST_PLAN:,}")
        with self._open(where) as handle:
            reader = _Summed(handle, entry, where)
            text = reader.take(entry.bytes)
            reader.done()
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise HistoryError(f"{where}: it is not UTF-8") from None

    # -- details ----------------------------------------------------------------------------------

    def _manifest(self) -> Manifest:
        names = [info.filename for info in self._zip.infolist()]
        if MANIFEST not in names:
            raise HistoryError(f"file: it has no {MANIFEST}, expected the history of a job")
        with self._open(MANIFEST) as handle:
            text = _Inflating(handle, MANIFEST).read(MOST_MANIFEST + 1)
        if len(text) > MOST_MANIFEST:
            raise HistoryError(f"{MANIFEST}: got more than {MOST_MANIFEST:,} bytes, expected at most that")
        try:
            manifest = read_model(Manifest, text)
        except ValidationError as error:
            raise HistoryError(f"{MANIFEST}: {_first(error)}") from None
        for name in (*EXPORTED, *manifest.tables):
            if name not in manifest.tables or name not in EXPORTED:
                what = "is missing" if name in EXPORTED else "is none that a history has"
                raise HistoryError(f"{MANIFEST}: table {name!r:.80} {what}")
        expected = {MANIFEST, *map(table_file, manifest.tables), *map(plan_file, manifest.plans)}
        for name in names:
            if name not in expected:
                raise HistoryError(f"file: got {name!r:.80} in it, which the manifest does not name")
        if len(names) != len(expected):
            missing = sorted(expected - set(names))
            raise HistoryError(f"file: {missing[0]} is missing" if missing else "file: a name is in it twice")
        entries: list[Entry] = [*manifest.tables.values(), *manifest.plans.values()]
        if sum(entry.bytes for entry in entries) > MOST_UNPACKED:
            raise HistoryError(f"{MANIFEST}: the files have more than {MOST_UNPACKED:,} bytes, expected at most that")
        return manifest

    def _open(self, name: str) -> IO[bytes]:
        info = self._zip.getinfo(name)
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise HistoryError(f"{name}: expected a file that is deflated, and not encrypted")
        if info.file_size > RATIO_FROM and info.file_size > MOST_RATIO * info.compress_size:
            raise HistoryError(
                f"{name}: got {info.file_size:,} bytes out of {info.compress_size:,}, expected at most {MOST_RATIO} "
                "times as many"
            )
        try:
            return self._zip.open(info)
        except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
            raise HistoryError(f"{name}: it is damaged ({error})") from None

    def _checked(self, name: str, spec: JobSpec, grid: set[str]) -> Iterator[BaseModel]:
        form = format_of(name)
        before: tuple[Any, ...] = ()
        for number, line in enumerate(self.lines(name), start=1):
            where = f"{table_file(name)}, line {number}"
            key = tuple(getattr(line, column) for column in form.key)
            if form.key and key <= before:
                raise HistoryError(f"{where}: got {', '.join(form.key)} {key}, expected more than the row before has")
            if form.single and number > 1:
                raise HistoryError(f"{where}: expected one row at most")
            before = key
            self._check_line(name, line, where, spec, grid)
            yield line

    def _check_line(self, name: str, line: Any, where: str, spec: JobSpec, grid: set[str]) -> None:
        if name == "worker" and line.name not in grid:
            raise HistoryError(f"{where}: name: got {line.name!r}, expected one of the job's grid")
        for column in _WORKER_COLUMNS.get(name, ()):
            value = getattr(line, column)
            for worker in _names(value):
                if worker not in grid:
                    raise HistoryError(f"{where}: {column}: got {worker!r}, expected one of the job's grid")
        plan = {"generation": "plan_fingerprint", "job_plan": "fingerprint"}.get(name)
        fingerprint = getattr(line, plan) if plan else None
        if name == "measured_iteration":
            fingerprint = line.document.plan_fingerprint
        if fingerprint is not None and fingerprint not in self.manifest.plans:
            raise HistoryError(f"{where}: plan: got {fingerprint!r}, expected one of the file's plans")
        if name == "iteration" and line.iteration >= spec.iterations:
            raise HistoryError(f"{where}: iteration: got {line.iteration}, expected below {spec.iterations}")
        if name == "heartbeat":
            _check_block(line, where, len(grid))
        if name == "measured_iteration":
            for worker in line.document.workers:
                if worker not in grid:
                    raise HistoryError(f"{where}: document: got {worker!r}, expected one of the job's grid")

    def _check_plan(self, fingerprint: str, spec: JobSpec) -> None:
        """Checks a plan; it must have the fingerprint in its name, since other jobs may come to share it."""
        where = plan_file(fingerprint)
        try:
            plan = Plan.from_json(self.plan(fingerprint), source=where)
            if plan.fingerprint != fingerprint or plan.compute_fingerprint() != fingerprint:
                raise HistoryError(f"{where}: got another plan than that of this fingerprint")
            wrong = check(plan)
        except PlannerError as error:
            raise HistoryError(f"{where}: {error}") from None
        if wrong:
            raise HistoryError(f"{where}: {wrong[0]}")
        for size in ("pipelines", "stages", "micro_batches"):
            if (got := getattr(plan.job, size)) != (expected := getattr(spec, size)):
                raise HistoryError(f"{where}: job.{size}: got {got}, expected {expected}, as the job has it")
        data = pack(plan)
        if len(data) <= self._room:
            self._packed[fingerprint], self._room = data, self._room - len(data)

    def packed_plan(self, fingerprint: str) -> bytes:
        """Returns a plan that was checked, in its packed form."""
        return self._packed.get(fingerprint) or pack(Plan.from_json(self.plan(fingerprint)))


class _Inflating:
    """A file of the zip. Raises HistoryError if it is damaged."""

    def __init__(self, handle: IO[bytes], where: str) -> None:
        self._handle, self._where = handle, where

    def read(self, size: int) -> bytes:
        return self._told(self._handle.read, size)

    def readline(self, size: int) -> bytes:
        return self._told(self._handle.readline, size)

    def _told(self, function: Any, size: int) -> bytes:
        try:
            data: bytes = function(size)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise HistoryError(f"{self._where}: it is damaged ({error})") from None
        return data


class _Summed:
    """Reads a file, and compares its bytes and SHA-256 with the manifest's in `done`."""

    def __init__(self, handle: IO[bytes], entry: Entry, where: str) -> None:
        self._reader, self._entry, self._where = _Inflating(handle, where), entry, where
        self._digest, self._size = hashlib.sha256(), 0

    def line(self) -> bytes:
        """Returns the next line with its line break; empty at the end of the file."""
        text = self._took(self._reader.readline(MOST_LINE + 1))
        if len(text) > MOST_LINE:
            raise HistoryError(f"{self._where}: got a line of more than {MOST_LINE:,} bytes, expected at most that")
        return text

    def take(self, size: int) -> bytes:
        return self._took(self._reader.read(size))

    def done(self) -> None:
        if self._reader.read(1) or self._size != self._entry.bytes or self._digest.hexdigest() != self._entry.sha256:
            raise HistoryError(f"{self._where}: its bytes or their SHA-256 are not those that the manifest says")

    def _took(self, data: bytes) -> bytes:
        self._digest.update(data)
        self._size += len(data)
        return data


def _opened(handle: IO[bytes]) -> zipfile.ZipFile:
    try:
        # ZipFile finds the directory by this same function, so a file can't show another one here.
        end = zipfile._EndRecData(handle)  # type: ignore[attr-defined]
        if end is None:
            raise HistoryError("file: it is not a zip file, expected the history of a job")
        if end[5] > MOST_DIRECTORY:
            raise HistoryError(f"file: its directory has {end[5]:,} bytes, expected at most {MOST_DIRECTORY:,}")
        return zipfile.ZipFile(handle)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise HistoryError(f"file: it is not a zip file, or damaged ({error})") from None


def _check_block(line: Any, where: str, workers: int) -> None:
    try:
        samples = unpack(base64.b64decode(line.data, validate=True))
    except (BlockError, binascii.Error) as error:
        raise HistoryError(f"{where}: data: {error}") from None
    if not len(samples):
        raise HistoryError(f"{where}: data: it is empty")
    if (samples.worker // GROUP != line.worker_group).any() or samples.worker.max() >= workers:
        raise HistoryError(f"{where}: data: it has workers that are not of group {line.worker_group}")
    if (samples.at.min(), samples.at.max()) != (line.begin, line.end) or (samples.at % line.level).any():
        raise HistoryError(f"{where}: data: its times are not those of begin, end and level")


def _names(value: Any) -> Iterator[str]:
    """Yields the workers' names in a column's value, at any depth; other values are skipped."""
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _names(part)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place or 'the line'}: {first['msg']}"


BATCH = 500
REST = 0.005
"""Seconds between two transactions: SQLite has one writer, and others wait."""
LONGEST = 6 * 3600.0
"""Seconds after which an import by a process on another host counts as ended."""
# Columns that are reset: in a job that is over nothing is under way, whatever its file says.
_AT_REST = {"broken": "", "moves": "[]", "unheard": False}
_ALIVE = frozenset({*PRESENT, WorkerState.STARTING})
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Imported:
    """An imported job. rows: of all tables together. plans: how many the file has."""

    job_id: str
    rows: int
    plans: int


def import_history(
    database: Database,
    path: Path,
    *,
    new_id: str | None = None,
    actor: str = "CLI",
    rest: Callable[[float], None] = time.sleep,
) -> Imported:
    """Imports a job, all of it or nothing; the whole file is checked first. new_id: replaces the job's own id. rest:
    waits between two transactions.

    A job that had not ended counts as stopped, since its processes do not know this console. Raises HistoryError,
    SQLAlchemyError.
    """
    if new_id is not None and not _IDENTIFIER.fullmatch(new_id):
        raise HistoryError(f"id: got {new_id!r:.80}, expected 1 to 64 letters, digits, _ or -")
    rows = JobRows(database)
    with History(path) as history:
        job = format_of("job").to_row(next(history.lines("job")))
        job_id = job["id"] = new_id or job["id"]
        if rows.exists(job_id):
            _clear(rows, job_id, rest)
        history.check()
        if job["state"] not in OVER:
            job["reason"] = f"it was {job['state']} when its history was exported; imported, it does not go on"
            job["state"] = "stopped"
        job |= _AT_REST
        hidden = rows.begin(job, _note())
        if hidden is None:
            raise _taken(job_id)
        try:
            _store(rows, history, job_id, rest)
            detail = f"exported as {history.manifest.job}"
            rows.finish(job, audit_row(actor, "import", job_id, job_id=job_id, detail=detail))
        except BaseException:
            delete_job(rows, hidden, rest)
            raise
        manifest = history.manifest
    return Imported(job_id, sum(t.rows for n, t in manifest.tables.items() if n != "audit"), len(manifest.plans))


def delete_job(rows: JobRows, job: HiddenJob, rest: Callable[[float], None] = time.sleep) -> None:
    """Deletes all rows of a hidden job, in small steps. Raises SQLAlchemyError."""
    while rows.delete_some(job):
        rest(REST)


def abandoned(note: str) -> bool:
    """Says whether the process has ended that was importing a job and left this note (see `_note`)."""
    try:
        host, process, at = note.rsplit(" ", 2)
        if host != socket.gethostname():
            return time.time() - float(at) > LONGEST
        pid, _, began = process.partition("/")
        if began:
            return _began(int(pid)) != began
        os.kill(int(pid), 0)  # this machine does not say when processes were started
    except ProcessLookupError:
        return True
    except (ValueError, OSError):
        return False
    return False


def _note() -> str:
    pid = os.getpid()
    return f"{socket.gethostname()} {pid}/{_began(pid)} {time.time():.0f}"


def _began(pid: int) -> str:
    """Returns when a process was started, in ticks since the machine's start; "": there is none, or the machine does
    not say. A process id alone is not enough: a container that is started again uses the same ids again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _clear(rows: JobRows, job_id: str, rest: Callable[[float], None]) -> None:
    """Deletes the rest of a job with this id; raises HistoryError if a whole one has it, or it is being imported."""
    left = next((hidden for hidden in rows.hidden() if hidden.job_id == job_id), None)
    if left is None or (left.state == IMPORTING and not abandoned(left.note)):
        raise _taken(job_id)
    delete_job(rows, left, rest)


def _store(rows: JobRows, history: History, job_id: str, rest: Callable[[float], None]) -> None:
    known: set[str] = set()  # plans that rows of this job refer to already
    for form in map(format_of, MODELS):
        for batch in _batches(history, form):
            if form.name == "worker":  # in a job that is over the coordinator leaves no worker living
                batch = [row | {"state": WorkerState.FINISHED} if row["state"] in _ALIVE else row for row in batch]
            named = {row[c] for row in batch for c in ("fingerprint", "plan_fingerprint") if c in row} - known
            # They are packed before the transaction: one of 2,048 workers takes a second or more.
            plans = [(f, history.packed_plan(f)) for f in sorted(named)]
            rows.add(form.name, job_id, batch, plans)
            known |= named
            rest(REST)


def _batches(history: History, form: TableFormat) -> Iterator[list[Record]]:
    """Yields rows for one transaction each; only a few if they bring plans along, which may be large."""
    size = 8 if form.name in ("job_plan", "generation") else BATCH
    lines = history.lines(form.name)
    while batch := [form.to_row(line) for line in islice(lines, size)]:
        yield batch


def _taken(job_id: str) -> HistoryError:
    return HistoryError(
        f"job: {job_id} is there already, and is not overwritten; delete it first, or import under another id (--as)"
    )


# -- histories of the jobs of a running console -------------------------------------------------

log = structlog.get_logger()

MOST_FILES = 4
"""The most exported files that are still being sent: each has a whole job on the disk until its reader is done."""
MOST_MEMORY = 8 * 2**30
"""More memory than any export needs. A process that asks for more ends, and harms no other."""
FOLLOW_SECONDS = 5.0


class JobReader(Protocol):
    """The part of console.service.JobRegistry that is used here."""

    def find(self, job_id: str) -> LiveJob:
        """Returns a job. Raises ConsoleError (404)."""

    def follow(self) -> None:
        """Takes notice of jobs that have come into the database, or gone. Raises SQLAlchemyError."""

    def left_out(self, job_id: str) -> str | None:
        """Returns the name of a job that can't be read; None: it is not such a job."""

    def let_go(self, job_id: str) -> None:
        """Forgets a job that is deleted."""


class Histories:
    """Exports and deletes jobs of a running console, and takes notice of those that the command line imports or
    deletes. One per console. Thread-safe; export is called in an event loop."""

    def __init__(self, jobs: JobReader, database: Database) -> None:
        self._jobs, self._database = jobs, database
        self._rows = JobRows(database)
        self._seldom = Seldom()
        self._exporting = threading.Lock()
        self._files: set[Path] = set()  # exported files, which their readers delete
        self._children = Children(work, name="history", memory=MOST_MEMORY)
        self._stop, self._deleted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console-histories", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._deleted.set()
        self._children.close()
        if self._thread.is_alive():
            self._thread.join(5)

    # -- out ------------------------------------------------------------------------------------

    async def export(self, job_id: str, *, audit: bool) -> Path:
        """Exports a job to a file, which the caller has to delete. audit: includes the audit log's lines about the job.
        Raises ConsoleError."""
        await asyncio.to_thread(self._jobs.find, job_id)
        if not self._exporting.acquire(blocking=False):
            raise ConsoleError(409, "busy", "another history is being exported; try again when it is done")
        try:
            self._files = {path for path in self._files if path.exists()}
            if len(self._files) >= MOST_FILES:
                detail = (
                    f"{MOST_FILES} histories are still being sent; try again later, or use `openrecycle history export`"
                )
                raise ConsoleError(409, "busy", detail)
            path = await self._exported(job_id, audit)
            self._files.add(path)
            return path
        finally:
            self._exporting.release()

    async def _exported(self, job_id: str, audit: bool) -> Path:
        out = _temporary()
        try:
            out.unlink()
            await self._run(job_id, str(out), audit)
        except BaseException:
            for left in out.parent.glob(f"{out.name}*"):  # also the part that a killed child had written
                left.unlink(missing_ok=True)
            raise
        return out

    async def _run(self, job_id: str, out: str, audit: bool) -> None:
        """Exports in a child."""
        with storing():  # the child opens the database anew, and must find the same file
            self._database.check_file()
        url = self._database.url.render_as_string(hide_password=False)
        asked = await asyncio.to_thread(self._children.begin, url, job_id, out, audit)
        try:
            await asyncio.to_thread(lambda: list(asked.messages()))
        finally:
            asked.end()  # the request may have been cancelled, so that nobody reads the rest

    # -- away -----------------------------------------------------------------------------------

    def delete(self, job_id: str, actor: str) -> None:
        """Deletes a job: nobody finds it from now on, and its rows are deleted in the background. Raises
        ConsoleError."""
        job: LiveJob | None = None
        try:
            job = self._jobs.find(job_id)
            name = job.spec.name
        except ConsoleError:  # a job that can't be read may be deleted, too; its state is not known
            if (left_out := self._jobs.left_out(job_id)) is None:
                raise
            name = left_out
        audit = audit_row(named(actor), "delete", job_id, job_id=job_id, detail=name)
        with job.lock if job else nullcontext(), storing():  # the lock, so that no worker registers meanwhile
            if job and (why := self.kept_for(job_id)):
                raise ConsoleError(409, "job_runs", f"{job_id} {why}, expected one that has ended", field="job")
            self._rows.hide(job_id, audit)
            self._jobs.let_go(job_id)
        self._deleted.set()
        log.info("job deleted", job=job_id, actor=actor)

    def kept_for(self, job_id: str) -> str:
        """Says why a job can't be deleted now, such as `is running (W0_0 lives)`; "": it can. Raises ConsoleError."""
        job = self._jobs.find(job_id)
        members = job.state.members.values()
        alive = [m.name for m in members if m.state in _ALIVE and m.incarnation is not None]
        # A job halted because nobody was heard for long may be deleted: only the operator can know of its workers.
        kept = alive and not job.state.over and not job.state.unheard
        return f"is {job.state.job_state} ({min(alive)} lives)" if kept else ""

    def _follow(self) -> None:
        while True:
            try:
                self._delete_rows()
                self._jobs.follow()
            except SQLAlchemyError as error:
                self._seldom.warn("histories wait for the database", reason=str(unavailable(error)))
            except Exception:
                log.exception("jobs that came or went could not be followed")
            self._deleted.wait(FOLLOW_SECONDS)
            self._deleted.clear()
            if self._stop.is_set():
                return

    def _delete_rows(self) -> None:
        """Deletes the rows of jobs that were deleted, and of imports whose process ended half way."""
        for job in self._rows.hidden():
            if job.state == DELETING or abandoned(job.note):
                while self._rows.delete_some(job):
                    if self._stop.wait(REST):
                        return


def work(channel: Channel, url: str, job_id: str, out: str, audit: bool) -> None:
    """Exports a job to a file, in a child. Raises ConsoleError."""
    database = Database(url)
    try:
        with storing():
            found = export(database, job_id, Path(out), audit=audit)
    finally:
        database.close()
    if found is None:
        raise unknown_job(job_id)


def _temporary() -> Path:
    """Makes an empty file in this process's folder for temporary files, which is cleaned up however the process
    ends."""
    handle, name = tempfile.mkstemp(prefix="history-", suffix=".zip", dir=scratch())
    os.close(handle)
    return Path(name)

"""A job's history as a zip file: one file of JSON lines per table, its plans, and a manifest of them all.

    manifest.json            what follows, each with its bytes and SHA-256; the tables with their rows
    tables/<table>.jsonl     a row per line, in the order of the table's key, without the job's id
    plans/<fingerprint>.json the Plan documents that the job has or has run

The form of the rows is app.history.tables'; app/docs/store.md says it in words.

A file that says it is a job's history may be damaged, or made to do harm: every byte of it is checked before anything
is stored. It is read as a stream, in little memory; nothing of it is ever written under a name that it says. A checked
file becomes a job in small steps, beside a console that has other things to do.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import socket
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.history.tables import Fingerprint, TableFormat, format_of
from openrecycle.db.access import audit_row
from openrecycle.db.heartbeats import GROUP, BlockError, unpack
from openrecycle.db.job_rows import IMPORTING, MODELS, OVER, HiddenJob, JobRows, Record
from openrecycle.db.session import Database
from openrecycle.planner.check import check
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.packed import SMALL_OPS, Packed, pack
from openrecycle.planner.plans.plan import INTEGER, Plan, read_model

MANIFEST = "manifest.json"
# The audit log is this console's own: it goes along to be read, and is never taken from a file.
EXPORTED = ("job", *MODELS, "audit")
IMPORTED = ("job", *MODELS)

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
    """Writes the file; it is there when it is whole, and not before. None: there is no such job. audit: with the lines
    of the audit log that speak of the job, else with none.

    Takes little memory, however long the history is: rows are written as they are read. Raises OSError,
    SQLAlchemyError.
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
                    document = snapshot.plan(fingerprint)
                    assert document is not None, "a foreign key holds it"
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
    """(SHA-256, bytes, chunks) of what was written."""
    digest, size, count = hashlib.sha256(), 0, 0
    with archive.open(name, "w", force_zip64=True) as handle:
        for chunk in chunks:
            handle.write(chunk)
            digest.update(chunk)
            size, count = size + len(chunk), count + 1
    return digest.hexdigest(), size, count


MOST_MANIFEST = 8 * 2**20
MOST_DIRECTORY = 16 * 2**20
"""Bytes of the zip's own list of files: it is read whole."""
MOST_LINE = 64 * 2**20
MOST_PLAN = 256 * 2**20
MOST_UNPACKED = 64 * 2**30
# JSON lines of a job are packed to a tenth, seldom to a hundredth.
MOST_RATIO, RATIO_FROM = 200, 2**20

_WORKER_COLUMNS = {
    "acknowledgement": ("worker",),
    "event": ("worker",),
    "recovery": ("worker",),
    "worker_state": ("worker",),
    "command": ("worker",),
    "job_plan": ("failed",),
    "generation": ("living", "failed", "joining", "moves", "interim_failed"),
}


class HistoryError(Exception):
    """The file is refused. `str(error)` is one sentence."""


class History:
    """Opened; `check` it before anything else is read from it. A context manager. Raises HistoryError."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise HistoryError(f"file: {path} can't be read: {error.strerror}") from None
        try:
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
        """Everything: sizes, sums, types, order, and whatever one table says of another."""
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
        """The rows of a table."""
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
        """A Plan document."""
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
        for table in (*EXPORTED, *manifest.tables):
            if table not in manifest.tables or table not in EXPORTED:
                what = "is missing" if table in EXPORTED else "is none that a history has"
                raise HistoryError(f"{MANIFEST}: table {table!r:.80} {what}")
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
        """It must be what its name says: other jobs may come to share it."""
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


class _Inflating:
    """A file of the zip, whose damage is told as a HistoryError."""

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
    """What is read is compared with what the manifest says of it."""

    def __init__(self, handle: IO[bytes], entry: Entry, where: str) -> None:
        self._reader, self._entry, self._where = _Inflating(handle, where), entry, where
        self._digest, self._size = hashlib.sha256(), 0

    def line(self) -> bytes:
        """With its end; empty at the end of the file."""
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
        # The same function by which ZipFile finds its directory, so that it can't be shown another one.
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
    if isinstance(value, str):
        if value:
            yield value
    elif value is not None:
        for part in value:
            yield from _names(part)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place or 'the line'}: {first['msg']}"


def importable() -> list[TableFormat]:
    return [format_of(name) for name in IMPORTED if name != "job"]


BATCH = 500
REST = 0.005
"""Seconds between two transactions: SQLite has one writer, and others wait."""
LONGEST = 6 * 3600.0
"""Seconds after which an import on another host, of which nothing more is known, counts as ended."""
# In a job that is over nothing is under way, whatever its file says.
_AT_REST = {"broken": "", "moves": "[]"}
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Imported:
    """rows: of all tables together. plans: documents, whether they were there before or not."""

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
    """Stores the job, all of it or nothing; the whole file is checked first. new_id: instead of its own.

    A job that had not ended is stopped: its processes do not know this console. Raises HistoryError,
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
    """All of it, in small steps. Raises SQLAlchemyError."""
    while rows.delete_some(job):
        rest(REST)


def abandoned(note: str) -> bool:
    """Has the process ended that left this note with a job on its way in?"""
    try:
        host, process, at = note.rsplit(" ", 2)
        if host != socket.gethostname():
            return time.time() - float(at) > LONGEST
        pid, _, began = process.partition("/")
        if began:
            return _began(int(pid)) != began
        os.kill(int(pid), 0)  # of a version that noted no more
    except ProcessLookupError:
        return True
    except (ValueError, OSError):
        return False
    return False


def _note() -> str:
    pid = os.getpid()
    return f"{socket.gethostname()} {pid}/{_began(pid)} {time.time():.0f}"


def _began(pid: int) -> str:
    """When the process was started, in ticks since the machine was; "": there is none, or it does not say. A container
    that is started again has the numbers of its processes again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _clear(rows: JobRows, job_id: str, rest: Callable[[float], None]) -> None:
    """The id is taken: by a job, or by what is left of one."""
    left = next((hidden for hidden in rows.hidden() if hidden.job_id == job_id), None)
    if left is None or (left.state == IMPORTING and not abandoned(left.note)):
        raise _taken(job_id)
    delete_job(rows, left, rest)


def _store(rows: JobRows, history: History, job_id: str, rest: Callable[[float], None]) -> None:
    known: set[str] = set()  # plans that rows of this job hold
    for form in importable():
        for batch in _batches(history, form):
            named = {row[c] for row in batch for c in ("fingerprint", "plan_fingerprint") if c in row} - known
            rows.add(form.name, job_id, batch, ((f, _storable(history.plan(f))) for f in sorted(named)))
            known |= named
            rest(REST)


def _storable(document: str) -> str | Packed:
    """As planner.plans.packed.storable of a plan, whose document stays as it is."""
    plan = Plan.from_json(document)
    return Packed(pack(plan), zlib.compress(document.encode())) if plan.op_count > SMALL_OPS else document


def _batches(history: History, form: TableFormat) -> Iterator[list[Record]]:
    """A row that brings a plan along, which may be large, has few others beside it."""
    size = 8 if form.name in ("job_plan", "generation") else BATCH
    lines = history.lines(form.name)
    while batch := [form.to_row(line) for line in islice(lines, size)]:
        yield batch


def _taken(job_id: str) -> HistoryError:
    return HistoryError(
        f"job: {job_id} is there already, and is not overwritten; delete it first, or import under another id (--as)"
    )

"""A row of each table as a line of JSON. What a column may hold is read off the table; what people or
the console rely on beyond its type is said here."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, create_model
from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, LargeBinary, String, Text

from openrecycle.agent.coordination.membership import LEAST_CHOICE_TIMEOUT, MOST_CHOICE_TIMEOUT, Mode
from openrecycle.agent.messages.protocol import (
    RANKS,
    Identifier,
    JobSpec,
    Milliseconds,
    Name,
    NodeNumber,
    OpKind,
    RankNumber,
    WorkerName,
    WorkerState,
)
from openrecycle.app.jobs.states import RoleState
from openrecycle.app.observing.as_run import IterationAsRun
from openrecycle.db.job_rows import table
from openrecycle.planner.jobs.job import MAX_LAYERS

Record = dict[str, Any]

# Not exported: what other jobs, consoles or launchers count by, and a key under which requests find the job again.
LEFT_OUT = {
    "job": ("idempotency_key", "lead_term", "lead_node"),
    "worker_state": ("id",),
    "heartbeat": ("id",),
    "audit": ("id",),
}
# Columns that older versions had, which their files have still.
GONE = {"worker": ("host", "pid")}
# Columns that have another name since.
RENAMED = {"job": {"patience": "choice_timeout"}}
# The job's id is that of the file, or another one.
JOB_COLUMN = "job_id"
MOST_TEXT = 2**20


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("text without NUL")
    return text


def exact(text: str, loss: float) -> str:
    """A loss as a hexadecimal float. Consoles of before took any text for one: where it is none, `loss` has to do."""
    try:
        return float.fromhex(text).hex()
    except (ValueError, OverflowError):
        return loss.hex()


Fingerprint = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Workers = list[WorkerName]
# POSIX seconds that a calendar has a day for.
Moment = Annotated[float, Field(strict=True, ge=0, le=1e11, allow_inf_nan=False)]


def _with_all(line: object) -> object:
    """Versions before this one said nothing of ranks, or of restarts."""
    missing: dict[int, tuple[object, ...]] = {6: ([], [], [], None), 9: (None,)}
    return [*line, *missing.get(len(line), ())] if isinstance(line, list | tuple) else line


InARow = Annotated[int, Field(ge=1, le=2**53)]
ProcessLine = Annotated[
    tuple[
        Identifier,
        Annotated[str, StringConstraints(max_length=255), AfterValidator(_no_nul)],
        Annotated[int, Field(ge=0, le=2**53)],
        Annotated[list[tuple[WorkerName, Moment]], Field(min_length=1)],
        Literal["", "failed", "drained"],
        Annotated[str, StringConstraints(max_length=MOST_TEXT), AfterValidator(_no_nul)],
        Annotated[list[Annotated[int, Field(ge=0, le=2**53)]], Field(max_length=RANKS)],
        Annotated[list[RankNumber], Field(max_length=RANKS)],
        Annotated[list[tuple[Identifier, RankNumber]], Field(max_length=RANKS)],
        tuple[InARow, InARow, Moment, NodeNumber | None] | None,
    ],
    BeforeValidator(_with_all),
]
"""See app.jobs.records.process_rows."""
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
    "event.severity": Literal["info", "warning", "error"],
    "event.kind": Literal["worker", "failure", "generation", "recovery", "plan", "job", "console", "operator", "step"],
    "event.worker": WorkerName | None,
    "event.count": Annotated[int, Field(ge=1, le=2**31 - 1)],
    "event.seq": Annotated[int, Field(ge=1, le=2**53)],
    "iteration.iteration": Annotated[int, Field(ge=0, le=2**53)],
    "iteration.seconds": Annotated[float, Field(ge=0, le=1e9)],
    "iteration.living": Annotated[int, Field(ge=0, le=2**31 - 1)],
    "iteration.skipped": list[Annotated[int, Field(ge=0, le=2**53)]],
    "iteration.loss_hex": Annotated[str, StringConstraints(max_length=40, strict=True), AfterValidator(_no_nul)],
    "recovery.worker": WorkerName,
    "measured_iteration.document": IterationAsRun,
    "worker_state.worker": WorkerName,
    "worker_state.state": RoleState | WorkerState,
    "command.kind": Literal["kill", "restart", "pause", "resume"],
    "command.worker": Place,
    "heartbeat.level": Literal[1, 60, 3600],
}


@dataclass(frozen=True)
class TableFormat:
    """One table: the model of its lines, and its key; both without the job's id.

    key: columns in which lines rise strictly; () where equal lines may follow each other. single: there
    is one line at most.
    """

    name: str
    line: type[BaseModel]
    key: tuple[str, ...]
    single: bool
    _write: dict[str, Callable[[Any], Any]]
    _read: dict[str, Callable[[Any], Any]]

    def to_line(self, row: Record) -> Record:
        """Plain data for JSON."""
        return {
            name: self._write[name](row[name]) if name in self._write else row[name]
            for name in self.line.model_fields
            if name in row
        }

    def to_row(self, line: BaseModel) -> Record:
        """Without the columns that an older file does not have."""
        row = {
            name: self._read[name](value) if name in self._read else value
            for said in line.model_fields_set
            if said not in GONE.get(self.name, ())
            for name, value in ((RENAMED.get(self.name, {}).get(said, said), getattr(line, said)),)
        }
        if self.name == "iteration":
            row["loss_hex"] = exact(row["loss_hex"], row["loss"])
        return row


@cache
def format_of(name: str) -> TableFormat:
    columns = [c for c in table(name).columns if c.name != JOB_COLUMN and c.name not in LEFT_OUT.get(name, ())]
    fields: dict[str, Any] = {}
    write: dict[str, Callable[[Any], Any]] = {}
    read: dict[str, Callable[[Any], Any]] = {}
    for column in columns:
        stricter = _STRICTER.get(f"{name}.{column.name}")
        kind = stricter if stricter is not None else _type(column)
        # Columns that came with a later version have a default for rows of before.
        fields[column.name] = (kind, ...) if column.server_default is None else (kind, None)
        if isinstance(column.type, LargeBinary):
            write[column.name], read[column.name] = _encoded, base64.b64decode
        if isinstance(stricter, type) and issubclass(stricter, BaseModel):
            deflate = isinstance(column.type, LargeBinary)
            write[column.name] = _inflated_json if deflate else json.loads
            read[column.name] = _deflated_json if deflate else BaseModel.model_dump_json
        elif isinstance(column.type, Text) and stricter is not None:
            write[column.name], read[column.name] = json.loads, json.dumps
    fields |= dict.fromkeys(GONE.get(name, ()), (Any, None))
    fields |= {before: (fields[now][0], None) for before, now in RENAMED.get(name, {}).items()}
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
    elif isinstance(column.type, BigInteger) or column.type._variant_mapping:
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


def _inflated_json(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


def _deflated_json(document: BaseModel) -> bytes:
    return zlib.compress(document.model_dump_json().encode())

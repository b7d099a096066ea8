"""The tables. Times are POSIX seconds (float, wall clock); JSON is stored as text.

The tables do not check whether values make sense. The store takes what the coordinator has accepted.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    case,
    false,
    func,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# Names for every constraint, so that a later migration can drop it by name on any database.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

# SQLite makes a row id only of a column declared INTEGER.
RowId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)


def _job_key() -> Mapped[str]:
    return mapped_column(String(64), ForeignKey("job.id", ondelete="CASCADE"), primary_key=True)


class JobRow(Base):
    """One training job. spec: the JobSpec as JSON. reason: why it is in `state`, where that needs a reason.

    unheard: it is halted only because none of its workers has been heard.
    mode: how the next generation is chosen, automatic or manual. choice_timeout: seconds that it waits in manual mode.
    frozen_by: the operator who has frozen its plan; "": nobody. broken: the transfer that broke in the generation in
    force, as JSON (reporter, worker, detail); "": none. moves: (from, to) of workers that have taken another place
    in a generation which has not opened yet, as JSON. baseline: what its throughput is compared with
    (app.jobs.throughput), as JSON.
    waits: when it waited for a person's choice, (begin, end, generation that followed), as JSON.
    lead_term, lead_node: in a job of several nodes, the newest leadership and the node that has it
    (agent.coordination.membership); 0: none.
    """

    __tablename__ = "job"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(80))
    spec: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text, default="")
    unheard: Mapped[bool] = mapped_column(default=False, server_default=false())
    mode: Mapped[str] = mapped_column(String(16), default="automatic", server_default="automatic")
    choice_timeout: Mapped[float] = mapped_column(Double, default=60.0, server_default="60")
    frozen_by: Mapped[str] = mapped_column(String(80), default="", server_default="")
    broken: Mapped[str] = mapped_column(Text, default="", server_default="")
    moves: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")
    baseline: Mapped[str] = mapped_column(Text, default="", server_default="")
    waits: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")
    lead_term: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    lead_node: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    created_at: Mapped[float] = mapped_column(Double)


class WorkerRow(Base):
    """The latest state of one cell of the grid. What heartbeats bring is written later, in batches.

    retired: earlier incarnations, a JSON list: they are fenced for good. member_generation: the newest generation that
    its incarnation is in; 0: none yet, -1: it has left as it was asked to, -2: it is there without a state. generation:
    the one that the worker reports. detail: why it has failed, in words. let_go: the same where it was let go, as JSON
    [actor, does it stand by?, for whom], else null. leaving: its launcher may not know yet that it is to leave.
    processes: those that were started for this cell, wherever they are by now, as JSON.
    """

    __tablename__ = "worker"

    job_id: Mapped[str] = _job_key()
    name: Mapped[str] = mapped_column(String(16), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    incarnation: Mapped[str | None] = mapped_column(String(64))
    retired: Mapped[str] = mapped_column(Text, default="[]")
    detail: Mapped[str] = mapped_column(Text, default="")
    draining: Mapped[bool] = mapped_column(default=False)
    leaving: Mapped[bool] = mapped_column(default=False, server_default=false())
    let_go: Mapped[str] = mapped_column(Text, default="null", server_default="null")
    member_generation: Mapped[int] = mapped_column(BigInteger, default=0)
    processes: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")
    seq: Mapped[int] = mapped_column(BigInteger, default=-1)
    generation: Mapped[int] = mapped_column(BigInteger, default=0)
    iteration: Mapped[int] = mapped_column(BigInteger, default=0)
    phase: Mapped[str] = mapped_column(String(16), default="")
    op_milliseconds: Mapped[str] = mapped_column(Text, default="{}")
    resident_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    heard_at: Mapped[float | None] = mapped_column(Double)


class PlanRow(Base):
    """A plan, packed (planner.plans.packed). Equal plans share a fingerprint and so one row, across all jobs."""

    __tablename__ = "plan"

    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[float] = mapped_column(Double)


class SavedPlanRow(Base):
    """A plan that somebody has saved under a name. summary: data for lists of plans, as JSON."""

    __tablename__ = "saved_plan"

    fingerprint: Mapped[str] = mapped_column(String(64), ForeignKey("plan.fingerprint"), primary_key=True)
    name: Mapped[str] = mapped_column(String(80))
    summary: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Double)


class ProfileRow(Base):
    """Op times and bytes that somebody has saved under a name. document: a measured profile or a job's, JSON, deflated.
    summary: data for lists of profiles, as JSON. saved_by: the person who saved it last."""

    __tablename__ = "profile"

    name: Mapped[str] = mapped_column(String(80), primary_key=True)
    document: Mapped[bytes] = mapped_column(LargeBinary)
    summary: Mapped[str] = mapped_column(Text)
    saved_by: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[float] = mapped_column(Double)
    updated_at: Mapped[float] = mapped_column(Double)


class CatalogRow(Base):
    """Plans made ahead for one job, technique and memory limit. info: the question that they answer, as JSON."""

    __tablename__ = "catalog"

    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    info: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Double)


class CatalogPlanRow(Base):
    """One plan of a catalog in its stored form (planner.plans.packed). failures: the number of failures it is for."""

    __tablename__ = "catalog_plan"

    fingerprint: Mapped[str] = mapped_column(
        String(64), ForeignKey("catalog.fingerprint", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    failures: Mapped[int] = mapped_column(Integer)
    data: Mapped[bytes] = mapped_column(LargeBinary)


class JobPlanRow(Base):
    """A plan of a job. ahead: it was made before its failure happened."""

    __tablename__ = "job_plan"

    job_id: Mapped[str] = _job_key()
    fingerprint: Mapped[str] = mapped_column(String(64), ForeignKey("plan.fingerprint"), primary_key=True, index=True)
    failed: Mapped[str] = mapped_column(Text)
    ahead: Mapped[bool]
    created_at: Mapped[float] = mapped_column(Double)


class GenerationRow(Base):
    """One deployment: the workers of a generation, and the plan that it runs.

    living, failed, joining: JSON lists of workers; moves: a JSON list of [from, to]. restore: it begins from a
    checkpoint. interim_plan: fingerprint of the plan that it runs until newcomers have their state, "": it runs none;
    interim_failed: the workers which that plan goes without, a JSON list. partition: layers per stage of the plan, a
    JSON list; moved_at: the iteration from which on the workers had them, where they had others before. let_go: of the
    workers that are out since the generation before, those that are not lost, a JSON list of [worker, does it stand
    by?]; lost: workers of the generation before whose process has died or was given up, a JSON list.
    """

    __tablename__ = "generation"

    job_id: Mapped[str] = _job_key()
    generation: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    plan_fingerprint: Mapped[str] = mapped_column(String(64), ForeignKey("plan.fingerprint"), index=True)
    living: Mapped[str] = mapped_column(Text)
    failed: Mapped[str] = mapped_column(Text)
    joining: Mapped[str] = mapped_column(Text)
    moves: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")
    restore: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())
    reason: Mapped[str] = mapped_column(Text)
    opened_at: Mapped[float] = mapped_column(Double)
    interim_plan: Mapped[str] = mapped_column(String(64), default="", server_default="")
    interim_failed: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")
    partition: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")
    moved_at: Mapped[int | None] = mapped_column(BigInteger)
    let_go: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")
    lost: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")


class AcknowledgementRow(Base):
    """A worker's progress in taking up a generation: one row each for adopted, formed, resumed."""

    __tablename__ = "acknowledgement"

    job_id: Mapped[str] = _job_key()
    generation: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    worker: Mapped[str] = mapped_column(String(16), primary_key=True)
    state: Mapped[str] = mapped_column(String(16), primary_key=True)
    incarnation: Mapped[str] = mapped_column(String(64))
    iteration: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(Double)


class EventRow(Base):
    """One line of a job's history. seq counts from 1 within the job, without gaps. count: how often it happened;
    last_at: the last time, if it happened more than once, else 0."""

    __tablename__ = "event"

    job_id: Mapped[str] = _job_key()
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[float] = mapped_column(Double)
    severity: Mapped[str] = mapped_column(String(8))
    kind: Mapped[str] = mapped_column(String(16))
    worker: Mapped[str | None] = mapped_column(String(16))
    text: Mapped[str] = mapped_column(Text)
    count: Mapped[int] = mapped_column(Integer, default=1, server_default="1")
    last_at: Mapped[float] = mapped_column(Double, default=0.0, server_default="0")


class IterationRow(Base):
    """One committed iteration; the first report of it counts. loss: None where there is none. loss_hex: the exact
    loss. skipped: JSON list of the micro-batches (numbered over all pipelines) that are left out of its sums."""

    __tablename__ = "iteration"

    job_id: Mapped[str] = _job_key()
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    loss: Mapped[float | None] = mapped_column(Double)
    loss_hex: Mapped[str] = mapped_column(String(40))
    seconds: Mapped[float] = mapped_column(Double)
    generation: Mapped[int] = mapped_column(BigInteger)
    living: Mapped[int] = mapped_column(Integer)
    committed_at: Mapped[float] = mapped_column(Double)
    skipped: Mapped[str] = mapped_column(Text, default="[]", server_default="[]")


class RecoveryRow(Base):
    """Milliseconds from a worker's death to each step of the recovery, as the launcher measured them.

    death_known: False where they count from the moment at which the death was noticed.
    """

    __tablename__ = "recovery"

    job_id: Mapped[str] = _job_key()
    worker: Mapped[str] = mapped_column(String(16), primary_key=True)
    generation: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    detected_ms: Mapped[float] = mapped_column(Double)
    unblocked_ms: Mapped[float] = mapped_column(Double)
    reformed_ms: Mapped[float] = mapped_column(Double)
    resumed_ms: Mapped[float] = mapped_column(Double)
    death_known: Mapped[bool] = mapped_column(default=True)
    at: Mapped[float] = mapped_column(Double)


class MeasuredIterationRow(Base):
    """An iteration of a job that was measured op by op. The newest one is kept, and those that links name. document:
    JSON, deflated."""

    __tablename__ = "measured_iteration"

    job_id: Mapped[str] = _job_key()
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    document: Mapped[bytes] = mapped_column(LargeBinary)
    at: Mapped[float] = mapped_column(Double)


class WorkerStateRow(Base):
    """A worker of the grid came into another state; there is one row for each change."""

    __tablename__ = "worker_state"
    __table_args__ = (Index(None, "job_id", "worker"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("job.id", ondelete="CASCADE"))
    worker: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    at: Mapped[float] = mapped_column(Double)


class HeartbeatRow(Base):
    """Samples of the workers of one group over some time (db.heartbeats).

    level: seconds of one sample. begin, end: when the first and the last sample begin (POSIX seconds).
    whole: the block is complete; it will not be joined with others of its span.
    """

    __tablename__ = "heartbeat"
    __table_args__ = (Index(None, "job_id", "level", "worker_group", "begin"), Index(None, "level", "whole", "begin"))

    id: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("job.id", ondelete="CASCADE"))
    level: Mapped[int] = mapped_column(Integer)
    worker_group: Mapped[int] = mapped_column(Integer)
    begin: Mapped[int] = mapped_column(BigInteger)
    end: Mapped[int] = mapped_column(BigInteger)
    whole: Mapped[bool]
    data: Mapped[bytes] = mapped_column(LargeBinary)


class EventSeenRow(Base):
    """An operator has acknowledged an event; the first one counts."""

    __tablename__ = "event_seen"

    job_id: Mapped[str] = _job_key()
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    actor: Mapped[str] = mapped_column(String(80))
    at: Mapped[float] = mapped_column(Double)


class CommandRow(Base):
    """An operator's request to the launcher. seq counts from 1 within the job."""

    __tablename__ = "command"

    job_id: Mapped[str] = _job_key()
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(16))
    worker: Mapped[str] = mapped_column(String(16))
    actor: Mapped[str] = mapped_column(String(80))
    at: Mapped[float] = mapped_column(Double)


class AuditRow(Base):
    """An operator's action: who did what to what. It is kept when the job is deleted."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "job_id", "at"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(Double)
    actor: Mapped[str] = mapped_column(String(80))
    action: Mapped[str] = mapped_column(String(40))
    job_id: Mapped[str | None] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(255), default="")
    detail: Mapped[str] = mapped_column(Text, default="")


class TokenRow(Base):
    """An access token, without its secret: `orc_<id>_<secret>` is recognized by the secret's hash.

    role: view, operate or agent. job_id: the only job that it is valid for; None: any. created_by: the token, or the
    operator, that made it.
    """

    __tablename__ = "token"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    secret_hash: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(80))
    role: Mapped[str] = mapped_column(String(16))
    job_id: Mapped[str | None] = mapped_column(String(64), ForeignKey("job.id", ondelete="CASCADE"), index=True)
    created_by: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[float] = mapped_column(Double)
    expires_at: Mapped[float | None] = mapped_column(Double)
    revoked_at: Mapped[float | None] = mapped_column(Double)
    last_used_at: Mapped[float | None] = mapped_column(Double)


class LeadershipRow(Base):
    """The only row: which console leads on PostgreSQL (db.session).

    term: number of leaderships so far. holder: the console that leads, "" when it has resigned. renewed_at:
    by the database's clock.
    """

    __tablename__ = "leadership"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    term: Mapped[int] = mapped_column(BigInteger)
    holder: Mapped[str] = mapped_column(String(64))
    address: Mapped[str] = mapped_column(String(255))
    renewed_at: Mapped[float] = mapped_column(Double)


class IdempotentRequestRow(Base):
    """A POST with an Idempotency-Key, and its answer (db.access). status: 0 until it is answered."""

    __tablename__ = "idempotent_request"

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    request: Mapped[str] = mapped_column(String(64))
    status: Mapped[int] = mapped_column(Integer)
    media_type: Mapped[str] = mapped_column(String(80))
    location: Mapped[str] = mapped_column(String(255))
    body: Mapped[bytes] = mapped_column(LargeBinary)
    at: Mapped[float] = mapped_column(Double, index=True)


def listed(column: Any) -> ColumnElement[int]:
    """The length of a JSON list of names or numbers without commas; 0 for NULL."""
    commas = func.length(column) - func.length(func.replace(column, ",", ""))
    return case((column.is_(None), 0), (column == "[]", 0), else_=commas + 1)

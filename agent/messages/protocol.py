"""Messages between agents and the console. No torch here: the console imports this module.

Every message is strict. Unknown fields are refused, strings and numbers are bounded, and of a list with wrong entries
only the first error is reported, since there may be a million. Paths are below `/api/v1`. A worker is named
`W<pipeline>_<stage>`. Its `incarnation` is new at every start of a process, so that a report of a dead process can't be
taken for one of its successor.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import socket
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    StringConstraints,
    ValidationError,
    model_validator,
)

from openrecycle.planner.jobs.errors import InputError, PlannerError, named_in_documents
from openrecycle.planner.jobs.job import MAX_LAYERS, Job, MayMove, MemoryLimit, Technique, Worker
from openrecycle.planner.layers.room import LayerRoom
from openrecycle.planner.plans.plan import INTEGER, JobDoc, job_doc

API = "/api/v1"
# A header in the answer to POST /jobs: a token for this job alone, which its launcher and workers use.
AGENT_TOKEN = "OpenRecycle-Agent-Token"
# A header in all requests of a launcher that leads several nodes: its term and its node
# (agent.coordination.membership).
LEAD = "OpenRecycle-Lead"
DEPOSED = "deposed"
"""The code of the problem (409) when another node has taken the lead."""
UNKNOWN_PLAN = "unknown_plan"
"""The code of the problem (404) when a plan is not stored, or what is stored of it is damaged."""
# The environment variable in which programs find their token.
TOKEN_VARIABLE = "OPENRECYCLE_TOKEN"
# The most ops of one worker and iteration.
MEASURED_OPS = 100_000
# The most lines in one post of a worker's log, and characters in each.
LOG_LINES, LOG_LINE = 100, 500
# The largest POSIX seconds in a message.
LATEST = 1e11
# The most registrations, heartbeats or acknowledgements in one post.
BATCH = 8_192
# The most ranks of one worker.
RANKS = 64


def hexadecimal(text: str) -> str:
    """Checks a float as float.hex writes it, which is how a history reads it."""
    try:
        float.fromhex(text)
    except OverflowError:
        raise ValueError(f"got {text!r}, expected a hexadecimal float of 64 bits") from None
    return text


def _or_nan(loss: object) -> object:
    return math.nan if loss is None else loss


def _not_infinite(loss: float) -> float:
    if math.isinf(loss):
        raise ValueError(f"got {loss}, expected a finite number, or null")
    return loss


def _or_null(loss: float) -> float | None:
    return None if math.isnan(loss) else loss


# The characters of names are written out, since regular expressions differ in what they take for a letter. Beyond ASCII
# this has all visible characters: no spaces, marks of direction, surrogates or characters of private use.
_BEYOND_ASCII = (
    "\xa1-\xac\xae-\u061b\u061d-\u167f\u1681-\u180d\u180f-\u1fff\u200c\u200d\u2010-\u2027\u2030-\u205e\u2070-\u2fff"
    "\u3001-\ud7ff\uf900-\ufefe\uff00-\uffef\U00010000-\U000dffff\U000e0100-\U000e01ef"
)
NAME = f"^[A-Za-z0-9_ .:@/()+{_BEYOND_ASCII}-]+$"
Name = Annotated[str, StringConstraints(min_length=1, max_length=80, pattern=NAME)]
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
Memory = Annotated[str, StringConstraints(pattern=r"^(1f1b|uniform|none|bytes|[1-9][0-9]{0,8})$")]
WorkerName = Annotated[str, StringConstraints(pattern=r"^W[0-9]{1,6}_[0-9]{1,6}$")]
NamedWorker = Annotated[Worker, PlainSerializer(str), BeforeValidator(Worker.parse)]
Text = Annotated[str, StringConstraints(max_length=2000)]
Count = Annotated[int, Field(ge=0, le=2**53), INTEGER]
Term = Annotated[int, Field(ge=0, lt=10**15), INTEGER]
NodeNumber = Annotated[int, Field(ge=0, le=4095), INTEGER]
RankNumber = Annotated[int, Field(ge=0, lt=RANKS), INTEGER]
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
PosixSeconds = Annotated[float, Field(strict=True, ge=0, le=LATEST, allow_inf_nan=False)]
LONGEST_MS = 1e9
Milliseconds = Annotated[float, Field(strict=True, ge=0, le=LONGEST_MS, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Microseconds = Annotated[int, Field(ge=0, le=10**12), INTEGER]
_HEXADECIMAL = r"^-?(0x[0-9a-f]{1,20}(\.[0-9a-f]{0,20})?(p[+-]?[0-9]{1,5})?|inf|nan)$"
Loss = Annotated[
    float,
    Field(strict=True),
    BeforeValidator(_or_nan, json_schema_input_type=float | None),
    AfterValidator(_not_infinite),
    PlainSerializer(_or_null, return_type=float | None),
]
"""A loss; NaN, which is null on the wire, where there is none."""
LossHex = Annotated[str, StringConstraints(max_length=40, pattern=_HEXADECIMAL), AfterValidator(hexadecimal)]
OpKind = Literal["F", "I", "W", "B", "O"]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerState(StrEnum):
    """The state that the console has a worker in.

    STARTING: known, not yet registered. RUNNING: in the generation, heard lately. SUSPECT: in the
    generation, heartbeats overdue. FAILED: out of the generation. REJOINING: registered again, not yet in
    a generation or still taking weights. FINISHED: left after the last iteration, or with all of its work done.
    Whether a running worker takes re-routed work is not stored: the plan shows it.
    """

    STARTING = "starting"
    RUNNING = "running"
    SUSPECT = "suspect"
    FAILED = "failed"
    REJOINING = "re-joining"
    FINISHED = "finished"


class JobState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    HALTED = "halted"
    FINISHED = "finished"
    STOPPED = "stopped"


class JobSpec(Message):
    """POST /jobs -> JobCreated. A job that a launcher asks the console to look after.

    The op times that plans are made from are given once: by profile, which has op times and bytes by stage; or, where
    all stages are alike, by durations: F, I, W, O, transfer in milliseconds. With neither, each op takes one slot.
    paced: each op is stretched to its duration (a demo on a machine without accelerators). demo: the console may kill
    the job's processes. checkpoints: the job writes checkpoints, so a stage whose last worker is gone can be staffed
    anew. migrate: workers may be told to move to another stage, in their processes (Deployment.incarnations).
    relayout: may layers move to another stage, where the profile has layers? When it pays, never, or whenever another
    partition is better. transfer_timeout, group_timeout: seconds that a worker waits for a peer's data, and for a sum
    over a stage; the console checks them against its own time-outs (agent.config.options); None: not given.
    max_restarts: how often in a row the launcher starts a worker again by itself. ranks_per_worker: processes of each
    worker. stage_bytes: by stage, what a worker may need on its device, beside the program itself, as reckoned before
    the start. own_loop: the job has no launcher, and nobody who can pause it or start its processes. room: the memory
    that workers have for layers that move; None: there is enough.
    """

    name: Name
    pipelines: Annotated[int, Field(ge=1, le=16_384), INTEGER]
    stages: Annotated[int, Field(ge=1, le=16_384), INTEGER]
    micro_batches: Annotated[int, Field(ge=1, le=65536), INTEGER]
    iterations: Annotated[int, Field(ge=1, le=2**53), INTEGER]
    samples_per_micro_batch: Annotated[int, Field(ge=1, le=2**31), INTEGER] = 1
    technique: Literal["adaptive", "decoupled", "staggered"] = "staggered"
    memory: Memory = "uniform"
    durations: dict[Literal["F", "I", "W", "O", "transfer"], Milliseconds] = Field(default_factory=dict)
    profile: JobDoc | None = None
    paced: StrictBool = False
    demo: StrictBool = False
    checkpoints: StrictBool = False
    migrate: StrictBool = False
    relayout: MayMove = "never"
    seed: Count = 0
    transfer_timeout: Seconds | None = None
    group_timeout: Seconds | None = None
    max_restarts: Count = 0
    ranks_per_worker: Annotated[int, Field(ge=1, le=RANKS), INTEGER] = 1
    stage_bytes: Annotated[tuple[Count, ...], Field(max_length=16_384)] = ()
    own_loop: StrictBool = False
    room: LayerRoom | None = None

    @classmethod
    def of(cls, job: Job, **about: Any) -> Self:
        """Makes the spec whose `job()` is that job. about: the fields that do not describe what is planned for. Raises
        InputError that names the first field which a console would refuse."""
        durations = _durations(job)
        profile = job_doc(job) if durations is None else None
        grid = {name: getattr(job, name) for name in ("pipelines", "stages", "micro_batches")}
        try:
            return cls(**grid, durations=durations or {}, profile=profile, **about)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(str(first["loc"][0]), first["input"], f"what a console accepts: {first['msg']}") from None

    @property
    def samples(self) -> int:
        """The samples of one iteration in which no micro-batch is left out."""
        return self.pipelines * self.micro_batches * self.samples_per_micro_batch

    def job(self) -> Job:
        """Returns the job that plans are made for. Durations are milliseconds, in whole microseconds.

        Raises InputError, or InfeasibleError where memory does not hold a single micro-batch.
        """
        if self.profile is None:
            durations: dict[str, float] = {kind: round(value, 3) for kind, value in self.durations.items()}
            unit = "ms" if durations else "slot"
            job = Job.uniform(self.pipelines, self.stages, self.micro_batches, durations=durations, time_unit=unit)
        else:
            if self.durations:
                raise InputError("durations", dict(self.durations), "nothing beside profile, which has the op times")
            for size in ("pipelines", "stages", "micro_batches"):
                own = getattr(self, size)
                if (value := getattr(self.profile, size)) != own:
                    raise InputError(f"profile.{size}", value, f"{own}, as the job has it")
            job = self.profile.job()
        if self.relayout != "never" and not job.layers:
            raise InputError("relayout", self.relayout, "never for a job whose profile has no layers")
        if self.stage_bytes and len(self.stage_bytes) != self.stages:
            raise InputError("stage_bytes", len(self.stage_bytes), f"{self.stages} numbers, one for each stage")
        if self.room is not None and not self.room.suits(self.stages, len(job.layers)):
            raise InputError("room", "another job's", f"that of {self.stages} stages and {len(job.layers)} layers")
        MemoryLimit.parse(self.memory, field="memory").limits(job, Technique(self.technique))
        return job


def _durations(job: Job) -> dict[str, float] | None:
    """Returns milliseconds by op kind, if these describe the job completely; {} if each op takes one slot.

    None: the console needs the job's whole profile.
    """
    if job.time_unit not in ("slot", "ms") or job.layers:
        return None
    first, times = job.profiles[0], dict[str, float]()
    if job.time_unit == "ms":
        times = {
            "F": first.forward,
            "I": first.input_backward,
            "W": first.weight_backward,
            "O": first.optimizer,
            "transfer": max(job.transfers, default=0.0),
        }
        if any(ms != round(ms, 3) for ms in times.values()):
            return None  # the console's durations are whole microseconds
    alike = Job.uniform(job.pipelines, job.stages, job.micro_batches, durations=times, time_unit=job.time_unit)
    return times if job == alike else None


class JobCreated(Message):
    job_id: Identifier
    heartbeat_seconds: Seconds
    suspect_seconds: Seconds
    dead_seconds: Seconds


class JobStatus(BaseModel):
    """GET /jobs/{job_id}, as far as a launcher or an own loop reads it. sentence: what the console does or waits for,
    and why. generation: the newest."""

    state: JobState
    sentence: Text
    generation: int


class Registration(Message):
    """A new worker process. ranks: the process ids of all ranks of the worker, in order, if it has several; pid is that
    of rank 0. made_of: spare ranks of other workers that this worker's ranks replace, as (incarnation, rank). own_loop:
    the worker has no launcher, and follows generations itself."""

    worker: WorkerName
    incarnation: Identifier
    host: Annotated[str, StringConstraints(max_length=255)]
    pid: Count
    ranks: Annotated[tuple[Count, ...], Field(max_length=RANKS, fail_fast=True)] = ()
    made_of: Annotated[tuple[tuple[Identifier, RankNumber], ...], Field(max_length=RANKS, fail_fast=True)] = ()
    own_loop: bool = False


class Registrations(Message):
    """POST /jobs/{job_id}/workers -> BatchReply. From a launcher, before any other report of them: the worker processes
    that have started since its last registration. Each is taken or refused by itself."""

    registrations: Annotated[tuple[Registration, ...], Field(min_length=1, max_length=BATCH, fail_fast=True)]


class Doing(Message):
    """What a worker's training thread is doing. kind: of an op; or `data`, `validation`, `leaving`, or `waiting` for a
    peer; "": none of these. pipeline, micro_batch: those of the op. seconds: for how long, without time in which the
    process could not run. limit: seconds after which it counts as hung; None: never."""

    kind: Annotated[str, StringConstraints(max_length=20)]
    pipeline: Annotated[int | None, Field(ge=0, le=10**6)] = None
    micro_batch: Annotated[int | None, Field(ge=0, le=10**6)] = None
    seconds: Seconds
    limit: Seconds | None = None

    @property
    def overdue(self) -> bool:
        return self.limit is not None and self.seconds > self.limit

    @property
    def lags(self) -> bool:
        """Is it half-way to being overdue? A worker that began at about the same time as an overdue one is."""
        return self.limit is not None and self.seconds > self.limit / 2

    def __str__(self) -> str:
        names = {
            "data": "loading the data",
            "validation": "settling the step before",
            "leaving": "leaving an iteration",
        }
        what = names.get(self.kind, f"op {self.kind}")
        return what if self.micro_batch is None else f"{what} of micro-batch {self.pipeline}.{self.micro_batch}"


class Heartbeat(Message):
    """A heartbeat of one worker. `seq` rises by one per incarnation.

    generation: the worker's own. iteration: the one it works on. op_milliseconds: the mean duration of each op kind
    (F, I, W, B, O) since the last heartbeat. doing: what it is doing now.
    """

    worker: WorkerName
    incarnation: Identifier
    seq: Count
    generation: Count
    iteration: Count
    phase: Literal["starting", "waiting", "forming", "training", "paused", "draining"]
    op_milliseconds: dict[OpKind, Milliseconds] = Field(default_factory=dict)
    resident_bytes: Count = 0
    doing: Annotated[Doing | None, Field(exclude_if=lambda value: value is None)] = None


class Heartbeats(Message):
    """POST /jobs/{job_id}/heartbeats -> BatchReply. From a launcher: what it has heard of its workers since its last
    post. A worker without a launcher posts its own. Each is taken or refused by itself."""

    heartbeats: Annotated[tuple[Heartbeat, ...], Field(min_length=1, max_length=BATCH, fail_fast=True)]


class RefusedReport(Message):
    """One refused entry of a batch. index: in the request, from 0. code, detail: as in a Problem. `fenced`: that
    process no longer counts, and must end."""

    index: Count
    worker: WorkerName
    code: str
    detail: str


class BatchReply(Message):
    """The answer to a batch of reports. generation: the newest generation of the job (0: none yet). measure: an
    iteration that has not begun, whose ops all workers are to record and post as MeasuredOps. taken: how many reports
    were taken; the others are in refused. before: for each process that has registered and follows generations itself,
    the newest generation that it is not in; the process that had its place before may have been in that one."""

    generation: Count
    measure: Count | None = None
    taken: Count
    refused: tuple[RefusedReport, ...] = ()
    before: Annotated[dict[WorkerName, Count], Field(exclude_if=lambda value: not value)] = Field(default_factory=dict)


class ClockReading(Message):
    """GET /clock. The console's monotonic clock, in microseconds. name: its `clock_name`."""

    name: Identifier
    microseconds: Count


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resident_bytes() -> int:
    """Returns the bytes of memory that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@cache
def boot_id() -> str:
    """Returns an id of the running system: the same in all its containers, and different on every other machine,
    whatever its name. "": the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@cache
def clock_name() -> str:
    """Returns a name that is equal for two processes if and only if they have the same monotonic clock."""
    with contextlib.suppress(OSError):
        # A container may have a time namespace of its own, whose clock is shifted.
        namespace = Path("/proc/self/ns/time").stat().st_ino
        if boot_id():
            return f"{boot_id()}-{namespace}"
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{socket.gethostname()[:32]}-{os.getpid()}")


class OpColumns(Message):
    """Ops of one worker in the order in which they ran, one entry per op in each column.

    pipelines, micro_batches: the pipeline that the micro-batch belongs to, and its index there; for O, the worker's own
    pipeline and -1.
    """

    kinds: Annotated[str, StringConstraints(min_length=1, max_length=MEASURED_OPS, pattern=r"^[FIWBO]+$")]
    pipelines: Annotated[
        tuple[Annotated[int, Field(ge=0, le=10**6), INTEGER], ...], Field(max_length=MEASURED_OPS, fail_fast=True)
    ]
    micro_batches: Annotated[
        tuple[Annotated[int, Field(ge=-1, le=10**6), INTEGER], ...], Field(max_length=MEASURED_OPS, fail_fast=True)
    ]
    starts_us: Annotated[tuple[Microseconds, ...], Field(max_length=MEASURED_OPS, fail_fast=True)]
    durations_us: Annotated[tuple[Microseconds, ...], Field(max_length=MEASURED_OPS, fail_fast=True)]

    @model_validator(mode="after")
    def _one_entry_per_op(self) -> Self:
        for name in ("pipelines", "micro_batches", "starts_us", "durations_us"):
            if (got := len(getattr(self, name))) != len(self.kinds):
                raise ValueError(f"{name}: got {got} entries, expected {len(self.kinds)}, as kinds")
        return self


class MeasuredOps(OpColumns):
    """POST /jobs/{job_id}/measured. When each op of one iteration ran on one worker.

    starts_us: microseconds since started_us. started_us: on the worker's monotonic clock, whose `clock_name` is clock.
    Add offset_us to get the console's clock, within ± uncertainty_us.
    """

    worker: WorkerName
    incarnation: Identifier
    generation: Annotated[int, Field(ge=1), INTEGER]
    iteration: Count
    clock: Identifier
    started_us: Count
    offset_us: Annotated[int, Field(ge=-(2**53), le=2**53), INTEGER]
    uncertainty_us: Count


class Deployment(Message):
    """GET /jobs/{job_id}/deployment?after=E&wait=S -> the newest deployment with generation > E, or 204
    after S seconds.

    One generation: its workers, and the plan they run. joining: living workers that must first take state from a peer
    of their stage. incarnations: the process at each place. One that is at another place moves there, gives up its
    stage, and takes the state of the other. A place that is not in it keeps its process. restore: all go back to the
    newest checkpoint, or to the start. leaving: of the workers that were living, those that are to end when the current
    iteration is done. Where a launcher passes this on to its workers, one may be in `living`, too: it ends with a later
    generation, when others have the state that it holds.
    """

    generation: Annotated[int, Field(ge=1), INTEGER]
    plan_fingerprint: Identifier
    living: tuple[WorkerName, ...]
    failed: tuple[WorkerName, ...]
    joining: tuple[WorkerName, ...] = ()
    incarnations: dict[WorkerName, Identifier] = {}
    restore: bool = False
    leaving: tuple[WorkerName, ...] = ()
    reason: Text = ""


class InterimPlan(Message):
    """POST /jobs/{job_id}/interim. From the launcher: what a generation runs until the workers that take their state
    from a peer have it, and acknowledge `formed`; then it runs the deployment's plan. plan: the interim plan, packed
    (planner.plans.packed.to_text)."""

    generation: Annotated[int, Field(ge=1), INTEGER]
    plan: str


class Acknowledgement(Message):
    """A worker's progress in taking up a generation.

    adopted: the worker has the plan. formed: it is in the generation's process groups, and has all of its stage's
    state; a Reporter says so together with the next. resumed: it has committed its first iteration in the generation.
    iteration: the one that workers have agreed on (formed), or have committed (resumed).
    """

    worker: WorkerName
    incarnation: Identifier
    generation: Annotated[int, Field(ge=1), INTEGER]
    state: Literal["adopted", "formed", "resumed"]
    iteration: Count = 0


class Acknowledgements(Message):
    """POST /jobs/{job_id}/acknowledgements -> BatchReply. From a launcher: for each step, those of all its workers that
    have taken it. Each is taken or refused by itself."""

    acknowledgements: Annotated[tuple[Acknowledgement, ...], Field(min_length=1, max_length=BATCH, fail_fast=True)]


class Restart(Message):
    """What a launcher does by itself about a process that is gone: it starts another one after `seconds`. This is the
    `number`th restart in a row, of at most `most`; if it exceeds that, none is started. node: where the process ran,
    and which must be back first; None: it is there."""

    number: Annotated[int, Field(ge=1, le=2**53), INTEGER]
    most: Annotated[int, Field(ge=1, le=2**53), INTEGER]
    seconds: Seconds = 0.0
    node: Annotated[NodeNumber | None, Field(exclude_if=lambda value: value is None)] = None

    @property
    def words(self) -> str:
        """The words that follow a worker's name and `is`."""
        if self.number > self.most:
            return f"not started again by itself, after {self.most:,} {'try' if self.most == 1 else 'tries'} in a row"
        which = f"({self.number:,} of {self.most:,})"
        if self.node is not None:
            return f"started again as soon as node {self.node} is back {which}"
        if not self.seconds:
            return f"about to be started again {which}"
        # In coarse steps, since a page reads it out whenever it changes.
        if self.seconds > 120:
            return f"started again in {math.ceil(self.seconds / 60)} min {which}"
        step = 10 if self.seconds > 10 else 1
        return f"started again in {math.ceil(self.seconds / step) * step} s {which}"


class FailureReport(Message):
    """Something broke.

    cause `exit`: the launcher saw the process of `worker` end, or an own loop has closed its reporter before its work
    was done. `closed`: an own loop has done its work and closed its reporter, which is no failure: others go on.
    `exception`: an op of a micro-batch raised in it, and all must connect anew with what the launcher decides about
    that micro-batch. `state-lost`: the state of its stage is lost, though workers of the stage live. `transfer`:
    `reporter` could not exchange data; then `worker` is the reporter's best guess, or itself. incarnation: of
    `reporter` for a transfer, of `worker` for anything else.
    detail: for an exit, what the process did (`was killed by SIGKILL`). age_milliseconds: how long ago it was seen.
    generation: the reporter's own when the transfer broke or the op raised, so that a late report can't disturb the
    next one (0: not given). spare: for an exit, which ranks of the worker had to end because another one had; nothing
    runs in their place. restart: for an exit, also for one that is known already.
    """

    worker: WorkerName
    incarnation: Identifier
    cause: Literal["exit", "closed", "transfer", "exception", "state-lost"]
    reporter: Name
    detail: Text = ""
    age_milliseconds: Milliseconds = 0
    generation: Count = 0
    spare: Annotated[tuple[RankNumber, ...], Field(max_length=RANKS, fail_fast=True)] = ()
    restart: Restart | None = None


class Failures(Message):
    """POST /jobs/{job_id}/failures -> BatchReply. From a launcher: all that it has seen in one turn, or since the
    console took the last batch, in order, such as the ends of all workers of a lost node: the job goes on in one
    generation without them. Each is taken or refused by itself."""

    failures: Annotated[tuple[FailureReport, ...], Field(min_length=1, max_length=BATCH, fail_fast=True)]


class Iteration(Message):
    """One committed iteration; they are counted from 0. loss: NaN where no micro-batch has one, or nobody knows it any
    more. loss_hex: the loss as a hexadecimal float, exact. skipped: micro-batches that were left out, numbered over the
    pipelines. learning_rate: that of the optimizer's first group in this step; None: not known. data_seconds: the
    longest that a worker waited for its micro-batches to be read."""

    iteration: Count
    loss: Loss
    loss_hex: LossHex
    seconds: Seconds
    generation: Count
    living: Annotated[int, Field(ge=0, le=2**31 - 1), INTEGER]
    skipped: Annotated[tuple[Count, ...], Field(max_length=65536, exclude_if=lambda value: not value)] = ()
    learning_rate: Annotated[Number | None, Field(exclude_if=lambda value: value is None)] = None
    data_seconds: Annotated[Seconds, Field(exclude_if=lambda value: not value)] = 0.0


class IterationReport(Message):
    """POST /jobs/{job_id}/iterations. From the launcher, in batches; repeated ones are ignored. age: seconds since the
    newest was committed, since the console may have been away."""

    iterations: Annotated[tuple[Iteration, ...], Field(max_length=1000, fail_fast=True)]
    age: Seconds = 0.0


class Recovery(Message):
    """POST /jobs/{job_id}/recoveries. Milliseconds from the death of `worker` until: detected, its death was seen;
    unblocked, the last survivor had left the iteration; reformed, the last one had re-formed; resumed, the redone
    iteration was committed. death_known: False if only the moment is known at which the death was seen; then the
    times count from there."""

    worker: WorkerName
    generation: Count
    detected_ms: Milliseconds
    unblocked_ms: Milliseconds
    reformed_ms: Milliseconds
    resumed_ms: Milliseconds
    death_known: StrictBool = True


class Relayout(Message):
    """POST /jobs/{job_id}/relayouts. From `iteration` on, all workers have `partition`, the layers per stage.

    moved_layers: how many have changed their stage. problem: why the move that was due has failed; then `partition` is
    the one from before.
    """

    generation: Count
    iteration: Count
    partition: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_LAYERS), INTEGER], ...], Field(max_length=MAX_LAYERS)]
    moved_layers: Annotated[int, Field(ge=0, le=MAX_LAYERS), INTEGER]
    problem: Annotated[str, StringConstraints(max_length=1000)] = ""


class LogLine(Message):
    """A line of a worker's log. at: POSIX seconds, of the worker's wall clock."""

    at: PosixSeconds
    text: Annotated[str, StringConstraints(max_length=LOG_LINE)]


class LogLines(Message):
    """POST /jobs/{job_id}/logs. What a worker process has written since the last post, oldest first.

    skipped: lines before these that were dropped, since they were too many."""

    worker: WorkerName
    incarnation: Identifier
    lines: Annotated[tuple[LogLine, ...], Field(max_length=LOG_LINES, fail_fast=True)]
    skipped: Count = 0


class ValidationReport(Message):
    """POST /jobs/{job_id}/validations. From the launcher: the outcome of checking an iteration's gradients.

    coefficient: what they were scaled by (1: not at all); None: the update was left out, since a gradient was NaN,
    infinite or out of range. redone: the step had been taken without this, and was corrected.
    """

    iteration: Count
    coefficient: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] | None
    redone: StrictBool


class Command(Message):
    """What an operator asks of the launcher. kill: SIGKILL the worker's process. restart: start a new process for a
    failed worker. pause: all workers stop before the same iteration, until resume."""

    seq: Count
    kind: Literal["kill", "restart", "pause", "resume"]
    worker: WorkerName | None = None


class Commands(Message):
    """GET /jobs/{job_id}/commands?after=SEQ&wait=S. What the operator asks of the launcher."""

    commands: tuple[Command, ...]


class LeadClaim(Message):
    """POST /jobs/{job_id}/lead -> LeadAnswer. A node that too few of the other nodes follow wants to lead in `term`.
    after: the newest term that it knows of. ask: it only asks whether it could."""

    term: Term
    node: NodeNumber
    after: Term
    ask: StrictBool = False


class LeadAnswer(Message):
    """granted: from now on the console takes nothing from a leader of an earlier term. reason: for people."""

    granted: StrictBool
    reason: Text


class JobFinished(Message):
    """POST /jobs/{job_id}/finish. From the launcher, when all its workers are gone."""

    state: Literal["finished", "stopped"]
    reason: Text = ""


class ProblemDetails(Message):
    """Body of every 4xx and 5xx answer (RFC 9457, application/problem+json).

    code: for programs (`unknown_job`, `unknown_worker`, `fenced`, `invalid`, `too_large`, ...).
    detail: one sentence for people that names the field, the value and what was expected. field: what of the request is
    wrong, where it is one of its parameters, headers or fields; "the body" for all of it.
    """

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    field: str = ""


class ConsoleError(Exception):
    """A request that the console refuses. status: HTTP's (4xx, 5xx); code, field: as in ProblemDetails. said: what is
    wrong; `detail` is the sentence, which begins with the field."""

    def __init__(self, status: int, code: str, said: str, *, field: str = "") -> None:
        self.status = status
        self.code = code
        self.field = field
        self.said = said
        self.detail = f"{field}: {said}" if field else said
        super().__init__(self.detail)

    @staticmethod
    def invalid(error: PlannerError, field: str = "") -> ConsoleError:
        """Makes the one (422) for what the planner refuses. field: in which it stands, where that is another."""
        error = named_in_documents(error)
        if field or not isinstance(error, InputError):
            return ConsoleError(422, "invalid", str(error), field=field)
        return ConsoleError(422, "invalid", error.said, field=error.field)

"""Filling a catalog: what is asked for, and the process that plans it.

The process (app.runtime.children) gets the question and what is stored of it already, and sends each plan as it is
made; who reads its messages stores them, so that nothing is lost when it is ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openrecycle.app.catalogs.plans_needed import most_failures
from openrecycle.app.runtime.children import Channel
from openrecycle.planner.catalogs.catalog_build import fill, targets
from openrecycle.planner.catalogs.catalog_engines import make_engine
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique
from openrecycle.planner.plans.packed import CatalogQuestion, Effort
from openrecycle.planner.plans.plan import INTEGER, PRINTABLE, JobDoc
from openrecycle.planner.portfolio import SOLVERS

log = structlog.get_logger()

# As many workers as a job may have. Plans of more ops take seconds each: the command line makes those, and
# `openrecycle catalog` may use a cluster.
MAX_WORKERS = 16_384
MAX_OPS = 3_200_000
MAX_TOLERANCE = 1024

Duration = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]


class CatalogRequest(BaseModel):
    """What is planned ahead: the question, and for how many failures with how much effort.

    job: replaces the grid and the durations (of F, I, W, O and transfer, in time_unit) by a job's
    own. solver: `list` takes milliseconds a plan, the others up to time_limit seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: JobDoc | None = None
    pipelines: Annotated[int, Field(ge=1, le=MAX_WORKERS), INTEGER] = 3
    stages: Annotated[int, Field(ge=1, le=MAX_WORKERS), INTEGER] = 4
    micro_batches: Annotated[int, Field(ge=1, le=4096), INTEGER] = 6
    durations: dict[Literal["F", "I", "W", "O", "transfer"], Duration] = Field(default_factory=dict)
    time_unit: Annotated[str, Field(min_length=1, max_length=20, pattern=PRINTABLE)] = "slot"
    technique: str = Technique.STAGGERED.value
    memory: Annotated[str, Field(max_length=20)] = "uniform"
    tolerance: Annotated[int, Field(ge=0, le=MAX_TOLERANCE), INTEGER] = 2
    solver: str = "list"
    time_limit: Annotated[float, Field(strict=True, gt=0, le=600, allow_inf_nan=False)] = 10.0

    @cached_property
    def question(self) -> CatalogQuestion:
        """Raises InputError, also for what is too large for the console."""
        grid = self.job or self
        workers, ops = grid.pipelines * grid.stages, 3 * grid.pipelines * grid.stages * grid.micro_batches
        if not 0 < workers <= MAX_WORKERS:
            raise InputError("pipelines x stages", workers, f"1 to {MAX_WORKERS:,} workers here; {ELSEWHERE}")
        if ops > MAX_OPS:
            raise InputError("ops of one plan", ops, f"at most {MAX_OPS:,} here; {ELSEWHERE}")
        if self.solver not in SOLVERS:
            raise InputError("solver", self.solver, "one of " + ", ".join(SOLVERS))
        times: Mapping[str, float] = {str(kind): value for kind, value in self.durations.items()}
        if self.job is not None:
            job = self.job.job()
        else:
            job = Job.uniform(
                self.pipelines, self.stages, self.micro_batches, durations=times, time_unit=self.time_unit
            )
        technique = Technique.of(self.technique, field="technique")
        question = CatalogQuestion(job, technique, MemoryLimit.parse(self.memory, field="memory"))
        question.problem(frozenset())  # refuses a limit that not even the full grid can keep
        most = most_failures(question)
        if self.tolerance > most:
            why = "each stage needs a living worker" if technique.reroutes else "fault-free plans take no failure"
            raise InputError("tolerance", self.tolerance, f"a number of failures from 0 to {most}, as {why}")
        return question

    @property
    def effort(self) -> Effort:
        return Effort(solver=self.solver, time_limit=None if self.solver == "list" else self.time_limit)


ELSEWHERE = "`openrecycle catalog` takes more"


def parse_request(**values: Any) -> CatalogRequest:
    """Raises InputError naming the field."""
    try:
        request = CatalogRequest(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(".".join(map(str, first["loc"])), first["input"], first["msg"]) from None
    _ = request.question
    return request


# -- the process -----------------------------------------------------------------------------


class _Sending:
    """A catalog's plans (planner.catalogs.catalog_build.Keeper): the stored ones, and new ones, which are sent."""

    def __init__(self, channel: Channel, blobs: dict[str, bytes]) -> None:
        self._channel = channel
        self._blobs = blobs

    def names(self) -> list[str]:
        return sorted(self._blobs)

    def get(self, name: str) -> bytes | None:
        return self._blobs.get(name)

    def put(self, name: str, blob: bytes) -> None:
        self._blobs[name] = blob
        self._channel.say(name.encode() + b"\0" + blob)


def serve(channel: Channel, request: CatalogRequest, stored: dict[str, bytes], processes: int) -> None:
    """In the child: progress and plans; then the end. See `read_message`."""
    try:
        question = request.question
        _say(channel, done=0, total=0)
        filled = fill(
            question,
            targets(question, request.tolerance),
            _Sending(channel, stored),
            engine=make_engine("local", jobs=processes, address=None),
            effort=request.effort,
            on_progress=lambda done, total: _say(channel, done=done, total=total),
        )
        _say(channel, finished=filled.finished, planned=filled.planned)
    except PlannerError as error:
        _say(channel, error=str(error))
    except Exception as error:
        log.exception("filling a catalog failed")
        _say(channel, error=f"the planner failed ({type(error).__name__}); the console's log says more")


def read_message(data: bytes) -> dict[str, Any] | tuple[str, bytes]:
    """What `serve` says: progress and the end, or (name, stored plan)."""
    if data[:1] == b"{":
        message: dict[str, Any] = json.loads(data)
        return message
    name, _, blob = data.partition(b"\0")
    return name.decode(), blob


def _say(channel: Channel, **message: Any) -> None:
    channel.say(json.dumps(message).encode())


def share_of_cores() -> int:
    """How many processes plan: half of the cores, as training may run on this machine too."""
    return max(1, (os.cpu_count() or 1) // 2)

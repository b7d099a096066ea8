"""Plans that child processes make or look up: those of jobs, and those that a page asks for on the spot, each once.

The two have a process each: what a page asks for never stands in the way of a job's own plans. Large plans cross the
pipe in columns (planner.plans.packed).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cachetools import LRUCache

from openrecycle.app.runtime.processes import Channel, answered
from openrecycle.app.runtime.task_queue import TaskQueue
from openrecycle.planner.catalogs.catalog import CatalogInfo, MappedBlobs, StoredCatalog
from openrecycle.planner.check import checked
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.failures import parse_workers
from openrecycle.planner.jobs.job import MemoryLimit, Problem, Technique
from openrecycle.planner.plans.packed import from_bytes, to_bytes
from openrecycle.planner.plans.plan import JobDoc, Plan, PlanError
from openrecycle.planner.solvers.portfolio import make_plan, reference_plan


@dataclass(frozen=True)
class PlanRequest:
    """Asks for one plan. time_limit: of the solver, in seconds. partition: layers per stage; (): as the job says."""

    owner: str
    job: JobDoc
    failed: tuple[str, ...]
    technique: str
    memory: str
    solver: str = "list"
    time_limit: float = 60.0
    partition: tuple[int, ...] = ()
    timeout: None = None
    makes: bool = True

    def read(self, document: bytes) -> Plan:
        return from_bytes(document, source="the planning process")


@dataclass(frozen=True)
class LookUpRequest:
    """Asks for one plan of a catalog, fitted to the failures. info: of the catalog, as JSON. stored: the plan as it
    lies there, under that name."""

    owner: str
    info: str
    failed: tuple[str, ...]
    name: str
    stored: bytes
    timeout: None = None
    makes: bool = False

    def read(self, document: bytes) -> Plan:
        return from_bytes(document, source="the planning process")


def plan_maker(name: str = "planning", *, on_made: Callable[[Plan], None] = lambda made: None) -> TaskQueue:
    """Takes PlanRequest and LookUpRequest."""
    return TaskQueue(serve, name, on_made=on_made)


def serve(channel: Channel, request: PlanRequest | LookUpRequest) -> None:
    """In the child."""
    channel.say(answered(lambda: to_bytes(_plan(request))))


def _plan(asked: PlanRequest | LookUpRequest) -> Plan:
    """Raises PlannerError, also when a stored plan is damaged, or not for such failures."""
    if isinstance(asked, LookUpRequest):
        catalog = StoredCatalog(CatalogInfo.from_json(asked.info), MappedBlobs({asked.name: asked.stored}))
        found = catalog.find(parse_workers(asked.failed))
        if found is None:
            raise PlanError(f"plan {asked.name} is not for these failures")
        return found.plan
    plan = make_plan(
        problem(asked.job, asked.failed, asked.technique, asked.memory, asked.partition),
        solver=asked.solver,
        time_limit=asked.time_limit,
        look_ahead=asked.solver != "list",  # asked for while workers wait
    )
    return checked(plan)


def problem(
    document: JobDoc, failed: Sequence[str], technique: str, memory: str, partition: Sequence[int] = ()
) -> Problem:
    """Raises PlannerError."""
    workers, job = parse_workers(failed), document.job()
    return Problem(
        job.with_partition(partition) if partition else job, workers, Technique.of(technique), MemoryLimit.parse(memory)
    )


MAX_KEPT = 32
TIME_LIMIT = 5.0
# Seconds that an answer without a plan stands.
FAILED_SECONDS = 30.0
# Above this a page gets the list scheduler's plan at once; better ones are for the Planner page.
SEARCHED_OPS = 20_000


@dataclass(frozen=True)
class PlanQuestion:
    """What is to be planned. Equal questions have one answer."""

    job: JobDoc
    failed: tuple[str, ...]
    technique: str
    memory: str

    @property
    def is_reference(self) -> bool:
        """Is it fault-free 1F1B of a grid small enough to be laid out at once?"""
        plain = self.technique == Technique.FAULT_FREE and self.memory == "1f1b" and not self.failed
        return plain and self.job.ops <= SEARCHED_OPS


@dataclass
class Answer:
    """plan or why, once `done`. asked, ended: monotonic seconds."""

    plan: Plan | None = None
    why: str = ""
    done: bool = False
    asked: float = field(default_factory=time.monotonic)
    ended: float = math.inf

    def end(self, plan: Plan | None, why: str) -> None:
        self.plan, self.why, self.ended, self.done = plan, why, time.monotonic(), True

    @property
    def stale(self) -> bool:
        """Did it fail some time ago? It may not do so again: its process had died, perhaps."""
        return self.done and self.plan is None and time.monotonic() - self.ended > FAILED_SECONDS


class Making:
    """Thread-safe. Its child process begins with the first question."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: LRUCache[str, Answer] = LRUCache(MAX_KEPT)
        self._maker = plan_maker("plans on the spot")
        self._started = False

    def get(self, question: PlanQuestion) -> Answer:
        """The answer, as far as it is there; it is begun now if nobody has asked before."""
        key = repr(question)
        with self._lock:
            known = self._answers.get(key)
            if known is None or known.stale:
                known = self._answers[key] = self._begin(question)
            return known

    def close(self) -> None:
        with self._lock:
            if self._started:
                self._maker.close()

    def _begin(self, question: PlanQuestion) -> Answer:
        answer = Answer()
        if question.is_reference:
            # A fixed order of ops: nothing is searched for, so nobody need wait for a process to begin.
            try:
                answer.end(checked(reference_plan(question.job.job(), "1f1b")), "")
            except PlannerError as error:
                answer.end(None, str(error))
            return answer
        if not self._started:
            self._started = True
            self._maker.start(child=False)
        solver = "auto" if question.job.ops <= SEARCHED_OPS else "list"
        request = PlanRequest(
            "a page", question.job, question.failed, question.technique, question.memory, solver, TIME_LIMIT
        )
        self._maker.submit(request, answer.end)
        return answer

"""Has jobs measure an iteration op by op now and then. Keeps each job's newest one, and those that links refer to.

All workers must record the same iteration. So the replies to their heartbeats name its number, far enough ahead that
all workers have heard of it before it begins.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from weakref import WeakKeyDictionary

import structlog
from cachetools import LRUCache
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.messages.protocol import MeasuredOps
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.observing.as_run import IterationAsRun, MeasuredIteration, as_plan, as_schedule, assemble
from openrecycle.app.runtime.errors import ConsoleError, storing, unavailable
from openrecycle.db.store import Store
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import SECONDS
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule

log = structlog.get_logger()

# Jobs of at most this many ops are measured also when nobody looks: after each change of their members, and again after
# this many seconds.
UNASKED_OPS = 20_000
UNASKED_SECONDS = 60.0
# While somebody looks: at least this many seconds between two measurements, and more for large iterations.
LEAST_PAUSE = 2.0
OPS_PER_SECOND = 20_000
WATCH_SECONDS = 15.0
"""How long somebody who has asked counts as looking."""
# How many of a job's iterations are kept for links to them: those that were looked at last, fewer of large jobs.
MOST_KEPT, MOST_KEPT_OPS = 50, 2_000_000
# How many older iterations of a job stay in memory.
READ = 4
# How many schedules stay in memory; and the period of an iteration is the median of this many before and after it.
DRAWN, AROUND = 8, 4
MOST_MISSED = 5
"""After this many missed measurements a job is not asked again until its members change: its trainers seem not to
record any."""
NO_PLAN = (PlannerError, ArithmeticError)
"""Raised by as_schedule and as_plan for an iteration that can't have run, for example with forwards of no length."""


@dataclass(frozen=True)
class TimelineRequest:
    """A measurement that workers are asked for. until: when it is given up, in monotonic seconds."""

    iteration: int
    generation: int
    living: frozenset[str]
    plan_fingerprint: str
    until: float


@dataclass
class CommitRate:
    """How fast a job commits iterations, found by a look at its count now and then."""

    at: float
    committed: int
    generation: int
    seconds: float | None = None

    def look(self, now: float, committed: int, generation: int) -> float | None:
        """Takes a look, and returns the seconds per iteration of late; None: not known yet."""
        if generation != self.generation:
            self.at, self.committed, self.generation = now, committed, generation
        elif committed - self.committed >= 2 and now - self.at >= 0.5:
            self.seconds = (now - self.at) / (committed - self.committed)
            self.at, self.committed = now, committed
        elif self.seconds is not None and now - self.at > 2 * self.seconds:
            # It has become slower, and how slow is not known yet: at least this much.
            self.seconds = max(self.seconds, (now - self.at) / (committed - self.committed + 1))
        return self.seconds


@dataclass
class Measurement:
    """The measurements of one job. request: the current one; heartbeats read it without the lock. parts: what workers
    have sent for it. kept: numbers of the iterations that links refer to, the one looked at last at the end. read:
    those of them that are in memory. missed: how many requests in a row were in vain, and missed_in: in which
    generation."""

    progress: CommitRate
    request: TimelineRequest | None = None
    parts: dict[str, MeasuredOps] = field(default_factory=dict)
    newest: IterationAsRun | None = None
    kept: list[int] = field(default_factory=list)
    read: LRUCache[int, IterationAsRun] = field(default_factory=lambda: LRUCache(READ))
    done_at: float = -math.inf
    watched_until: float = -math.inf
    missed: int = 0
    missed_in: int = 0


class Measuring:
    """The measured iterations of all jobs of a console. Thread-safe. plan: finds a plan by its fingerprint; raises
    ConsoleError. heartbeat: seconds."""

    def __init__(
        self,
        store: Store,
        plan: Callable[[str], Plan],
        heartbeat: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._plan = store, plan
        self._heartbeat, self._clock = heartbeat, clock
        self._made: LRUCache[tuple[str, int, int, float], tuple[Schedule, Plan]] = LRUCache(DRAWN)
        self._of: WeakKeyDictionary[LiveJob, Measurement] = WeakKeyDictionary()
        self._lock = threading.Lock()

    # -- asked ------------------------------------------------------------------------------

    def wanted(self, job: LiveJob) -> int | None:
        """Returns the iteration that workers are to record, for the reply to a heartbeat. Waits for nothing."""
        found = self._of.get(job)
        request = found.request if found else None
        return request.iteration if request else None

    def newest(self, job: LiveJob, *, watch: bool = False, keep: bool = False) -> IterationAsRun | None:
        """Returns the newest measured iteration. watch: somebody looks, so it is measured again soon. keep: a link
        refers to it."""
        with self._lock:
            found = self._measurement(job)
            if watch:
                found.watched_until = self._clock() + WATCH_SECONDS
            if keep and found.newest is not None:
                _keep(found.kept, found.newest.iteration, _most_kept(job))
            return found.newest

    def kept(self, job: LiveJob, iteration: int) -> IterationAsRun | None:
        """Returns a measured iteration if it is still kept; each look keeps it for longer."""
        with self._lock:
            found = self._measurement(job)
            if found.newest is not None and found.newest.iteration == iteration:
                _keep(found.kept, iteration, _most_kept(job))
                return found.newest
            if iteration not in found.kept:
                return None
            _keep(found.kept, iteration, _most_kept(job))
            if iteration in found.read:
                return found.read[iteration]
        read = self._stored(job.job_id, iteration)
        if read is not None:
            with self._lock:
                found.read[iteration] = read
        return read

    def iteration(
        self, job: LiveJob, iteration: int | None = None, *, watch: bool = False, keep: bool = False
    ) -> MeasuredIteration | None:
        """Returns the newest measured iteration, or the one with this number, with its schedule and plan; None if none
        has been measured yet, or that one is not kept.

        watch: somebody looks, so it is measured again soon. keep: a link refers to it. Raises ConsoleError.
        """
        found = self.newest(job, watch=watch, keep=keep and iteration is None)
        if iteration is not None:
            found = self.kept(job, iteration)
        if found is None:
            return None
        try:
            planned = self._plan(found.plan_fingerprint)
            schedule, plan = self._drawn(job.job_id, found, planned)
        except (ConsoleError, *NO_PLAN) as error:  # its plan is damaged, or it came with an imported history
            if isinstance(error, ConsoleError) and error.status >= 500:
                raise
            log.warning("a stored measured iteration is not used", job=job.job_id, reason=str(error))
            return None
        with storing():
            around = self._store.iterations(job.job_id, after=found.iteration - AROUND - 1, limit=2 * AROUND + 1)
        # The first iteration of a generation includes a recovery.
        settled = [
            r["seconds"]
            for before, r in pairwise(around)
            if r["generation"] == before["generation"] == found.generation
        ]
        unit = SECONDS.get(planned.job.time_unit)
        return MeasuredIteration(
            job.job_id,
            found.iteration,
            found.generation,
            found.at,
            found.uncertainty_us / 1000,
            schedule,
            plan,
            planned,
            1000 * median(settled) if settled else None,
            1000 * unit * planned.metrics.period if unit else None,
        )

    def _unusable(self, job: LiveJob, measured: IterationAsRun) -> str:
        """Says why an iteration can't be shown; "": it can. Workers may report impossible ops."""
        try:
            self._drawn(job.job_id, measured, self._plan(measured.plan_fingerprint))
        except (ConsoleError, *NO_PLAN) as error:
            log.warning("a measured iteration is not used", job=job.job_id, reason=str(error))
            return str(error)
        return ""

    def _drawn(self, job_id: str, found: IterationAsRun, planned: Plan) -> tuple[Schedule, Plan]:
        """Returns the schedule and plan of an iteration. Some are cached, since many viewers look at the same one."""
        key = (job_id, found.generation, found.iteration, found.at)
        with self._lock:
            if key in self._made:
                return self._made[key]
        schedule = as_schedule(found, planned)
        made = schedule, as_plan(schedule, planned)
        with self._lock:
            self._made[key] = made
        return made

    # -- told -------------------------------------------------------------------------------

    def take(self, job: LiveJob, message: MeasuredOps) -> str:
        """Takes one worker's part of a measurement; returns what became of it. Raises ConsoleError for impossible
        ops."""
        check_ops(message, job)
        with self._lock:
            found = self._measurement(job)
            request = found.request
            if request is None or (message.generation, message.iteration) != (request.generation, request.iteration):
                return f"iteration {message.iteration} is not asked for any more"
            if message.worker not in request.living:
                return f"{message.worker} was not in generation {request.generation}"
            found.parts[message.worker] = message
            if len(found.parts) < len(request.living):
                return f"{len(found.parts)} of {len(request.living)} workers are here"
            measured = assemble(found.parts, request.plan_fingerprint, time.time())
            found.request, found.parts, found.done_at = None, {}, self._clock()
        why = self._unusable(job, measured)
        with self._lock:
            if why:  # counts as missed
                found.missed, found.missed_in = found.missed + 1, measured.generation
                return f"iteration {message.iteration} is not kept: {why}"
            found.newest, found.missed = measured, 0
            # A job that went back to a checkpoint may run it twice: links refer to the later run.
            found.read.pop(measured.iteration, None)
            keep = tuple(found.kept)
        try:
            self._store.put_measured(job.job_id, measured.iteration, measured.model_dump_json(), measured.at, keep=keep)
        except SQLAlchemyError as error:
            log.warning("a measured iteration could not be stored", job=job.job_id, reason=str(unavailable(error)))
        job.topic.publish()
        return f"iteration {message.iteration} is measured"

    def consider(self, job: LiveJob) -> None:
        """Asks for a measurement if one is due, and gives up one that does not come; called once per tick."""
        now, state = self._clock(), job.state
        with self._lock:
            found = self._measurement(job)
            seconds = found.progress.look(now, state.committed, state.generation)
            if found.request is not None and (
                now > found.request.until or found.request.generation != state.generation
            ):
                late = found.request.generation == state.generation
                found.missed, found.missed_in = (found.missed + 1 if late else 0), state.generation
                found.request, found.parts = None, {}
            current = state.current
            if found.request is not None or current is None or seconds is None or not state.settled or state.over:
                return
            if state.halted or not self._due(found, job, now):
                return
            beats = [contact.beat for contact in list(job.measurements.contacts.values())]
            ahead = 2.5 * self._heartbeat * (1 + found.missed)
            foremost = max([state.committed, *(beat.iteration for beat in beats)])
            iteration = foremost + math.ceil(ahead / seconds) + 2
            if iteration >= job.spec.iterations:
                return
            until = now + 2 * (ahead + 4 * seconds) + 4 * self._heartbeat + 2.0
            found.parts = {}
            found.request = TimelineRequest(
                iteration, current.number, frozenset(current.living), current.plan_fingerprint, until
            )

    # -- details ----------------------------------------------------------------------------

    def _due(self, found: Measurement, job: LiveJob, now: float) -> bool:
        generation, ops = job.state.generation, job.plans.ops
        silent = found.missed >= MOST_MISSED and found.missed_in == generation
        if now < found.watched_until and not silent:
            return now - found.done_at >= max(LEAST_PAUSE, ops / OPS_PER_SECOND)
        if ops > UNASKED_OPS or silent:
            return False
        return found.newest is None or found.newest.generation != generation or now - found.done_at >= UNASKED_SECONDS

    def _measurement(self, job: LiveJob) -> Measurement:
        found = self._of.get(job)
        if found is None:
            state = job.state
            found = Measurement(CommitRate(self._clock(), state.committed, state.generation))
            found.newest = self._stored(job.job_id)
            found.kept = self._stored_kept(job)
            self._of[job] = found
        return found

    def _stored_kept(self, job: LiveJob) -> list[int]:
        try:
            return self._store.measured_iterations(job.job_id)[-_most_kept(job) :]
        except SQLAlchemyError as error:
            log.warning(
                "which measured iterations are stored is not known", job=job.job_id, reason=str(unavailable(error))
            )
            return []

    def _stored(self, job_id: str, iteration: int | None = None) -> IterationAsRun | None:
        try:
            text = self._store.measured(job_id, iteration)
            return None if text is None else IterationAsRun.model_validate_json(text)
        except (SQLAlchemyError, ValueError) as error:
            log.warning("a stored measured iteration is not used", job=job_id, reason=type(error).__name__)
            return None


def check_ops(message: MeasuredOps, job: LiveJob) -> None:
    """Raises ConsoleError if these can't be ops of the job."""
    spec = job.spec
    job.sender(message.worker, message.incarnation)
    if max(message.pipelines) >= spec.pipelines:
        got = max(message.pipelines)
        raise ConsoleError(422, "invalid", f"got {got}, expected below {spec.pipelines}", field="pipelines")
    for kind, micro_batch in zip(message.kinds, message.micro_batches, strict=True):
        if (micro_batch == -1) != (kind == "O") or micro_batch >= spec.micro_batches:
            raise ConsoleError(
                422,
                "invalid",
                f"got {micro_batch} for {kind}, expected 0 to {spec.micro_batches - 1}, and -1 for O",
                field="micro_batches",
            )
    ops = list(zip(message.kinds, message.pipelines, message.micro_batches, strict=True))
    if len(set(ops)) < len(ops) or not message.kinds.endswith("O"):
        raise ConsoleError(422, "invalid", "each op is expected once, and O at the end", field="kinds")


def _keep(kept: list[int], iteration: int, most: int) -> None:
    """Moves `iteration` to the end of `kept`, and drops the first ones beyond `most`."""
    if iteration in kept:
        kept.remove(iteration)
    kept.append(iteration)
    del kept[:-most]


def _most_kept(job: LiveJob) -> int:
    return max(1, min(MOST_KEPT, MOST_KEPT_OPS // job.plans.ops))

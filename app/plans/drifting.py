"""Workers that take longer than they were planned for: said, marked, and planned for.

Heartbeats bring every worker's mean op times. planner.layers.drift says from them who is slow, and with what
speed; where that changes, a plan is made for these speeds, and put in force if it is quicker than the
order that runs now. Whatever fails later is planned with them, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.agent.coordination.choosing import out
from openrecycle.agent.coordination.events import Note, UsePlan
from openrecycle.agent.messages.protocol import OpKind
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.job_planner import JobPlanner
from openrecycle.app.plans.plan_comparison import gain
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.jobs.job import Job, Worker
from openrecycle.planner.jobs.words import percent
from openrecycle.planner.layers.drift import Drift, DriftLimits, DriftState, Ratios, assumed, drifted, forget, observe
from openrecycle.planner.layers.migration import SECONDS
from openrecycle.planner.plans.plan import Plan

log = structlog.get_logger()

LIMITS = DriftLimits(slow=1.3, well=1.15, window=20)
# A plan that is quicker by less is not worth the iteration that a new generation costs.
LEAST_GAIN = 0.03
# Above this an order is not played through with other op times: the new plan is taken.
MOST_OPS = 60_000
# A round is closed without those that have been silent for so many heartbeats.
TIMEOUT = 2.5


@dataclass
class _Watch:
    """One job. living: of the generation of that number. round: the ratios so far, begun at that time.

    wanted: the job as it turned out to be. asked: what a plan is being made for, and without whom. held: is
    there one that waits because the plan in force is frozen?
    """

    ratios: Ratios
    wanted: Job
    workers: Mapping[str, Worker]
    generation: int = 0
    living: frozenset[Worker] = frozenset()
    state: DriftState = field(default_factory=DriftState)
    round: dict[Worker, float] = field(default_factory=dict)
    began: float = 0.0
    incarnations: dict[Worker, str] = field(default_factory=dict)
    asked: tuple[Job, tuple[str, ...]] | None = None
    held: bool = False


class Drifting:
    """Of all jobs. plan: finds one by its fingerprint, and may raise SQLAlchemyError. heartbeat: seconds."""

    def __init__(
        self,
        planning: JobPlanner,
        plan: Callable[[str], Plan | None],
        heartbeat: float,
        *,
        limits: DriftLimits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planning, self._plan = planning, plan
        self._heartbeat, self._limits, self._clock = heartbeat, limits, clock
        self._of: dict[str, _Watch] = {}

    def consider(self, job: LiveJob) -> None:
        """Takes the op times that came in since the last call. For one thread alone.

        Raises ConsoleError when what it has to say can't be stored.
        """
        if job.state.over:
            self._of.pop(job.job_id, None)
            return
        try:
            watch = self._of.get(job.job_id)
            if watch is None:
                watch = self._of[job.job_id] = self._begin(job)
        except SQLAlchemyError as error:
            log.warning("speeds wait for the database", job=job.job_id, reason=type(error).__name__)
            return
        reports, failed, current = job.op_times.take(), out(job.state), job.state.current
        if failed is None or current is None:
            watch.round.clear()  # in a recovery nobody's times are usual
            return
        if watch.ratios.job is not job.nominal:  # with other layers an op of a stage takes another time
            watch.ratios, watch.round = Ratios(job.nominal), {}
            watch.wanted = drifted(job.nominal, watch.state)
        if watch.generation != current.number:
            watch.generation, watch.living = current.number, frozenset(map(Worker.parse, current.living))
        for name, (incarnation, milliseconds) in reports.items():
            self._take(watch, watch.workers[name], incarnation, milliseconds)
        late = self._clock() - watch.began > TIMEOUT * self._heartbeat
        if watch.round and (len(watch.round) == len(watch.living) or late):
            drift = observe(job.nominal, watch.state, watch.round, self._limits)
            watch.state, watch.round = drift.state, {}
            self._tell(job, drift)
            factors = {w: track.assumed for w, track in watch.state.workers.items() if track.assumed > 1}
            job.slow = {str(w): factor for w, factor in factors.items() if w in watch.living}
            watch.wanted = drifted(job.nominal, watch.state)
        self._plan_anew(job, watch, failed)

    def _begin(self, job: LiveJob) -> _Watch:
        """After a restart of the console: with the speeds that the plan in force was made for."""
        workers = {name: Worker.parse(name) for name in job.state.members}
        watch, current = _Watch(Ratios(job.nominal), job.nominal, workers), job.state.current
        plan = self._plan(current.plan_fingerprint) if current else None
        if plan is not None:
            planned = plan.job.job()
            if planned != job.nominal and replace(planned, speeds=job.nominal.speeds) == job.nominal:
                watch.state = assumed(job.nominal, planned)
                watch.wanted = drifted(job.nominal, watch.state)
        return watch

    def _take(self, watch: _Watch, worker: Worker, incarnation: str, milliseconds: Mapping[OpKind, float]) -> None:
        if watch.incarnations.setdefault(worker, incarnation) != incarnation:
            # Another process, perhaps on another machine.
            watch.incarnations[worker] = incarnation
            watch.state = forget(watch.state, [worker])
            watch.round.pop(worker, None)
        took = watch.ratios.of(worker, milliseconds)
        if took is not None and worker in watch.living:
            watch.began = watch.began if watch.round else self._clock()
            watch.round[worker] = took

    def _tell(self, job: LiveJob, drift: Drift) -> None:
        whose = "the others', measured by the profile" if job.job.time_unit in SECONDS else "its peers'"
        notes = []
        for worker, (before, factor) in sorted(drift.changed.items()):
            text, severity = f"{worker} is as fast as the others again", "info"
            if factor > 1:
                word = "slow" if before <= 1 else "slower" if factor > before else "still slow, but less so"
                text, severity = f"{worker} is {word}: its ops take {factor:.2f} times {whose}", "warning"
            elif factor < 1:
                text = f"{worker} is fast: its ops take {factor:.2f} times {whose}"
            notes.append(Note(severity, "worker", text, str(worker)))  # type: ignore[arg-type]
        if drift.scale == 1:
            notes.append(Note("info", "worker", "ops take what the profile says again"))
        elif drift.scale is not None:
            text = (
                f"all workers' ops take {drift.scale:.3g} times what the profile says: the plans are as good as "
                f"before, and an iteration takes {drift.scale:.3g} times as long as they say"
            )
            notes.append(Note("info" if drift.scale < 1 else "warning", "worker", text))
        if notes:
            job.record(*notes)

    # -- plans --------------------------------------------------------------------------------

    def _plan_anew(self, job: LiveJob, watch: _Watch, failed: tuple[str, ...]) -> None:
        """Has a plan made where the speeds are not those that the job is planned with."""
        wanted = watch.wanted
        thawed = watch.held and not job.state.frozen_by
        if wanted == job.job and not thawed:
            watch.asked = None
        elif thawed or watch.asked != (wanted, failed):
            watch.asked, watch.held = (wanted, failed), False

            def done(plan: Plan | None, why: str) -> None:
                self._made(job, watch, wanted, failed, plan, why)

            self._planning.make_for(job, wanted, failed, done)

    def _made(
        self, job: LiveJob, watch: _Watch, wanted: Job, failed: tuple[str, ...], plan: Plan | None, why: str
    ) -> None:
        """In the planning's own thread."""
        if plan is None:
            log.warning("no plan for the speeds measured", job=job.job_id, reason=why)
            return
        gained = self._gain(job, wanted, plan)
        self._planning.replan(job, wanted, plan)
        if gained is not None and gained < LEAST_GAIN:
            saved = max(0.0, 1 - 1 / (1 + gained))
            text = (
                f"the plan in force stays: by one for {_words(wanted)} an iteration would take {percent(saved, 1)} less"
            )
            job.record(Note("info", "plan", text))
            return
        less = ""
        if gained is not None:
            less = f": an iteration takes {percent(1 - 1 / (1 + gained))} less than by the plan before"
        reason = f"a plan for {_words(wanted)}{less}"
        if job.state.frozen_by:
            watch.held = True
            job.record(Note("info", "plan", f"{reason}; it waits: {job.state.frozen_by} has frozen the plan"))
            return
        try:
            job.apply(UsePlan(plan.fingerprint, failed, "", reason), plan=plan)
        except ConsoleError as error:
            # A recovery came first, and is planned with these speeds.
            log.info("the plan for the speeds measured comes too late", job=job.job_id, reason=error.detail)

    def _gain(self, job: LiveJob, wanted: Job, plan: Plan) -> float | None:
        """By how much the order in force takes longer than `plan`'s, both at the speeds measured; None: not known."""
        current = job.state.current
        if current is None or job.ops > MOST_OPS:
            return None
        try:
            now = self._plan(current.plan_fingerprint)
            if now is None or now.failed != plan.failed:
                return None
            return gain(now, plan, wanted)
        except (PlannerError, SQLAlchemyError) as error:
            log.warning("the plan in force can't be compared", job=job.job_id, reason=str(error))
            return None


def _words(job: Job) -> str:
    """`W1_2 at speed 0.5`, and how many more."""
    if not job.speeds:
        return "workers that are all alike"
    shown = ", ".join(f"{worker} at speed {speed:g}" for worker, speed in job.speeds[:3])
    return shown + (f" and {len(job.speeds) - 3} more" if len(job.speeds) > 3 else "")

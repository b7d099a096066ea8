"""Plans a job again for the workers that are out now, when an operator asks for it.

The plan is made beside the console (app.plans.solving). Made, it is kept for the job in any case, and
put in force if it is worth a generation (app.plans.plan_comparison); the event feed says which, and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from openrecycle.agent.coordination.choosing import out
from openrecycle.agent.coordination.events import Note, UsePlan
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.plans.plan_comparison import compare_plans
from openrecycle.app.plans.solving import Point, Solve, Solves
from openrecycle.app.plans.solving_child import PlanAsked
from openrecycle.app.runtime.errors import ConsoleError, storing
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.jobs.words import names
from openrecycle.planner.plans.plan import Plan, job_doc

log = structlog.get_logger()

# planning: not made yet. adopted: in force. kept: the plan before stays. failed: there is no plan.
Outcome = Literal["planning", "adopted", "kept", "failed"]


@dataclass(frozen=True)
class Replan:
    """One request. failed: the workers that were out. at: POSIX seconds of the request, then of its end.

    reason: why it ended so. elapsed: seconds of solving so far; best, bound: in the job's time unit.
    """

    actor: str
    solver: str
    seconds: float
    failed: tuple[str, ...]
    at: float
    outcome: Outcome = "planning"
    reason: str = ""
    elapsed: float = 0.0
    best: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class _Running:
    replan: Replan
    job: Job
    solve: Solve


class Replanning:
    """One per console; the newest request of each job. A console that restarts forgets what is being made.

    find: a job by its id; plan: a stored one by its fingerprint, both raise ConsoleError. keep: puts a plan
    with the others of the job's catalog.
    """

    def __init__(
        self,
        find: Callable[[str], LiveJob],
        plan: Callable[[str], Plan],
        solves: Solves,
        keep: Callable[[LiveJob, Plan], None],
    ) -> None:
        self._find, self._plan, self._solves, self._keep = find, plan, solves, keep
        self._running: dict[str, _Running] = {}
        self._ended: dict[str, Replan] = {}

    def start(self, job_id: str, solver: str, seconds: float, actor: str) -> str:
        """seconds: of the solver, at most. Raises ConsoleError: nothing is planned then."""
        job = self._find(job_id)
        failed = self._ready(job)
        planned = job.job
        try:
            asked = PlanAsked(
                job=job_doc(planned),
                failed=failed,
                technique=job.catalog.technique,
                memory=job.catalog.memory.text,
                solver=solver,
                time_limit=seconds,
                over="schedules" if job.spec.relayout == "never" else "partitions",
                partition=planned.partition,
            )
            asked.check()
        except InputError as error:
            raise ConsoleError(422, "invalid", str(error)) from None
        except PlannerError as error:
            raise ConsoleError(409, "no_plan", str(error)) from None
        except ValueError:
            raise ConsoleError(422, "invalid", f"seconds: got {seconds!r}, expected above 0, at most 3600") from None
        with job.lock:
            if self.status(job_id, planning=True):
                raise ConsoleError(409, "no_choice", "the job is being planned again already; stop that first")
            solve = self._solves.start(asked)
            text = f"{actor} asked for a new plan{_without(failed)} ({solver}, at most {seconds:g} s)"
            audit = {"at": time.time(), "actor": actor, "action": "replan", "target": solver, "detail": f"{seconds:g}"}
            job.record(Note("warning", "operator", text), audit=audit)
            self._running[job_id] = _Running(Replan(actor, solver, seconds, failed, time.time()), planned, solve)
        return text

    def stop(self, job_id: str) -> str:
        """Has the search end; its best plan so far counts. Raises ConsoleError."""
        self._find(job_id)
        running = self._running.get(job_id)
        if running is None:
            raise ConsoleError(409, "no_choice", "the job is not being planned again")
        self._solves.stop(running.solve.id)
        return "the best plan so far counts"

    def status(self, job_id: str, *, planning: bool = False) -> Replan | None:
        """The newest request; None: there was none (planning: or it has ended). Raises ConsoleError."""
        self._find(job_id)
        running = self._running.get(job_id)
        if running is None:
            return None if planning else self._ended.get(job_id)
        last = next((p for p in reversed(running.solve.points) if p.incumbent is not None), None)
        last = last or Point(0.0, None, 0.0, "")
        bound = last.bound if last.bound > 0 else None
        return replace(running.replan, elapsed=running.solve.elapsed, best=last.incumbent, bound=bound)

    def consider(self, job: LiveJob) -> None:
        """Decides on a plan that has been made. For the console's ticks; raises ConsoleError when it can't be
        stored, and is to be called again then."""
        running = self._running.get(job.job_id)
        if running is None or not (running.solve.over or job.state.over):
            return
        outcome, reason = self._decide(job, running)
        replan = running.replan
        if outcome != "adopted" and not job.state.over:
            lead = "the plan in force stays" if outcome == "kept" else "no new plan was made"
            job.record(Note("info" if outcome == "kept" else "warning", "plan", f"{lead}: {reason}"))
        ended = replace(replan, outcome=outcome, reason=reason, at=time.time(), elapsed=running.solve.elapsed)
        self._ended[job.job_id] = ended
        del self._running[job.job_id]

    # -- details ----------------------------------------------------------------------------

    def _ready(self, job: LiveJob) -> tuple[str, ...]:
        """Without whom the job trains. Raises ConsoleError when it can't take another plan now."""
        state = job.state
        if state.over:
            raise ConsoleError(409, "job_over", f"the job is {state.over}")
        if state.frozen_by:
            raise ConsoleError(409, "frozen", f"{state.frozen_by} has frozen the plan; unfreeze it first")
        failed = out(state)
        if failed is None:
            raise ConsoleError(409, "no_choice", "the job does not train yet, or recovers; try again when it trains")
        return failed

    def _decide(self, job: LiveJob, running: _Running) -> tuple[Outcome, str]:
        replan, plan, state = running.replan, running.solve.plan, job.state
        if state.over:
            return "kept", f"the job is {state.over}"
        if plan is None:
            return "failed", running.solve.error or "the search left none"
        if job.job != running.job:
            return "kept", "the speeds that the new one is for have changed since"
        with storing():
            job.file_plan(plan)
        self._keep(job, plan)
        current = state.current
        if current is None or out(state) != replan.failed:
            now = _without(current.failed if current else ()) or " with all workers"
            return "kept", (
                f"the new one is for a job{_without(replan.failed) or ' with all workers'}; by now it trains{now}, or "
                "recovers. It is used when it fits again"
            )
        found = compare_plans(
            self._plan(current.plan_fingerprint), plan, job.job, job.spec.iterations - state.committed
        )
        if not found.better:
            return "kept", found.reason
        reason = f"{replan.actor} planned again ({plan.solver.name}): {found.reason}"
        try:
            job.apply(UsePlan(plan.fingerprint, replan.failed, replan.actor, reason, plan.partition), plan=plan)
        except ConsoleError as error:
            if error.status >= 500:
                raise
            return "kept", error.detail
        return "adopted", found.reason


def _without(failed: tuple[str, ...]) -> str:
    return f" without {names(failed)}" if failed else ""

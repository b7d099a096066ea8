"""JobViews as the console would make them, with real plans, for tests of charts and pages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from openrecycle.agent.messages.protocol import JobSpec, JobState
from openrecycle.app.console.view import EventView, JobView, RecoveryView, WorkerView
from openrecycle.app.jobs.states import HOLDING, OUT, Condition, JobSummary, ProcessState, RoleState
from openrecycle.app.jobs.throughput import Baseline, Figures, IterationView
from openrecycle.planner.jobs.failures import parse_failed
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan

STEPS = (("seen", 12.0), ("free", 49.0), ("formed", 46.0), ("done again", 176.0), ("waited for a person", 0.0))
T0 = 1_790_000_000.0
MEASURED = Baseline(36.5, "measured", 1, 20, "plan")
PACE = {"F": 40.0, "I": 40.0, "W": 40.0}


@cache
def plan(
    failed: tuple[str, ...] = (),
    *,
    grid: tuple[int, int, int] = (3, 4, 6),
    technique: str = "staggered",
    memory: str = "uniform",
    unit: str = "ms",
    optimizer: float = 0.0,
) -> Plan:
    durations = {**PACE, "O": optimizer} if unit == "ms" else {"F": 1, "I": 1, "W": 1, "O": optimizer}
    job = Job.uniform(*grid, durations=durations, time_unit=unit)
    problem = Problem(job, parse_failed(failed, job), Technique.of(technique), MemoryLimit.parse(memory))
    return make_plan(problem, solver="list")


def spec(**changes: object) -> JobSpec:
    values: dict[str, object] = {
        "name": "demo 3x4",
        "pipelines": 3,
        "stages": 4,
        "micro_batches": 6,
        "iterations": 400,
        "samples_per_micro_batch": 2,
        "durations": dict(PACE),
        "paced": True,
        "demo": True,
    }
    return JobSpec.model_validate(values | changes)


def worker_views(
    job: JobSpec, in_force: Plan | None, states: dict[str, RoleState], iteration: int
) -> tuple[WorkerView, ...]:
    guests: dict[str, int] = {}
    if in_force is not None:
        for op in in_force.schedule().compute_ops():
            if op.kind == "F" and op.rerouted:
                guests[str(op.worker)] = guests.get(str(op.worker), 0) + 1
    workers = []
    for p in range(job.pipelines):
        for s in range(job.stages):
            name = f"W{p}_{s}"
            usual = RoleState.REROUTED if guests.get(name) else RoleState.RUNNING
            state = states.get(name, usual)
            started = state is not RoleState.EMPTY
            workers.append(
                WorkerView(
                    name=name,
                    pipeline=p,
                    stage=s,
                    state=state,
                    takes_rerouted=guests.get(name, 0),
                    heartbeat_age=(7.4 if state is RoleState.SUSPECT else 0.3 + 0.05 * s) if started else None,
                    generation=2 if in_force is not None and in_force.failed else 1,
                    iteration=iteration,
                    phase="training" if started else "",
                    op_milliseconds={"F": 40.2, "I": 40.1, "W": 40.3} if started else {},
                    resident_bytes=412 * 2**20 if started else 0,
                    host="node-a" if started else "",
                    pid=4100 + 10 * p + s if started else 0,
                    acknowledged="resumed" if state in HOLDING else "",
                    detail="process ended with signal 9" if state is RoleState.FAILED else "",
                )
            )
    return tuple(workers)


def iteration_views(count: int, *, failed_at: int | None = None, fault_free: float = 0.98) -> tuple[IterationView, ...]:
    made = []
    for i in range(count):
        lost = failed_at is not None and i >= failed_at
        seconds = fault_free * (1 + 0.02 * ((i * 7) % 5) / 5) * (1.08 if lost else 1.0)
        if i == failed_at:
            seconds += 0.42
        made.append(
            IterationView(
                iteration=i,
                loss=5.5 * 0.985**i + 0.03 * ((i * 13) % 7) / 7 + 1.1,
                seconds=seconds,
                samples_per_second=36 / seconds,
                generation=2 if lost else 1,
                living=11 if lost else 12,
                committed_at=T0 + i,
            )
        )
    return tuple(made)


def running(**changes: object) -> JobView:
    """A healthy job after 30 iterations."""
    job, in_force = spec(), plan()
    view = JobView(
        job_id="job-1",
        spec=job,
        state=JobState.RUNNING,
        sentence="training on all 12 workers with the fault-free plan",
        created_at=T0,
        generation=1,
        workers=worker_views(job, in_force, {}, 30),
        plan=in_force,
        iterations=iteration_views(30),
        events=(
            EventView(3, T0 + 1, "info", "generation", None, "generation 1 opened: all 12 workers have registered"),
            EventView(2, T0 + 0.4, "info", "plan", None, "made the fault-free plan: period 960 ms"),
            EventView(1, T0, "info", "job", None, "job created: 3 pipelines x 4 stages, 6 micro-batches each"),
        ),
        recoveries=(),
        planned_ahead=19,
        plans_to_make=79,
        figures=Figures(MEASURED, 0.97, 0.94, 31.0, 30.07),
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def starting() -> JobView:
    job = spec()
    states = {f"W{p}_{s}": RoleState.EMPTY for p in range(3) for s in range(4) if (p, s) != (0, 0)}
    return running(
        state=JobState.STARTING,
        condition=Condition.STARTING,
        sentence="waiting for 11 of 12 workers to register",
        generation=0,
        workers=worker_views(job, None, states, 0),
        plan=None,
        iterations=(),
        events=(),
        planned_ahead=1,
    )


def lost(name: str) -> ProcessState:
    return ProcessState(f"{name}-a", "node-a", 4000, ((name, T0),), "failed", "process ended with signal 9")


def failed() -> JobView:
    """W1_2 died in iteration 18 and the job goes on without it."""
    base, in_force = running(), plan(("W1_2",))
    return replace(
        base,
        condition=Condition.DEGRADED,
        missing=(lost("W1_2"),),
        sentence="training on 11 workers; W1_2's micro-batches run on W0_2 and W2_2",
        generation=2,
        workers=worker_views(base.spec, in_force, {"W1_2": RoleState.FAILED}, 30),
        plan=in_force,
        iterations=iteration_views(30, failed_at=18),
        recoveries=(RecoveryView("W1_2", 2, 12.0, 61.0, 107.0, 283.0, T0 + 17.5, steps=STEPS),),
        events=(
            EventView(6, T0 + 17.9, "info", "recovery", "W1_2", "training resumed after 283 ms: iteration 18 redone"),
            EventView(5, T0 + 17.6, "info", "generation", None, "generation 2 opened without W1_2: plan looked up"),
            EventView(4, T0 + 17.5, "error", "failure", "W1_2", "W1_2 died: its process ended with signal 9"),
            *base.events,
        ),
    )


def suspect_and_joining() -> JobView:
    base = failed()
    states = {"W1_2": RoleState.JOINING, "W2_0": RoleState.SUSPECT}
    return replace(
        base,
        state=JobState.RECOVERING,
        condition=Condition.RECOVERING,
        missing=(),
        sentence="waiting for W2_0: last heard 7.4 s ago, dead at 20 s",
        workers=worker_views(base.spec, base.plan, states, 30),
    )


def halted() -> JobView:
    base = failed()
    states = {f"W{p}_2": RoleState.FAILED for p in range(3)}
    return replace(
        base,
        state=JobState.HALTED,
        condition=Condition.HALTED,
        missing=tuple(lost(name) for name in states),
        sentence="stage 2 has no living worker; bring back one of W0_2, W1_2, W2_2",
        workers=worker_views(base.spec, base.plan, states, 30),
    )


def finished() -> JobView:
    base = running()
    states = {w.name: RoleState.FINISHED for w in base.workers}
    return replace(
        base,
        spec=spec(iterations=30),
        state=JobState.FINISHED,
        condition=Condition.FINISHED,
        sentence="all 30 iterations are done",
        workers=worker_views(base.spec, base.plan, states, 30),
    )


def large(pipelines: int = 64, stages: int = 32) -> JobView:
    """2,048 workers with a few that need a look."""
    job = spec(name="large job", pipelines=pipelines, stages=stages, micro_batches=64, demo=False, paced=False)
    states = {"W3_5": RoleState.FAILED, "W20_9": RoleState.FAILED, "W40_1": RoleState.SUSPECT}
    return running(
        job_id="large",
        condition=Condition.SILENT,
        missing=(lost("W3_5"), lost("W20_9")),
        spec=job,
        workers=worker_views(job, None, states, 30),
        plan=None,
        generation=3,
    )


def summary(view: JobView) -> JobSummary:
    living = sum(w.state not in OUT for w in view.workers)
    return JobSummary(
        view.job_id,
        view.spec.name,
        view.state,
        view.sentence,
        view.created_at,
        view.generation,
        living,
        len(view.workers),
        view.condition,
    )


STATES = {
    "running": running,
    "starting": starting,
    "failed": failed,
    "suspect": suspect_and_joining,
    "halted": halted,
    "finished": finished,
}

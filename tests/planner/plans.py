"""Plans to export and compare, and their documents."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.plan import MetricsDoc, Plan, SolverDoc
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.portfolio import make_plan


@cache
def worked_example(technique: Technique = Technique.STAGGERED, *failed: str, pipelines: int = 3) -> Plan:
    """3 x 4 x 6 of one slot per op, without a memory limit."""
    dead = frozenset(map(Worker.parse, failed))
    problem = Problem(Job.uniform(pipelines, 4, 6), dead, technique, MemoryLimit("none"))
    return make_plan(problem, solver="list", look_ahead=False)


def listed(problem: Problem) -> Plan:
    """The list scheduler's plan, without a memory limit so that there always is one."""
    return make_plan(
        Problem(problem.job, problem.failed, problem.technique, MemoryLimit("none")), solver="list", look_ahead=False
    )


def as_plan(schedule: Schedule) -> Plan:
    """A Plan of any schedule, said to be optimal."""
    units = schedule.problem.job.units
    metrics = MetricsDoc(
        makespan=units(schedule.makespan),
        period=units(schedule.period),
        lower_bound=units(schedule.period),
        gap=0.0,
        bubble_fraction=schedule.bubble_fraction,
        slowdown_vs_1f1b=0.0,
        slowdown_vs_best=0.0,
        peak_activations={str(w): n for w, n in schedule.peak_activations.items()},
    )
    return Plan.of(schedule, metrics=metrics, solver=SolverDoc(name="test", status="optimal", seconds=0.0))


def with_another(plan: Plan, at: str, value: object) -> str:
    """The plan's document with another value at this place."""
    document: dict[str, Any] = json.loads(plan.to_json())
    place: Any = document
    *way, last = at.split(".")
    for name in way:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(last) if isinstance(place, list) else last] = value
    return json.dumps(document)

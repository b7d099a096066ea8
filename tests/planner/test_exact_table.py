"""CP-SAT against the MILP: two models that share no code, on the same routing, give one optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Run
from openrecycle.planner.solvers.cp_sat import ScheduleModel, run
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.milp import MilpSolver
from openrecycle.planner.solvers.routing import Reduction, routes_of
from tests.conftest import at_length

EVEN = StageProfile()
HEAVY = StageProfile(2, 3, 1, 1)
LATE = StageProfile(1, 2, 2, 0)
# A first stage without an input gradient: W is the whole backward.
FIRST = StageProfile(1, 0, 2, 1)
MEASURED = StageProfile(1, 1.1, 0.9, 0.5)
# Of which 5 bytes hold one whole, and a part of another.
SHRINKING = StageProfile(activation_bytes=3, weight_backward_bytes=1)
GROWING = StageProfile(activation_bytes=2, weight_backward_bytes=3)
ROOM = 5

# grid (pipelines, stages, micro-batches), technique, memory, failed, profiles, transfers
CASES = [
    ((2, 2, 2), "adaptive", "1f1b", "W0_0", (EVEN,), 0),
    ((2, 2, 2), "adaptive", "none", "W1_1", (EVEN,), 0),
    ((2, 2, 2), "decoupled", "1f1b", "W0_1", (EVEN,), 0),
    ((2, 2, 2), "staggered", "uniform", "W0_1", (EVEN,), 0),
    ((2, 2, 2), "staggered", "1", "W0_1", (EVEN,), 0),
    ((2, 2, 2), "staggered", "none", "W0_0 W1_1", (EVEN,), 1),
    ((2, 2, 2), "staggered", "bytes", "", (SHRINKING,), 0),
    ((2, 2, 2), "staggered", "bytes", "", (SHRINKING, GROWING), 1),
    ((2, 2, 2), "adaptive", "1", "W0_0 W1_1", (HEAVY, LATE), 1),
    ((2, 2, 2), "decoupled", "uniform", "W1_0", (FIRST, EVEN), 2),
    ((2, 2, 2), "staggered", "1f1b", "W1_0", (FIRST, LATE), 1),
    ((2, 2, 2), "adaptive", "1f1b", "W0_1", (MEASURED, MEASURED), 0),
    ((2, 2, 2), "staggered", "1f1b", "W0_1", (MEASURED, MEASURED), 0),
    ((2, 2, 3), "adaptive", "2", "W1_1", (EVEN,), 0),
    ((2, 2, 3), "decoupled", "none", "W1_1", (LATE, HEAVY), 0),
    ((2, 2, 3), "staggered", "uniform", "W1_0", (HEAVY, LATE), 1),
    ((2, 2, 3), "staggered", "none", "", (FIRST, EVEN), 0),
    ((2, 2, 3), "adaptive", "1f1b", "", (EVEN,), 1),
    ((2, 3, 2), "adaptive", "1f1b", "W0_1", (EVEN,), 0),
    ((2, 3, 2), "decoupled", "uniform", "W0_2", (EVEN,), 1),
    ((2, 3, 2), "staggered", "2", "W0_0 W1_2", (EVEN,), 0),
    ((2, 3, 2), "staggered", "2", "W0_1", (EVEN, HEAVY, LATE), 0),
    ((2, 3, 2), "adaptive", "none", "W1_1", (FIRST, LATE, EVEN), 2),
    ((2, 3, 3), "adaptive", "1f1b", "W0_1", (EVEN,), 0),
    ((2, 3, 3), "adaptive", "1", "W0_1", (EVEN,), 0),
    ((2, 3, 3), "decoupled", "1f1b", "W0_2", (EVEN,), 0),
    ((2, 3, 3), "staggered", "1f1b", "W0_1", (EVEN,), 0),
    ((2, 3, 3), "adaptive", "none", "W0_1", (HEAVY, LATE, HEAVY), 1),
    ((3, 2, 2), "adaptive", "1f1b", "W1_0 W2_0", (EVEN,), 0),
    ((3, 2, 2), "decoupled", "2", "W2_1", (EVEN, LATE), 0),
    ((3, 2, 3), "staggered", "uniform", "W2_1", (EVEN,), 0),
    ((3, 2, 3), "staggered", "2", "W0_0 W1_0", (EVEN,), 0),
    ((3, 3, 2), "decoupled", "none", "W1_1 W2_1", (EVEN,), 0),
    ((3, 3, 2), "staggered", "uniform", "W1_2 W0_0", (EVEN,), 0),
    ((3, 3, 3), "adaptive", "1f1b", "W1_1", (EVEN,), 0),
    ((3, 3, 3), "decoupled", "none", "W1_1", (EVEN,), 0),
    ((3, 3, 3), "staggered", "uniform", "W1_1", (EVEN,), 0),
]


def quick(case: tuple) -> bool:
    """Every technique and limit is among these, and what is soon proven of the rest."""
    grid, _, memory, failed, profiles, _ = case
    if MEASURED in profiles or (grid == (2, 2, 3) and profiles != (EVEN,) and failed):
        return False
    return grid in ((2, 2, 2), (2, 2, 3)) or (grid == (2, 3, 2) and memory != "2")


def problem_of(case: tuple) -> Problem:
    grid, technique, memory, failed, profiles, transfer = case
    stages = grid[1]
    profiles = profiles * stages if len(profiles) == 1 else profiles
    room = (ROOM,) * stages if memory == "bytes" else ()
    job = Job(*grid, profiles=profiles, transfers=(transfer,) * (stages - 1), capacity_bytes=room)
    workers = frozenset(Worker.parse(name) for name in failed.split())
    return Problem(job, workers, Technique(technique), MemoryLimit.parse(memory))


def name(case: tuple) -> str:
    grid, technique, memory, failed, profiles, transfer = case
    kind = "even" if profiles == (EVEN,) else "uneven"
    return f"{'x'.join(map(str, grid))}-{technique}-{memory}-{failed.replace(' ', '+') or 'healthy'}-{kind}-{transfer}"


def test_the_table_has_every_technique_and_limit() -> None:
    assert len(CASES) >= 30 and len(set(map(name, CASES))) == len(CASES)


# The last of each technique with each limit.
QUICK = list({c[1:3]: c for c in CASES if quick(c)}.values())


@pytest.mark.processes
@pytest.mark.parametrize("case", [c if c in QUICK else at_length(c) for c in CASES], ids=name)
def test_milp_and_cp_sat_agree(case: tuple) -> None:
    problem = problem_of(case)
    counted = problem
    if not problem.limits_are_exact:  # one that leaves something to find
        counted = replace(problem, memory=MemoryLimit(str(problem.limits[0])))
    warm = Schedule(problem, ListScheduler().solve(counted).schedule.ops)
    reduction = Reduction.of(problem, routes_of(warm))

    # CP-SAT with no bound and no hint to lean on.
    model = ScheduleModel(reduction, 0, warm.period)
    outcome = run(model.model, time_limit=60, workers=1, seed=0)
    assert outcome.proven
    by_cp_sat = reduction.schedule(model.read(outcome.solver))

    by_milp = MilpSolver().solve(problem, Run(60), warm_start=warm)
    assert "limit" not in by_milp.message.split(";")[0], by_milp.message

    assert check(by_cp_sat) == []
    assert check(by_milp.schedule) == []
    assert outcome.objective == by_cp_sat.period == by_milp.schedule.period
    assert by_milp.bound <= by_milp.schedule.period <= warm.period
    assert problem.limits_are_exact or by_milp.schedule.period < warm.period

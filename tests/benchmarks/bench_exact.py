"""The exact solvers' figures: `python -m tests.benchmarks.bench_exact [proofs] [blame] [slices]`.

proofs: time to proof of the worked example. CP-SAT starts from the slowest schedule there is, so
that neither the list scheduler nor an analytic bound does its work.
blame: on grids small enough to be solved exactly, whether the schedules of list scheduler and window
search or the analytic bound leave the gap.
slices: what large-neighbourhood search takes off the list scheduler's schedules in 10 s.

CPU seconds are this process's, all threads; wall seconds depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.plans.bounds import period_bound
from openrecycle.planner.plans.schedule import Schedule
from openrecycle.planner.solvers.base import Run
from openrecycle.planner.solvers.cp_sat import CpSatSolver, PooledModel, ScheduleModel, run
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.local_search import Rearranger
from openrecycle.planner.solvers.routing import Reduction
from tests.benchmarks.bench_planner import TIMES
from tests.benchmarks.machine import describe

FAILED = (Worker(1, 2),)
TARGETS = [
    ("fault-free", "1f1b", ()),
    ("adaptive", "1f1b", FAILED),
    ("adaptive", "3", FAILED),
    ("adaptive", "4", FAILED),
    ("adaptive", "none", FAILED),
    ("decoupled", "1f1b", FAILED),
    ("decoupled", "none", FAILED),
    ("staggered", "1f1b", FAILED),
    ("staggered", "uniform", FAILED),
    ("staggered", "none", FAILED),
    ("staggered", "uniform", ()),
    ("staggered", "none", ()),
]


def failures(pipelines: int, stages: int, count: int, seed: int) -> frozenset[Worker]:
    """`count` workers drawn at random, such that each stage keeps one."""
    grid = [Worker(p, s) for p in range(pipelines) for s in range(stages)]
    draw = random.Random(seed)
    while True:
        failed = frozenset(draw.sample(grid, count))
        if all(any(Worker(p, s) not in failed for p in range(pipelines)) for s in range(stages)):
            return failed


def proofs() -> None:
    print("worked example 3x4x6, F = I = W = 1: period proven, for the given routing and for all")
    print("technique   memory   failed  period  routing: wall, CPU s   all routings: wall, CPU s")
    for technique, memory, failed in TARGETS:
        problem = Problem(Job.uniform(3, 4, 6), frozenset(failed), Technique(technique), MemoryLimit.parse(memory))
        upper = 3 * 6 * 4 * 3
        reduction = Reduction.of(problem)
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = run((model := ScheduleModel(reduction, 0, upper)).model, time_limit=120, workers=2, seed=0)
        first = time.perf_counter() - wall, time.process_time() - cpu
        assert outcome.solved and check(reduction.schedule(model.read(outcome.solver))) == []
        wall, cpu = time.perf_counter(), time.process_time()
        pooled = run(PooledModel(problem, 0, outcome.objective or upper).model, time_limit=120, workers=2, seed=0)
        second = time.perf_counter() - wall, time.process_time() - cpu
        proof = "proven" if pooled.bound == outcome.objective else f"bound {pooled.bound}"
        print(
            f"{technique:<11} {memory:<8} {len(failed):>6}  {outcome.objective:>6}  "
            f"{first[0]:8.2f} {first[1]:8.2f} {'proven' if outcome.proven else 'open'}   "
            f"{second[0]:8.2f} {second[1]:8.2f} {proof}",
            flush=True,
        )


def blame(time_limit: float) -> None:
    print("F:I:W, grid, failures, memory: list scheduler / windows / optimum for its routing / bound / analytic bound")
    for f, i, w in TIMES:
        for grid, count in [((3, 4, 6), 1), ((3, 4, 6), 2), ((4, 4, 8), 1), ((4, 4, 8), 3), ((4, 6, 8), 2)]:
            for memory in ("uniform", str(2 * grid[1])):
                for seed in range(2):
                    failed = failures(grid[0], grid[1], count, seed)
                    job = Job.uniform(*grid, durations={"F": f, "I": i, "W": w})
                    _blame(Problem(job, failed, Technique.STAGGERED, MemoryLimit.parse(memory)), time_limit)


def _blame(problem: Problem, time_limit: float) -> None:
    first = ListScheduler().solve(problem)
    moved = Rearranger().solve(problem, Run(time_limit / 2), warm_start=first.schedule)
    best = CpSatSolver(free_routes=False).solve(problem, Run(time_limit), warm_start=moved.schedule)
    assert check(best.schedule) == []
    job = problem.job
    periods = [first.schedule.period, moved.schedule.period, best.schedule.period, best.bound, period_bound(problem)]
    times = ":".join(map(str, job.ticks[0][:3]))
    print(
        f"{times} {job.pipelines}x{job.stages}x{job.micro_batches} "
        f"{' '.join(map(str, sorted(problem.failed)))} {problem.memory.text}: {' / '.join(map(str, periods))}"
        f"  ({best.seconds:.1f} s; {'optimal' if best.optimal else best.message})",
        flush=True,
    )


def slices(time_limit: float) -> None:
    print("grid, failed, memory: bound, list scheduler, CP-SAT in the time given; gaps")
    for grid in ((8, 8, 16), (16, 8, 64)):
        for memory in ("uniform", str(2 * grid[1])):
            for percent in (0, 5, 10, 25):
                failed = failures(grid[0], grid[1], grid[0] * grid[1] * percent // 100, seed=1)
                problem = Problem(Job.uniform(*grid), failed, Technique.STAGGERED, MemoryLimit.parse(memory))
                first = ListScheduler().solve(problem)
                cpu = time.process_time()
                best = CpSatSolver().solve(problem, Run(time_limit), warm_start=first.schedule)
                assert check(best.schedule) == []
                print(
                    f"{'x'.join(map(str, grid))} {percent} % {memory}: {best.bound}, "
                    f"{gap(first.schedule, best.bound)}, {gap(best.schedule, best.bound)}"
                    f"  ({best.seconds:.1f} s, {time.process_time() - cpu:.1f} s CPU)",
                    flush=True,
                )


def gap(schedule: Schedule, bound: int) -> str:
    return f"{schedule.period} (+{schedule.period / bound - 1:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", nargs="*", default=["proofs"], help="proofs (the default), blame, slices")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds per problem")
    options = parser.parse_args()
    print(describe())
    kinds: dict[str, Callable[[], object]] = {
        "proofs": proofs,
        "blame": lambda: blame(options.time_limit),
        "slices": lambda: slices(options.time_limit),
    }
    for what in options.what:
        kinds[what]()
    print(describe())


if __name__ == "__main__":
    main()

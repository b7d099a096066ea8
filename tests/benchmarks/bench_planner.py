"""Prints the planner's figures: replanning speed, and gaps over a set of grids.

    python -m tests.benchmarks.bench_planner [speed]
    python -m tests.benchmarks.bench_planner gaps [--seconds 10] [--solver auto] [--grids 8x8x16,16x16x64]

Every figure comes with the machine's load, since others may be using it.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import time

from openrecycle.planner.check import check
from openrecycle.planner.jobs.job import UNEVEN_SCALES, Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.loops import worth_compiling
from openrecycle.planner.solvers.portfolio import make_plan

GRIDS = ("8x8x16", "16x8x64", "16x16x64", "32x64x128", "64x32x64")
FAILED = (0.0, 0.01, 0.05, 0.10, 0.25)
TIMES = ((1.0, 1.0, 1.0), (1.0, 1.1, 0.9))


def problem(
    grid: tuple[int, int, int],
    failed: float,
    memory: str,
    times: tuple[float, float, float] = TIMES[0],
    *,
    uneven: bool = False,
    seed: int = 0,
) -> Problem:
    """Random workers fail, so that each stage keeps a living one. Equal arguments, equal problem.

    grid: pipelines, stages, micro-batches. failed: a fraction of all workers. times: of F, I, W.
    """
    noise = random.Random(seed)
    pipelines, stages, micro_batches = grid
    scales = [noise.choice(UNEVEN_SCALES) if uneven else 1.0 for _ in range(stages)]
    f, i, w = times
    profiles = tuple(StageProfile(round(x * f, 3), round(x * i, 3), round(x * w, 3)) for x in scales)
    job = Job(pipelines, stages, micro_batches, profiles=profiles)
    workers = list(job.workers())
    noise.shuffle(workers)
    dead: set[Worker] = set()
    left = [pipelines] * stages
    for worker in workers:
        if len(dead) < round(failed * len(workers)) and left[worker.stage] > 1:
            dead.add(worker)
            left[worker.stage] -= 1
    return Problem(job, frozenset(dead), Technique.STAGGERED, MemoryLimit(memory))


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def speed() -> None:
    print(f"one replan by the list scheduler, 5 % failed, memory uniform, median of 5; {load()}")
    for grid in ((16, 16, 64), (32, 64, 64), (128, 128, 64)):
        workers, ops = grid[0] * grid[1], 3 * grid[0] * grid[1] * grid[2]
        kind = "compiled" if worth_compiling(ops) else "plain Python"
        begin = time.perf_counter()
        ListScheduler().solve(problem(grid, 0.05, "uniform", seed=99))
        first = time.perf_counter() - begin
        seconds, cpu = [], []
        for seed in range(5):
            question = problem(grid, 0.05, "uniform", seed=seed)
            wall, used = time.perf_counter(), time.process_time()
            solution = ListScheduler().solve(question)
            seconds.append(time.perf_counter() - wall)
            cpu.append(time.process_time() - used)
        begin = time.perf_counter()
        count = sum(map(len, solution.schedule.ops.values()))
        made = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{workers:6d} workers x {grid[2]} micro-batches ({ops:,} ops, {kind}): "
            f"{statistics.median(seconds):.3f} s wall, {statistics.median(cpu):.3f} s CPU (first use {first:.2f} s), "
            f"gap {solution.schedule.period / solution.bound - 1:.1%}; "
            f"all {count:,} op objects {made:.2f} s; peak memory {peak:.0f} MiB"
        )


def gaps(grids: list[str], solver: str, seconds: float) -> None:
    print(f"gap = period / bound - 1; solver {solver}, {seconds:g} s at most; {load()}")
    print("grid       memory   F:I:W        stages " + "".join(f"{f:>8.0%}" for f in FAILED))
    for name in grids:
        pipelines, stages, micro_batches = map(int, name.split("x"))
        for memory in ("uniform", str(2 * stages)):
            for times in TIMES:
                for uneven in (False, True):
                    row = []
                    for failed in FAILED:
                        question = problem((pipelines, stages, micro_batches), failed, memory, times, uneven=uneven)
                        plan = make_plan(question, solver=solver, time_limit=seconds)
                        ops = sum(map(len, plan.workers.values()))
                        wrong = check(plan) if ops < 100_000 else []
                        row.append("invalid" if wrong else f"{plan.metrics.gap:.1%}")
                    label = f"{name:10s} {memory:8s} {':'.join(f'{t:g}' for t in times):12s} "
                    label += "uneven " if uneven else "even   "
                    print(label + "".join(f"{cell:>8}" for cell in row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="speed", choices=("speed", "gaps"))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--solver", default="auto", choices=("auto", "list", "cp-sat"))
    parser.add_argument("--grids", default=",".join(GRIDS))
    options = parser.parse_args()
    if options.what == "speed":
        speed()
    else:
        gaps(options.grids.split(","), options.solver, options.seconds)


if __name__ == "__main__":
    main()

"""`openrecycle bench`: how good the plans of this machine are, and how soon they are there."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.jobs.profile import UNEVEN_SCALES
from openrecycle.planner.solvers.portfolio import best_solution

GRIDS = ("8x8x16", "16x8x64", "16x16x64", "32x64x128", "64x32x64")
QUICK_GRIDS = ("4x4x8", "8x8x16")
FAILED = (0.0, 0.01, 0.05, 0.10, 0.25)
QUICK_FAILED = (0.0, 0.10)
TIMES = ((1.0, 1.0, 1.0), (1.0, 1.1, 0.9))
SOLVERS = ("list", "auto")
HEADER = f"{'grid':>10} {'failed':>7} {'solver':>7} {'period':>9} {'bound':>9} {'gap':>7} {'seconds':>8}  made by"


@dataclass(frozen=True)
class BenchRow:
    """One plan. failed: workers. period, bound: slots. gap: period / bound - 1. load: see `machine_load`."""

    grid: str
    failed: int
    solver: str
    period: float
    bound: float
    gap: float
    seconds: float
    made_by: str
    load: float

    def __str__(self) -> str:
        return (
            f"{self.grid:>10} {self.failed:>7} {self.solver:>7} {self.period:>9g} {self.bound:>9g} "
            f"{self.gap:>7.2%} {self.seconds:>8.3f}  {self.made_by}"
        )


def bench_problem(
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


def machine_load() -> float:
    """Processes that wanted to run in the last minute, on average: others may use the machine too."""
    return round(os.getloadavg()[0], 2)


def load() -> str:
    return f"load {machine_load():.1f} on {os.cpu_count()} cores"


def bench_command(
    quick: Annotated[bool, typer.Option(help="Two small grids and 1 second for each plan.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Seconds at most for each plan of auto (10; quick 1).")] = None,
    memory: Annotated[str, typer.Option(help="Activations per worker: 1f1b, uniform, none or a number.")] = "uniform",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Plan a set of grids: period, proven bound, gap, time. The failures are random and always the same."""
    limit = (1.0 if quick else 10.0) if seconds is None else seconds
    if not 0 < limit < float("inf"):
        raise InputError("--seconds", limit, "a number of seconds above 0")
    limited = MemoryLimit.parse(memory)
    if limited.text == "bytes":
        raise InputError(
            "--memory", memory, "1f1b, uniform, none or a number: the grids of the benchmark have no bytes"
        )
    if not as_json:
        print(f"memory {limited.text}, staggered, F:I:W 1:1:1; auto gets {limit:g} s; {load()}")
        print(HEADER)
    rows = []
    for grid in QUICK_GRIDS if quick else GRIDS:
        for failed in QUICK_FAILED if quick else FAILED:
            for solver in SOLVERS:
                rows.append(_row(grid, failed, limited.text, solver, limit))
                if not as_json:
                    print(rows[-1], flush=True)
    if as_json:
        machine = {"cores": os.cpu_count(), "load": machine_load()}
        document = {"memory": limited.text, "seconds": limit, "machine": machine, "rows": [asdict(r) for r in rows]}
        sys.stdout.write(json.dumps(document) + "\n")


def _row(grid: str, failed: float, memory: str, solver: str, limit: float) -> BenchRow:
    pipelines, stages, micro_batches = map(int, grid.split("x"))
    problem = bench_problem((pipelines, stages, micro_batches), failed, memory)
    begin = time.perf_counter()
    solution = best_solution(problem, solver=solver, time_limit=limit)
    taken = time.perf_counter() - begin
    period = solution.schedule.period
    bound = min(solution.bound, period)
    return BenchRow(
        grid,
        len(problem.failed),
        solver,
        problem.job.units(period),
        problem.job.units(bound),
        period / bound - 1,
        round(taken, 3),
        solution.solver,
        machine_load(),
    )

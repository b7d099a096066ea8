"""After a failure, against torchft on the same model and grid, in turns: samples a second.

torchft drops the pipeline that lost a worker, and with it the pipeline's micro-batches; here the peers of
the dead worker's stage take them over. Ops are paced equally in both (F, I, W of 40 ms, B of 80, a
step of 20 with the reduction in it), so that the schedules are compared and not this machine's cores.
Our plan reckons with 2 ms a transfer, as a measured profile would. At the memory limit given, its
period with one failure is that of fault-free 1F1B without any transfers. A third job is ours with the same work in 44
layers, of which some move to other stages after the death.

Needs torchft in a folder of its own (see requirements-torchft.txt); says so where it is not there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from openrecycle.planner.plans.baseline import reference_period
from tests.agent.runs import launch
from tests.benchmarks.machine import describe

TORCHFT = Path(".venv-torchft")
PIPELINES, STAGES, MICRO_BATCHES, MEMORY = 3, 4, 6, "8"
OPS = {"F": 40.0, "I": 40.0, "W": 40.0, "O": 20.0}
TRANSFER = {"transfer": 2.0}
MODEL = {"width": 32, "heads": 2, "sequence": 16, "batch": 2}
DEAD = Worker(1, 1)
# Iterations: the first ones warm up, the one of the death and the next are not counted either.
TURNS, KILLED_AT, SKIPPED, COUNTED = 2, 4, 2, 6
ITERATIONS = KILLED_AT + SKIPPED + COUNTED
LAYERS, MOVES = 44, 6
"""Of the job whose layers move: iterations that they may take for it."""


def main() -> None:
    print(describe())
    if not (TORCHFT / "torchft").is_dir():
        print(
            "skipped: torchft is not installed; .venv/bin/pip install --no-deps --target .venv-torchft "
            "-r tests/benchmarks/requirements-torchft.txt brings it"
        )
        return
    ours: list[float] = []
    layered: list[float] = []
    theirs: list[float] = []
    lost = {"ours": [0.0], "ours, layers move": [0.0], "torchft": [0.0]}
    for _ in range(TURNS):
        seconds = _ours()
        ours += seconds[-COUNTED:]
        lost["ours"].append(seconds[KILLED_AT])
        seconds = _ours(LAYERS)
        layered += seconds[-COUNTED:]
        lost["ours, layers move"].append(seconds[KILLED_AT])
        seconds = _theirs()
        theirs += seconds[-COUNTED:]
        lost["torchft"].append(seconds[KILLED_AT])
    per_pipeline = MICRO_BATCHES * MODEL["batch"]
    rate_ours = PIPELINES * per_pipeline / statistics.median(ours)
    rate_layered = PIPELINES * per_pipeline / statistics.median(layered)
    rate_theirs = (PIPELINES - 1) * per_pipeline / statistics.median(theirs)
    planned, reference = _periods()
    print(
        f"{PIPELINES} x {STAGES} workers, {MICRO_BATCHES} micro-batches a pipeline, {DEAD} dead: "
        f"planned period {planned:.0f} ms, fault-free 1F1B {reference:.0f} ms (slowdown {planned / reference - 1:.1%})"
    )
    for name, times, rate, pipelines in (
        ("ours", ours, rate_ours, PIPELINES),
        ("ours, layers move", layered, rate_layered, PIPELINES),
        ("torchft", theirs, rate_theirs, PIPELINES - 1),
    ):
        print(
            f"  {name:17} {pipelines * per_pipeline} samples in {1000 * statistics.median(times):.1f} ms (median of "
            f"{len(times)}, {1000 * min(times):.0f} to {1000 * max(times):.0f}): {rate:.2f} samples/s; iteration of "
            f"the death {1000 * statistics.median(lost[name][1:]):.0f} ms"
        )
    goal = PIPELINES / (PIPELINES - 1)
    print(f"ours/torchft {rate_ours / rate_theirs:.3f} (goal {goal:.3f})")
    print(f"ours with layers that move/torchft {rate_layered / rate_theirs:.3f}")
    print(describe())


def _periods() -> tuple[float, float]:
    """Milliseconds: of the plan without DEAD, and of fault-free 1F1B."""
    ours, plain = (
        Job.uniform(PIPELINES, STAGES, MICRO_BATCHES, durations=durations, time_unit="ms")
        for durations in (OPS | TRANSFER, OPS)
    )
    plan, _ = Catalog(ours, Technique.STAGGERED, MemoryLimit.parse(MEMORY)).plan_for([DEAD])
    return plan.schedule().period / ours.ticks_per_unit, reference_period(plain) / plain.ticks_per_unit


def _ours(layers: int = 0) -> list[float]:
    """layers: of the same model; 0: a stage is one, and can't be cut."""
    each = STAGES / layers if layers else 1.0
    pace = ",".join(f"{kind}={ms if kind == 'transfer' else each * ms:.3f}ms" for kind, ms in (OPS | TRANSFER).items())
    model = MODEL | ({"layers": layers} if layers else {})
    with tempfile.TemporaryDirectory() as folder:
        run = launch(
            Path(folder) / "run.jsonl",
            *("--pipelines", str(PIPELINES), "--stages", str(STAGES), "--micro-batches", str(MICRO_BATCHES)),
            *("--pace", pace, "--pace-per", "layer" if layers else "stage", "--memory", MEMORY),
            *("--iterations", str(ITERATIONS + (MOVES if layers else 0))),
            *("--kill", f"{DEAD}@{KILLED_AT}:F{DEAD.pipeline}.0", "--workload-options", json.dumps(model)),
        )
    assert run.status == 0, run.errors
    assert {line["living"] for line in run.iterations[-COUNTED:]} == {PIPELINES * STAGES - 1}
    moved = [line["relayout"] for line in run.lines if "relayout" in line]
    assert bool(moved) == bool(layers) and all(m["iteration"] < ITERATIONS + MOVES - COUNTED for m in moved), moved
    return [line["seconds"] for line in run.iterations]


def _theirs() -> list[float]:
    job = {
        "pipelines": PIPELINES,
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
        "iterations": ITERATIONS,
        "pace": {kind: ms / 1000 for kind, ms in OPS.items()},
        "model": MODEL,
        "kill": [DEAD.pipeline, DEAD.stage, KILLED_AT],
    }
    path = os.pathsep.join(filter(None, (str(TORCHFT.resolve()), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.reference_torchft", json.dumps(job)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    iterations = json.loads(done.stdout.splitlines()[-1])
    assert [replicas for _, replicas, _ in iterations[-COUNTED:]] == [PIPELINES - 1] * COUNTED, iterations
    # The first iteration's length is not known: what came before it was the start.
    return [float("nan")] * (ITERATIONS - len(iterations)) + [seconds for _, _, seconds in iterations]


if __name__ == "__main__":
    main()

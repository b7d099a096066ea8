"""Does a plan made from a measured profile predict the real period?

A GPT of ops of some milliseconds is profiled, a plan is made from the profile, and the job runs with
that plan, unpaced, on grids of no more processes than this machine has cores. Predicted is the
plan's period; real is the median time between commits. The profile and the run see the same machine,
so the load of other programs distorts both, and the run more: its processes need their cores at the
same time. On a busy machine the ratio says little.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from planner.catalog import Catalog
from planner.job import MemoryLimit, Technique
from planner.profiles import Profile, load_profile
from tests.agent.runs import launch
from tests.benchmarks.machine import describe

WORKLOAD = ("--workload-options", '{"width": 256, "heads": 4, "blocks": 2, "sequence": 128, "batch": 2, "dropout": 0}')
MICRO_BATCHES = 6
ITERATIONS, WARM_UP = 16, 4
# One worker alone has no transfer, no reduction and no rival: what is left is the executor's own time.
GRIDS = ((1, 1), (1, 2), (2, 1))


def main() -> None:
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        for pipelines, stages in GRIDS:
            if pipelines * stages > (os.cpu_count() or 1):
                continue
            profile = Path(folder) / "profile.json"
            grid = ("--pipelines", str(pipelines), "--stages", str(stages), "--micro-batches", str(MICRO_BATCHES))
            made = _profile(profile, grid)
            run = launch(
                Path(folder) / "run.jsonl",
                *(*grid, *WORKLOAD, "--profile", str(profile), "--iterations", str(ITERATIONS)),
            )
            assert run.status == 0, run.errors
            seconds = [line["seconds"] for line in run.iterations[WARM_UP:]]
            real, predicted = 1000 * statistics.median(seconds), _period(made)
            print(
                f"{pipelines} x {stages}: predicted {predicted:.1f} ms, real {real:.1f} ms "
                f"({1000 * min(seconds):.0f} to {1000 * max(seconds):.0f}), real/predicted {real / predicted:.3f}; "
                f"spread of the profile {made.spread:.0%}"
            )
    print(describe())


def _profile(out: Path, grid: tuple[str, ...]) -> Profile:
    command = [sys.executable, "-m", "agent", "profile", "--workload", "agent.examples.gpt:Gpt", *WORKLOAD, *grid]
    subprocess.run(
        [*command, "--repeats", "30", "--warm-up", "5", "--allow-spread", "--out", str(out)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return load_profile(out)


def _period(made: Profile) -> float:
    """Milliseconds, of the plan that the launcher's catalog has for the whole grid."""
    job = made.job.job()
    schedule = Catalog(job, Technique.STAGGERED, MemoryLimit.parse("uniform")).plan_for(())[0].schedule()
    return schedule.period / job.ticks_per_unit


if __name__ == "__main__":
    main()

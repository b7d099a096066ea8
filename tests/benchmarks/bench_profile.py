"""Does a plan made from a measured profile predict the real period?

A GPT of ops of some milliseconds is profiled, a plan is made from the profile, and the job runs with
that plan, unpaced, on grids of no more processes than this machine has cores. Predicted is the
plan's period; real is the median time between commits. The profile and the run see the same machine,
so the load of other programs distorts both, and the run more: its processes need their cores at the
same time; on a busy machine that ratio says little. So a second one is printed, of processor time alone:
what the workers take of it per iteration, over what a profile by the `cpu` clock says their ops take.
Above 1 is what no op accounts for: transfers, reductions, waiting, reporting.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agent.start import StartOptions, make_launcher
from agent.workload import NamedWorkload
from planner.catalog import Catalog
from planner.job import MemoryLimit, Technique
from planner.profiles import Profile, load_profile
from tests.agent.runs import launch
from tests.benchmarks.machine import describe

SIZES = {"width": 256, "heads": 4, "blocks": 2, "sequence": 128, "batch": 2, "dropout": 0}
WORKLOAD = ("--workload-options", json.dumps(SIZES))
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
            taken, said = _processor_time(_profile(profile, grid, "cpu"), (pipelines, stages))
            made = _profile(profile, grid, "wall")
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
                f"spread of the profile {made.spread:.0%}; processor time {taken:.1f} of {said:.1f} ms, "
                f"{taken / said:.3f}"
            )
    print(describe())


def _processor_time(made: Profile, grid: tuple[int, int]) -> tuple[float, float]:
    """Milliseconds per iteration of all workers together: taken, and by the profile."""
    marks: list[float] = []

    def listen(line: dict[str, Any]) -> None:
        if "iteration" in line:
            marks.append(sum(_processor_seconds(pid) for name, pid in launcher.pids.items() if name != "store"))

    options = StartOptions(
        job=made.job.job(), iterations=ITERATIONS, workload=NamedWorkload("agent.examples.gpt:Gpt", SIZES)
    )
    launcher = make_launcher(options, listen, print)
    launcher.run()
    each = sum(
        MICRO_BATCHES * (p.forward + p.input_backward + p.weight_backward) + p.optimizer for p in options.job.profiles
    )
    # The last mark may come after workers have ended.
    return 1000 * (marks[-2] - marks[WARM_UP]) / (len(marks) - 2 - WARM_UP), grid[0] * each


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _profile(out: Path, grid: tuple[str, ...], clock: str) -> Profile:
    command = [sys.executable, "-m", "agent", "profile", "--workload", "agent.examples.gpt:Gpt", *WORKLOAD, *grid]
    subprocess.run(
        [*command, "--clock", clock, "--repeats", "30", "--warm-up", "5", "--allow-spread", "--out", str(out)],
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

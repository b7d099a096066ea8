"""Does a plan made from a measured profile predict the real period?

A GPT of ops of some milliseconds is profiled, a plan is made from the profile, and the job runs with
that plan. Three times over, since one profile is one moment of the machine; each line is the middle of
the three, with the three behind it.

Unpaced, on grids of no more processes than this machine has cores, for the worker that is furthest off:

    instructions     what it executes per iteration, all its threads together, over what the profile's ops
                     and step do. Their number does not depend on what else the machine does: it says
                     whether the profile leaves anything out. Reductions and transfers are no ops.
    processor time   the same in time, over a profile by the `cpu` clock. Programs that share caches
                     and memory with the job change it by some percent, from one minute to the next.
    period           median time between commits over the plan's period; and the quickest iteration's.
                     On a machine with other work neither says much.

Paced by the profile, on a grid of more workers than cores: ops are stretched, those of each stage by a
factor of its own and those of one worker once more, so that the cores suffice and nothing is even. Real
period over planned period, without and with a failure.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from openrecycle.agent.config.options import Optimization, TrainingOptions
from openrecycle.agent.jobs.start import make_launcher
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.profiling import ProfilingEffort, StageBenchmark, StageRun
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, StageProfile, Technique, Worker
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.profiles import load_profile
from tests.agent.runs import launch
from tests.benchmarks.instructions import counter, process_counter
from tests.benchmarks.machine import describe

PATH = "openrecycle.agent.examples.gpt:Gpt"
# What no plan leaves empty: ops of 10 ms, whose overheads are those of real stages and not all there is.
SIZES = {"width": 256, "heads": 4, "blocks": 2, "sequence": 128, "batch": 2, "dropout": 0}
MICRO_BATCHES = 6
ITERATIONS, WARM_UP = 16, 4
ROUNDS = 3
# One worker alone has no transfer, no reduction and no rival: what is left is the executor's own time.
GRIDS = ((1, 1), (1, 2), (2, 1))
GOAL = 1.05

PACED = (2, 3, 6)
SMALL = {"width": 64, "heads": 2, "blocks": 1, "sequence": 64, "batch": 2, "dropout": 0}
STRETCH = (16.0, 24.0, 12.0)
SLOW = (Worker(0, 2), 0.75)
DEAD = Worker(1, 1)
SKIPPED, COUNTED = 3, 8


@dataclass(frozen=True)
class Measured:
    """Ratios to what was planned, and the period planned, in ms. instructions: None where nobody counts them."""

    instructions: float | None
    processor: float
    median: float
    quickest: float
    planned: float


def main() -> None:
    print(describe())
    for pipelines, stages in GRIDS:
        if pipelines * stages <= (os.cpu_count() or 1):
            found = [_unpaced((pipelines, stages, MICRO_BATCHES)) for _ in range(ROUNDS)]
            planned = statistics.median(m.planned for m in found)
            print(f"{pipelines} x {stages} x {MICRO_BATCHES}, planned period {planned:.1f} ms:")
            counted = [m.instructions for m in found if m.instructions is not None]
            print(f"  instructions     {_ratio(counted) if counted else 'can not be counted here'}")
            print(f"  processor time   {_ratio([m.processor for m in found])}")
            print(f"  period           {_ratio([m.median for m in found])}")
            print(f"  quickest         {_ratio([m.quickest for m in found])}")
    print(f"{' x '.join(map(str, PACED))}, paced by a profile whose stages differ:")
    runs = [_paced() for _ in range(ROUNDS)]
    for failures, words in enumerate(("no failure", f"{DEAD} out")):
        print(f"  {words:<16} {_ratio([run[failures] for run in runs])}")
    print(describe())


def _ratio(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} (goal {GOAL})   {', '.join(f'{v:.3f}' for v in sorted(values))}"


# -- unpaced -----------------------------------------------------------------------------------


def _unpaced(grid: tuple[int, int, int]) -> Measured:
    job = _profiled(grid, SIZES)
    marks: list[dict[str, tuple[float, float]]] = []
    seconds: list[float] = []
    counters: dict[str, Callable[[], float]] = {}

    def listen(line: dict[str, Any]) -> None:
        """At every commit: instructions and processor seconds so far, by worker."""
        if "iteration" in line:
            seconds.append(line["seconds"])
            workers = launcher.pids
            if not counters:
                counters.update({name: process_counter(pid) for name, pid in workers.items()})
            marks.append({name: (counters[name](), _processor_seconds(pid)) for name, pid in workers.items()})

    options = TrainingOptions(job=job, iterations=ITERATIONS)
    launcher = make_launcher(options, NamedWorkload(PATH, SIZES), listen, print)
    launcher.run()
    # Workers may have ended by the last mark.
    begin, end = marks[WARM_UP], marks[-2]
    count = len(marks) - 2 - WARM_UP
    own = _instructions(job)
    executed, processor = [], []
    for worker in job.workers():
        instructions, time = (
            after - before for before, after in zip(begin[str(worker)], end[str(worker)], strict=True)
        )
        processor.append(1000 * time / count / _busy(job.profiles[worker.stage], job.micro_batches))
        if own:
            executed.append(instructions / count / own[worker.stage])
    planned, counted = _period(job, ()), [1000 * s for s in seconds[WARM_UP:]]
    return Measured(
        max(executed, key=lambda r: abs(r - 1), default=None),
        max(processor, key=lambda r: abs(r - 1)),
        statistics.median(counted) / planned,
        min(counted) / planned,
        planned,
    )


def _instructions(job: Job) -> list[float]:
    """Millions of one iteration, by stage, as the profiler runs it; [] where they can't be counted."""
    if (read := counter()) is None:
        return []
    torch.set_num_threads(1)  # the only one, which is counted
    out = []
    for stage in range(job.stages):
        run = StageRun(Worker(0, stage), job, NamedWorkload(PATH, SIZES), Optimization(), ProfilingEffort(), 1)
        bench = StageBenchmark(run, read)
        rounds = [bench.round() for _ in range(2 * WARM_UP)][WARM_UP:]
        one = {kind: statistics.median(r[kind] for r in rounds) for kind in rounds[0]}
        out.append(job.micro_batches * (one["F"] + one["I"] + one["W"]) + one["O"])
    return out if all(out) else []  # the processor has few counters, and others may hold them


def _busy(profile: StageProfile, micro_batches: int) -> float:
    """Milliseconds of an iteration that one worker computes, its reduction included."""
    each = profile.forward + profile.input_backward + profile.weight_backward
    return micro_batches * each + profile.optimizer + (profile.reductions[-1] if profile.reductions else 0.0)


def _processor_seconds(pid: int) -> float:
    """Of all threads, the ones of gloo included."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


# -- paced by the profile ----------------------------------------------------------------------


def _paced() -> list[float]:
    """Real over planned period, without a failure and with one."""
    job = _stretched(_profiled(PACED, SMALL))
    each = SKIPPED + COUNTED
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "job.json"
        document.write_text(job_doc(job).model_dump_json())
        run = launch(
            Path(folder) / "run.jsonl",
            *("--profile", str(document), "--pace", "profile", "--iterations", str(2 * each)),
            *("--kill", f"{DEAD}@{each}:F{DEAD.pipeline}.2", "--workload-options", json.dumps(SMALL)),
        )
    assert run.status == 0, run.errors
    seconds = [line["seconds"] for line in run.iterations]
    out = []
    for failures, begin in enumerate((0, each)):
        real = 1000 * statistics.median(seconds[begin + SKIPPED : begin + each])
        out.append(real / _period(job, (DEAD,)[:failures]))
    return out


def _stretched(job: Job) -> Job:
    """Transfers, which aren't paced, stay as long as they are."""

    def stretched(profile: StageProfile, factor: float) -> StageProfile:
        return replace(
            profile,
            forward=round(factor * profile.forward, 3),
            input_backward=round(factor * profile.input_backward, 3),
            weight_backward=round(factor * profile.weight_backward, 3),
            optimizer=round(factor * profile.optimizer, 3),
            reductions=tuple(round(factor * ms, 3) for ms in profile.reductions),
        )

    profiles = tuple(stretched(p, factor) for p, factor in zip(job.profiles, STRETCH, strict=True))
    return replace(job, profiles=profiles, speeds=(SLOW,))


# -- both --------------------------------------------------------------------------------------


def _profiled(grid: tuple[int, int, int], sizes: dict[str, int]) -> Job:
    """By the `cpu` clock, as `openrecycle profile` does it."""
    pipelines, stages, micro_batches = map(str, grid)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.json"
        subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "agent",
                    "profile",
                    "--workload",
                    PATH,
                    "--workload-options",
                    json.dumps(sizes),
                ),
                *("--pipelines", pipelines, "--stages", stages, "--micro-batches", micro_batches),
                *("--repeats", "16", "--warm-up", "4", "--spread-limit", "inf", "--out", str(out)),
            ],
            check=True,
            capture_output=True,
            timeout=300,
        )
        return load_profile(out).job.job()


def _period(job: Job, failed: Sequence[Worker]) -> float:
    """Milliseconds, of the plan that the launcher's catalog has for this failure set."""
    plan = Catalog(job, Technique.STAGGERED, MemoryLimit.parse("uniform")).plan_for(failed)[0]
    return float(plan.metrics.period)


if __name__ == "__main__":
    main()

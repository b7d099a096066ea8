"""Does a plan's period come true? 12 workers whose ops take 40 ms each, with 0, 1 and 2 failures.

Ops are paced (the real computation is inside), so that this machine's cores don't hide the schedule.
Each run loses one worker after the other; the period of a generation is the time between the commits of
its iterations, without the ones that warm up and the one that is redone. The planned period is that
of the plan the workers run. Two runs: with a step (reduction and optimizer) of 20 ms that the plan
knows of, as a measured profile has it; and with the steps as long as they take, which the plan takes
for nothing.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique, Worker
from tests.agent.runs import launch
from tests.benchmarks.machine import describe

PIPELINES, STAGES, MICRO_BATCHES = 3, 4, 6
OPS = {"F": 40.0, "I": 40.0, "W": 40.0}
DEATHS = (Worker(1, 2), Worker(2, 1))
# Of each generation: iterations that are not counted (warming up, or redone), and the ones that are.
SKIPPED, COUNTED = 2, 6
GOAL = 1.03
TINY = ("--workload-options", '{"width": 32, "heads": 2, "sequence": 16, "batch": 2}')


def main() -> None:
    print(describe())
    for durations in ({**OPS, "O": 20.0}, OPS):
        told = ", ".join(f"{kind} {ms:g} ms" for kind, ms in durations.items())
        print(f"the plan knows of {told}:")
        periods = _measured(durations)
        for failures, seconds in enumerate(periods):
            planned = _planned(durations, DEATHS[:failures])
            real = 1000 * statistics.median(seconds)
            print(
                f"  {failures} failed: planned {planned:.0f} ms, real {real:.1f} ms (median of {len(seconds)}, "
                f"{1000 * min(seconds):.0f} to {1000 * max(seconds):.0f}), real/planned {real / planned:.3f}"
                f" (goal {GOAL})"
            )
    print(describe())


def _planned(durations: dict[str, float], failed: Sequence[Worker]) -> float:
    """Milliseconds, of the plan that the launcher's catalog has for this failure set."""
    job = Job.uniform(PIPELINES, STAGES, MICRO_BATCHES, durations=durations, time_unit="ms")
    schedule = Catalog(job, Technique.STAGGERED, MemoryLimit.parse("uniform")).plan_for(failed)[0].schedule()
    return schedule.period / job.ticks_per_unit


def _measured(durations: dict[str, float]) -> list[list[float]]:
    """Seconds of the counted iterations, by number of failures."""
    each = SKIPPED + COUNTED
    kills = [f"{worker}@{each * (n + 1)}:F{worker.pipeline}.2" for n, worker in enumerate(DEATHS)]
    with tempfile.TemporaryDirectory() as folder:
        run = launch(
            Path(folder) / "run.jsonl",
            *("--pipelines", str(PIPELINES), "--stages", str(STAGES), "--micro-batches", str(MICRO_BATCHES)),
            *("--pace", ",".join(f"{kind}={ms:g}ms" for kind, ms in durations.items())),
            *("--iterations", str(each * (len(DEATHS) + 1))),
            *(word for kill in kills for word in ("--kill", kill)),
            *TINY,
        )
    assert run.status == 0, run.errors
    seconds = [line["seconds"] for line in run.iterations]
    return [seconds[each * n + SKIPPED : each * (n + 1)] for n in range(len(DEATHS) + 1)]


if __name__ == "__main__":
    main()

"""What a lost worker costs when layers move: real jobs, paced per layer, on this machine.

The grid 3 x 4 x 6 with 44 equal layers of 4 ms an op. Prints, as ratios inside one run: the throughput that is left
after one death, re-routed and after the move; the real period against the planned one; and how much longer the
iteration of the move took than its neighbours. Load is printed: on a busy machine the ratios of paced jobs grow.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from openrecycle.agent.config.options import Faults, Planning, TrainingOptions
from openrecycle.agent.jobs.start import make_launcher
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Job, Worker

SMALL = {"width": 8, "heads": 1, "sequence": 4, "batch": 1}


def run(layers: int, milliseconds: float, iterations: int, kill: str) -> tuple[list[dict[str, Any]], Catalog]:
    source = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", {**SMALL, "layers": layers})
    pace = ",".join(f"{kind}={milliseconds:g}ms" for kind in "FIW")
    options = TrainingOptions(
        job=Job(3, 4, 6),
        iterations=iterations,
        planning=Planning(pace=pace, pace_per="layer"),
        faults=Faults(kill=(kill,)),
    )
    lines: list[dict[str, Any]] = []
    launcher = make_launcher(options, source, lines.append, lambda _: None)
    launcher.run()
    technique, memory = options.planning.limits
    job = options.planning.layered(options.planning.job(options.job), layers)
    return lines, Catalog(job, technique, memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=44)
    parser.add_argument("--milliseconds", type=float, default=4.0)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--kill", default="W1_2@10:F2")
    given = parser.parse_args()
    lines, plans = run(given.layers, given.milliseconds, given.iterations, given.kill)
    moved = next(line["relayout"] for line in lines if "relayout" in line)
    seconds = {line["iteration"]: line["seconds"] for line in lines if "iteration" in line}
    generations = {line["iteration"]: line["generation"] for line in lines if "iteration" in line}
    killed = int(given.kill.partition("@")[2].partition(":")[0])
    lost = [Worker.parse(given.kill.partition("@")[0])]
    healthy = statistics.median(seconds[i] for i in range(2, killed))
    rerouted = [s for i, s in seconds.items() if i > killed and generations[i] == 2]
    after = [s for i, s in seconds.items() if i > moved["iteration"] + 1]
    planned = plans.at(tuple(moved["partition"])).plan_for(lost)[0].metrics.period / 1000
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"fault-free iteration {healthy:.3f} s, planned {plans.plan_for([])[0].metrics.period / 1000:.3f} s")
    if rerouted:
        print(f"re-routed: {healthy / statistics.median(rerouted):.1%} of fault-free")
    new = statistics.median(after)
    print(f"after the move to {moved['partition']}: {healthy / new:.1%} of fault-free, {new / planned:.3f} of the plan")
    during = [s for i, s in seconds.items() if generations[i] == moved["generation"] and i <= moved["iteration"]]
    base = statistics.median(rerouted) if rerouted else new
    extra = sum(max(0.0, s - base) for s in during)
    print(f"the move took {extra / new:.2f} iterations more, over {len(during)}; the change {moved['stall_ms']} ms")


if __name__ == "__main__":
    main()

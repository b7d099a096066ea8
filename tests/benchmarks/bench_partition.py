"""What is lost against the best layout whatever, when layers may move: gaps over random jobs, time, and deaths in the
demo's grid.

The gap is that of the list scheduler's plan to the bound over all partitions of the job's layers.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence

from openrecycle.planner.jobs.job import Job, LayerProfile, MemoryLimit, Problem, Technique, Worker
from openrecycle.planner.layers.partition import Layout, lay_out, layer_bounds, staffed, with_stages
from openrecycle.planner.solvers.list_scheduler import ListScheduler
from openrecycle.planner.solvers.portfolio import make_plan
from tests.benchmarks.machine import describe

JOBS = 200
NONE, UNIFORM = MemoryLimit("none"), MemoryLimit("uniform")


def random_job(seed: int) -> tuple[Job, frozenset[Worker]]:
    """Up to 64 x 32 workers, 2 to 8 layers per stage, whose times differ by up to 1.2, 2 or 3 times; up to 5 % dead."""
    draw = random.Random(seed)
    pipelines, stages = draw.choice([2, 4, 8, 16, 32, 64]), draw.choice([2, 4, 8, 16, 32])
    spread = draw.choice([1.2, 2, 3])

    def layer() -> LayerProfile:
        f = draw.uniform(1, spread)
        back, weight, step = f * draw.uniform(0.9, 1.2), f * draw.uniform(0.8, 1.1), draw.uniform(0, 0.5)
        return LayerProfile(round(f, 2), round(back, 2), round(weight, 2), round(step, 2), transfer=0.1)

    layers = tuple(layer() for _ in range(draw.randint(2 * stages, min(8 * stages, 128))))
    job = Job(pipelines, stages, draw.choice([2, 3, 4]) * stages, layers=layers, time_unit="ms")
    dead: set[Worker] = set()
    for worker in draw.sample(list(job.workers()), draw.randint(0, max(1, pipelines * stages // 20))):
        if sum(w.stage == worker.stage for w in dead) < pipelines - 1:
            dead.add(worker)
    return job, frozenset(dead)


def gaps(memory: MemoryLimit, count: int) -> None:
    found = []
    for seed in range(count):
        job, dead = random_job(seed)
        layout = lay_out(job, dead, memory=memory)
        period = ListScheduler().solve(layout.problem).schedule.period
        found.append(min(period, layout.period) / layout.bound.ticks - 1)
    found.sort()
    share = sum(gap <= 0.02 for gap in found) / count
    nine = found[int(0.9 * count) - 1]
    print(
        f"{count} random jobs, memory {memory.text}: gap to the best layout's bound <= 2 % in {share:.0%}; "
        f"median {found[count // 2]:.2%}, 90 % within {nine:.2%}, worst {found[-1]:.2%}",
        flush=True,
    )


def large() -> None:
    draw = random.Random(1)
    f, i, w, o = ([round(draw.uniform(0.5, 2), 3) for _ in range(96)] for _ in range(4))
    layers = tuple(LayerProfile(*times) for times in zip(f, i, w, o, strict=True))
    job = Job(64, 32, 64, layers=layers, time_unit="ms")
    dead = frozenset(draw.sample(list(job.workers()), 102))
    for turn in range(2):  # the first loads machine code
        layer_bounds(job, Technique.STAGGERED, NONE)
        begin, cpu = time.perf_counter(), time.process_time()
        layout = lay_out(job, dead, memory=NONE)
        laid, laid_cpu = time.perf_counter() - begin, time.process_time() - cpu
        period = ListScheduler().solve(layout.problem).schedule.period
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        if turn:
            print(
                f"2,048 workers, 96 layers, 102 dead: partition {laid:.2f} s, with its plan {wall:.2f} s "
                f"({laid_cpu:.2f} and {cpu:.2f} s of CPU); gap {period / layout.bound.ticks - 1:.2%}"
            )


def share(full: Layout, period: int) -> str:
    return f"{full.period / period:6.1%}"


def table(memory: MemoryLimit, seconds: float) -> None:
    """As much of fault-free as is left; by the list scheduler, and by `auto` in so many seconds."""
    layers = (LayerProfile(4, 4, 4),) * 44
    job = Job(3, 4, 6, layers=layers, time_unit="ms")
    full = lay_out(job, memory=memory)
    best = make_plan(full.problem, time_limit=seconds, layout=full)
    print(f"3 x 4 x 6, 44 equal layers, memory {memory.text}: fault-free {best.metrics.period} ms, {full.partition}")
    deaths = ("W1_2", "W1_2 W0_1", "W1_2 W0_1 W2_0")
    for dead in (frozenset(map(Worker.parse, names.split())) for names in deaths):
        here = Problem(job, dead, memory=memory)
        stay = make_plan(here, time_limit=seconds)
        layout = lay_out(job, dead, memory=memory)
        plan = make_plan(layout.problem, time_limit=seconds, layout=layout)
        moved = lay_out(job, dead, memory=memory, over="layouts")
        shallow = with_stages(job, 3, 12 - len(dead))
        fewer = shallow and staffed(shallow, 12 - len(dead), technique=Technique.STAGGERED, memory=memory)
        base = best.metrics.period
        print(
            f"  {len(dead)} dead (floor {(12 - len(dead)) / 12:.1%}): re-routed {base / stay.metrics.period:.1%}; "
            f"re-laid {layout.partition} {base / plan.metrics.period:.1%} (list {share(full, layout.period)}, "
            f"gap {plan.metrics.gap:.1%}); "
            f"workers move too {moved.partition} {share(full, moved.period)}; "
            f"3 stages {share(full, fewer.period) if fewer else '-'}",
            flush=True,
        )


def dense() -> None:
    job = Job(3, 4, 48, layers=(LayerProfile(4, 4, 4),) * 44, time_unit="ms")
    full, one = lay_out(job, memory=NONE), lay_out(job, [Worker(1, 2)], memory=NONE)
    stay = ListScheduler().solve(Problem(job, frozenset({Worker(1, 2)}), memory=NONE)).schedule
    print(
        f"3 x 4 x 48 without bubbles ({full.period / full.bound.ticks:.3f} of the bound), 1 dead: "
        f"{one.period / full.period:.3f} x the period {one.partition}; re-routed {stay.period / full.period:.3f} x"
    )


def main(arguments: Sequence[str]) -> None:
    print(describe())
    count, seconds = int(arguments[0]) if arguments else JOBS, float(arguments[1]) if arguments[1:] else 20
    large()
    dense()
    table(NONE, seconds)
    table(UNIFORM, seconds)
    gaps(NONE, count)
    gaps(UNIFORM, max(1, count // 5))


if __name__ == "__main__":
    main(sys.argv[1:])

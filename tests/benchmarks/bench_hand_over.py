"""What it costs the others that a worker which joins takes a large state over slow links, and how long that takes.

A real job of 2 x 2 workers (or --holders + 1 x 2); W1_1 dies, comes back, and takes its stage's state from all of its
peers at once. In 2 x 2 that is one, which sums gradients with nobody until then, and copies them to the newcomer in
every iteration that it takes; in 3 x 2 two peers sum theirs all along.
--rate is what each of them gives, so with twice the holders the state should come in half the time. Prints the
iterations before it comes back (the plan without it), those while its state comes, which run the same plan, and
those by the full plan; and how much time the others lost by it, in iterations of the plan without it: by its entering
(the first iteration's excess over the later ones), while its state comes (the later ones' over those without it, their
sums with it included), and by the change to the full plan (its first iteration's excess over the later ones). All
share the machine's cores, and the newcomer steps as they do: --pace leaves it time for that, as a host of its own
would. With several numbers of holders, one job after the other, it prints how many times as fast the state came.

    python -m tests.benchmarks.bench_hand_over --mebibytes 2048 --rate 50 --pace 0.5
    python -m tests.benchmarks.bench_hand_over --mebibytes 128 --rate 10     # shorter
    python -m tests.benchmarks.bench_hand_over --holders 1 2 3               # from several at once
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from openrecycle.agent.config.options import HandOver, Timeouts
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.local_jobs import LocalJob
from tests.benchmarks.machine import describe

AFTER = 4
"""Iterations by the full plan at the end."""


def run(mebibytes: int, rate: float, before: int, pace: float, holders: int) -> float:
    """Returns the seconds in which the state came."""
    model = {"mebibytes": mebibytes, "width": 512, "heads": 2, "sequence": 16, "batch": 2}
    began: list[float] = []
    complete: list[tuple[int, float]] = []

    def hear(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        if message["kind"] == "formed" and message["generation"] == 3:
            if worker == "W1_1":
                complete.append((message["iteration"], time.monotonic()))
            elif not began:
                began.append(time.monotonic())

    def act(job: LocalJob, line: dict[str, Any]) -> None:
        if "iteration" not in line:
            return
        alone = [i for i in job.iterations if i["generation"] == 2]
        if len(alone) == before and line["generation"] == 2:
            job.start("W1_1")
        if complete and line["iteration"] >= complete[0][0] + AFTER:
            job.stop()

    job = LocalJob(
        pipelines=holders + 1,
        stages=2,
        micro_batches=2,
        kills=("W1_1@1:I1",),
        workload=NamedWorkload("tests.agent.bulky:Bulky", model),
        hand_over=HandOver(rate=rate * 1e6),
        timeouts=Timeouts(op=120.0),
        pace=pace,
        on_message=hear,
        on_line=act,
    ).run()
    first, at = complete[0]
    alone = [i["seconds"] for i in job.iterations if i["generation"] == 2][1:]
    joint = [i["seconds"] for i in job.iterations if i["generation"] == 3]
    start = next(i["iteration"] for i in job.iterations if i["generation"] == 3)
    while_coming, full = joint[: first - start], joint[first - start :]
    usual = statistics.median(alone)
    later = while_coming[1:] or while_coming
    entering = while_coming[0] - statistics.median(later)
    changing = full[0] - statistics.median(full[1:])
    streaming = sum(while_coming) - usual * len(while_coming) - entering
    print(
        f"state of {mebibytes:,} MiB from {holders} at {rate:g} MB/s each: {at - began[0]:.1f} s, "
        f"{len(while_coming)} iterations meanwhile"
    )
    for name, seconds in (("without it", alone), ("while its state comes", while_coming), ("by the full plan", full)):
        print(f"  {name}: median {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s ({len(seconds)})")
    print(
        f"  lost by the others: {(entering + streaming + changing) / usual:.2f} iterations; by its entering "
        f"{entering / usual:.2f}, while its state comes {streaming / usual:.2f}, by the full plan's start "
        f"{changing / usual:.2f}"
    )
    print(f"  dead: {', '.join(job.dead)}")
    return at - began[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rate", type=float, default=10.0, help="MB/s")
    parser.add_argument("--before", type=int, default=6, help="iterations until it comes back")
    parser.add_argument("--holders", type=int, nargs="+", default=[1], help="peers that have the state")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of each op")
    arguments = parser.parse_args()
    print(describe())
    took: dict[int, float] = {}
    for holders in arguments.holders:
        took[holders] = run(arguments.mebibytes, arguments.rate, arguments.before, arguments.pace, holders)
    first = arguments.holders[0]
    for holders in arguments.holders[1:]:
        print(f"from {holders} instead of {first}: {took[first] / took[holders]:.2f} times as fast")
    print(describe())


if __name__ == "__main__":
    main()

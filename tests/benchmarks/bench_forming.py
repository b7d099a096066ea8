"""How long the workers of a job need to form the groups of their next generation, and for the first sum in them.

As many real processes as there are workers, forked from one that has loaded torch, over a real store; no training. A
generation begins when all are at rest. Printed: medians, over the generations, of the last worker's time, and the
processor time of all of them, which other programs on the machine hardly touch.

    python -m tests.benchmarks.bench_forming --grids 3x4 8x8
    python -m tests.benchmarks.bench_forming --grids 16x16 --generations 5     # 256 processes, some 8 GiB
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from openrecycle.agent.transport.communicator import Communicator
from openrecycle.agent.transport.store import RendezvousStore
from openrecycle.planner.jobs.job import Worker
from tests.benchmarks.machine import describe

FORMED, SUMMED, SENT = range(3)


def _worker(pipe: Connection, me: Worker, living: list[Worker], store: tuple[str, int]) -> None:
    torch.set_num_threads(1)
    communicator = Communicator()
    while True:
        try:
            generation = pipe.recv()
        except EOFError:
            os._exit(0)
        busy, began = time.process_time(), time.monotonic()
        groups = communicator.form(generation, me, living, store)
        times = [time.monotonic() - began]
        groups.gather_rows((generation,))
        times.append(time.monotonic() - began)
        groups.reduce(torch.ones(1, dtype=torch.int64))
        stages = 1 + max(w.stage for w in living)
        there = [Worker(me.pipeline, me.stage + by) for by in (-1, 1) if 0 <= me.stage + by < stages]
        exchanged = [groups.receive(w, torch.zeros(1), 1) for w in there] + [
            groups.send(w, torch.zeros(1), 1) for w in there
        ]
        for pending in exchanged:
            pending.wait()
        times.append(time.monotonic() - began)
        pipe.send((times, time.process_time() - busy))


def run(pipelines: int, stages: int, generations: int) -> None:
    living = [Worker(p, s) for p in range(pipelines) for s in range(stages)]
    context: Any = multiprocessing.get_context("fork")
    store = RendezvousStore(multiprocessing.get_context("spawn"))
    pipes = []
    try:
        for worker in living:
            ours, theirs = context.Pipe()
            context.Process(target=_worker, args=(theirs, worker, living, store.address), daemon=True).start()
            theirs.close()
            pipes.append(ours)
        rows, busy = [], []
        for generation in range(1, generations + 2):
            for pipe in pipes:
                pipe.send(generation)
            answers = [pipe.recv() for pipe in pipes]
            rows.append([max(times[i] for times, _ in answers) for i in (FORMED, SUMMED, SENT)])
            busy.append(sum(used for _, used in answers))
            time.sleep(0.3)  # the groups before are buried
        # The first one connects to the store, too.
        formed, summed, sent = (1000 * statistics.median(row[i] for row in rows[1:]) for i in (FORMED, SUMMED, SENT))
        quickest_formed, quickest_sent = (1000 * min(row[i] for row in rows[1:]) for i in (FORMED, SENT))
        print(
            f"{len(living)} workers ({pipelines} x {stages}): formed {formed:.0f} ms, "
            f"first sum over all {summed:.0f} ms, neighbours reached {sent:.0f} ms; "
            f"quickest formed {quickest_formed:.0f}, reached {quickest_sent:.0f}; "
            f"processor time of all {1000 * statistics.median(busy[1:]):.0f} ms"
        )
    finally:
        for pipe in pipes:
            pipe.close()
        store.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["3x4", "8x8"])
    parser.add_argument("--generations", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(describe())
    for grid in arguments.grids:
        pipelines, stages = map(int, grid.split("x"))
        run(pipelines, stages, arguments.generations)
    print(describe())


if __name__ == "__main__":
    main()

"""How long the workers of a job need, from the death of one of them, to have groups again and to agree in them.

As many real processes as there are workers, forked from one that has loaded torch, over a real store; no training. In
each generation one worker is killed with SIGKILL, until each has a peer less; all others hear of the next generation at
once, and cancel the one before, as a launcher has them do. First with connections on standby, which are there by then,
and then without, as after two deaths in quick succession. Printed: medians, over the generations, of the last worker's
time since the kill, and the processor time of all of them, which other programs on the machine hardly touch.

    python -m tests.benchmarks.bench_forming --grids 3x4 8x8
    python -m tests.benchmarks.bench_forming --grids 12x8     # 96 processes; 256 on two cores do not connect in 15 s
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

FORMED, AGREED, SENT, REDUCED = range(4)
STANDBY_SECONDS = 40.0
WIDTH = 24
"""Numbers of an agreement's row, without gradients that are clipped."""


def _worker(pipe: Connection, me: Worker, store: tuple[str, int]) -> None:
    torch.set_num_threads(1)
    communicator = Communicator()
    while True:
        try:
            generation, living, standby = pipe.recv()
        except EOFError:
            os._exit(0)
        busy = time.process_time()
        communicator.cancel(generation)
        communicator.abandon()
        groups = communicator.form(generation, me, living, store)
        times = [time.monotonic()]
        groups.gather_rows((generation,) * WIDTH)
        times.append(time.monotonic())
        there = [w for w in living if w.pipeline == me.pipeline and abs(w.stage - me.stage) == 1]
        exchanged = [groups.receive(w, torch.zeros(1), 1) for w in there] + [
            groups.send(w, torch.zeros(1), 1) for w in there
        ]
        for pending in exchanged:
            pending.wait()
        times.append(time.monotonic())
        groups.reduce(torch.ones(1, dtype=torch.int64))
        times.append(time.monotonic())
        pipe.send((times, time.process_time() - busy))
        began = time.monotonic()
        if standby:
            communicator.stand_by()
            while not communicator.stands_by:
                assert time.monotonic() - began < STANDBY_SECONDS, f"{me} has no connections on standby"
                time.sleep(0.02)
        pipe.send(time.monotonic() - began)


def run(pipelines: int, stages: int, generations: int, *, standby: bool) -> None:
    living = [Worker(p, s) for p in range(pipelines) for s in range(stages)]
    # Of the last pipelines, so that nobody is alone; each of another stage.
    dying = [Worker(pipelines - 1 - k // stages, k % stages) for k in range(generations)]
    context: Any = multiprocessing.get_context("fork")
    store = RendezvousStore(multiprocessing.get_context("spawn"))
    processes, pipes = {}, {}
    try:
        for worker in living:
            ours, theirs = context.Pipe()
            processes[worker] = context.Process(target=_worker, args=(theirs, worker, store.address), daemon=True)
            processes[worker].start()
            theirs.close()
            pipes[worker] = ours
        rows, busy, ahead = [], [], []
        for generation in range(1, generations + 2):
            began = time.monotonic()
            if generation > 1:
                dead = dying[generation - 2]
                processes[dead].kill()
                living = [w for w in living if w != dead]
            for worker in living:
                pipes[worker].send((generation, living, standby))
            answers = [pipes[worker].recv() for worker in living]
            rows.append([1000 * (max(times[i] for times, _ in answers) - began) for i in range(4)])
            busy.append(1000 * sum(used for _, used in answers))
            ahead.append(1000 * max(pipes[worker].recv() for worker in living))
            time.sleep(0.3)  # the groups before are buried
        formed, agreed, sent, reduced = (statistics.median(row[i] for row in rows[1:]) for i in range(4))
        print(
            f"{pipelines * stages} workers ({pipelines} x {stages}), {'on standby' if standby else 'connecting'}: "
            f"formed {formed:.0f} ms after the kill, agreed {agreed:.0f}, neighbours reached {sent:.0f}, "
            f"stages reduced {reduced:.0f}; quickest {min(row[SENT] for row in rows[1:]):.0f} and "
            f"{min(row[REDUCED] for row in rows[1:]):.0f}; "
            f"processor time of all {statistics.median(busy[1:]):.0f} ms"
            + (f"; on standby {statistics.median(ahead):.0f} ms after" if standby else "")
        )
    finally:
        for pipe in pipes.values():
            pipe.close()
        store.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["3x4", "8x8"])
    parser.add_argument("--generations", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(describe())
    for grid in arguments.grids:
        pipelines, stages = map(int, grid.split("x"))
        for standby in (True, False):
            run(pipelines, stages, arguments.generations, standby=standby)
        print(describe())


if __name__ == "__main__":
    main()

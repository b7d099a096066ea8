"""How long the workers of a job need, from the death of one of them, to have groups again and to agree in them.

As many real processes as there are workers, forked from one that has loaded torch, over a real store; no training, but
each waits for what a neighbour is to send, as one that trains does. With `--together` several workers are threads of
one process, each with connections of its own, but for those that will die: what does not fit a machine as processes.
They wait for each other's interpreter then, which makes them slower. In each generation one worker is killed with
SIGKILL, until each has a peer less; all others hear of the next generation at once, and cancel the one before, as a
launcher has them do. First with connections on standby, which are there by then, and then without, as after two deaths
in quick succession. Printed: medians, over the generations, of the last worker's time since the kill, and the processor
time of all of them, which other programs on the machine hardly touch: of many workers on few cores it is what takes
long. Where each has a core, what takes long is the work of the one that has most, by way of which all agree.

    python -m tests.benchmarks.bench_forming --grids 3x4 8x8
    python -m tests.benchmarks.bench_forming --grids 16x8 --only standby

A worker that is a process takes some 40 MiB. What takes longest with many is that all connect to all in the beginning.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.transport.communicator import Communicator, RendezvousStore
from openrecycle.agent.transport.group import TransferError
from openrecycle.planner.jobs.job import Worker
from tests.benchmarks.machine import describe

FORMED, AGREED, SENT, REDUCED = range(4)
STANDBY_SECONDS = 120.0
NO_MORE = 2**31
TRAINS = "trains"
"""Said to each worker when all have reduced: connections on standby are made then."""
WIDTH = 24
"""Numbers of an agreement's row, without gradients that are clipped."""


TIMEOUTS = Timeouts(form=120.0, transfer=130.0, group=140.0)
"""Several hundred workers do not connect on a few cores in a job's usual ones."""


def _process(workers: Sequence[tuple[Worker, Connection]], store: tuple[str, int]) -> None:
    torch.set_num_threads(1)
    threads = [threading.Thread(target=_worker, args=(pipe, me, store)) for me, pipe in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def _worker(pipe: Connection, me: Worker, store: tuple[str, int]) -> None:
    communicator = Communicator(TIMEOUTS)
    news, trains = queue.SimpleQueue[Any](), queue.SimpleQueue[None]()

    def hear() -> None:
        while True:
            try:
                told = pickle.loads(pipe.recv_bytes())
            except EOFError:
                communicator.cancel(NO_MORE)
                news.put(None)
                return
            if told == TRAINS:
                trains.put(None)
                continue
            generation, living, standby = told
            busy = time.process_time()
            communicator.cancel(generation)
            news.put((generation, living, standby, busy))

    threading.Thread(target=hear, daemon=True).start()
    while (told := news.get()) is not None:
        generation, living, standby, busy = told
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
        pipe.send((times, (os.getpid(), busy, time.process_time())))
        trains.get()
        began = time.monotonic()
        if standby:
            communicator.stand_by()
            while not communicator.stands_by:
                assert time.monotonic() - began < STANDBY_SECONDS, f"{me} has no connections on standby"
                time.sleep(0.02)
        pipe.send(time.monotonic() - began)
        if there:
            with contextlib.suppress(TransferError):  # the next death, and the news of it
                groups.receive(there[0], torch.zeros(1), 2).wait()
        del groups


def _busy(said: Iterable[tuple[int, float, float]]) -> list[float]:
    """Seconds of each process, from (process, before, after) of its workers."""
    used: dict[int, list[float]] = {}
    for process, before, after in said:
        used.setdefault(process, []).extend((before, after))
    return [max(times) - min(times) for times in used.values()]


def run(pipelines: int, stages: int, generations: int, together: int, *, standby: bool) -> None:
    living = [Worker(p, s) for p in range(pipelines) for s in range(stages)]
    # Of the last pipelines, so that nobody is alone; each of another stage.
    dying = [Worker(pipelines - 1 - k // stages, k % stages) for k in range(generations)]
    gc.freeze()  # as the server does that workers are forked from: nobody looks through what torch has imported
    context: Any = multiprocessing.get_context("fork")
    store = RendezvousStore()
    processes, pipes = {}, {}
    try:
        staying = [w for w in living if w not in dying]
        parts = [[w] for w in dying] + [staying[i : i + together] for i in range(0, len(staying), together)]
        for part in parts:
            ends = {worker: context.Pipe() for worker in part}
            told = [(worker, theirs) for worker, (_, theirs) in ends.items()]
            process = context.Process(target=_process, args=(told, store.address), daemon=True)
            process.start()
            for worker, (ours, theirs) in ends.items():
                theirs.close()
                pipes[worker], processes[worker] = ours, process
        rows, busy, ahead = [], [], []
        for generation in range(1, generations + 2):
            began = time.monotonic()
            if generation > 1:
                dead = dying[generation - 2]
                processes[dead].kill()
                living = [w for w in living if w != dead]
            orders = pickle.dumps((generation, living, standby))  # once, as a launcher does what takes long
            for worker in living:
                pipes[worker].send_bytes(orders)
            answers = [pipes[worker].recv() for worker in living]
            # After an iteration, in which all have reduced: before, it would hold up those that come last.
            for worker in living:
                pipes[worker].send_bytes(pickle.dumps(TRAINS))
            rows.append([1000 * (max(times[i] for times, _ in answers) - began) for i in range(4)])
            busy.append([1000 * seconds for seconds in _busy(used for _, used in answers)])
            ahead.append(1000 * max(pipes[worker].recv() for worker in living))
            time.sleep(0.3)  # the groups before are closed
        formed, agreed, sent, reduced = (statistics.median(row[i] for row in rows[1:]) for i in range(4))
        print(
            f"{pipelines * stages} workers ({pipelines} x {stages}) in {len(parts)} processes, "
            f"{'on standby' if standby else 'connecting'}: "
            f"formed {formed:.0f} ms after the kill, agreed {agreed:.0f}, neighbours reached {sent:.0f}, "
            f"stages reduced {reduced:.0f}; quickest {min(row[SENT] for row in rows[1:]):.0f} and "
            f"{min(row[REDUCED] for row in rows[1:]):.0f}; "
            f"processor time of all {statistics.median(map(sum, busy[1:])):.0f} ms, "
            f"of the one that has most {statistics.median(map(max, busy[1:])):.0f}"
            + (f"; on standby {statistics.median(ahead):.0f} ms after" if standby else "")
        )
    finally:
        for pipe in pipes.values():
            pipe.close()
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["3x4", "8x8"])
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--together", type=int, default=1, help="workers in a process")
    parser.add_argument("--only", choices=("standby", "connecting"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(describe())
    for grid in arguments.grids:
        pipelines, stages = map(int, grid.split("x"))
        for way in ("standby", "connecting"):
            if arguments.only in (None, way):
                run(pipelines, stages, arguments.generations, arguments.together, standby=way == "standby")
        print(describe())


if __name__ == "__main__":
    main()

"""A checkpoint of a stage: what each of its workers copies, for how long it does not train meanwhile, and how long it
then writes beside the training.

Each worker is a process that has a chain of linear layers, its AdamW state, and writes its share (agent.models.state)
to a folder of this machine: one after the other, as workers have processors and connections of their own. The slowest
of them counts, and the median of several checkpoints.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openrecycle.agent.checkpoints import Identity, find, write_share
from openrecycle.agent.models.state import Writer
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.shards import assign
from openrecycle.planner.jobs.job import Worker
from tests.benchmarks.machine import describe

WIDTH, LAYERS, TIMES = 1024, 16, 5
ROWS = {"1 worker": (1, False), "3 workers": (3, False), "3 workers, optimizer sharded": (3, True)}
"""How many peers, and whether they share the optimizer's state."""


def now() -> torch.Tensor:
    """By the clock, and on a processor."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def work(peer: int, peers: int, sharded: bool, folder: str, together: Any, answer: Connection) -> None:
    """Answers with (bytes, seconds of copying, of these on a processor, the same of writing) of each checkpoint."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    sums = SUM_OF["deterministic"](model.parameters(), terms=1)
    made = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = StageOptimizer(model, made, sums, pipelines=peers if sharded else None)
    writer, identity = Writer(peer, peers), Identity("bench", 1, 1, peers, 1, 0)
    if (shards := optimizer.shards) is not None:
        living = [Worker(p, 0) for p in range(peers)]
        held = dict.fromkeys(living, shards.shards_held)
        ownership = assign(living, held, dict.fromkeys(living, 0), shards.sizes)
        optimizer.release([n for n, s in enumerate(shards.segments) if living[peer] not in ownership.owners[s.shard]])
        primaries = [living.index(ownership.primary[segment.shard]) for segment in shards.segments]
        writer = Writer(peer, peers, primaries=primaries)
    found = []
    for _ in range(TIMES):
        for parameter in model.parameters():
            sums.add(parameter, torch.ones_like(parameter))
        optimizer.step()
        for turn in range(peers):
            together.wait()
            if turn == peer:
                began, on_processor = time.perf_counter(), time.process_time()
                share = optimizer.share(writer)
                copied, copied_on = time.perf_counter(), time.process_time()
                write_share(Path(folder), share, 0, 1, identity, 1, 1)
                written, written_on = time.perf_counter(), time.process_time()
                size = sum(tensor.nbytes for tensor in share.tensors.values())
                copying, writing = (
                    (copied - began, copied_on - on_processor),
                    (written - copied, written_on - copied_on),
                )
                found.append((size, *copying, *writing))
    answer.send(found)


def measured(peers: int, sharded: bool) -> str:
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(peers)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(peers)]
        processes = [
            context.Process(target=work, args=(peer, peers, sharded, folder, together, theirs))
            for peer, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        found = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
        assert find(Path(folder)).iteration == TIMES
    size, copying, copying_on, writing, writing_on = (
        statistics.median(max(each) for each in zip(*([row[n] for row in worker] for worker in found), strict=True))
        for n in range(5)
    )
    return (
        f"each copies {size / 1e6:.0f} MB in {1000 * copying:.0f} ms ({1000 * copying_on:.0f} on a processor), and "
        f"writes for {writing:.2f} s ({writing_on:.2f})"
    )


def main() -> None:
    print(describe())
    for name, (peers, sharded) in ROWS.items():
        print(f"{name}: {measured(peers, sharded)}", flush=True)
    print(describe())


if __name__ == "__main__":
    main()

"""What a step takes where the optimizer's state is sharded over a stage's workers, against one where it is not.

Three peers, real processes, gloo over loopback, AdamW, fp32, deterministic. A step is the reduction, the step itself,
and where it is sharded the parameters' way to the others. The two take turns in one run; the median ratio counts.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import nn

from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import CLEAN
from openrecycle.agent.stages.shards import assign
from openrecycle.agent.transport.communicator import Communicator, Groups
from openrecycle.agent.workers.sharding import ShardedStage
from openrecycle.planner.jobs.job import Worker
from tests.benchmarks.machine import describe

dist: Any = torch.distributed

PEERS, TURNS = 3, 9
WIDTHS = {"1 M parameters": (256, 16), "17 M parameters": (1024, 16)}


def main() -> None:
    print(describe())
    context = multiprocessing.get_context("spawn")
    for name, size in WIDTHS.items():
        meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = ("127.0.0.1", meeting.port)
        pipes = [context.Pipe(duplex=False) for _ in range(PEERS)]
        processes = [
            context.Process(target=peer, args=(place, size, store, theirs)) for place, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        rows: list[list[tuple[float, float]]] = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
        times = [[max(row[turn][kind] for row in rows) for turn in range(TURNS)] for kind in (0, 1)]
        whole, sharded = map(statistics.median, times)
        ratios = [b / a for a, b in zip(*times, strict=True)]
        print(
            f"{name}: {1000 * whole:.1f} ms whole, {1000 * sharded:.1f} ms sharded, "
            f"{statistics.median(ratios):.2f} times (of {TURNS} turns: {min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(describe())


def peer(place: int, size: tuple[int, int], store: tuple[str, int], answer: Connection) -> None:
    """Answers with the seconds of each turn: (whole, sharded)."""
    torch.set_num_threads(1)
    me, living = Worker(place, 0), [Worker(p, 0) for p in range(PEERS)]
    groups = Communicator().form(1, me, living, store)
    whole, sharded = Stepping(size), Stepping(size, me, groups)
    seconds = [(whole.step(groups), sharded.step(groups)) for _ in range(TURNS + 1)]
    answer.send(seconds[1:])
    groups.gather_rows((0,))  # nobody leaves before all have finished


class Stepping:
    def __init__(self, size: tuple[int, int], me: Worker | None = None, groups: Groups | None = None) -> None:
        width, layers = size
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.parameters = list(model.parameters())
        self.sums = SUM_OF["deterministic"](self.parameters, terms=8)
        made = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.optimizer = StageOptimizer(model, made, self.sums, pipelines=None if me is None else PEERS)
        self.sharded: ShardedStage | None = None
        if me is not None and groups is not None and (shards := self.optimizer.shards) is not None:
            held, hosts = dict.fromkeys(groups.peers, shards.shards_held), dict.fromkeys(groups.peers, 0)
            owners = assign(groups.peers, held, hosts, shards.sizes)
            self.sharded = ShardedStage(me, groups, self.optimizer, owners, print)

    def step(self, groups: Groups) -> float:
        for parameter in self.parameters:
            self.sums.add(parameter, torch.full_like(parameter, 1e-3))
        groups.gather_rows((0,))
        begun = time.monotonic()
        groups.reduce(self.sums.buffer)
        self.optimizer.step(None)
        self.optimizer.settle(CLEAN)
        if self.sharded is not None:
            self.sharded.gather()
        return time.monotonic() - begun


if __name__ == "__main__":
    main()

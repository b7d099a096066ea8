"""What a step takes where the optimizer's state is sharded over a stage's workers, against one where it is not: the
time, and the bytes that a worker sends.

Real processes, gloo over loopback, AdamW, fp32, deterministic. A step is the reduction, the step itself, and where it
is sharded the parameters' way to the others. The two take turns in one run; the median ratio counts. On a loopback
bytes cost next to nothing. In a network of its own, root can have the peers share a link of so many bits a second:

    unshare -n sh -c "ip link set lo up; tc qdisc add dev lo root tbf rate 3gbit burst 1mb latency 1s; python -m ..."
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import stat
import statistics
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import CLEAN
from openrecycle.agent.stages.shards import assign
from openrecycle.agent.transport.communicator import Communicator, Groups
from openrecycle.agent.workers.reduction import GradientReduction
from openrecycle.agent.workers.sharding import ShardedStage
from openrecycle.planner.jobs.job import Worker
from tests.benchmarks.machine import describe

dist: Any = torch.distributed

TURNS = 9
WIDTHS = {"1 M parameters": (256, 16), "17 M parameters": (1024, 16)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=3)
    told = parser.parse_args()
    print(describe())
    peers = told.peers
    context = multiprocessing.get_context("spawn")
    for name, size in WIDTHS.items():
        meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = ("127.0.0.1", meeting.port)
        pipes = [context.Pipe(duplex=False) for _ in range(peers)]
        processes = [
            context.Process(target=peer, args=(place, peers, size, store, theirs))
            for place, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        rows: list[list[tuple[float, float]]] = []
        sent: list[list[tuple[float, float]]] = []
        for ours, _ in pipes:
            rows.append(ours.recv())
            sent.append(ours.recv())
        for process in processes:
            process.join()
        times = [[max(row[turn][kind] for row in rows) for turn in range(TURNS)] for kind in (0, 1)]
        whole, sharded = map(statistics.median, times)
        ratios = [b / a for a, b in zip(*times, strict=True)]
        print(
            f"{name}, {peers} peers: {1000 * whole:.1f} ms whole, {1000 * sharded:.1f} ms sharded, "
            f"{statistics.median(ratios):.2f} times (of {TURNS} turns: {min(ratios):.2f} to {max(ratios):.2f})"
        )
        each = [statistics.mean(turn[kind] for row in sent for turn in row) for kind in (0, 1)]
        print(f"  a worker sends {each[0]:.1f} bytes a parameter whole, {each[1]:.1f} sharded")
    print(describe())


def peer(place: int, peers: int, size: tuple[int, int], store: tuple[str, int], answer: Connection) -> None:
    """Answers with the seconds of each turn, and the bytes sent a parameter: (whole, sharded)."""
    torch.set_num_threads(1)
    me, living = Worker(place, 0), [Worker(p, 0) for p in range(peers)]
    groups = Communicator().form(1, me, living, store)
    whole, sharded = Stepping(size), Stepping(size, me, groups)
    seconds = [(whole.step(groups), sharded.step(groups)) for _ in range(TURNS + 1)]
    answer.send([(a[0], b[0]) for a, b in seconds[1:]])
    answer.send([(a[1], b[1]) for a, b in seconds[1:]])
    groups.gather_rows((0,))  # nobody leaves before all have finished


class Stepping:
    def __init__(self, size: tuple[int, int], me: Worker | None = None, groups: Groups | None = None) -> None:
        width, layers = size
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.parameters = list(model.parameters())
        self.sums = SUM_OF["deterministic"](self.parameters, terms=8)
        made = torch.optim.AdamW(self.parameters, lr=1e-3)
        peers = None if groups is None else len(groups.peers)
        self.optimizer = StageOptimizer(model, made, self.sums, pipelines=peers)
        self.sharded: ShardedStage | None = None
        if me is not None and groups is not None and (shards := self.optimizer.shards) is not None:
            held, hosts = dict.fromkeys(groups.peers, shards.shards_held), dict.fromkeys(groups.peers, 0)
            owners = assign(groups.peers, held, hosts, shards.sizes)
            self.sharded = ShardedStage(me, groups, self.optimizer, owners, print)

    def step(self, groups: Groups) -> tuple[float, float]:
        for parameter in self.parameters:
            self.sums.add(parameter, torch.full_like(parameter, 1e-3))
        groups.gather_rows((0,))
        group, begun, sent = groups.peer_group, time.monotonic(), bytes_sent()
        assert group is not None
        begin = group.begin_sum if self.sharded is None else self.sharded.begin_reduce
        GradientReduction(self.sums, begin).finish()
        self.optimizer.step(None)
        self.optimizer.settle(CLEAN)
        if self.sharded is not None:
            self.sharded.gather()
        seconds = time.monotonic() - begun
        groups.gather_rows((0,))
        return seconds, (bytes_sent() - sent) / sum(p.numel() for p in self.parameters)


def bytes_sent() -> int:
    """Over all connections of this process, once more where they were sent again."""
    total = 0
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # it is closed by now, or no connection
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    about = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", about, _BYTES_SENT)[0]
    return total


_BYTES_SENT = 200
"""Where struct tcp_info has tcpi_bytes_sent (Linux 4.19)."""


if __name__ == "__main__":
    main()

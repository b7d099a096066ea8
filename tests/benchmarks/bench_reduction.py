"""What it gives to begin the reduction of gradients bucket by bucket, beside the last backward: the seconds from the
beginning of that backward until all sums are there, of one worker of a stage, with buckets and in one piece, by turns
in one run.

Here computing and carrying share the cores, so that there is nothing to win by doing both at once: what it says on a
CPU is what buckets cost. On GPUs computing leaves the host free.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import torch
import torch.distributed
from torch import nn

from openrecycle.agent.stages.backward import Deferred
from openrecycle.agent.stages.gradients import BUCKET_BYTES, GradientSum
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.communicator import Communicator
from openrecycle.agent.workers.reduction import GradientReduction
from openrecycle.planner.jobs.job import Worker
from tests.benchmarks.machine import describe

dist: Any = torch.distributed

PEERS, TURNS = 2, 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    told = parser.parse_args()
    print(describe())
    context = multiprocessing.get_context("spawn")
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, size = ("127.0.0.1", meeting.port), (told.width, told.layers, told.tokens)
    pipes = [context.Pipe(duplex=False) for _ in range(PEERS)]
    peers = [context.Process(target=_peer, args=(n, size, store, pipes[n][1])) for n in range(PEERS)]
    for peer in peers:
        peer.start()
    turns = pipes[0][0].recv()
    for peer in peers:
        peer.join()
    whole, buckets = (statistics.median(column) for column in zip(*turns, strict=True))
    megabytes = 8 * told.width * (told.width + 1) * told.layers / 1e6
    print(
        f"{megabytes:.0f} MB of sums, {PEERS} workers: {whole * 1000:.0f} ms in one piece, {buckets * 1000:.0f} ms in"
    )
    print(f"buckets: {buckets / whole:.2f} times (median of {TURNS})")
    print(describe())


def _peer(place: int, size: tuple[int, int, int], store: tuple[str, int], answer: Any) -> None:
    """Answers with the seconds of each turn: (in one piece, in buckets)."""
    torch.set_num_threads(1)
    width, layers, tokens = size
    groups = Communicator().form(1, Worker(place, 0), [Worker(p, 0) for p in range(PEERS)], store)
    group, turns = groups.peer_group, []
    assert group is not None
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    sums = [GradientSum(module.parameters(), terms=2, bucket_bytes=n) for n in (1 << 62, BUCKET_BYTES)]
    split = Deferred(module)
    for _ in range(TURNS + 1):
        seconds = []
        for these in sums:
            stage = Stage(module, these, split=split)
            reduction = GradientReduction(these, group.begin_sum)
            stage.expect(1, reduction)
            stage.forward((0, 0), torch.randn(tokens, width), seed=0, loss=lambda y: y.square().mean())
            stage.input_backward((0, 0), None)
            groups.gather_rows((0,))
            begun = time.monotonic()
            stage.weight_backward((0, 0))
            reduction.finish()
            seconds.append(time.monotonic() - begun)
            these.clear()
        turns.append(tuple(seconds))
    answer.send(turns[1:])
    groups.gather_rows((0,))  # nobody leaves before all have finished


if __name__ == "__main__":
    main()

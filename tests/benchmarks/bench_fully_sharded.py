"""What a rank of a worker holds, and how long its ops take, where the layers are fully sharded over 1, 2, ... ranks.

Three blocks of the example's GPT in the middle of a model, with as many samples in all whatever the ranks; real
processes over gloo. Printed per number of ranks: bytes that a rank holds for parameters, sums of gradients and AdamW's
state; the most that it holds of whole parameters at any time; medians of F, I and W.

    python -m tests.benchmarks.bench_fully_sharded --width 256 --ranks 1 2
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from openrecycle.agent.config.options import Optimization, Timeouts
from openrecycle.agent.examples.fully_sharded import Gpt
from openrecycle.agent.models.layers import build_layers
from openrecycle.agent.models.parallelized import Parallelized, Unit
from openrecycle.agent.stages.backward import Deferred
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import stage_optimizer
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.ranks import Ranks
from tests.benchmarks.machine import describe

BATCH, SEQUENCE, BLOCKS, WARM_UP = 8, 64, 3, 3


def _rank(rank: int, ranks: int, width: int, rounds: int, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    workload: Any = Gpt(width=width, heads=4, sequence=SEQUENCE, batch=BATCH)
    among = Ranks.begin(rank, ranks, meeting, Timeouts())
    if ranks > 1:
        workload = Parallelized(workload, among.mesh, among.gather, divided=True)
    module = build_layers(workload, range(1, 1 + BLOCKS), BLOCKS + 2, 0)
    sums = GradientSum(module.parameters(), terms=8)
    stage = Stage(module, sums, split=Deferred(module))
    optimizer = stage_optimizer(workload, module, sums, Optimization())
    x = torch.randn(BATCH // ranks, SEQUENCE, width)
    most, times = 0, []
    wholes = [p.whole for p in module.parameters() if hasattr(p, "whole")]

    gather = Unit.gather

    def watched(unit: Unit) -> None:
        nonlocal most
        gather(unit)
        most = max(most, sum(whole.untyped_storage().nbytes() for whole in wholes))

    Unit.gather = watched  # type: ignore[method-assign, assignment]
    for _ in range(WARM_UP + rounds):
        marks = [time.monotonic()]
        stage.forward((0, 0), x, seed=1)
        marks.append(time.monotonic())
        stage.input_backward((0, 0), torch.ones_like(x))
        marks.append(time.monotonic())
        stage.weight_backward((0, 0))
        marks.append(time.monotonic())
        times.append([b - a for a, b in itertools.pairwise(marks)])
        optimizer.step()
    held = sums.buffer.nbytes + sum(p.nbytes for p in module.parameters())
    held += sum(t.nbytes for state in optimizer.optimizer.state.values() for t in state.values())
    pipe.send((held, most, [statistics.median(column) for column in zip(*times[WARM_UP:], strict=True)]))


def run(ranks: int, width: int, rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, ranks, width, rounds, f"{folder}/store", theirs)
            context.Process(target=_rank, args=arguments, daemon=True).start()
            theirs.close()
            pipes.append(ours)
        answers = [pipe.recv() for pipe in pipes]
    held, most = max(held for held, _, _ in answers), max(most for _, most, _ in answers)
    f, i, w = (1000 * max(times[n] for _, _, times in answers) for n in range(3))
    words = f", of whole parameters {most / 2**20:.1f} MiB at most" if most else ""
    print(f"{ranks} ranks: a rank holds {held / 2**20:.1f} MiB{words}; F {f:.1f} ms, I {i:.1f} ms, W {w:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    print(describe())
    for ranks in asked.ranks:
        run(ranks, asked.width, asked.rounds)


if __name__ == "__main__":
    main()

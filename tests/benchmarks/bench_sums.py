"""What an order-proof sum of gradients costs, and which forms are order-proof at all.

Adding one micro-batch's gradient of 5 M fp32 elements, on one thread, in several forms, in turns, as
multiples of a plain fp32 addition (medians); differing elements between two orders of the
same 18 terms; an all-reduce of the accumulators between two processes; what an iteration costs in the deterministic
mode, against the fast one; and how far a run in fast mode ends from the deterministic one.
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from openrecycle.agent.config.devices import Mode
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.stages.gradients import SUM_OF, FastSum, GradientSum
from openrecycle.agent.stages.stage import Stage
from tests.benchmarks.machine import describe

ELEMENTS, ROUNDS = 5_000_000, 15
TERMS = 18
_GRID = 2.0**40


class Fp32:
    def __init__(self, size: int) -> None:
        self.total = torch.zeros(size)

    def add(self, term: Tensor) -> None:
        self.total.add_(term)

    def result(self) -> Tensor:
        return self.total


class Fp64(Fp32):
    def __init__(self, size: int) -> None:
        self.total = torch.zeros(size, dtype=torch.float64)

    def result(self) -> Tensor:
        return self.total.float()


class Fp64Grid(Fp64):
    """Terms rounded to multiples of 2**-40: sums below 2**13 are exact."""

    chunk = 1 << 16

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._scratch = torch.empty(min(size, self.chunk), dtype=torch.float64)

    def add(self, term: Tensor) -> None:
        rounding = 1.5 * 2.0**52 / _GRID
        for start in range(0, term.numel(), self.chunk):
            part = term[start : start + self.chunk]
            scratch = self._scratch[: part.numel()].copy_(part)
            low, high = torch.aminmax(part)
            assert low.item() > -4096 and high.item() < 4096
            self.total[start : start + self.chunk].add_(scratch.add_(rounding).sub_(rounding))


class Ours:
    """The sums of the agent, one parameter wide."""

    def __init__(self, kind: type[GradientSum], size: int) -> None:
        self.parameter = nn.Parameter(torch.zeros(size))
        self.sum = kind([self.parameter], terms=TERMS * ROUNDS)

    def add(self, term: Tensor) -> None:
        self.sum.add(self.parameter, term)

    def result(self) -> Tensor:
        self.sum.write_gradients()
        assert self.parameter.grad is not None and not self.sum.rejected
        return self.parameter.grad


FORMS: dict[str, Callable[[int], Any]] = {
    "fp32": Fp32,
    "fp32, FastSum": lambda size: Ours(FastSum, size),
    "fp64": Fp64,
    "fp64 on a grid of 2**-40": Fp64Grid,
    "int64 on a grid of 2**-50, GradientSum": lambda size: Ours(GradientSum, size),
}


def additions() -> dict[str, float]:
    """Median processor seconds per addition."""
    term = torch.randn(ELEMENTS) * 1e-3
    forms = {name: make(ELEMENTS) for name, make in FORMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(ROUNDS):
        for name, form in forms.items():
            started = time.thread_time()
            form.add(term)
            seconds[name].append(time.thread_time() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def differences(spread: int, size: int = 500_000) -> dict[str, int]:
    """Elements of the result that change when the terms come in another order.

    spread: the terms' sizes lie between 1e-`spread` and 1.
    """
    generator = torch.Generator().manual_seed(spread)
    scale = 10.0 ** (-spread * torch.rand(TERMS, size, generator=generator))
    terms = list(torch.randn(TERMS, size, generator=generator) * scale)
    out = {}
    for name, make in FORMS.items():
        results = []
        for seed in (1, 2):
            random.Random(seed).shuffle(terms)
            form = make(size)
            for term in terms:
                form.add(term)
            results.append(form.result().clone())
        out[name] = int((results[0] != results[1]).sum())
    return out


def _reduce(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist: Any = torch.distributed
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
    buffers = {dtype: torch.zeros(ELEMENTS, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64)}
    seconds: dict[str, list[tuple[float, float]]] = {str(dtype): [] for dtype in buffers}
    for _ in range(ROUNDS):
        for dtype, buffer in buffers.items():
            group.barrier().wait()
            started, used = time.perf_counter(), time.process_time()
            group.allreduce([buffer], dist.AllreduceOptions()).wait()
            seconds[str(dtype)].append((time.perf_counter() - started, time.process_time() - used))
    pipe.send({name: tuple(map(statistics.median, zip(*times, strict=True))) for name, times in seconds.items()})
    pipe.recv()  # rank 0 holds the store


def reductions() -> dict[str, tuple[float, float]]:
    """Median seconds per all-reduce between two processes, and processor seconds of one of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=_reduce, args=(rank, port, theirs))
        process.start()
        ends.append(mine)
        processes.append(process)
    seconds: list[dict[str, tuple[float, float]]] = [end.recv() for end in ends]
    for end in ends:
        end.send("over")
    for process in processes:
        process.join()
    return seconds[0]


def train(mode: Mode, *, backwards: bool = False, iterations: int = 100) -> tuple[list[float], Tensor]:
    """Losses and final parameters of the demo GPT in one stage, 6 micro-batches per iteration."""
    gpt, micro_batches = Gpt(dropout=0.0), 6
    module = gpt.build_layer(0, 1, seed=0)
    gradients = SUM_OF[mode](module.parameters(), terms=micro_batches)
    stage, optimizer, losses = Stage(module, gradients), gpt.optimizer(module.parameters()), []
    for iteration in range(iterations):
        for m in sorted(range(micro_batches), reverse=backwards):
            targets = gpt.targets(0, iteration, 0, m)

            def loss(y: Tensor, targets: Tensor = targets) -> Tensor:
                return gpt.loss(y, targets) / micro_batches

            stage.forward((0, m), gpt.inputs(0, iteration, 0, m), seed=m, loss=loss)
            stage.input_backward((0, m), None)
            stage.weight_backward((0, m))
        losses.append(gradients.loss)
        gradients.write_gradients()
        optimizer.step()
        gradients.clear()
    return losses, torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def deviations() -> None:
    """Prints how far runs are apart after 100 iterations."""
    exact = train("deterministic")
    others = {
        "deterministic, other order": train("deterministic", backwards=True),
        "fast": train("fast"),
        "fast, other order": train("fast", backwards=True),
    }
    print("training the demo GPT for 100 iterations, against the deterministic mode (relative):")
    for name, (losses, parameters) in others.items():
        loss = max(abs(a - b) / a for a, b in zip(exact[0], losses, strict=True))
        distance = float((parameters - exact[1]).norm() / exact[1].norm())
        changed = float((parameters != exact[1]).float().mean())
        print(f"{name:28s} loss off by at most {loss:.1e}, parameters by {distance:.1e} (L2), {changed:.0%} changed")


def iterations(tokens: int = 16, micro_batches: int = 6, width: int = 1024, layers: int = 9) -> dict[Mode, float]:
    """Least processor seconds of an iteration of linear layers with 4 * width**2 parameters each, AdamW's step with it;
    `tokens` in each micro-batch. By turns."""
    x, dy = torch.randn(tokens, width), torch.randn(tokens, width) * 1e-3
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(4 * layers)))
    kinds = {mode: SUM_OF[mode](module.parameters(), terms=micro_batches) for mode in SUM_OF}
    stages = {mode: Stage(module, gradients) for mode, gradients in kinds.items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    seconds: dict[Mode, list[float]] = {mode: [] for mode in SUM_OF}
    for _ in range(ROUNDS):
        for mode, stage in stages.items():
            started = time.thread_time()
            for m in range(micro_batches):
                stage.forward((0, m), x, seed=m)
                stage.input_backward((0, m), dy)
                stage.weight_backward((0, m))
            kinds[mode].write_gradients()
            optimizer.step()
            kinds[mode].clear()
            seconds[mode].append(time.thread_time() - started)
    return {mode: min(times) for mode, times in seconds.items()}


def main() -> None:
    print(describe())
    torch.set_num_threads(1)
    seconds = additions()
    narrow, wide = differences(3), differences(12)
    print("elements: of 500,000, those that depend on the order; terms between 1e-3 and 1, and 1e-12 and 1")
    print(f"{'':40s} {'ms':>7s} {'ratio':>6s}   elements")
    for name, value in seconds.items():
        ratio = value / seconds["fp32"]
        print(f"{name:40s} {1000 * value:7.2f} {ratio:6.1f}   {narrow[name]:7d} / {wide[name]:7d}")
    reduced = reductions()
    plain, plain_used = reduced["torch.float32"]
    for name, (value, used) in reduced.items():
        print(
            f"all-reduce of 2, {name:22s} {1000 * value:7.2f} ms, {value / plain:5.2f} times fp32; "
            f"processor time {1000 * used:6.2f} ms, {used / plain_used:5.2f} times"
        )
    found = iterations()
    each = ", ".join(f"{mode} {1000 * value:.0f} ms" for mode, value in found.items())
    ratio = found["deterministic"] / found["fast"]
    print(f"an iteration of 38 M parameters, 6 micro-batches of 16 tokens: {each}; {ratio:.2f} times")
    deviations()
    print(describe())


if __name__ == "__main__":
    main()

"""A training loop of your own that goes on when a worker dies. One process for each worker, and a console:

python -m openrecycle.agent.examples.own_loop http://127.0.0.1:8501 run-42 W0_1 /shared/folder/run-42
"""

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from openrecycle import GradientSum, GroupLost, Job, Membership, Reporter

JOB = Job.uniform(pipelines=2, stages=2, micro_batches=3)
MICRO_BATCHES = JOB.pipelines * JOB.micro_batches
ITERATIONS = 20


def build(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(stage)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8 if stage == 0 else 2))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def load(*micro_batch: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(hash(micro_batch)))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def form_group(now: Membership, shared: str) -> None:
    size, timeout = len(now.workers), timedelta(seconds=30)
    store = dist.FileStore(f"{shared}.{now.generation}", size)  # type: ignore[attr-defined]  # new for each generation
    now.meet(store)
    try:
        dist.init_process_group("gloo", store=store, rank=now.rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise GroupLost(f"generation {now.generation} did not meet: {error}") from error


def catch_up(now: Membership, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = now.hand_over({"i": iteration, "model": model.state_dict(), "adam": optimizer.state_dict()})
    if now.worker in now.joining:  # this process has been started again
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["adam"])
    return int(state["i"])


def train(reporter: Reporter, model: nn.Module, optimizer: torch.optim.Optimizer, shared: str) -> None:
    iteration = 0
    while iteration < ITERATIONS:
        now = reporter.membership()  # after a death, once the console goes on without the dead
        try:
            form_group(now, shared)
            iteration = catch_up(now, iteration, model, optimizer)
            while iteration < ITERATIONS:
                run(reporter, iteration, model, optimizer)
                iteration += 1
        except GroupLost as lost:  # the iteration in hand is asked for again
            print(f"iteration {iteration}: {lost}", file=sys.stderr)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def run(reporter: Reporter, iteration: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters, of = list(model.parameters()), torch.autograd.grad
    sums = GradientSum(parameters=parameters, terms=MICRO_BATCHES)  # the same bits whoever ran what; others will do
    kept: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    for op in reporter.schedule(iteration):
        key = op.pipeline, op.micro_batch
        if op.kind == "F":
            x, target = load(iteration, *key)
            x = op.receive().requires_grad_() if op.source else x
            y = model(x)
            if op.destination:
                op.send(y)
            else:
                y = functional.cross_entropy(y, target) / MICRO_BATCHES
                sums.add_loss(y)
            kept[key] = x, y
        if op.kind in "IB":  # the gradient of the input; B is I and W in one
            x, y = kept[key]
            kept[key] = y, op.receive() if op.source else torch.ones(())
            if op.destination:
                op.send(*of(y, x, kept[key][1], retain_graph=True))
        if op.kind in "WB":  # those of the parameters
            y, dy = kept.pop(key)
            for parameter, gradient in zip(parameters, of(y, parameters, dy), strict=True):
                sums.add(parameter, gradient)
        if op.kind == "O":
            op.reduce(sums.buffer)
            sums.write_gradients()
            optimizer.step()
    reporter.iteration(iteration, loss=sums.loss)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="One worker of four of a training loop of your own.")
    for name, about in (
        ("console", "its address, such as http://127.0.0.1:8501"),
        ("run", "the same name for all four, and new for each run"),
        ("worker", "W0_0 to W1_1: which one this process is"),
        ("shared", "the beginning of the names of files, in a folder that exists, that all four can reach"),
    ):
        arguments.add_argument(name, help=about)
    console, name, worker, shared = vars(arguments.parse_args()).values()
    torch.set_num_threads(1)  # the same in all workers, since it shows in the bits
    with Reporter(console=console, run=name, job=JOB, worker=worker, iterations=ITERATIONS) as reporter:
        train(reporter, *build(int(worker.partition("_")[2])), shared)
    print(f"{worker}: {ITERATIONS} iterations done")

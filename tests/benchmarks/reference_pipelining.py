"""The yardstick: the same job on `torch.distributed.pipelining`, Schedule1F1B plus plain data parallelism.

One process per cell of the grid, on gloo. Each stage all-reduces its gradients over the pipelines in
one flat tensor and steps; nothing survives a failure here. Model, data, loss and optimizer are those
that the agent is given.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from openrecycle.agent.models.layers import build_layer, layer_count, partition_of, spans
from tests.benchmarks.clocked import ClockedGpt

dist: Any = torch.distributed


@dataclass(frozen=True)
class Grid:
    pipelines: int
    stages: int
    micro_batches: int


@dataclass(frozen=True)
class Outcome:
    """seconds: between the moments at which all ranks had taken their step. losses: of each iteration."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...]


def train(grid: Grid, options: Mapping[str, Any], *, iterations: int, seed: int = 0) -> Outcome:
    """Runs the job to its end in processes of its own. options: of tests.benchmarks.clocked.ClockedGpt.

    Raises RuntimeError when a process fails.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(grid.pipelines * grid.stages):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(rank, grid, dict(options), iterations, seed, store.port, theirs), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        reports = [pipe.recv() for pipe in pipes]
    except EOFError:
        raise RuntimeError("a process of the reference job ended early") from None
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
    stepped = [max(times) for times in zip(*(times for times, _ in reports), strict=True)]
    # Only last stages have losses.
    losses = [sum(losses[i] for _, losses in reports if losses) / grid.pipelines for i in range(iterations)]
    return Outcome(tuple(b - a for a, b in pairwise(stepped)), tuple(losses))


def _rank_main(
    rank: int, grid: Grid, options: dict[str, Any], iterations: int, seed: int, port: int, report: Connection
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=grid.pipelines * grid.stages)
    pipeline, stage = divmod(rank, grid.stages)
    # Every process takes part in the making of every group.
    rows = [dist.new_group([p * grid.stages + s for s in range(grid.stages)]) for p in range(grid.pipelines)]
    columns = [dist.new_group([p * grid.stages + s for p in range(grid.pipelines)]) for s in range(grid.stages)]
    workload = ClockedGpt(**options)
    layers = layer_count(workload, grid.stages)
    span = spans(partition_of((), layers, grid.stages))[stage]
    module = nn.Sequential(*(build_layer(workload, layer, layers, seed) for layer in span))
    optimizer = workload.optimizer(module.parameters())
    schedule = Schedule1F1B(
        PipelineStage(module, stage, grid.stages, torch.device("cpu"), group=rows[pipeline]),
        grid.micro_batches,
        loss_fn=workload.loss,
    )
    times, losses = [], []
    for iteration in range(iterations):
        keys = [(seed, iteration, pipeline, m) for m in range(grid.micro_batches)]
        inputs = (torch.cat([workload.inputs(*key) for key in keys]),) if stage == 0 else ()
        last = stage == grid.stages - 1
        targets = torch.cat([workload.targets(*key) for key in keys]) if last else None
        terms: list[Tensor] = []
        schedule.step(*inputs, target=targets, losses=terms if last else None, return_outputs=False)
        if grid.pipelines > 1:
            _average(module, columns[stage], grid.pipelines)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.monotonic())
        losses += [float(torch.stack(terms).detach().mean())] if last else []
    report.send((times, losses))
    dist.barrier()
    os._exit(0)


def _average(module: nn.Module, group: Any, peers: int) -> None:
    """Mean of the gradients over the peers of a stage."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients]).div_(peers)
    dist.all_reduce(flat, group=group)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()

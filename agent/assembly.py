"""Puts one worker's stage together: its module, how its backward is split, and the sum of its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from agent.backward.probe import Probe, Split, choose_split
from agent.boundaries import CPU, Boundaries, tensors_of
from agent.devices import on_device
from agent.gradients import gradient_sum
from agent.randomness import seed_for
from agent.recipe import Recipe
from agent.stage import Stage
from agent.workload import Workload
from planner.job import Job


def assemble(
    workload: Workload,
    job: Job,
    stage: int,
    seed: int,
    recipe: Recipe,
    boundaries: Boundaries,
    device: torch.device = CPU,
) -> tuple[Stage, Split]:
    """The stage, ready to run; and what was found out about its backward.

    Runs a few micro-batches of the size of real ones, on `device`. Initial parameters are those of the
    CPU, so that they don't depend on it. Raises whatever the workload raises.
    """
    module = workload.build_stage(stage, job.stages, seed).to(device)
    split = choose_split(module, _probe(workload, job, stage, seed, boundaries, device), autocast=recipe.autocast)
    gradients = gradient_sum(
        recipe.mode,
        module.parameters(),
        terms=job.pipelines * job.micro_batches,
        buffers=split.moving,
        device=device,
    )
    return Stage(module, gradients, split=split.strategy, autocast=recipe.autocast), split


def _probe(workload: Workload, job: Job, stage: int, seed: int, boundaries: Boundaries, device: torch.device) -> Probe:
    """Real data where the stage sees any, numbers of the same shape elsewhere."""
    generator = torch.Generator().manual_seed(seed_for("probe", seed, stage))
    if stage == 0:
        inputs = tensors_of(workload.inputs(seed, 0, 0, 0), "data")
    else:
        inputs = tuple(_like(spec.empty(), generator) for spec in boundaries[stage - 1])
    inputs = on_device(inputs, device)
    if stage < job.stages - 1:
        return Probe(inputs)
    targets, share = on_device(workload.targets(seed, 0, 0, 0), device), 1.0 / (job.pipelines * job.micro_batches)
    return Probe(inputs, loss=lambda y: workload.loss(y, targets) * share)


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    # Integers may be indices: 0 is always one.
    return tensor.normal_(generator=generator) if tensor.is_floating_point() else tensor.zero_()

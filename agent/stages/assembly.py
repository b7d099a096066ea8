"""Puts one worker's stage together: its module, how its backward is split, and the sum of its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from openrecycle.agent.config.devices import on_device
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.config.randomness import seed_for
from openrecycle.agent.models.layers import LayerStack, build_layers
from openrecycle.agent.models.stage_io import CPU, StageCuts, StageIO, tensors_of, wanted_of
from openrecycle.agent.models.workload import Workload, nominal_weight, probe_inputs, probe_targets
from openrecycle.agent.stages.backward.probe import Probe, Split, choose_split
from openrecycle.agent.stages.backward.split import STRATEGIES, StrategyName
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.stage import Stage
from openrecycle.planner.jobs.job import Job


def assemble(
    workload: Workload,
    job: Job,
    cuts: StageCuts,
    stage: int,
    seed: int,
    optimization: Optimization,
    device: torch.device = CPU,
) -> tuple[Stage, Split]:
    """The stage, ready to run; and what was found out about its backward.

    Runs a few micro-batches of the size of real ones, on `device`. Initial parameters are those of the
    CPU, so that they don't depend on it. Raises whatever the workload raises.
    """
    module = build_layers(workload, cuts.span(stage), cuts.layers, seed).to(device)
    probe = _probe(workload, job, stage, seed, cuts.stage_io, device)
    split = choose_split(module, probe, autocast=optimization.autocast)
    gradients = SUM_OF[optimization.mode](
        module.parameters(),
        terms=job.pipelines * job.micro_batches,
        buffers=split.moving,
        device=device,
        nominal=nominal_weight(workload, job.pipelines * job.micro_batches),
        bucket_bytes=optimization.bucket_bytes,
    )
    return Stage(module, gradients, split=split.strategy, autocast=optimization.autocast), split


def reassemble(optimizer: StageOptimizer, strategy: StrategyName, optimization: Optimization) -> Stage:
    """The stage of layers that are here already, with what is summed of them. strategy: how the backward of each of
    them is split."""
    split = STRATEGIES[strategy](optimizer.module)
    return Stage(optimizer.module, optimizer.gradients, split=split, autocast=optimization.autocast)


def try_split(
    workload: Workload,
    job: Job,
    cuts: StageCuts,
    stage: int,
    seed: int,
    optimization: Optimization,
    module: LayerStack,
    device: torch.device = CPU,
) -> StrategyName:
    """How the backward of layers that are here already can be split, on a few micro-batches. Nothing is split then."""
    probe = _probe(workload, job, stage, seed, cuts.stage_io, device)
    found = choose_split(module, probe, autocast=optimization.autocast).strategy
    found.close()
    return found.name


def _probe(workload: Workload, job: Job, stage: int, seed: int, stage_io: StageIO, device: torch.device) -> Probe:
    """Real data where the stage sees any, numbers of the same shape elsewhere."""
    generator = torch.Generator().manual_seed(seed_for("probe", seed, stage))
    if stage == 0:
        inputs, wanted = tensors_of(probe_inputs(workload, seed), "data"), None
    else:
        inputs = tuple(_like(spec.empty(), generator) for spec in stage_io[stage - 1])
        wanted = wanted_of(stage_io[stage - 1])
    inputs = on_device(inputs, device)
    if stage < job.stages - 1:
        return Probe(inputs, wanted=wanted)
    targets = on_device(probe_targets(workload, seed), device)
    share = 1.0 / (job.pipelines * job.micro_batches)
    return Probe(inputs, lambda y: workload.loss(y, targets) * share, wanted)


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    # Integers may be indices: 0 is always one.
    return tensor.normal_(generator=generator) if tensor.is_floating_point() else tensor.zero_()

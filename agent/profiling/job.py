"""A whole profile: every part of a model, then the traffic between the processes that will run it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.config.options import Optimization
from openrecycle.agent.models.stage_io import LOWER, StageCuts, Tensors, tensors_of
from openrecycle.agent.models.workload import NamedWorkload, load_workload
from openrecycle.agent.profiling.profiler import PartSpec, ProfilingEffort, measure_part, size_of, timing_of
from openrecycle.agent.profiling.shapes import parts_of, shape_of
from openrecycle.agent.profiling.stages import Rounds, StageError, measure_stages
from openrecycle.agent.profiling.traffic import TrafficError, measure_traffic
from openrecycle.agent.stages.assembly import assemble
from openrecycle.agent.stages.optimizer import StageOptimizer, stage_optimizer
from openrecycle.agent.stages.stage import Stage
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.profiles import Hardware, Measurements, Part, Reductions, Timing

__all__ = ["StageError", "TrafficError", "measure_model", "measure_workload"]

Say = Callable[[str], None]
Grid = tuple[int, int, int]
"""Pipelines, stages, micro-batches."""


def measure_model(
    name: str, batch: int, grid: Grid, optimization: Optimization, effort: ProfilingEffort, say: Say
) -> Measurements:
    """Of a built-in shape: embedding, one layer and head, split as the deferred Linear does it.

    grid: pipelines, stages, micro-batches. say: gets sentences about the progress. Raises InputError
    or TrafficError.
    """
    shape, (pipelines, stages, _) = shape_of(name), grid
    if stages > shape.layers:
        raise InputError("--stages", stages, f"at most {shape.layers}, the layers of {name}")
    parts = []
    for spec in parts_of(shape, batch, optimization):
        say(f"measuring {spec.name} of {name}")
        parts.append(measure_part(spec, effort)[0])
    boundary = torch.float32.itemsize * batch * shape.sequence * shape.width
    transfers, reductions = _traffic((boundary,), parts, pipelines, effort, say)
    about = (
        f"{shape.layers} layers, hidden {shape.width}, {shape.heads} heads, sequence {shape.sequence}, "
        f"vocabulary {shape.vocabulary}, {shape.parameters / 1e9:.2f} billion parameters; sizes: {shape.note}"
    )
    return Measurements(
        model=name,
        about=about,
        samples_per_micro_batch=batch,
        mode=optimization.mode,
        hardware=_hardware(effort, optimization),
        cut="layers",
        layers=shape.layers,
        parts=tuple(parts),
        boundary_bytes=boundary,
        transfers=transfers,
        reductions=reductions,
    )


def measure_workload(
    path: str, options: Mapping[str, Any], grid: Grid, optimization: Optimization, effort: ProfilingEffort, say: Say
) -> Measurements:
    """Of any workload: each of its stages as a worker puts it together and runs it. Bytes are those of one
    micro-batch, fed with what the stage before puts out.

    grid: pipelines, stages, micro-batches. Raises InputError, StageError or TrafficError.
    """
    pipelines, stages, micro_batches = grid
    workload, job = load_workload(path, dict(options)), Job.uniform(*grid)
    cuts = StageCuts.of(workload, stages, autocast=optimization.autocast)
    inputs = tensors_of(workload.inputs(0, 0, 0, 0), "data")
    x: Tensors = inputs if len(inputs) > 1 else inputs[0]
    targets = workload.targets(0, 0, 0, 0)

    def scaled_loss(output: Any) -> Tensor:
        return workload.loss(output, targets) / (pipelines * micro_batches)

    def trained(stage: int) -> tuple[Stage, StageOptimizer]:
        made, _ = assemble(workload, job, cuts, stage, 0, optimization)
        return made, stage_optimizer(workload, made.module, made.gradients, optimization)

    parts, sizes = [], []
    say(f"measuring the bytes that {stages} stages of {path} keep")
    for stage in range(stages):
        last = stage == stages - 1
        spec = PartSpec(f"stage {stage}", partial(trained, stage), x, scaled_loss if last else None)
        part, x = measure_part(spec, replace(effort, repeats=1, warm_up=0))
        parts.append(part)
        if not last:
            sizes.append(size_of(x))
    rounds = measure_stages(NamedWorkload(path, options), job, optimization, effort, say)
    parts = [_timed(part, found) for part, found in zip(parts, rounds, strict=True)]
    transfers, reductions = _traffic(tuple(sizes), parts, pipelines, effort, say)
    return Measurements(
        model=path,
        about=f"{stages} stages of {path} with options {dict(options)}"[:300],
        samples_per_micro_batch=workload.samples_per_micro_batch,
        mode=optimization.mode,
        hardware=_hardware(effort, optimization),
        cut="stages",
        parts=tuple(parts),
        boundary_bytes=max(sizes, default=0),
        transfers=transfers,
        reductions=reductions,
    )


def _timed(part: Part, found: Rounds) -> Part:
    names = {"F": "forward", "I": "input_backward", "W": "weight_backward", "O": "step"}
    return part.model_copy(update={name: timing_of(found[kind]) for kind, name in names.items()})


def _traffic(
    sizes: tuple[int, ...], parts: list[Part], pipelines: int, effort: ProfilingEffort, say: Say
) -> tuple[tuple[Timing, ...], Reductions | None]:
    say("measuring transfers and reductions")
    largest = max(part.reduced_bytes for part in parts)
    repeats = max(5, effort.repeats)
    return measure_traffic(sizes, largest, pipelines, repeats=repeats, warm_up=effort.warm_up, clock=effort.clock)


def _hardware(effort: ProfilingEffort, optimization: Optimization) -> Hardware:
    return Hardware(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        dtype=_dtype(optimization),
        clock=effort.clock,
        load=round(os.getloadavg()[0], 2),
        measured_on=datetime.now(UTC).date().isoformat(),
    )


def _processor() -> str:
    """Its name, where the system says it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _dtype(optimization: Optimization) -> str:
    if optimization.autocast is None:
        return "float32"
    return f"{str(LOWER[optimization.autocast]).removeprefix('torch.')} by autocast, float32 sums"

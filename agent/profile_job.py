"""A whole profile: every part of a model, then the traffic between the processes that will run it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from agent.model_shapes import parts_of, shape_of
from agent.profile_traffic import TrafficError, measure_traffic
from agent.profiler import Effort, PartSpec, measure_part
from agent.workload import load_workload
from planner.errors import InputError
from planner.profiles import Hardware, Measurements, Part, Reductions, Timing

__all__ = ["TrafficError", "measure_model", "measure_workload"]

Say = Callable[[str], None]


def measure_model(name: str, batch: int, stages: int, pipelines: int, effort: Effort, say: Say) -> Measurements:
    """Of a built-in shape: embedding, one layer and head. say: gets sentences about the progress.

    Raises InputError or TrafficError.
    """
    shape = shape_of(name)
    if stages > shape.layers:
        raise InputError("--stages", stages, f"at most {shape.layers}, the layers of {name}")
    parts = []
    for spec in parts_of(shape, batch):
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
        hardware=_hardware(effort),
        cut="layers",
        layers=shape.layers,
        parts=tuple(parts),
        boundary_bytes=boundary,
        transfers=transfers,
        reductions=reductions,
    )


def measure_workload(
    path: str,
    options: Mapping[str, Any],
    stages: int,
    pipelines: int,
    micro_batches: int,
    effort: Effort,
    say: Say,
) -> Measurements:
    """Of any workload: each of its stages, fed with what the one before puts out.

    Raises InputError or TrafficError.
    """
    workload = load_workload(path, dict(options))
    x, targets = workload.inputs(0, 0, 0, 0), workload.targets(0, 0, 0, 0)
    parts, boundaries = [], []
    for stage in range(stages):
        say(f"measuring stage {stage} of {path}")
        last = stage == stages - 1
        spec = PartSpec(
            f"stage {stage}",
            lambda stage=stage: workload.build_stage(stage, stages, 0),  # type: ignore[misc]
            x,
            (lambda y: workload.loss(y, targets)) if last else None,
            workload.optimizer,
            terms=pipelines * micro_batches,
        )
        part, x = measure_part(spec, effort)
        parts.append(part)
        if not last:
            boundaries.append(x.numel() * x.element_size())
    transfers, reductions = _traffic(tuple(boundaries), parts, pipelines, effort, say)
    return Measurements(
        model=path,
        about=f"{stages} stages of {path} with options {dict(options)}"[:300],
        samples_per_micro_batch=workload.samples_per_micro_batch,
        hardware=_hardware(effort),
        cut="stages",
        parts=tuple(parts),
        boundary_bytes=max(boundaries, default=0),
        transfers=transfers,
        reductions=reductions,
    )


def _traffic(
    sizes: tuple[int, ...], parts: list[Part], pipelines: int, effort: Effort, say: Say
) -> tuple[tuple[Timing, ...], Reductions | None]:
    say("measuring transfers and reductions")
    largest = max(part.reduced_bytes for part in parts)
    return measure_traffic(sizes, largest, pipelines, repeats=max(5, effort.repeats), warm_up=effort.warm_up)


def _hardware(effort: Effort) -> Hardware:
    return Hardware(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        dtype="float32",
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

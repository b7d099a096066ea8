"""A whole profile: every part of a model, then the traffic between the processes that will run it."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle.agent.config.options import Optimization
from openrecycle.agent.examples.gpt import Block
from openrecycle.agent.models.layers import kind_of, spans
from openrecycle.agent.models.stage_io import LOWER, StageCuts, Tensors, tensors_of
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.profiling.profiler import PartSpec, ProfilingEffort, measure_part, size_of, timing_of
from openrecycle.agent.profiling.stages import Rounds, measure_stages
from openrecycle.agent.profiling.traffic import MeasuringError, measure_traffic
from openrecycle.agent.stages.assembly import assemble
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer, stage_optimizer
from openrecycle.agent.stages.stage import Stage
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import MAX_LAYERS, Job
from openrecycle.planner.profiles import Hardware, Measurements, Part, Reductions, Timing, shape_name

__all__ = ["MeasuringError", "measure_model", "measure_workload"]

# -- models that are profiled by name: the shapes of the GPT-3 family, in pieces ---------------------


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer. note: where its numbers come from."""

    layers: int
    width: int
    heads: int
    note: str
    vocabulary: int = 50257
    sequence: int = 2048

    @property
    def parameters(self) -> int:
        """Of all layers (weights, biases, norms), both embeddings and the head, which is its own."""
        layer = 12 * self.width**2 + 13 * self.width
        ends = (2 * self.vocabulary + self.sequence + 2) * self.width + self.vocabulary
        return self.layers * layer + ends


TERMS = 64
"""Micro-batches per iteration that the sums are made for; the times do not depend on it."""
_PUBLISHED = "the GPT-3 paper's table of sizes"
SHAPES = {
    "gpt-3-medium": Shape(24, 1024, 16, _PUBLISHED),
    "gpt-3-3.35b": Shape(28, 3072, 24, "chosen here so that layers and one embedding make 3.3 billion parameters"),
    "gpt-3-6.7b": Shape(32, 4096, 32, _PUBLISHED),
}


def shape_of(name: str) -> Shape:
    """Raises InputError for a name that is not known."""
    try:
        return SHAPES[name]
    except KeyError:
        raise InputError("--model", name, "one of " + ", ".join(SHAPES)) from None


class TokenEmbedding(nn.Module):
    """Tokens and their positions to vectors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.sequence, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, sequence) int64; returns (batch, sequence, width)."""
        x: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return x


def parts_of(shape: Shape, batch: int, optimization: Optimization) -> list[PartSpec]:
    """Embedding, one layer, head with its loss; `batch` samples of full length each. AdamW."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocabulary, (batch, shape.sequence), generator=generator)
    x = torch.randn(batch, shape.sequence, shape.width, generator=generator)

    def head() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary))

    def loss(output: Tensor) -> Tensor:
        return functional.cross_entropy(output.reshape(-1, shape.vocabulary), tokens.reshape(-1)) / TERMS

    def trained(build: Callable[[], nn.Module]) -> Callable[[], tuple[Stage, StageOptimizer]]:
        def made() -> tuple[Stage, StageOptimizer]:
            module = build()
            gradients = SUM_OF[optimization.mode](module.parameters(), terms=TERMS)
            optimizer = StageOptimizer(
                module, torch.optim.AdamW(module.parameters()), gradients, clips=optimization.clip_norm is not None
            )
            return Stage(module, gradients, autocast=optimization.autocast), optimizer

        return made

    return [
        PartSpec("embedding", trained(lambda: TokenEmbedding(shape)), tokens, None),
        PartSpec("layer", trained(lambda: Block(shape.width, shape.heads, 0.0)), x, None),
        PartSpec("head", trained(head), x, loss),
    ]


# -- a whole profile ---------------------------------------------------------------------------------

Say = Callable[[str], None]
Grid = tuple[int, int, int]
"""Pipelines, stages, micro-batches."""


def measure_model(
    name: str, batch: int, grid: Grid, optimization: Optimization, effort: ProfilingEffort, say: Say
) -> Measurements:
    """Of a built-in shape: embedding, one layer and head, split as the deferred Linear does it.

    grid: pipelines, stages, micro-batches. say: gets sentences about the progress. Raises InputError
    or MeasuringError.
    """
    name, (pipelines, stages, _) = shape_name(name), grid
    shape = shape_of(name)
    if stages > shape.layers:
        raise InputError("--stages", stages, f"at most {shape.layers}, the layers of {name}")
    parts = []
    for spec in parts_of(shape, batch, optimization):
        say(f"measuring {spec.name} of {name}")
        parts.append(measure_part(spec, effort)[0])
    boundary = torch.float32.itemsize * batch * shape.sequence * shape.width
    reduced = max(part.reduced_bytes for part in parts)
    transfers, reductions = _traffic((boundary,), reduced, pipelines, effort, say)
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
    """Of any workload: each of its layers as a worker puts it together and runs it, were it a stage; of one that comes
    in stages, each of these. Bytes are those of one micro-batch, fed with what the one before puts out.

    What an op costs beside its layers would count once for each of them; so the stages of an even cut are measured,
    too, and a layer's time is its part of its stage's.

    grid: pipelines, stages, micro-batches. Raises InputError or MeasuringError.
    """
    pipelines, stages, micro_batches = grid
    source, job = NamedWorkload(path, options), Job.uniform(*grid)
    workload = source.load()
    autocast = optimization.autocast
    whole = StageCuts.of(workload, stages, autocast=autocast)
    what = kind_of(workload) if whole.layers <= MAX_LAYERS else "stage"
    cuts, alone, together = whole, job, tuple(range(k, k + 1) for k in range(stages))
    if what == "layer":
        together = spans(whole.partition)
        cuts = StageCuts((1,) * whole.layers, whole.layer_io)
        alone = Job.uniform(pipelines, cuts.layers, micro_batches)
    inputs = tensors_of(workload.inputs(0, 0, 0, 0), "data")
    x: Tensors = inputs if len(inputs) > 1 else inputs[0]
    targets = workload.targets(0, 0, 0, 0)

    def scaled_loss(output: Any) -> Tensor:
        return workload.loss(output, targets) / (pipelines * micro_batches)

    def trained(number: int) -> tuple[Stage, StageOptimizer]:
        made, _ = assemble(workload, alone, cuts, number, 0, optimization)
        return made, stage_optimizer(workload, made.module, made.gradients, optimization)

    parts, sizes = [], []
    say(f"measuring the bytes that {alone.stages} {what}s of {path} keep")
    for number in range(alone.stages):
        last = number == alone.stages - 1
        spec = PartSpec(f"{what} {number}", partial(trained, number), x, scaled_loss if last else None)
        part, x = measure_part(spec, replace(effort, repeats=1, warm_up=0))
        parts.append(part)
        if not last:
            sizes.append(size_of(x))
    rounds = measure_stages(source, alone, optimization, effort, say, what=what, layers=cuts.layers)
    if alone.stages > stages:
        of_stages = measure_stages(source, job, optimization, effort, say, layers=cuts.layers)
        rounds = [
            layer
            for span, stage in zip(together, of_stages, strict=True)
            for layer in shared_out(stage, [rounds[k] for k in span])
        ]
    parts = [_timed(part, found) for part, found in zip(parts, rounds, strict=True)]
    reduced = max(sum(parts[k].reduced_bytes for k in span) for span in together)
    transfers, reductions = _traffic(tuple(sizes), reduced, pipelines, effort, say)
    return Measurements(
        model=path,
        about=f"{alone.stages} {what}s of {path} with options {dict(options)}"[:300],
        samples_per_micro_batch=workload.samples_per_micro_batch,
        mode=optimization.mode,
        hardware=_hardware(effort, optimization),
        cut="each" if what == "layer" else "stages",
        layers=alone.stages if what == "layer" else 0,
        parts=tuple(parts),
        boundary_bytes=max(sizes, default=0),
        transfers=transfers,
        reductions=reductions,
    )


def shared_out(stage: Rounds, layers: list[Rounds]) -> list[Rounds]:
    """Of the stage's seconds, to each of its layers its part, by what each takes alone."""
    made: list[Rounds] = [{} for _ in layers]
    for kind, seconds in stage.items():
        alone = [statistics.median(layer[kind]) for layer in layers]
        whole = sum(alone)
        for out, mine in zip(made, alone, strict=True):
            out[kind] = [each * mine / whole if whole else each / len(layers) for each in seconds]
    return made


def _timed(part: Part, found: Rounds) -> Part:
    names = {"F": "forward", "I": "input_backward", "W": "weight_backward", "O": "step"}
    return part.model_copy(update={name: timing_of(found[kind]) for kind, name in names.items()})


def _traffic(
    sizes: tuple[int, ...], reduced: int, pipelines: int, effort: ProfilingEffort, say: Say
) -> tuple[tuple[Timing, ...], Reductions | None]:
    """One transfer per boundary. reduced: bytes of the largest sum."""
    say("measuring transfers and reductions")
    repeats, unlike = max(5, effort.repeats), tuple(sorted(set(sizes)))
    found, reductions = measure_traffic(
        unlike, reduced, pipelines, repeats=repeats, warm_up=effort.warm_up, clock=effort.clock
    )
    by_size = dict(zip(unlike, found, strict=True))
    return tuple(by_size[size] for size in sizes), reductions


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

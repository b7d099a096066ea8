"""What a job trains: model stages, data, loss and optimizer, all functions of their arguments alone."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from openrecycle.planner.jobs.errors import InputError

if TYPE_CHECKING:  # a launcher refuses bad input before it imports torch, which takes seconds
    import torch
    from torch import Tensor

T = TypeVar("T")
Metric = Callable[[Any, Any], Any]
"""(output of the last layer, targets) to a number, the mean over a micro-batch."""


class EvaluationData(Protocol):
    """What a workload is evaluated on: so many micro-batches of the form of those that it trains on, and what is
    measured beside its loss, by name."""

    @property
    def micro_batches(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, Metric]: ...

    def inputs(self, seed: int, index: int) -> Any: ...

    def targets(self, seed: int, index: int) -> Any: ...


MAX_WEIGHT = 1e9
"""Of one micro-batch."""
PROBED = 16
"""Micro-batches that are tried at most to see what data is like."""


class Workload(Protocol):
    """A training task.

    Its model comes as layers, `layer_count(stages)` and `build_layer(layer, layers, seed)`, of which a stage holds a
    contiguous run; or as stages that can't be cut, `build_stage(stage, stages, seed)`. Each gives a torch.nn.Module
    that takes what the one before returns; equal arguments give equal initial parameters. Parameters that several
    layers share are named by `tied(layers)`: groups of `LAYER.NAME`.
    `inputs` and `targets` depend on (seed, iteration, pipeline, micro_batch) only, so that whichever
    worker runs a micro-batch sees the same data.
    A workload may have more: `scheduler(optimizer)`, an LRScheduler that is stepped once per
    iteration; and, where agent.models.layers should not find out what passes from one to the next,
    `stage_io` (TensorSpecs per pair of neighbouring layers, or stages) or `stage_output_shape` and
    `stage_output_dtype` (of one tensor that is the same between all of them); and
    `samples(iteration, pipeline, micro_batch)`, the indices of the samples in a micro-batch, for messages about one
    that raises; `evaluation`, EvaluationData; and, where layer 0 takes its inputs as keyword arguments, their names in
    the order of the tensors, `input_names`, and those of them that all layers get, `shared_inputs`. Where the loss of
    an iteration is not the plain mean over its micro-batches: `weight(targets)`, how much one counts, such as its
    number of tokens, and `usual_weight`, what that is about (a constant). `upcoming(places)` is told the
    (iteration, pipeline, micro-batch) of those that will be asked for next, where any are; first of none, to get ready.
    `parallelize(layer, mesh)` returns a layer split over the ranks of a worker, a torch DeviceMesh, by
    torch.distributed.tensor.parallel.parallelize_module, and then what enters a layer and leaves it is a plain tensor,
    of the same form on every rank as without them; or by torch.distributed.fsdp.fully_shard, and then each rank runs a
    part of the samples; or by both, over a mesh of two dimensions (agent.models.parallelized). Where inputs are of
    several shapes, `varies` is true, and `largest(seed)` gives the (inputs, targets) of a micro-batch that is in no
    dimension smaller than any. Where its data are cut for one grid, `grid` is that: (pipelines, micro-batches).
    """

    @property
    def samples_per_micro_batch(self) -> int: ...

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        """What enters the first stage: a tensor, or a tuple of tensors, its positional arguments."""

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        """What the last stage's output is compared with."""

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Scalar mean loss of one micro-batch."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Of a stage's parameters, an iterable; or of a list of (name, parameter) pairs, where the argument is called
        `named_parameters`."""


def nominal_weight(workload: Workload, micro_batches: int) -> float | None:
    """Of an iteration; None where its micro-batches are not weighted."""
    weight = getattr(workload, "usual_weight", None)
    return None if weight is None else micro_batches * float(weight)


def weight_of(workload: Any, targets: Any) -> Tensor:
    """How much a micro-batch with these targets counts: fp64, one element. Raises ValueError."""
    import torch

    weight = float(workload.weight(targets))
    if not 0 <= weight < MAX_WEIGHT:
        raise ValueError(f"weight of a micro-batch: got {weight}, expected a number from 0 to {MAX_WEIGHT:g}")
    return torch.full((1,), weight, dtype=torch.float64)


def first_readable(read: Callable[[int, int, int], T]) -> T:
    """What `read` gives for (iteration, pipeline, micro-batch): of the first iteration, or the next ones while it
    raises, as one bad sample is no reason not to begin. Where all raise, so does this, what the first did."""
    for iteration in range(PROBED):
        with contextlib.suppress(Exception):
            return read(iteration, 0, 0)
    return read(0, 0, 0)


def probe_inputs(workload: Any, seed: int) -> Any:
    """Inputs to try layers on: of the largest shape where shapes vary."""
    largest = workload.largest(seed) if getattr(workload, "varies", False) else None
    return first_readable(partial(workload.inputs, seed)) if largest is None else largest[0]


def probe_targets(workload: Any, seed: int) -> Any:
    """The targets of those."""
    largest = workload.largest(seed) if getattr(workload, "varies", False) else None
    return first_readable(partial(workload.targets, seed)) if largest is None else largest[1]


_NEEDED = ("inputs", "targets", "loss", "optimizer")


def load_workload(path: str, options: dict[str, Any]) -> Workload:
    """`package.module:factory` called with `options`. Raises InputError when that can't be done, or gives something
    else."""
    module_name, _, factory_name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError("--workload", path, f"module:factory that can be imported ({error})") from None
    try:
        workload: Workload = factory(**options)
    except (TypeError, ValueError) as error:
        raise InputError("--workload-options", json.dumps(options), f"options that {path} accepts ({error})") from None
    if missing := [name for name in _NEEDED if not hasattr(workload, name)]:
        got = f"{path}, which gives a {type(workload).__name__} without {', '.join(missing)}"
        expected = "a class of workloads, or a function that returns one, such as `ResilientTrainer(...).workload()`"
        raise InputError("--workload", got, expected)
    return workload


class WorkloadSource(Protocol):
    """How a worker process comes by its workload; is sent to it.

    modules: names that the server of worker processes imports once, for all of them.
    """

    @property
    def modules(self) -> tuple[str, ...]: ...

    def load(self) -> Workload:
        """Raises InputError when it can't be made."""


@dataclass(frozen=True)
class NamedWorkload:
    """A workload by name: plain data, so it may go to another host. path: `package.module:factory`.

    In a clone the examples may be named by their folder, `agent.examples.gpt:Gpt`; the module is
    `openrecycle.agent.examples.gpt`.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.startswith("agent.examples."):
            object.__setattr__(self, "path", f"openrecycle.{self.path}")

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.path.partition(":")[0],)

    def load(self) -> Workload:
        return load_workload(self.path, dict(self.options))

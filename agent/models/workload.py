"""What a job trains: model stages, data, loss and optimizer, each a function of its arguments alone."""

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

    from openrecycle.agent.models.state import StageState

T = TypeVar("T")
Metric = Callable[[Any, Any], Any]
"""(output of the last layer, targets) to a number, the mean over a micro-batch."""


class EvaluationData(Protocol):
    """The data that a workload is evaluated on: `micro_batches` of them, of the same form as those that it trains on.
    metrics: what is measured beside the loss, by name."""

    @property
    def micro_batches(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, Metric]: ...

    def inputs(self, seed: int, index: int) -> Any: ...

    def targets(self, seed: int, index: int) -> Any: ...


MAX_WEIGHT = 1e9
"""The largest weight of one micro-batch."""
PROBED = 16
"""At most so many micro-batches are tried to find out what the data looks like."""


class Workload(Protocol):
    """A training task.

    Its model comes as layers, `layer_count(stages)` and `build_layer(layer, layers, seed)`, of which a stage holds a
    contiguous run; or as stages that can't be cut, `build_stage(stage, stages, seed)`. Each of these functions returns
    a torch.nn.Module that takes what the module before it returns. Equal arguments give equal initial parameters.
    `inputs` and `targets` depend on (seed, iteration, pipeline, micro_batch) only, so that a micro-batch has the same
    data whichever worker runs it.

    A workload may also have:
    tied(layers): parameters that several layers share, as groups of `LAYER.NAME`.
    scheduler(optimizer): an LRScheduler, which is stepped once per iteration.
    stage_io: TensorSpecs of what passes between each pair of neighbouring layers, or stages. Or stage_output_shape and
        stage_output_dtype, of a single tensor that is the same between all of them. Without either,
        agent.models.layers finds it out.
    samples(iteration, pipeline, micro_batch): the indices of the samples in a micro-batch, for the message about a
        micro-batch that raises.
    evaluation: EvaluationData.
    input_names: where layer 0 takes its inputs as keyword arguments, their names, in the order of the tensors.
        shared_inputs: those of the names that all layers get.
    weight(targets): where the loss of an iteration is not the plain mean over its micro-batches, how much one of them
        counts, such as its number of tokens. usual_weight: roughly what `weight` returns (a constant).
    upcoming(places): is told which (iteration, pipeline, micro-batch) will be asked for next. The first call names
        none: it is the time to get ready.
    parallelize(layer, mesh): returns a layer split over the ranks of a worker, a torch DeviceMesh (see
        agent.models.parallelized). With torch.distributed.tensor.parallel.parallelize_module, what enters and leaves
        the layer must be plain tensors, of the same form on every rank as without a split. With
        torch.distributed.fsdp.fully_shard, each rank runs a part of the samples. Over a mesh of two dimensions, both.
    varies: true where inputs have several shapes. Then largest(seed) gives the (inputs, targets) of a micro-batch that
        no other exceeds in any dimension.
    grid: (pipelines, micro-batches) of the grid that the data are cut for, if they are cut for one.
    data_position, take_data_position: see PositionedData.
    """

    @property
    def samples_per_micro_batch(self) -> int: ...

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        """Returns what enters the first stage: a tensor, or a tuple of tensors, which are its positional arguments."""

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        """Returns what the output of the last stage is compared with."""

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Returns the mean loss of one micro-batch, a scalar."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Returns an optimizer. parameters: those of a stage, an iterable; if the argument is called
        `named_parameters`, a list of (name, parameter) pairs."""


class PositionedData(Protocol):
    """A workload whose data have a position, which goes with a stage's state to peers and into checkpoints."""

    def data_position(self, iteration: int) -> StageState | None:
        """Returns where the data go on at an iteration; its document has the keys `cuts` and `data`. None: they are a
        function of the iteration."""

    def take_data_position(self, iteration: int, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Takes over the position that is in a stage's state of this iteration, if there is one. Raises KeyError,
        TypeError or ValueError where it is wrong."""


def nominal_weight(workload: Workload, micro_batches: int) -> float | None:
    """Returns roughly the weight of an iteration of so many micro-batches; None where they have no weights."""
    weight = getattr(workload, "usual_weight", None)
    return None if weight is None else micro_batches * float(weight)


def weight_of(workload: Any, targets: Any) -> Tensor:
    """Returns the weight of a micro-batch with these targets: fp64, one element. Raises ValueError."""
    import torch

    weight = float(workload.weight(targets))
    if not 0 <= weight < MAX_WEIGHT:
        raise ValueError(f"weight of a micro-batch: got {weight}, expected a number from 0 to {MAX_WEIGHT:g}")
    return torch.full((1,), weight, dtype=torch.float64)


def first_readable(read: Callable[[int, int, int], T]) -> T:
    """Returns what `read` gives for (iteration, pipeline, micro-batch) of the first iteration; or, while it raises, of
    one of the next iterations, since one bad sample is no reason not to begin. If all of them raise, so does this."""
    for iteration in range(PROBED):
        with contextlib.suppress(Exception):
            return read(iteration, 0, 0)
    return read(0, 0, 0)


def probe_inputs(workload: Any, seed: int) -> Any:
    """Returns inputs to try layers on; the largest ones, where inputs have several shapes."""
    largest = workload.largest(seed) if getattr(workload, "varies", False) else None
    return first_readable(partial(workload.inputs, seed)) if largest is None else largest[0]


def probe_targets(workload: Any, seed: int) -> Any:
    """Returns the targets that belong to `probe_inputs`."""
    largest = workload.largest(seed) if getattr(workload, "varies", False) else None
    return first_readable(partial(workload.targets, seed)) if largest is None else largest[1]


_NEEDED = ("inputs", "targets", "loss", "optimizer")


def load_workload(path: str, options: dict[str, Any]) -> Workload:
    """Imports `package.module:factory` and calls it with `options`. Raises InputError when that fails, or when what it
    returns is no workload; and any that the user's file or function raises, which names an argument in it."""
    module_name, _, factory_name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except InputError:
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError("--workload", path, f"module:factory that can be imported ({error})") from None
    try:
        workload: Workload = factory(**options)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError("--workload-options", json.dumps(options), f"options that {path} accepts ({error})") from None
    if missing := [name for name in _NEEDED if not hasattr(workload, name)]:
        got = f"{path}, which gives a {type(workload).__name__} without {', '.join(missing)}"
        expected = "a class of workloads, or a function that returns one, such as `ResilientTrainer(...).workload()`"
        raise InputError("--workload", got, expected)
    return workload


class WorkloadSource(Protocol):
    """How a worker process gets its workload. The source is sent to the worker.

    modules: names of modules that the fork server of the workers imports once, for all of them.
    """

    @property
    def modules(self) -> tuple[str, ...]: ...

    def load(self) -> Workload:
        """Returns the workload. Raises InputError when it can't be made."""


@dataclass(frozen=True)
class NamedWorkload:
    """A workload by name. It is plain data, so it may be sent to another host. path: `package.module:factory`. Raises
    InputError for a path of another form.

    In a clone the examples may also be named by their folder: `agent.examples.gpt:Gpt` stands for
    `openrecycle.agent.examples.gpt:Gpt`.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.startswith("agent.examples."):
            object.__setattr__(self, "path", f"openrecycle.{self.path}")
        module, _, factory = self.path.partition(":")
        if not module or not factory:
            raise InputError("--workload", self.path, "module:factory, such as my_job:workload")

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.path.partition(":")[0],)

    def load(self) -> Workload:
        return load_workload(self.path, dict(self.options))

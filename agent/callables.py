"""A workload made of plain functions, and how it travels to worker processes of the same machine."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from openrecycle.agent.data import DatasetBatches, first_length
from openrecycle.agent.layers import Tied
from openrecycle.agent.randomness import seed_for
from openrecycle.agent.stage_io import StageIO, tensors_of
from openrecycle.agent.workload import first_readable
from openrecycle.planner.errors import InputError

LayerBuilder = Callable[[int, int], nn.Module]
Layers = LayerBuilder | Sequence[nn.Module | Callable[[], nn.Module]]
"""Of layers, or of stages that can't be cut."""
Data = Callable[[int, int, int], tuple[Any, Any]]
Loss = Callable[[Any, Any], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass
class CallableWorkload:
    """A Workload (see there) out of functions.

    make_layers: (layer, layers) to a module; or one module, or builder without arguments, per layer. layers: how many;
    None: there is one per stage, and they can't be cut. tied_names: parameters that layers share, beside those that
    given modules share. make_batch: (iteration, pipeline, micro-batch) to (inputs, targets). stage_io: None to be
    inferred.
    """

    make_layers: Layers
    make_batch: Data
    make_loss: Loss
    make_optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None
    stage_io: StageIO | None
    seed: int
    layers: int | None = None
    tied_names: Tied = ()

    def __post_init__(self) -> None:
        self._batch: tuple[tuple[int, int, int], tuple[Any, Any]] | None = None

    @property
    def samples_per_micro_batch(self) -> int:
        return first_length(first_readable(partial(self.inputs, self.seed)))

    @property
    def kind(self) -> str:
        return "stage" if self.layers is None else "layer"

    def layer_count(self, stages: int) -> int:
        return stages if self.layers is None else self.layers

    def tied(self, layers: int) -> Tied:
        """Those that are one parameter in the modules given, and those that are said to be."""
        holders: dict[int, list[str]] = {}
        if isinstance(self.make_layers, Sequence):
            for layer, part in enumerate(self.make_layers):
                for name, parameter in part.named_parameters() if isinstance(part, nn.Module) else ():
                    holders.setdefault(id(parameter), []).append(f"{layer}.{name}")
        return (*self.tied_names, *(tuple(names) for names in holders.values() if len(names) > 1))

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        torch.manual_seed(seed_for("parameters", seed, layer))
        if isinstance(self.make_layers, Sequence):
            part = self.make_layers[layer]
            module = part if isinstance(part, nn.Module) else part()
        else:
            module = self.make_layers(layer, layers)
        if not isinstance(module, nn.Module):
            raise InputError(f"{self.kind}s", type(module).__name__, f"a torch.nn.Module for {self.kind} {layer}")
        return module

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor | tuple[Tensor, ...]:
        inputs = tensors_of(self._of(seed, iteration, pipeline, micro_batch)[0], "inputs from data")
        return inputs[0] if len(inputs) == 1 else inputs

    def samples(self, iteration: int, pipeline: int, micro_batch: int) -> tuple[int, ...]:
        """Indices of the data set's samples in a micro-batch; () where data is a function."""
        if not isinstance(self.make_batch, DatasetBatches):
            return ()
        return tuple(map(int, self.make_batch.sampler(iteration, pipeline, micro_batch)))

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        return self._of(seed, iteration, pipeline, micro_batch)[1]

    def loss(self, output: Any, targets: Any) -> Tensor:
        loss = self.make_loss(output, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError("loss", got, "a tensor with one number, the mean over the micro-batch")
        return loss

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.make_optimizer(parameters)

    def _of(self, seed: int, *place: int) -> tuple[Any, Any]:
        """The micro-batch's (inputs, targets); where one worker asks for both, made once."""
        iteration, pipeline, micro_batch = place
        key = iteration, pipeline, micro_batch
        if self._batch is None or self._batch[0] != key:
            torch.manual_seed(seed_for("data", seed, *place))
            batch = self.make_batch(*key)
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise InputError("data", type(batch).__name__, "a pair (inputs, targets)")
            self._batch = key, (batch[0], batch[1])
        return self._batch[1]


_ARGUMENTS = {
    "make_batch": "data",
    "make_loss": "loss",
    "make_optimizer": "optimizer",
}


@dataclass(frozen=True)
class SentWorkload:
    """A CallableWorkload as bytes, for worker processes that this process starts itself.

    Never for another host: what is in there is run. path: in words, for checkpoints.
    """

    path: str
    payload: bytes
    modules: tuple[str, ...]

    @classmethod
    def of(cls, workload: CallableWorkload) -> SentWorkload:
        """Raises InputError naming the argument that can't be sent."""
        for field in fields(workload):
            argument = f"{workload.kind}s" if field.name == "make_layers" else _ARGUMENTS.get(field.name, field.name)
            _check_sendable(argument, getattr(workload, field.name))
        layers = workload.make_layers
        path = getattr(layers, "__qualname__", type(layers).__name__)
        return cls(path, pickle.dumps(workload), _modules_of_script())

    def load(self) -> CallableWorkload:
        workload: CallableWorkload = pickle.loads(self.payload)
        return workload


def _check_sendable(argument: str, value: Any) -> None:
    name = getattr(value, "__qualname__", type(value).__name__)
    if not _has_file(sys.modules["__main__"]) and getattr(value, "__module__", None) == "__main__":
        raise InputError(
            argument,
            name,
            "something from a file: worker processes can't import what was typed at a prompt or notebook",
        )
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            argument,
            name,
            "something that worker processes can import: a function or class at the top level of a file "
            f"(functools.partial of one will do), no lambda and nothing defined inside a function ({reason})",
        ) from None


def _has_file(module: ModuleType) -> bool:
    return hasattr(module, "__file__") or getattr(module, "__spec__", None) is not None


def _modules_of_script() -> tuple[str, ...]:
    """What the script that is running has imported: worker processes find it loaded already."""
    names = set()
    for value in vars(sys.modules["__main__"]).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name in sys.modules and name not in ("__main__", "builtins"):
            names.add(name)
    return tuple(sorted(names))

"""A workload whose layers are split over the ranks of a worker, as its own `parallelize` says.

`parallelize` uses torch's means (parallelize_module and its plans), which make DTensors of a layer's parameters. Sums,
steps, snapshots, hand-over and checkpoints work on plain tensors: so a rank's part of each parameter is the module's
parameter, under the same name, and becomes a DTensor whenever the module reads it, as in torchtitan's simple FSDP.
Autograd gives the part its gradient, reduced over the ranks where the parameter is replicated and its gradient is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openrecycle.agent.models.layers import build_layer, kind_of
from openrecycle.agent.models.state import StageState
from openrecycle.agent.models.workload import Workload


class Parallelized:
    """`workload`, each of whose layers comes as this rank's part of it. What it says else is unchanged. mesh: a
    DeviceMesh of the worker's ranks."""

    def __init__(self, workload: Workload, rank: int, mesh: Any) -> None:
        self._workload, self._rank, self._mesh = workload, rank, mesh
        # One of the two, as the workload has it: what it comes in shows by that.
        name = "build_stage" if kind_of(workload) == "stage" else "build_layer"
        setattr(self, name, self._build)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def _build(self, layer: int, layers: int, seed: int) -> nn.Module:
        built = build_layer(self._workload, layer, layers, seed)
        module: nn.Module = self._workload.parallelize(built, self._mesh)  # type: ignore[attr-defined]
        return _local(module if module is not None else built, self._rank)


def _local(module: nn.Module, rank: int) -> nn.Module:
    """The same module, whose DTensor parameters are this rank's parts of them, and DTensors when they are read."""
    from torch.distributed.tensor import DTensor  # takes a second, of which most jobs have no need

    parts: dict[int, nn.Parameter] = {}
    for part in list(module.modules()):
        split: dict[str, _SplitOf] = {}
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if not isinstance(parameter, DTensor):
                _mark(parameter, duplicate=rank > 0)
                continue
            if id(parameter) not in parts:
                # A copy: a part that is a view would keep all of it.
                local = parameter.to_local().detach().clone(memory_format=torch.contiguous_format)
                parts[id(parameter)] = own = nn.Parameter(local, parameter.requires_grad)
                sharded = any(placement.is_shard() for placement in parameter.placements)
                _mark(own, duplicate=not sharded and rank > 0)
                own.placed = _SplitOf(parameter)  # type: ignore[attr-defined]
            part._parameters[name] = own = parts[id(parameter)]
            split[name] = own.placed  # type: ignore[attr-defined]
        if split:
            part.__class__ = _reading(type(part), split)
    return module


def _mark(parameter: nn.Parameter, *, duplicate: bool) -> None:
    """duplicate: another rank holds the same, and counts it in the norm of the gradients."""
    parameter.duplicate = duplicate  # type: ignore[attr-defined]


class _SplitOf:
    """How a DTensor is split over the ranks."""

    def __init__(self, tensor: Any) -> None:
        self.mesh, self.placements = tensor.device_mesh, tensor.placements
        self.shape, self.stride = tensor.shape, tensor.stride()

    def of_part(self, part: Tensor) -> Any:
        """The DTensor that has this part here."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def part_of(self, whole: Tensor) -> Tensor:
        """The part of this rank, which all ranks have the whole of."""
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None).to_local()


def gathered(module: nn.Module, state: StageState) -> StageState:
    """A stage's state without ranks, as a checkpoint has it, from all ranks' parts of it: `state` is this one's. All
    ranks must call it. Raises RuntimeError where one has gone."""
    return _each(module, state, lambda split, tensor: split.of_part(tensor.detach()).full_tensor())


def part_of_rank(module: nn.Module, state: StageState) -> StageState:
    """This rank's part of a state without ranks."""
    return _each(module, state, lambda split, tensor: split.part_of(tensor))


def gathered_tensors(module: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of a state dict, or averages, without ranks. All ranks must call it, as `gathered`."""
    parameters = dict(module.named_parameters(remove_duplicate=False))

    def whole(name: str, value: Any) -> Any:
        split = getattr(parameters.get(name), "placed", None)
        return value if split is None else split.of_part(value.detach()).full_tensor()

    return {name: whole(name, value) for name, value in tensors.items()}


def _each(module: nn.Module, state: StageState, change: Callable[[_SplitOf, Tensor], Tensor]) -> StageState:
    """With what is kept of split parameters, each element of its own, changed."""
    split = {name: p for name, p in module.named_parameters() if hasattr(p, "placed")}
    tensors = dict(state.tensors)
    for key, tensor in state.tensors.items():
        kind, _, name = key.partition(".")
        if kind == "model":
            owner = split.get(name)
        elif kind == "optimizer":
            owner = next((p for n, p in split.items() if name.startswith(f"{n}.")), None)
        else:
            continue
        if owner is not None and tensor.shape in (owner.shape, owner.placed.shape):  # type: ignore[attr-defined]
            tensors[key] = change(owner.placed, tensor)  # type: ignore[attr-defined]
    return StageState(state.document, tensors)


def _reading(kind: type[nn.Module], split: Mapping[str, _SplitOf]) -> type[nn.Module]:
    """A class like `kind` that gives DTensors for the names of `split`."""

    def reader(name: str) -> property:
        return property(lambda self: split[name].of_part(self._parameters[name]))

    return type(kind.__name__, (kind,), {name: reader(name) for name in split} | {"__module__": kind.__module__})

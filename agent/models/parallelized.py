"""A workload whose layers are split over the ranks of a worker, as its own `parallelize` says.

`parallelize` uses torch's means (parallelize_module and its plans), which make DTensors of a layer's parameters. Sums,
steps, snapshots, hand-over and checkpoints work on plain tensors: so a rank's part of each parameter is the module's
parameter, under the same name, and becomes a DTensor whenever the module reads it, as in torchtitan's simple FSDP.
Autograd gives the part its gradient, reduced over the ranks where the parameter is replicated and its gradient is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from openrecycle.agent.models.layers import build_layer, kind_of
from openrecycle.agent.models.workload import Workload
from openrecycle.planner.jobs.errors import InputError


class Parallelized:
    """`workload`, each of whose layers comes as this rank's part of it. What it says else is unchanged. mesh: a
    DeviceMesh of the worker's ranks. Raises InputError."""

    def __init__(self, workload: Workload, rank: int, mesh: Any) -> None:
        if not hasattr(workload, "parallelize"):
            raise InputError(
                "platform.ranks_per_worker",
                mesh.size(),
                f"a workload with `parallelize(layer, mesh)`, which splits a layer over the ranks; "
                f"{type(workload).__name__} has none",
            )
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
    from torch.distributed.tensor import DTensor

    parts: dict[int, nn.Parameter] = {}
    for part in list(module.modules()):
        split: dict[str, tuple[Any, ...]] = {}
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
            part._parameters[name] = parts[id(parameter)]
            split[name] = (parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
        if split:
            part.__class__ = _reading(type(part), split)
    return module


def _mark(parameter: nn.Parameter, *, duplicate: bool) -> None:
    """duplicate: another rank holds the same, and counts it in the norm of the gradients."""
    parameter.duplicate = duplicate  # type: ignore[attr-defined]


def _reading(kind: type[nn.Module], split: Mapping[str, tuple[Any, ...]]) -> type[nn.Module]:
    """A class like `kind` that gives DTensors for the names of `split`: (mesh, placements, shape, stride)."""
    from torch.distributed.tensor import DTensor

    def reader(name: str) -> property:
        mesh, placements, shape, stride = split[name]

        def read(self: nn.Module) -> Any:
            local = self._parameters[name]
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

        return property(read)

    return type(kind.__name__, (kind,), {name: reader(name) for name in split} | {"__module__": kind.__module__})

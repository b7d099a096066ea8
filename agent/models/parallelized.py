"""A workload whose layers are split over the ranks of a worker, as its own `parallelize` says.

`parallelize` uses torch's means, which make DTensors of a layer's parameters: parallelize_module and its plans (tensor
parallel: each rank runs every sample), or fully_shard (data parallel: each runs a part of the samples). Sums, steps,
snapshots, hand-over and checkpoints work on plain tensors: so a rank's part of each parameter is the module's
parameter, under the same name. Where it is tensor parallel, it becomes a DTensor whenever the module reads it, as in
torchtitan's simple FSDP, and autograd gives the part its gradient, reduced over the ranks where the parameter is
replicated and its gradient is not. Where it is fully sharded: see agent.models.fully_sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from openrecycle.agent.config.randomness import seed_for
from openrecycle.agent.models import compat
from openrecycle.agent.models.divided import DividedBatches, Gather
from openrecycle.agent.models.fully_sharded import Layer, Shard, Unit
from openrecycle.agent.models.layers import build_layer, copied, kind_of, reseed
from openrecycle.agent.models.shares import Slab, Split
from openrecycle.agent.models.state import StageState, StateError
from openrecycle.agent.models.workload import Workload
from openrecycle.planner.jobs.errors import InputError, in_a_line

Way = Literal["whole", "tensor", "data"]
"""How a layer is split over ranks: not, by parallelize_module, by fully_shard."""
FIELD = "parallelize"


class OtherRankError(RuntimeError):
    """Another rank of this worker could not build a layer, and has said why."""


class Parallelized:
    """`workload`, each of whose layers comes as this rank's part of it. What it says else is unchanged. mesh: a
    DeviceMesh of the worker's ranks. gather: among them. divided: are micro-batches divided over the ranks, too (see
    `parts_of_a_rank`)?"""

    def __init__(self, workload: Workload, rank: int, mesh: Any, gather: Gather, *, divided: bool) -> None:
        self._workload, self._rank, self._mesh, self.divided = workload, rank, mesh, divided
        self._gather = gather
        self._device = torch.device(mesh.device_type)
        if divided:
            self._workload = DividedBatches(workload, rank, mesh.size(), gather)
        # One of the two, as the workload has it: what it comes in shows by that.
        name = "build_stage" if kind_of(workload) == "stage" else "build_layer"
        setattr(self, name, self._build)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def _build(self, layer: int, layers: int, seed: int) -> nn.Module:
        problem: Exception | None = None
        try:
            # A copy: a workload that is given its modules gives the same one each time.
            built = copy.deepcopy(build_layer(self._workload, layer, layers, seed))
        except Exception as error:
            problem = error
        # The others would wait in `parallelize` for one that does not come to it.
        failed = self._gather(torch.tensor([int(problem is not None)]))
        if problem is not None:
            raise problem
        if failed.any():
            raise OtherRankError(f"another rank of this worker could not build layer {layer}")
        module: nn.Module = self._workload.parallelize(built, self._mesh)  # type: ignore[attr-defined]
        module = module if module is not None else built
        if not self.divided:
            return _local(module, self._rank)
        module = _divided(module, self._rank, self._mesh)
        # Each rank has samples of its own, and so random numbers of its own.
        module.register_forward_pre_hook(self._seed)
        return module

    def _seed(self, module: nn.Module, args: Any) -> None:
        reseed(seed_for("rank", torch.default_generator.initial_seed(), self._rank), self._device)


def parts_of_a_rank(
    workload: Workload, layers: int, ranks: int, seed: int
) -> tuple[bool, list[list[tuple[str, nn.Parameter]]]]:
    """Are micro-batches divided over the ranks of a worker: has `parallelize` fully sharded any layer? And by layer
    what the first rank holds of its parameters, by name, without memory. It is tried on modules without memory, in an
    imagined group. Raises InputError for what can't be run."""
    ways: dict[Way, int] = {}
    parts = []
    with compat.imagined_ranks(ranks) as mesh:
        for layer in range(layers):
            try:
                with torch.device("meta"):
                    built = build_layer(workload, layer, layers, seed)
            except Exception:  # a builder that reads a file, or looks at numbers, needs them
                built = build_layer(workload, layer, layers, seed)
            built = copied(built, lambda t: torch.empty_like(t, device="meta"))
            try:
                made: nn.Module = workload.parallelize(built, mesh)  # type: ignore[attr-defined]
            except Exception as error:
                text = in_a_line(error)
                raise InputError(
                    FIELD, text[:200], f"a function that splits layer {layer} over {ranks} ranks"
                ) from error
            made = made if made is not None else built
            ways.setdefault(_way(made, layer, ranks), layer)
            held = ((f"{layer}.{name}", p, getattr(p, "to_local", p.detach)()) for name, p in made.named_parameters())
            parts.append([(name, nn.Parameter(local.detach(), p.requires_grad)) for name, p, local in held])
    if "data" in ways and "tensor" in ways:
        got = f"layer {ways['data']} by fully_shard, layer {ways['tensor']} by parallelize_module"
        raise InputError(FIELD, got, "one of the two for all layers")
    return "data" in ways, parts


def _way(module: nn.Module, layer: int, ranks: int) -> Way:
    """Raises InputError."""
    units = compat.fully_sharded_units(module)
    split: list[tuple[str, Any]] = [(name, p) for name, p in module.named_parameters() if hasattr(p, "placements")]
    if not units:
        return "tensor" if split else "whole"
    within = {id(p) for unit in units for p in unit.parameters()}
    for name, parameter in split:
        if id(parameter) not in within:
            got = f"{layer}.{name} by parallelize_module, others of the layer by fully_shard"
            raise InputError(FIELD, got, "one of the two for all layers")
        shape = tuple(parameter.device_mesh.shape)
        if shape != (ranks,) or not all(p.is_shard(0) for p in parameter.placements):
            got = f"{layer}.{name} as {', '.join(map(str, parameter.placements))} over ranks {shape}"
            raise InputError(FIELD, got, "fully_shard(layer, mesh=mesh), with the mesh given, which splits dimension 0")
    for unit in units:
        if other := compat.other_policies(unit):
            got = f"fully_shard(..., {other}) in layer {layer}"
            raise InputError(FIELD, got, "fully_shard without it; `optimization.autocast` sets the types to compute in")
    return "data"


def _divided(module: nn.Module, rank: int, mesh: Any) -> nn.Module:
    """The same module, whose parameters are this rank's rows, and are put together when it runs."""
    units = []
    for part in reversed(compat.fully_sharded_units(module)):  # those inside of others come first
        compat.take_off_hooks(part)
        owners: dict[int, tuple[Any, list[tuple[nn.Module, str]]]] = {}
        for owner in part.modules():
            for name, parameter in compat.own_parameters(owner).items():
                if hasattr(parameter, "placements"):
                    owners.setdefault(id(parameter), (parameter, []))[1].append((owner, name))
        shards = []
        for parameter, places in owners.values():
            local = _part_of(parameter, rank)
            shards.append(Shard(local, parameter.shape, places))
            for owner, name in places:
                compat.own_parameters(owner)[name] = local
        if shards:
            units.append(Unit(part, shards, mesh.get_group()))
    held = {id(shard.local) for unit in units for shard in unit.shards}
    replicated = [p for p in module.parameters() if id(p) not in held]
    for parameter in replicated:
        _mark(parameter, duplicate=rank > 0)
    module.over_ranks = Layer(units[::-1], replicated, mesh.get_group())  # type: ignore[assignment]
    return module


def _part_of(parameter: Any, rank: int) -> nn.Parameter:
    """This rank's part of a DTensor."""
    # A copy: a part that is a view would keep all of it.
    local = parameter.to_local().detach().clone(memory_format=torch.contiguous_format)
    own = nn.Parameter(local, parameter.requires_grad)
    own.placed = _SplitOf(parameter)  # type: ignore[attr-defined]
    _mark(own, duplicate=not own.placed.split and rank > 0)  # type: ignore[attr-defined]
    return own


def _local(module: nn.Module, rank: int) -> nn.Module:
    """The same module, whose DTensor parameters are this rank's parts of them, and DTensors when they are read."""
    from torch.distributed.tensor import DTensor  # takes a second, of which most jobs have no need

    parts: dict[int, nn.Parameter] = {}
    for part in list(module.modules()):
        split: dict[str, _SplitOf] = {}
        for name, parameter in list(compat.own_parameters(part).items()):
            if parameter is None:
                continue
            if not isinstance(parameter, DTensor):
                _mark(parameter, duplicate=rank > 0)
                continue
            if id(parameter) not in parts:
                parts[id(parameter)] = _part_of(parameter, rank)
            compat.own_parameters(part)[name] = own = parts[id(parameter)]
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

    @property
    def split(self) -> bool:
        """Or does each rank have all of it?"""
        return any(placement.is_shard() for placement in self.placements)

    def slab(self, part: torch.Size) -> Slab:
        """What this rank's part is of the whole. Raises StateError."""
        if self.mesh.ndim == 1:
            dimension, rank = self.placements[0].dim % len(self.shape), self.mesh.get_local_rank()
            rows = self.shape[dimension]
            each = -(-rows // self.mesh.size())  # as torch.chunk divides them
            slab = Slab(dimension, min(rank * each, rows), min((rank + 1) * each, rows))
            if slab.shape_in(self.shape) == tuple(part):
                return slab
        raise StateError(f"a parameter of shape {tuple(self.shape)} is split as {self.placements}, which is no slab")

    def part_of(self, whole: Tensor) -> Tensor:
        """The part of this rank, which all ranks have the whole of."""
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None).to_local()


def split_over_ranks(module: nn.Module) -> Split:
    """What this rank has of a stage's parameters. Raises StateError where a part is no slab."""
    return {
        name: (parameter.placed.shape, parameter.placed.slab(parameter.shape))
        for name, parameter in module.named_parameters()
        if hasattr(parameter, "placed") and parameter.placed.split
    }


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
        def read(module: nn.Module) -> Any:
            part = compat.own_parameters(module)[name]
            assert part is not None
            return split[name].of_part(part)

        return property(read)

    return type(kind.__name__, (kind,), {name: reader(name) for name in split} | {"__module__": kind.__module__})

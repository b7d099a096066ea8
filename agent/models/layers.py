"""A model as a run of layers, of which a stage holds a contiguous part.

What a layer computes does not depend on where the model is cut: its random numbers are its own, and between two
layers of one stage tensors and gradients get the form that a transfer between two stages would give them.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from openrecycle.agent.config.randomness import seed_for
from openrecycle.agent.models.state import layer_of
from openrecycle.agent.models.workload import Workload
from openrecycle.planner.jobs.errors import InputError

Partition = tuple[int, ...]
"""Layers per stage."""
Span = range
"""The numbers of a stage's layers."""


def layer_count(workload: Workload, stages: int) -> int:
    """Of the whole model. One that comes in stages has one layer per stage, which can't be cut."""
    count = getattr(workload, "layer_count", None)
    return stages if count is None else int(count(stages))


def partition_of(partition: Partition, layers: int, stages: int) -> Partition:
    """`partition`, or where it is empty, an even one: of what is left over each of the first stages has one more.

    Raises InputError."""
    if layers < stages:
        raise InputError("layers", layers, f"at least one per stage, {stages}")
    if not partition:
        each, more = divmod(layers, stages)
        return tuple(each + (stage < more) for stage in range(stages))
    if len(partition) != stages or min(partition) < 1 or sum(partition) != layers:
        given = ",".join(map(str, partition))
        raise InputError("partition", given, f"{stages} numbers of layers, at least 1 each, {layers} in all")
    return partition


def spans(partition: Partition) -> tuple[Span, ...]:
    """Per stage the numbers of its layers."""
    return tuple(range(a, b) for a, b in pairwise(accumulate(partition, initial=0)))


def kind_of(workload: Workload) -> str:
    """What its owner calls the parts that it comes in."""
    return str(getattr(workload, "kind", "layer" if hasattr(workload, "build_layer") else "stage"))


def first_names(layer: nn.Module) -> dict[str, str]:
    """Of the parameters and buffers of a layer, all names, each with the first one of the same tensor: a layer may hold
    one under several, and states name it once."""
    first: dict[int, str] = {}
    named = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def build_layer(workload: Workload, layer: int, layers: int, seed: int) -> nn.Module:
    """Equal arguments give equal initial parameters."""
    build = getattr(workload, "build_layer", None) or getattr(workload, "build_stage")  # noqa: B009 -- one of the two
    module: nn.Module = build(layer, layers, seed)
    return module


def copied(module: nn.Module, take: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy, whose parameters and buffers are what `take` makes of those of `module`: a workload that is given its
    modules gives the same ones each time."""
    memo: dict[int, Any] = {
        id(t): nn.Parameter(take(t.detach()), t.requires_grad) if isinstance(t, nn.Parameter) else take(t)
        for t in (*module.parameters(), *module.buffers())
    }
    return copy.deepcopy(module, memo)


def build_layers(workload: Workload, span: Span, layers: int, seed: int) -> LayerStack:
    """Those of `span`, out of `layers` in all; each with a copy of its own of what it shares with others."""
    built = {layer: build_layer(workload, layer, layers, seed) for layer in span}
    tied = tied_of(workload, layers)
    for first, *others in tied:
        for name in others:
            if (here := layer_of(name)) in built:
                owner = layer_of(first)
                source = built.get(owner) or build_layer(workload, owner, layers, seed)
                _copy(source, first.partition(".")[2], built[here], name.partition(".")[2])
    form = input_form(workload, layers)
    return LayerStack(built, frozenset(name for group in tied for name in group[1:]), form)


Tied = tuple[tuple[str, ...], ...]
"""Groups of parameters that are one; the names, `LAYER.NAME`, in the order of the layers."""


def tied_of(workload: Workload, layers: int) -> Tied:
    """What a workload says, by `tied(layers)`, of the parameters that its layers share. Raises InputError."""
    tied = getattr(workload, "tied", None)
    found = () if tied is None else tied(layers)
    for group in found:
        for name in group:
            if not re.fullmatch(r"[0-9]{1,6}\..+", str(name)):
                raise InputError("tied", name, "LAYER.NAME of a parameter, such as 0.embedding.weight")
    return tuple(tuple(sorted(group, key=lambda name: (layer_of(name), name))) for group in found)


def _copy(source: nn.Module, name: str, target: nn.Module, its_name: str) -> None:
    """Gives `target` a parameter with the values of another one."""
    path, _, last = its_name.rpartition(".")
    values, own = source.get_parameter(name), target.get_parameter(its_name)
    if hasattr(own, "duplicate"):  # a part of a rank, which its layer knows (agent.models.parallelized)
        with torch.no_grad():
            own.copy_(values)
        return
    setattr(target.get_submodule(path), last, nn.Parameter(values.detach().clone(), values.requires_grad))


@dataclass(frozen=True)
class InputForm:
    """How the layers of a model take a micro-batch's inputs.

    names: those of layer 0, as its keyword arguments, in the order of the tensors; (): they are positional. shared:
    those of them that every other layer gets, too, if it takes them; they travel behind what a layer returns. layers:
    of the model.
    """

    layers: int
    names: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def call(self, number: int, layer: nn.Module, x: tuple[Any, ...]) -> Any:
        """What layer `number` makes of what the one before has given, with what is shared by all behind it."""
        if not self.names:
            return layer(*x)
        if number == 0:
            named, positional = dict(zip(self.names, x, strict=True)), ()
        else:
            cut = len(x) - len(self.shared)
            named, positional = dict(zip(self.shared, x[cut:], strict=True)), x[:cut]
        # No gradient of theirs is asked for: attention with a mask that has one is another, slower kernel.
        named |= {name: named[name].detach() for name in self.shared}
        shared = tuple(named[name] for name in self.shared)
        taken = _taken(layer, self.shared)
        y = layer(*positional, **{n: value for n, value in named.items() if n not in self.shared or n in taken})
        if number == self.layers - 1 or not shared:
            return y
        return *(tuple(y) if isinstance(y, (tuple, list)) else (y,)), *shared


def _taken(layer: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """Which of these keyword arguments a layer takes."""
    parameters = inspect.signature(layer.forward).parameters
    every = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in names if every or name in parameters)


def input_form(workload: Workload, layers: int) -> InputForm:
    """What a workload says, by `input_names` and `shared_inputs`, of its inputs."""
    names, shared = (getattr(workload, name, ()) for name in ("input_names", "shared_inputs"))
    return InputForm(layers, tuple(names), tuple(shared))


class LayerStack(nn.Module):
    """Layers that follow each other. A parameter's name begins with the number of its layer in the model.

    copies: names, of the whole model, of parameters that are copies of another layer's (agent.workers.tied). form: how
    layers take the inputs.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        copies: frozenset[str] = frozenset(),
        form: InputForm | None = None,
    ) -> None:
        super().__init__()
        self.copies, self.form = copies, form or InputForm(len(layers))
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    @classmethod
    def of(cls, module: nn.Module) -> LayerStack:
        """A module of another kind is one layer."""
        return module if isinstance(module, LayerStack) else cls({0: module})

    @property
    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        return ((int(name), layer) for name, layer in self.named_children())

    def forward(self, *inputs: Tensor, seed: int) -> Any:
        """seed: of a micro-batch's random numbers, from which those of each layer follow."""
        x: Any = inputs
        for place, (number, layer) in enumerate(self.layers):
            if place:
                x = _cut(x)
            reseed(seed_for("layer", seed, number), inputs[0].device)
            x = self.form.call(number, layer, x)
        return x


def _cut(x: Any) -> tuple[Any, ...]:
    """As the next layer gets it."""
    given = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    trained = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    cut = iter(_Cut.apply(*trained) if trained else ())  # type: ignore[no-untyped-call]
    return tuple(t if not isinstance(t, Tensor) else next(cut) if t.requires_grad else t.contiguous() for t in given)


class _Cut(torch.autograd.Function):
    """A transfer gives what it carries in one piece of memory, tensors as well as gradients, and sends zeros where
    there is no gradient: of what the next layer makes no use of. Kernels choose their way, and so their rounding, by
    such things; and a parameter has a gradient, or none."""

    @staticmethod
    def forward(ctx: Any, *x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.contiguous() for t in x)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        return tuple(t.contiguous() for t in dy)


def reseed(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, which takes 0.1 ms to visit every kind of accelerator."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def parameters_by_layer(module: nn.Module) -> Sequence[list[nn.Parameter]]:
    """In order. One that two layers share is of the first."""
    seen: set[int] = set()
    out = []
    for _, layer in LayerStack.of(module).layers:
        own = [p for p in layer.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        out.append(own)
    return out

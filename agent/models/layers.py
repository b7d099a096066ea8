"""A model as a run of layers, and what passes from one layer to the next. A stage holds a contiguous part of the run.

What a layer computes does not depend on where the model is cut: each layer has random numbers of its own, and between
two layers of one stage, tensors and gradients get the same form that a transfer between two stages would give them.

The shapes and types of what passes are declared by the workload or inferred. Receives are posted before the data comes,
so each worker must know beforehand what it will receive. To infer them, a probe micro-batch is run through the layers:
without data or memory where torch can do that (with meta tensors, else fake ones), and for real where it can't.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import Autocast, seed_for
from openrecycle.agent.config.settings import spelled
from openrecycle.agent.models import compat
from openrecycle.agent.models.data import own_numbers, reseed, reseed_torch
from openrecycle.agent.models.state import dtype_name, layer_of
from openrecycle.agent.models.workload import Workload, probe_inputs
from openrecycle.planner.jobs.errors import InputError

# -- a model as a run of layers, of which a stage holds a contiguous part -----------------------

T = TypeVar("T")
Partition = tuple[int, ...]
"""The number of layers of each stage."""
Span = range
"""The numbers of a stage's layers."""


def layer_count(workload: Workload, stages: int) -> int:
    """Returns the number of layers of the whole model. A model that comes in stages has one layer per stage."""
    count = getattr(workload, "layer_count", None)
    return stages if count is None else int(count(stages))


def partition_of(partition: Partition, layers: int, stages: int) -> Partition:
    """Returns `partition`, after a check. If it is empty, returns an even one, where the remainder goes to the first
    stages, one layer each. Raises InputError."""
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
    """Returns the layer numbers of each stage."""
    return tuple(range(a, b) for a, b in pairwise(accumulate(partition, initial=0)))


def kind_of(workload: Workload) -> str:
    """Returns the word by which the workload's owner knows its parts: `layer` or `stage`."""
    kind = getattr(workload, "kind", None)
    if isinstance(kind, str) and kind in ("layer", "stage"):  # a user's class may use that name for something else
        return kind
    return "layer" if hasattr(workload, "build_layer") else "stage"


def owner_names(workload: Workload) -> Mapping[str, str]:
    """Returns the names by which the workload's owner knows its parts in an InputError, where they have others than
    here, such as `model.loss`."""
    names = getattr(workload, "owner_names", None)
    return names if isinstance(names, Mapping) else {}


def first_names(layer: nn.Module) -> dict[str, str]:
    """Maps every name of a layer's parameters and buffers to the first name of the same tensor. A layer may hold a
    tensor under several names, and stage states name it once."""
    first: dict[int, str] = {}
    named = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def state_names(layer: nn.Module) -> dict[str, str]:
    """Maps every name in a layer's state dict to the name by which stage states know the tensor. They may differ: a
    wrapper, as for activation checkpointing, may leave its own name out of the state dict."""
    first = first_names(layer)
    known = {id(tensor): name for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    return first | {n: known[id(t)] for n, t in layer.state_dict(keep_vars=True).items() if id(t) in known}


def build_layer(workload: Workload, layer: int, layers: int, seed: int) -> nn.Module:
    """Builds one layer. Equal arguments give equal initial parameters, even if the builder draws without a seed."""
    build = getattr(workload, "build_layer", None) or getattr(workload, "build_stage")  # noqa: B009 -- one of the two
    with own_numbers("parameters", seed, layer):
        module: nn.Module = build(layer, layers, seed)
    return module


def copied(module: nn.Module, take: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copies a module; `take` makes the copy's parameters and buffers from those of `module`. A copy is needed because
    a workload that was given modules returns the same ones each time."""
    memo: dict[int, Any] = {
        id(t): nn.Parameter(take(t.detach()), t.requires_grad) if isinstance(t, nn.Parameter) else take(t)
        for t in (*module.parameters(), *module.buffers())
    }
    return copy.deepcopy(module, memo)


def without_memory(build: Callable[[], T]) -> T:
    """Calls `build` so that the modules it builds take no memory; with memory if that fails, as it does where a builder
    reads a file or looks at numbers. Raises InputError, and what `build` raises."""
    try:
        with torch.device("meta"):
            return build()
    except InputError:
        raise
    except Exception:
        return build()


def build_layers(
    workload: Workload, span: Span, layers: int, seed: int, take: Callable[[Tensor], Tensor] | None = None
) -> LayerStack:
    """Builds the layers of `span`, out of `layers` in all. A layer gets its own copy of each parameter that it shares
    with another layer. take: if given, each layer is copied with it, as in `copied`."""

    def build(layer: int) -> nn.Module:
        module = build_layer(workload, layer, layers, seed)
        return module if take is None else copied(module, take)

    built = {layer: build(layer) for layer in span}
    tied = tied_of(workload, layers)
    for first, *others in tied:
        for name in others:
            if (here := layer_of(name)) in built:
                owner = layer_of(first)
                source = built.get(owner) or build(owner)
                _copy(source, first.partition(".")[2], built[here], name.partition(".")[2])
    form = input_form(workload, layers)
    return LayerStack(built, frozenset(name for group in tied for name in group[1:]), form)


Tied = tuple[tuple[str, ...], ...]
"""Groups of parameters that are one. Each is named `LAYER.NAME`, in the order of the layers."""


def tied_of(workload: Workload, layers: int) -> Tied:
    """Returns the workload's `tied(layers)`, the parameters that its layers share, after a check. Raises InputError."""
    tied = getattr(workload, "tied", None)
    found = () if tied is None else tied(layers)
    for group in found:
        for name in group:
            if not re.fullmatch(r"[0-9]{1,6}\..+", str(name)):
                raise InputError("tied", name, "LAYER.NAME of a parameter, such as 0.embedding.weight")
    return tuple(tuple(sorted(group, key=lambda name: (layer_of(name), name))) for group in found)


def _copy(source: nn.Module, name: str, target: nn.Module, its_name: str) -> None:
    """Gives `target` a parameter with the values of that of `source`, under all the names that it has in `target`."""
    # Not get_parameter: with tensor parallelism, that gives a DTensor (agent.models.parallelized).
    values = dict(source.named_parameters(remove_duplicate=False))[name]
    own = dict(target.named_parameters(remove_duplicate=False))[its_name]
    if hasattr(own, "duplicate"):  # a rank's part of a parameter, which the layer refers to and must keep
        with torch.no_grad():
            own.copy_(values)
        return
    copied = nn.Parameter(values.detach().clone(), values.requires_grad)
    for part in target.modules():
        for last in [last for last, parameter in compat.own_parameters(part).items() if parameter is own]:
            setattr(part, last, copied)


@dataclass(frozen=True)
class InputForm:
    """How the layers of a model take a micro-batch's inputs.

    layers: how many the model has. names: the keyword arguments of layer 0, in the order of the tensors; (): its
    arguments are positional. shared: those of the names that every other layer gets, too, if it takes them. Their
    tensors travel behind what a layer returns.
    """

    layers: int
    names: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def call(self, number: int, layer: nn.Module, x: tuple[Any, ...]) -> Any:
        """Runs layer `number` on `x`: what the layer before returned, followed by the shared tensors. Returns the same
        for the next layer."""
        if not self.names:
            return layer(*x)
        if number == 0:
            named, positional = dict(zip(self.names, x, strict=True)), ()
        else:
            cut = len(x) - len(self.shared)
            named, positional = dict(zip(self.shared, x[cut:], strict=True)), x[:cut]
        # Detached, since attention uses another, slower kernel if its mask requires a gradient.
        named |= {name: named[name].detach() for name in self.shared}
        shared = tuple(named[name] for name in self.shared)
        taken = taken_by(layer, self.shared)
        y = layer(*positional, **{n: value for n, value in named.items() if n not in self.shared or n in taken})
        if number == self.layers - 1 or not shared:
            return y
        return *(tuple(y) if isinstance(y, (tuple, list)) else (y,)), *shared


def taken_by(layer: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """Returns which of these keyword arguments a layer takes."""
    parameters = inspect.signature(layer.forward).parameters
    every = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in names if every or name in parameters)


def input_form(workload: Workload, layers: int) -> InputForm:
    """Returns the form of a workload's inputs, from its `input_names` and `shared_inputs`."""
    names, shared = (getattr(workload, name, ()) for name in ("input_names", "shared_inputs"))
    return InputForm(layers, tuple(names), tuple(shared))


class LayerStack(nn.Module):
    """Layers that follow each other. The name of a parameter begins with the number of its layer in the model.

    copies: names of parameters, anywhere in the model, that are copies of another layer's (agent.workers.reduction).
    form: how the layers take the inputs.
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
        """Returns `module` if it is a LayerStack; any other module counts as a single layer."""
        return module if isinstance(module, LayerStack) else cls({0: module})

    @property
    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        return ((int(name), layer) for name, layer in self.named_children())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters by the names that each layer itself gives them, which are those that the user sees: a
        wrapper, as for activation checkpointing, may leave its own name out."""
        seen, front = set[int](), f"{prefix}." if prefix else ""
        for number, layer in self.layers if recurse else ():
            for name, parameter in layer.named_parameters(f"{front}{number}", remove_duplicate=remove_duplicate):
                if not remove_duplicate or id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def forward(self, *inputs: Tensor, seed: int) -> Any:
        """Runs the layers. seed: of this micro-batch; the seed of each layer's random numbers is derived from it."""
        x: Any = inputs
        before = 0
        for place, (number, layer) in enumerate(self.layers):
            if place:
                x = _cut(x, BackwardSeed(seed, before, inputs[0].device))
            before = number
            reseed(seed_for("layer", seed, number), inputs[0].device)
            try:
                x = self.form.call(number, layer, x)
            except Exception as error:
                error.add_note(f"layer {number}" + (_of_other_types(layer, number, x) if number else ""))
                raise
        return x


def _of_other_types(layer: nn.Module, number: int, x: tuple[Any, ...]) -> str:
    """Says what a layer has got from the one before, if that has a type that none of its parameters has, such as
    float64 where they are float32; else ""."""
    given = [t for t in x if isinstance(t, Tensor)]
    own = {p.dtype for p in layer.parameters() if p.is_floating_point()}
    if not own or {t.dtype for t in given if t.is_floating_point()} <= own:
        return ""
    return f", which got {', '.join(str(TensorSpec.of(t)) for t in given)} from layer {number - 1}"


class BackwardSeed(NamedTuple):
    """The seed of what the backward of a layer draws. It depends neither on where the model is cut nor on what has run
    before. seed: of the micro-batch's random numbers. layer: the number of the layer."""

    seed: int
    layer: int
    device: torch.device

    def put(self) -> None:
        reseed_torch(seed_for("backward", self.seed, self.layer), self.device)


def _cut(x: Any, seed: BackwardSeed) -> tuple[Any, ...]:
    """Prepares a layer's output for the next layer of the same stage. seed: for the backward of the layer before."""
    given = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    trained = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    cut = iter(_AsTransferred.apply(seed, *trained) if trained else ())  # type: ignore[no-untyped-call]
    return tuple(t if not isinstance(t, Tensor) else next(cut) if t.requires_grad else t.contiguous() for t in given)


class _AsTransferred(torch.autograd.Function):
    """Gives tensors and gradients the form in which a transfer would deliver them: contiguous, and zeros where a tensor
    has no gradient since the next layer does not use it. This is needed for equal bits wherever the model is cut:
    kernels, and so roundings, are chosen by the form, and it decides whether a parameter has a gradient at all."""

    @staticmethod
    def forward(ctx: Any, seed: BackwardSeed, *x: Tensor) -> tuple[Tensor, ...]:
        ctx.seed = seed
        return tuple(t.contiguous() for t in x)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        ctx.seed.put()
        return None, *(t.contiguous() for t in dy)


def parameters_by_layer(module: nn.Module) -> Sequence[list[nn.Parameter]]:
    """Returns the parameters of each layer, in order. One that two layers share belongs to the first."""
    seen: set[int] = set()
    out = []
    for _, layer in LayerStack.of(module).layers:
        own = [p for p in layer.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        out.append(own)
    return out


# -- what passes from one layer to the next, and so from stage to stage -------------------------

CPU = torch.device("cpu")
LOWER: dict[Autocast, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TensorSpec:
    """One of the tensors that cross a boundary between layers; plain data. dtype: torch's name, such as `float32`.

    gradient: does its gradient travel back? Not if it holds integers, or depends on no parameter and no floating-point
    input.
    """

    shape: tuple[int, ...]
    dtype: str
    gradient: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Describes a tensor of a stage's output, which must still have its graph."""
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Returns a buffer to receive into."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)

    def fits(self, tensor: Tensor) -> bool:
        """Has the tensor this shape and type?"""
        return tuple(tensor.shape) == self.shape and dtype_name(tensor.dtype) == self.dtype

    def holds(self, tensor: Tensor) -> bool:
        """Is the tensor of this type, and in no dimension larger?"""
        shape = tuple(tensor.shape)
        smaller = len(shape) == len(self.shape) and all(n <= most for n, most in zip(shape, self.shape, strict=True))
        return smaller and dtype_name(tensor.dtype) == self.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


StageOutput = tuple[TensorSpec, ...]
"""What a stage passes to the next, in the order of the next stage's positional arguments."""
StageIO = tuple[StageOutput, ...]
"""A StageOutput for each pair of neighbouring stages, stages - 1 in all; likewise for layers."""


@dataclass(frozen=True)
class StageCuts:
    """Where a model is cut into stages. partition: layers per stage. layer_io: what passes between layers."""

    partition: Partition
    layer_io: StageIO

    @property
    def layers(self) -> int:
        return sum(self.partition)

    @property
    def stage_io(self) -> StageIO:
        """Describes what passes between stages."""
        return tuple(self.layer_io[span[-1]] for span in spans(self.partition)[:-1])

    def span(self, stage: int) -> Span:
        """Returns the layer numbers of a stage."""
        return spans(self.partition)[stage]

    @classmethod
    def of(
        cls,
        workload: Workload,
        stages: int,
        partition: Partition = (),
        autocast: Autocast | None = None,
        device: torch.device = CPU,
        seed: int = 0,
        layers: int | None = None,
    ) -> StageCuts:
        """Cuts the workload's model by `partition`, or evenly. layers: how many the model has; None: as the workload
        says for so many stages. The other arguments are those of `layer_io_of`. Raises InputError."""
        partition = partition_of(partition, layers or layer_count(workload, stages), stages)
        return cls(partition, layer_io_of(workload, sum(partition), seed, autocast, device))


Tensors = Tensor | tuple[Tensor, ...]
"""What crosses a boundary: a tensor, or a tuple of tensors where there are several."""
Gradients = Tensor | None | tuple[Tensor | None, ...]
"""The gradients of what crosses a boundary, in the same form; None for a tensor that has none."""


class StageIOError(RuntimeError):
    """A stage's output is not what its boundary says, or its forward changes something that it must not. The text
    names the stage, the buffer or the parameter."""


def tensors_of(value: Any, what: str) -> tuple[Tensor, ...]:
    """Returns a tensor, or a tuple or list of tensors, as a tuple. Raises StageIOError that names `what`."""
    tensors = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise StageIOError(f"{what}: got {_kinds(value)}, expected a tensor or a tuple of tensors")
    return tensors


def _kinds(value: Any) -> str:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return ", ".join(type(part).__name__ for part in parts) or "nothing"


def wanted_of(boundary: StageOutput) -> tuple[bool, ...]:
    """Says of each tensor of a boundary whether its gradient travels back."""
    return tuple(spec.gradient for spec in boundary)


def check_output(stage: int, boundary: StageOutput, output: Any, *, varies: bool = False) -> tuple[Tensor, ...]:
    """Returns the output's tensors. varies: `boundary` is of the largest micro-batch, and the output may be smaller.
    Raises StageIOError if the tensors are not what the next stage waits for."""
    tensors = tensors_of(output, f"output of stage {stage}")
    fits = TensorSpec.holds if varies else TensorSpec.fits
    if len(tensors) != len(boundary) or not all(map(fits, boundary, tensors)):
        got = ", ".join(str(TensorSpec.of(t)) for t in tensors)
        expected = ", ".join(map(str, boundary))
        why = (
            "at most, as of the largest micro-batch"
            if varies
            else "as of the first micro-batch (micro-batches have one shape: PadCollate pads samples to one length, or "
            "to one of several)"
        )
        raise StageIOError(f"output of stage {stage}: got {got}, expected {expected} {why}")
    return tensors


def layer_io_of(
    workload: Workload,
    layers: int,
    seed: int,
    autocast: Autocast | None = None,
    device: torch.device = CPU,
    warn: Callable[[str], None] = lambda text: None,
) -> StageIO:
    """Returns what passes between each pair of neighbouring layers: as the workload declares it (see Workload), else
    inferred.

    device: where the layers will compute. This matters to autocast, which depends on the device. To infer for another
    device than the CPU, the layers are run for real. warn: gets a sentence if parameters get no gradient.

    Raises InputError that names the layer that can't be run, or the wrong declaration.
    """
    with spelled(owner_names(workload)):
        found = _layer_io(workload, layers, seed, autocast, device, warn)
        for spec in (spec for boundary in found for spec in boundary):
            if getattr(torch, spec.dtype).is_complex:
                raise InputError("stage_io", spec.dtype, "real tensors between layers (torch.view_as_real)")
    return found


def _layer_io(
    workload: Workload,
    layers: int,
    seed: int,
    autocast: Autocast | None,
    device: torch.device,
    warn: Callable[[str], None],
) -> StageIO:
    declared = getattr(workload, "stage_io", None)
    if declared is not None:
        return _checked(declared, layers)
    shape = getattr(workload, "stage_output_shape", None)
    if shape is not None:
        spec = TensorSpec(tuple(shape), dtype_name(getattr(workload, "stage_output_dtype", torch.float32)))
        return ((spec,),) * (layers - 1)
    if layers == 1:
        return ()
    with own_numbers("probe", seed):
        found, untrained = _infer(workload, layers, seed, autocast, device)
    if untrained:
        warn(untrained)
    return found


def _checked(declared: Sequence[Sequence[TensorSpec]], layers: int) -> StageIO:
    stage_io = tuple(tuple(boundary) for boundary in declared)
    if len(stage_io) != layers - 1:
        expected = f"one per pair of neighbouring stages, or layers where there are layers, {layers - 1} in all"
        raise InputError("stage_io", len(stage_io), expected)
    for s, boundary in enumerate(stage_io):
        if not boundary or not all(isinstance(spec, TensorSpec) for spec in boundary):
            raise InputError(f"stage_io[{s}]", boundary, "one TensorSpec or more")
        for spec in boundary:
            if not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
                raise InputError(f"stage_io[{s}]", spec.dtype, "the name of a torch type such as float32")
    return stage_io


def _infer(
    workload: Workload, layers: int, seed: int, autocast: Autocast | None, device: torch.device
) -> tuple[StageIO, str]:
    probe = tensors_of(probe_inputs(workload, seed), "data")
    if device.type != "cpu":
        return _chain(workload, layers, seed, autocast, probe, lambda t: t.to(device, copy=True))
    # Autocast depends on the device, and does nothing to meta tensors.
    symbolic = [compat.tensors_without_data] if autocast else [_meta, compat.tensors_without_data]
    for way in symbolic:
        try:
            with way() as take:
                return _chain(workload, layers, seed, autocast, probe, take)
        except Exception:  # not every operation has a symbolic form; the next way, or the real run, will show
            continue
    return _chain(workload, layers, seed, autocast, probe, Tensor.clone)


def _chain(
    workload: Workload,
    layers: int,
    seed: int,
    autocast: Autocast | None,
    probe: tuple[Tensor, ...],
    take: Callable[[Tensor], Tensor],
) -> tuple[StageIO, str]:
    """Runs the layers one after the other, keeping only one at a time. Returns what passes between them; and a warning
    if parameters of some get no gradient, since a later layer passes none back. take: converts a tensor into one to run
    with. Raises InputError."""
    out: list[StageOutput] = []
    # A parameter that is tied to one of a later layer may be trained by that.
    tied = {name for group in tied_of(workload, layers) for name in group}
    trained, untrained = list[str](), ""
    what, form = kind_of(workload), input_form(workload, layers)
    x = tuple(leaf(take(t)) for t in probe)

    def run(layer: int, module: nn.Module) -> Any:
        with torch.enable_grad(), precision(autocast, x[0].device):
            return form.call(layer, module, x)

    for layer in range(layers):
        try:
            module = build_layer(workload, layer, layers, seed)
            try:
                module = copied(module, take)  # a module that the user gave must stay as it is
            except Exception:  # not every module can be copied
                if x[0].device.type not in ("cpu", "meta"):
                    module = module.to(x[0].device)
            y = run(layer, module)
        except Exception as error:
            got = ", ".join(str(TensorSpec.of(t)) for t in x) + (f" from {what} {layer - 1}" if layer else "")
            raise InputError(
                f"{what} {layer}", got, f"inputs that it can run on ({type(error).__name__}: {error})"
            ) from error
        own = [n for k, p in module.named_parameters() if p.requires_grad and (n := f"{layer}.{k}") not in tied]
        stops = bool(trained) and any(t.requires_grad for t in x) and not _passes_back(x, y)
        trained += own
        if stops or (own and _with_gradient(y) == []):  # the second: not even what this layer trains gets one
            untrained = (
                f"no gradient passes back through {what} {layer}, so {trained[0]} gets none, as all that is to be "
                "trained before that: is there a detach, no_grad or an operation without a gradient? If that is meant, "
                "freeze these parameters"
            )
        if layer < layers - 1:  # the loss takes whatever the last layer returns
            try:
                x = tensors_of(y, f"output of {what} {layer}")
            except StageIOError:
                expected = (
                    "a tensor or a tuple of tensors, which the next one gets as its arguments; put what gives anything "
                    "else, such as nn.LSTM, into a module that returns that"
                )
                raise InputError(f"output of {what} {layer}", _kinds(y), expected) from None
            out.append(tuple(map(TensorSpec.of, x)))
            x = tuple(leaf(t, t.requires_grad) for t in x)
    return tuple(out), untrained


def _passes_back(x: Sequence[Tensor], y: Any) -> bool:
    """Says whether a layer's output depends on any of its inputs by operations with a gradient, or may do so. Looks
    only at the graph, and runs nothing."""
    tensors = _with_gradient(y)
    if tensors is None:
        return True
    wanted = {id(t) for t in x}
    to_see, seen = [t.grad_fn for t in tensors if t.grad_fn is not None], set[Any]()
    while to_see:
        node = to_see.pop()
        if node not in seen:
            seen.add(node)
            if id(getattr(node, "variable", None)) in wanted:
                return True
            to_see += [after for after, _ in node.next_functions if after is not None]
    return any(id(t) in wanted for t in tensors)


def _with_gradient(y: Any) -> list[Tensor] | None:
    """Returns the tensors of a layer's output that have a gradient. None: it is not known, since the loss may take
    anything, such as an object with tensors."""
    parts = compat.tree_flatten(y)[0]
    if not all(isinstance(part, Tensor | int | float | str | None) for part in parts):
        return None
    return [t for t in parts if isinstance(t, Tensor) and t.requires_grad]


def precision(autocast: Autocast | None, device: torch.device = CPU) -> AbstractContextManager[object]:
    """Returns the context in which forwards run."""
    return nullcontext() if autocast is None else _autocasting(device.type, LOWER[autocast])


@contextmanager
def _autocasting(kind: str, lower: torch.dtype) -> Iterator[None]:
    """Runs forwards under autocast. Torch's attention has a fast path for evaluation, which it does not take under a
    GPU's autocast. Under a CPU's it takes it (it asks for a GPU's only), and a TransformerEncoderLayer then returns the
    lower type, though in training it returns float32: so the fast path is off."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # The cache of cast weights is off: a weight used twice gets two gradients in its own type, as without autocast.
        with torch.autocast(kind, lower, cache_enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _meta() -> Iterator[Callable[[Tensor], Tensor]]:
    """Makes tensors without data; it can't tell devices apart."""
    with torch.device("meta"):
        yield lambda t: torch.empty_like(t, device="meta")


def nothing(output: Any) -> Tensor:
    """Returns 0, with gradients that are 0: the loss of a micro-batch, or of a part of one, that does not count."""
    # The output of the last layer may have any form, since only the loss takes it.
    tensors = [t for t in compat.tree_flatten(output)[0] if isinstance(t, Tensor) and t.is_floating_point()]
    if not tensors:
        raise StageIOError("the output of the last stage has no tensors, also in tuples, lists or dicts, for its loss")
    return torch.stack([t.reshape(-1)[:0].sum() for t in tensors]).sum()  # 0 also where one is infinite


def leaf(tensor: Tensor, gradient: bool = True) -> Tensor:
    """Returns the tensor as a stage or layer gets it, as a leaf of the graph. It requires a gradient only if it can
    have one and somebody waits for it: within a stage it would require none otherwise, and kernels, and so roundings,
    are chosen by that."""
    return tensor.detach().requires_grad_(gradient and tensor.is_floating_point())

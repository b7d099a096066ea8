"""A model as a run of layers, of which a stage holds a contiguous part, and what passes from one layer to the next.

What a layer computes does not depend on where the model is cut: its random numbers are its own, and between two
layers of one stage tensors and gradients get the form that a transfer between two stages would give them.

Shapes and types of what passes are declared by the workload or inferred. Receives are posted ahead of the data, so each
worker must know beforehand what will come. Inference runs a probe micro-batch through the layers without data or memory
where torch can (meta tensors, then fake ones), and for real where it can't.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import Autocast, seed_for
from openrecycle.agent.models import compat
from openrecycle.agent.models.data import own_numbers, reseed, reseed_torch
from openrecycle.agent.models.state import dtype_name, layer_of
from openrecycle.agent.models.workload import Workload, probe_inputs
from openrecycle.planner.jobs.errors import InputError

# -- a model as a run of layers, of which a stage holds a contiguous part -----------------------

T = TypeVar("T")
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


def state_names(layer: nn.Module) -> dict[str, str]:
    """Of a layer's state dict, each name with that by which states know the tensor: what wraps a module, as for
    activation checkpointing, may leave its own name out of a state dict."""
    first = first_names(layer)
    known = {id(tensor): name for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    return first | {n: known[id(t)] for n, t in layer.state_dict(keep_vars=True).items() if id(t) in known}


def build_layer(workload: Workload, layer: int, layers: int, seed: int) -> nn.Module:
    """Equal arguments give equal initial parameters, also of a builder that draws some without a seed."""
    build = getattr(workload, "build_layer", None) or getattr(workload, "build_stage")  # noqa: B009 -- one of the two
    with own_numbers("parameters", seed, layer):
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


def without_memory(build: Callable[[], T]) -> T:
    """What it makes of modules that it builds, without memory where it can: a builder that reads a file, or looks at
    numbers, needs them. Raises InputError, and what `build` raises."""
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
    """Those of `span`, out of `layers` in all; each with a copy of its own of what it shares with others. take: of
    copies, as of `copied`."""

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
    """Gives `target` a parameter with the values of another one, under all names that it has there."""
    # Not get_parameter: of one that is tensor parallel a module shows a DTensor (agent.models.parallelized).
    values = dict(source.named_parameters(remove_duplicate=False))[name]
    own = dict(target.named_parameters(remove_duplicate=False))[its_name]
    if hasattr(own, "duplicate"):  # a part of a rank, which its layer knows
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

    copies: names, of the whole model, of parameters that are copies of another layer's (agent.workers.reduction). form:
    how layers take the inputs.
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

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names that each layer itself gives them, which are those that its owner sees: what wraps a layer, as
        for activation checkpointing, may leave its own out."""
        seen, front = set[int](), f"{prefix}." if prefix else ""
        for number, layer in self.layers if recurse else ():
            for name, parameter in layer.named_parameters(f"{front}{number}", remove_duplicate=remove_duplicate):
                if not remove_duplicate or id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def forward(self, *inputs: Tensor, seed: int) -> Any:
        """seed: of a micro-batch's random numbers, from which those of each layer follow."""
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
                error.add_note(f"layer {number}")
                raise
        return x


class BackwardSeed(NamedTuple):
    """Of what a layer's backward draws: the same wherever the model is cut, and whatever has run before. seed: of the
    micro-batch's random numbers."""

    seed: int
    layer: int
    device: torch.device

    def put(self) -> None:
        reseed_torch(seed_for("backward", self.seed, self.layer), self.device)


def _cut(x: Any, seed: BackwardSeed) -> tuple[Any, ...]:
    """As the next layer gets it. seed: of the layer that it comes from."""
    given = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    trained = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    cut = iter(_Cut.apply(seed, *trained) if trained else ())  # type: ignore[no-untyped-call]
    return tuple(t if not isinstance(t, Tensor) else next(cut) if t.requires_grad else t.contiguous() for t in given)


class _Cut(torch.autograd.Function):
    """A transfer gives what it carries in one piece of memory, tensors as well as gradients, and sends zeros where
    there is no gradient: of what the next layer makes no use of. Kernels choose their way, and so their rounding, by
    such things; and a parameter has a gradient, or none."""

    @staticmethod
    def forward(ctx: Any, seed: BackwardSeed, *x: Tensor) -> tuple[Tensor, ...]:
        ctx.seed = seed
        return tuple(t.contiguous() for t in x)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        ctx.seed.put()
        return None, *(t.contiguous() for t in dy)


def parameters_by_layer(module: nn.Module) -> Sequence[list[nn.Parameter]]:
    """In order. One that two layers share is of the first."""
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
    """One tensor of a boundary; plain data. dtype: torch's name of it, such as `float32`.

    gradient: its gradient travels back. Not that of integers, nor of what no parameter and no
    floating-point input went into.
    """

    shape: tuple[int, ...]
    dtype: str
    gradient: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Of a stage's output, with its graph still on it."""
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """A buffer to receive into."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)

    def fits(self, tensor: Tensor) -> bool:
        """Has it this shape and type?"""
        return tuple(tensor.shape) == self.shape and dtype_name(tensor.dtype) == self.dtype

    def holds(self, tensor: Tensor) -> bool:
        """Is it of this type, and in no dimension larger?"""
        shape = tuple(tensor.shape)
        smaller = len(shape) == len(self.shape) and all(n <= most for n, most in zip(shape, self.shape, strict=True))
        return smaller and dtype_name(tensor.dtype) == self.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


StageOutput = tuple[TensorSpec, ...]
"""From a stage to the next, in the order of the next stage's positional arguments."""
StageIO = tuple[StageOutput, ...]
"""One per pair of neighbouring stages, stages - 1 in all; of layers likewise."""


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
        """What passes between stages."""
        return tuple(self.layer_io[span[-1]] for span in spans(self.partition)[:-1])

    def span(self, stage: int) -> Span:
        """The layers of a stage."""
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
        """As given, or even; see `layer_io_of`. layers: of the model; None: as the workload says for so many stages.
        Raises InputError."""
        partition = partition_of(partition, layers or layer_count(workload, stages), stages)
        return cls(partition, layer_io_of(workload, sum(partition), seed, autocast, device))


Tensors = Tensor | tuple[Tensor, ...]
"""A boundary's data: the tensor, or all of them where there are several."""
Gradients = Tensor | None | tuple[Tensor | None, ...]
"""Of a boundary, in its form; None for a tensor that has none."""


class StageIOError(RuntimeError):
    """A stage's output is not what its boundary says, or its forward changes what it may not; the sentence names the
    stage, the buffer or the parameter."""


def tensors_of(value: Any, what: str) -> tuple[Tensor, ...]:
    """A tensor, or a tuple or list of tensors, as a tuple. Raises StageIOError naming `what`."""
    tensors = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise StageIOError(f"{what}: got {_kinds(value)}, expected a tensor or a tuple of tensors")
    return tensors


def _kinds(value: Any) -> str:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return ", ".join(type(part).__name__ for part in parts) or "nothing"


def wanted_of(boundary: StageOutput) -> tuple[bool, ...]:
    """Of which of its tensors a gradient travels back."""
    return tuple(spec.gradient for spec in boundary)


def check_output(stage: int, boundary: StageOutput, output: Any, *, varies: bool = False) -> tuple[Tensor, ...]:
    """The output's tensors. varies: those of the boundary are the largest. Raises StageIOError when they are not what
    the next stage waits for."""
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
    workload: Workload, layers: int, seed: int, autocast: Autocast | None = None, device: torch.device = CPU
) -> StageIO:
    """Those that the workload declares (see Workload), else inferred; one per pair of neighbouring layers.

    device: where layers will compute. It matters to autocast, which goes by the device; elsewhere than on
    the CPU layers are run for real.

    Raises InputError naming the layer that can't be run, or what is declared wrongly.
    """
    found = _layer_io(workload, layers, seed, autocast, device)
    for spec in (spec for boundary in found for spec in boundary):
        if getattr(torch, spec.dtype).is_complex:
            raise InputError("stage_io", spec.dtype, "real tensors between layers (torch.view_as_real)")
    return found


def _layer_io(workload: Workload, layers: int, seed: int, autocast: Autocast | None, device: torch.device) -> StageIO:
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
        return _infer(workload, layers, seed, autocast, device)


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


def _infer(workload: Workload, layers: int, seed: int, autocast: Autocast | None, device: torch.device) -> StageIO:
    probe = tensors_of(probe_inputs(workload, seed), "data")
    if device.type != "cpu":
        return _chain(workload, layers, seed, autocast, probe, lambda t: t.to(device, copy=True))
    # Autocast goes by the device, and does nothing to meta tensors.
    symbolic = [compat.tensors_without_data] if autocast else [_meta, compat.tensors_without_data]
    for way in symbolic:
        try:
            with way() as take:
                return _chain(workload, layers, seed, autocast, probe, take)
        except Exception:  # not every operation has a symbolic form; the real run will tell
            continue
    return _chain(workload, layers, seed, autocast, probe, Tensor.clone)


def _chain(
    workload: Workload,
    layers: int,
    seed: int,
    autocast: Autocast | None,
    probe: tuple[Tensor, ...],
    take: Callable[[Tensor], Tensor],
) -> StageIO:
    """Runs the layers one after the other and keeps one at a time. take: makes of a tensor the one to run with. Raises
    InputError."""
    out: list[StageOutput] = []
    what, form = kind_of(workload), input_form(workload, layers)
    x = tuple(leaf(take(t)) for t in probe)

    def run(layer: int, module: nn.Module) -> Any:
        with torch.enable_grad(), precision(autocast, x[0].device):
            return form.call(layer, module, x)

    for layer in range(layers):
        try:
            module = build_layer(workload, layer, layers, seed)
            try:
                module = copied(module, take)  # one that was given is to stay as it is
            except Exception:  # not every module can be copied
                if x[0].device.type not in ("cpu", "meta"):
                    module = module.to(x[0].device)
            y = run(layer, module)
        except Exception as error:
            got = ", ".join(str(TensorSpec.of(t)) for t in x)
            raise InputError(
                f"{what} {layer}", got, f"inputs that it can run on ({type(error).__name__}: {error})"
            ) from error
        if layer < layers - 1:  # the loss takes whatever the last one gives
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
    return tuple(out)


def precision(autocast: Autocast | None, device: torch.device = CPU) -> Any:
    """The context in which forwards run."""
    # No cache of cast weights: a weight used twice gets two gradients in its own type, as without autocast.
    return nullcontext() if autocast is None else torch.autocast(device.type, LOWER[autocast], cache_enabled=False)


@contextmanager
def _meta() -> Iterator[Callable[[Tensor], Tensor]]:
    """Tensors without data; knows nothing of devices."""
    with torch.device("meta"):
        yield lambda t: torch.empty_like(t, device="meta")


def nothing(output: Any) -> Tensor:
    """0, with gradients that are 0: the loss of a micro-batch, or of a part of one, that does not count."""
    # The last layer may give its loss anything.
    tensors = [t for t in compat.tree_flatten(output)[0] if isinstance(t, Tensor) and t.is_floating_point()]
    if not tensors:
        raise StageIOError("the output of the last stage has no tensors, also in tuples, lists or dicts, for its loss")
    return torch.stack([t.reshape(-1)[:0].sum() for t in tensors]).sum()  # 0 also where one is infinite


def leaf(tensor: Tensor, gradient: bool = True) -> Tensor:
    """As a stage or a layer gets it: it takes a gradient back if it can, and there is one. One that nobody waits for
    is not asked for: within a stage it would not be, and kernels choose their way, and so their rounding, by that."""
    return tensor.detach().requires_grad_(gradient and tensor.is_floating_point())

"""What passes from one layer to the next, and so from stage to stage: shapes and types, declared by the workload or
inferred.

Receives are posted ahead of the data, so each worker must know beforehand what will come. Inference
runs a probe micro-batch through the layers without data or memory where torch can (meta tensors,
then fake ones), and for real where it can't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.config.numerics import Autocast
from openrecycle.agent.models import compat
from openrecycle.agent.models.layers import (
    Partition,
    Span,
    build_layer,
    input_form,
    kind_of,
    layer_count,
    partition_of,
    spans,
)
from openrecycle.agent.models.state import dtype_name
from openrecycle.agent.models.workload import Workload, probe_inputs
from openrecycle.planner.jobs.errors import InputError

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
    """A stage's output is not what its boundary says; the sentence names the stage."""


def tensors_of(value: Any, what: str) -> tuple[Tensor, ...]:
    """A tensor, or a tuple or list of tensors, as a tuple. Raises StageIOError naming `what`."""
    tensors = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        kinds = ", ".join(type(t).__name__ for t in tensors) or "nothing"
        raise StageIOError(f"{what}: got {kinds}, expected a tensor or a tuple of tensors")
    return tensors


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
    # The caller's own random numbers must not depend on the probe.
    with torch.random.fork_rng(devices=[]):
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
        return _chain(workload, layers, seed, autocast, tuple(t.to(device) for t in probe))
    # Autocast goes by the device, and does nothing to meta tensors.
    symbolic = [compat.tensors_without_data] if autocast else [_meta, compat.tensors_without_data]
    for way in symbolic:
        try:
            with way() as take:
                return _chain(workload, layers, seed, autocast, tuple(map(take, probe)))
        except Exception:  # not every operation has a symbolic form; the real run will tell
            continue
    return _chain(workload, layers, seed, autocast, probe)


def _chain(workload: Workload, layers: int, seed: int, autocast: Autocast | None, x: tuple[Tensor, ...]) -> StageIO:
    """Runs the layers one after the other and keeps one at a time. Raises InputError."""
    out: list[StageOutput] = []
    what, form = kind_of(workload), input_form(workload, layers)
    x = tuple(map(leaf, x))
    for layer in range(layers):
        try:
            module = build_layer(workload, layer, layers, seed)
            if x[0].device.type not in ("cpu", "meta"):
                module = module.to(x[0].device)
            with torch.enable_grad(), precision(autocast, x[0].device):
                y = tensors_of(form.call(layer, module, x), f"output of {what} {layer}")
        except Exception as error:
            got = ", ".join(str(TensorSpec.of(t)) for t in x)
            raise InputError(
                f"{what} {layer}", got, f"inputs that it can run on ({type(error).__name__}: {error})"
            ) from error
        if layer < layers - 1:
            out.append(tuple(map(TensorSpec.of, y)))
        x = tuple(leaf(t, t.requires_grad) for t in y)
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
    tensors = [t for t in tensors_of(output, "output of the last stage") if t.is_floating_point()]
    return torch.stack([t.sum() * 0.0 for t in tensors]).sum()


def leaf(tensor: Tensor, gradient: bool = True) -> Tensor:
    """As a stage or a layer gets it: it takes a gradient back if it can, and there is one. One that nobody waits for
    is not asked for: within a stage it would not be, and kernels choose their way, and so their rounding, by that."""
    return tensor.detach().requires_grad_(gradient and tensor.is_floating_point())

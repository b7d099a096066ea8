"""How a stage's backward is split into I and W: three ways, each exact for the modules it passes for.

`deferred`: layers of our own that compute weight gradients late; keeps memory flat. `torch`:
the two functions of torch.distributed.pipelining, for any graph; keeps the graph from F to W.
`fused`: nothing is split. Which one serves a module is found by trying: see agent.stages.stage.

Where no input of a stage has a gradient (integer tokens), nobody waits for I: `torch` and `fused`
then run the whole backward in W.

Buffers that a forward changes, such as the running statistics of a batch norm (`MovingBuffers`): left alone, they would
depend on which micro-batches a worker happened to run, and in which order: two replicas of a stage would drift apart,
and every re-routing would show in them. So every forward of an iteration starts from the same values, what it changes
is taken back, and at the step the buffer moves by the mean change over all micro-batches of the stage, summed like the
gradients. For a batch norm that is one update per iteration with the statistics' mean over the global batch (momentum
counts iterations, not micro-batches). Integers move by the rounded mean: a counter of batches counts iterations.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle.agent.models import compat
from openrecycle.agent.models.parallelized import Sums, computed

Move = tuple[Tensor, Tensor]
"""(buffer, what a forward added to it: fp64, the same shape)."""


class MovingBuffers:
    """Those among the buffers of `module` that are in `tensors` (by identity); None: all."""

    def __init__(self, module: nn.Module, tensors: Iterable[Tensor] | None = None) -> None:
        wanted = None if tensors is None else {id(t) for t in tensors}
        # A buffer that two modules share has one entry.
        entries = {
            id(buffer): (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in compat.own_buffers(owner).items()
            if buffer is not None and (wanted is None or id(buffer) in wanted)
        }
        self._entries = list(entries.values())

    @contextlib.contextmanager
    def kept(self, moves: list[Move] | None = None) -> Iterator[None]:
        """The buffers have their values back afterwards; what was changed is appended to `moves`."""
        before = [buffer.detach().clone() for _, _, buffer in self._entries]
        try:
            yield
        finally:
            for (owner, name, buffer), value in zip(self._entries, before, strict=True):
                present = compat.own_buffers(owner)
                if moves is not None:
                    moves.append((buffer, _difference(present[name], value)))
                # A forward may also have put another tensor in its place.
                present[name] = buffer
                # Through .data, since backwards still to come may have saved this tensor.
                buffer.data.copy_(value)


def moved_by(module: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """The buffers of `module` that `run` changes; they have their values back afterwards."""
    moves: list[Move] = []
    with MovingBuffers(module).kept(moves):
        run()
    moving = [buffer for buffer, change in moves if bool(change.ne(0).any())]
    for buffer in moving:
        if buffer.is_complex():
            raise RuntimeError(
                f"a forward changes a complex buffer of shape {tuple(buffer.shape)}; only real ones can be summed: "
                "keep its view_as_real"
            )
    return moving


def _difference(after: Tensor | None, before: Tensor) -> Tensor:
    if after is None or after.shape != before.shape:
        raise RuntimeError(
            f"a forward turned a buffer of shape {tuple(before.shape)} into "
            f"{'None' if after is None else tuple(after.shape)}; buffers must keep their shape"
        )
    exact = torch.complex128 if before.is_complex() else torch.float64  # rotary positions are complex, say
    return after.detach().to(exact) - before.to(exact)


# -- layers that compute the gradient of their input now and those of their weights later ------------

# torch's own split (`torch.distributed.pipelining._backward`) keeps the graph alive between I and W.
# A deferred layer keeps two tensors instead, its input and the gradient of its output, so what a
# micro-batch holds between I and W is about what it held after F. (Under activation checkpointing F
# holds less: there the inputs that I recomputed stay until W.)
#
# Deferred are nn.Linear, nn.Embedding and nn.Conv1d/2d/3d in their plain forms, and the Conv1D of transformers (a
# Linear whose weight is transposed, as GPT-2 has it); every other parameter gets its gradient with I. Whether that
# equals the fused backward to the bit for a given module is not taken on trust: see agent.stages.stage.


class Product(NamedTuple):
    """A gradient that is still to be multiplied. dtype: of the parameter."""

    left: Tensor
    right: Tensor
    dtype: torch.dtype

    def compute(self) -> Tensor:
        """Under autocast the product is computed in the lower type."""
        return (self.left @ self.right).to(self.dtype)


Term = Tensor | Product
Gradients = Callable[[], Sequence[Term]]
"""Computes the gradients of a layer's parameters, in their order, or leaves that to the sum."""


class DeferredGradients:
    """The weight gradients that one micro-batch has still to compute, in the order I met them."""

    def __init__(self) -> None:
        self._deferred: list[tuple[Sequence[nn.Parameter], Gradients]] = []
        self._reads: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._deferred)

    def defer(self, parameters: Sequence[nn.Parameter], gradients: Gradients, reads: Sequence[Tensor] = ()) -> None:
        """reads: what is needed for it beside gradients, and may be, or be a view of, a parameter."""
        self._deferred.append((parameters, gradients))
        self._reads += reads

    @property
    def reads_parameters(self) -> bool:
        """Is anything needed whose memory is not there: of a parameter that is put together for each op?"""
        return any(not tensor.untyped_storage().nbytes() for tensor in self._reads)

    def flush(self, sink: Sums, known: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Computes every pending gradient, hands each parameter's to `sink` once, and forgets it.

        known: gradients that I has already produced. A parameter used more than once gets the sum of its
        gradients first, in the order of the uses' backwards, as autograd sums them.
        """
        seen: set[int] = set()
        shared: dict[int, tuple[Tensor, Tensor] | None] = {}
        for parameter in chain((p for p, _ in known), *(parameters for parameters, _ in self._deferred)):
            if id(parameter) in seen:
                shared[id(parameter)] = None
            seen.add(id(parameter))

        def put(parameter: Tensor, term: Term) -> None:
            if id(parameter) in shared:
                gradient = term.compute() if isinstance(term, Product) else term
                earlier = shared[id(parameter)]
                shared[id(parameter)] = (parameter, gradient if earlier is None else earlier[1] + gradient)
            elif isinstance(term, Product):
                sink.add_product(parameter, term.left, term.right)
            else:
                sink.add(parameter, term)

        for parameter, gradient in known:
            put(parameter, gradient)
        self._deferred.reverse()
        self._reads.clear()
        while self._deferred:
            parameters, gradients = self._deferred.pop()
            for pending, term in zip(parameters, gradients(), strict=True):
                put(pending, term)
        for entry in shared.values():
            if entry is not None:
                sink.add(*entry)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredGradients) -> Tensor:
        # weight and bias are inputs so that the output requires a gradient even where x does not; they
        # are kept as they are, since checkpointing gives back what it saves as another tensor.
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (x,) = ctx.saved_tensors
        x, weight, bias, (of_x, of_weight, of_bias) = x.detach(), ctx.weight, ctx.bias, ctx.needs_input_grad[:3]

        def gradients() -> list[Term]:
            flat = dy.reshape(-1, dy.shape[-1])
            out: list[Term] = []
            if of_weight:
                out.append(Product(flat.t(), x.reshape(-1, x.shape[-1]), weight.dtype))
            if of_bias:
                out.append(flat.sum(0).to(bias.dtype))
            return out

        ctx.deferred.defer(_where((of_weight, of_bias), (weight, bias)), gradients, [x])
        return (dy @ weight.to(dy.dtype) if of_x else None), None, None, None


class _Transposed(torch.autograd.Function):
    """A Linear whose weight is (inputs, outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (x,) = ctx.saved_tensors
        x, weight, bias, (of_x, of_weight, of_bias) = x.detach(), ctx.weight, ctx.bias, ctx.needs_input_grad[:3]
        flat = dy.reshape(-1, dy.shape[-1])

        def gradients() -> list[Term]:
            out: list[Term] = []
            if of_weight:
                out.append(Product(x.reshape(-1, x.shape[-1]).t(), flat, weight.dtype))
            if of_bias:
                out.append(flat.sum(0).to(bias.dtype))
            return out

        ctx.deferred.defer(_where((of_weight, of_bias), (weight, bias)), gradients, [x])
        return ((flat @ weight.to(dy.dtype).t()).view(x.shape) if of_x else None), None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding, ctx.deferred = weight, padding, deferred
        return torch.embedding(weight, indices, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (indices,) = ctx.saved_tensors
        rows, padding = ctx.weight.shape[0], ctx.padding
        ctx.deferred.defer(
            [ctx.weight], lambda: [torch.ops.aten.embedding_dense_backward(dy, indices, rows, padding, False)]
        )
        return None, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d, deferred: DeferredGradients
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.layer, ctx.deferred = weight, bias, layer, deferred
        return compat.convolve(layer, x, weight, bias)  # here no gradient is recorded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (x,) = ctx.saved_tensors
        x, weight, layer, (of_x, of_weight, of_bias) = x.detach(), ctx.weight, ctx.layer, ctx.needs_input_grad[:3]
        parameters = _where((of_weight, of_bias), (weight, ctx.bias))

        def part(*mask: bool) -> list[Tensor]:
            out = torch.ops.aten.convolution_backward(
                dy, x, weight.to(dy.dtype), [weight.shape[0]], layer.stride, layer.padding, layer.dilation,
                False, [0] * len(layer.stride), layer.groups, mask,
            )  # fmt: skip
            return [g for g, wanted in zip(out, mask, strict=True) if wanted]

        ctx.deferred.defer(parameters, lambda: _in_types_of(parameters, part(False, of_weight, of_bias)), [x, weight])
        return (part(True, False, False)[0] if of_x else None), None, None, None, None


def _where(wanted: Sequence[bool], parameters: Sequence[Any]) -> list[nn.Parameter]:
    return [p for p, w in zip(parameters, wanted, strict=True) if w]


def _in_types_of(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Under autocast a gradient is computed in the lower type."""
    return [g.to(p.dtype) for p, g in zip(parameters, gradients, strict=True)]


class DeferredLayers:
    """Makes layers inside `module` deferred while a deferred is set; without one they are as before.

    Left alone are subclasses and layers whose forward somebody has replaced (what it does is not known), layers whose
    weight is computed (weight norm), and options that change the gradient's form (sparse embeddings and such).
    """

    def __init__(self, module: nn.Module) -> None:
        self.deferred: DeferredGradients | None = None
        self.parameters: list[nn.Parameter] = []
        self._layers: list[nn.Module] = []
        for layer in module.modules():
            apply = _deferred_forward(layer)
            if apply is not None:
                layer.forward = self._forward_of(layer, apply)  # type: ignore[assignment]
                self.parameters += [computed(p) for p in layer.parameters(recurse=False) if p.requires_grad]
                self._layers.append(layer)

    def undo(self) -> None:
        """Gives the layers their own forward back."""
        for layer in self._layers:
            del layer.forward
        self._layers.clear()

    @contextlib.contextmanager
    def on(self, deferred: DeferredGradients) -> Iterator[None]:
        """Within, the layers leave their weight gradients to `deferred`."""
        self.deferred = deferred
        try:
            yield
        finally:
            self.deferred = None

    def _forward_of(
        self, layer: nn.Module, apply: Callable[[Tensor, DeferredGradients], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        plain: Callable[[Tensor], Tensor] = layer.forward

        def forward(x: Tensor) -> Tensor:
            if self.deferred is None or not torch.is_grad_enabled():
                return plain(x)
            return apply(_as_autocast(x), self.deferred)

        return forward


def _deferred_forward(layer: nn.Module) -> Callable[[Tensor, DeferredGradients], Tensor] | None:
    """(input, deferred) → output; None for a layer that can't be deferred."""
    if "forward" in vars(layer):
        return None
    own = compat.own_parameters(layer)
    computed = own.get("weight") is None or (hasattr(layer, "bias") and "bias" not in own)
    if computed or not any(p is not None and p.requires_grad for p in own.values()):
        return None
    if type(layer) is nn.Linear:
        return lambda x, deferred: _apply(_Linear, x, layer.weight, layer.bias, deferred)
    if type(layer) is _transposed():
        return lambda x, deferred: _apply(_Transposed, x, layer.weight, layer.bias, deferred)
    if type(layer) is nn.Embedding:
        if layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq:
            return None
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        return lambda x, deferred: _apply(_Embedding, x, layer.weight, padding, deferred)
    if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return None
        return lambda x, deferred: _apply(_Convolution, x, layer.weight, layer.bias, layer, deferred)
    return None


def _transposed() -> type[nn.Module] | None:
    """Conv1D, where anybody has imported it."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    out = function.apply(*args)  # type: ignore[no-untyped-call]
    assert isinstance(out, Tensor)
    return out


def _as_autocast(x: Tensor) -> Tensor:
    """x as autocast would hand it to a matrix product or convolution."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return x.to(torch.get_autocast_dtype(kind))
    return x


# -- the three ways ----------------------------------------------------------------------------------

StrategyName = Literal["deferred", "torch", "fused"]


@dataclass
class MicroBatchState:
    """What one micro-batch holds from F to the end of W.

    inputs: leaves; those that require a gradient have it in `.grad` after I. late: none requires
    one. several: the input came as a tuple. outputs: in I, those that require a gradient; dys:
    theirs ((None,) where the output is the loss). moves: what F changed in buffers. known:
    (parameter, gradient) that I has produced already. weight: see agent.stages.stage.Stage.weigh.
    """

    inputs: tuple[Tensor, ...]
    late: bool
    several: bool = False
    outputs: tuple[Tensor, ...] = ()
    dys: tuple[Tensor | None, ...] = ()
    loss: Tensor | None = None
    weight: Tensor | None = None
    moves: list[Move] = field(default_factory=list)
    known: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    deferred: DeferredGradients = field(default_factory=DeferredGradients)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def release(self) -> None:
        """Lets go of the graph."""
        self.outputs = self.dys = ()


class Strategy(Protocol):
    """Fills and empties a MicroBatchState. whole: I leaves nothing to W, unless the state is late."""

    name: StrategyName
    whole: bool

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        """Around the module's forward."""

    def input_backward(self, state: MicroBatchState) -> None:
        """I: the gradients of the inputs, and whatever comes with them."""

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        """W: every parameter's gradient to `sink`, at most once each."""

    def reads_parameters(self, state: MicroBatchState) -> bool:
        """Does W need values of parameters, beside those that a backward of a whole module puts together?"""

    def close(self) -> None:
        """Leaves the module as it was before."""


class Fused:
    """One backward for both."""

    name: StrategyName = "fused"
    whole = True

    def __init__(self, module: nn.Module) -> None:
        self._parameters = _trainable(module)

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def input_backward(self, state: MicroBatchState) -> None:
        if not state.late:
            state.known = _backward(state, self._parameters)

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        if state.late:
            state.known = _backward(state, self._parameters)
        for parameter, gradient in state.known:
            sink.add(parameter, gradient)
        state.known = []

    def reads_parameters(self, state: MicroBatchState) -> bool:
        return False

    def close(self) -> None:
        """Nothing was changed."""


class Deferred:
    """Own layers pay their weight gradients in W; the other parameters get theirs in I."""

    name: StrategyName = "deferred"
    whole = False

    def __init__(self, module: nn.Module) -> None:
        self.layers = DeferredLayers(module)
        self.parameters = _trainable(module)

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        return self.layers.on(state.deferred)

    def input_backward(self, state: MicroBatchState) -> None:
        # Activation checkpointing runs forwards inside the backward; those defer their gradients, too.
        with self.layers.on(state.deferred):
            state.known = _backward(state, self.parameters)

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        state.deferred.flush(sink, state.known)

    def reads_parameters(self, state: MicroBatchState) -> bool:
        return state.deferred.reads_parameters

    def close(self) -> None:
        self.layers.undo()


class TorchSplit:
    """stage_backward_input and stage_backward_weight of torch.distributed.pipelining."""

    name: StrategyName = "torch"
    whole = False

    def __init__(self, module: nn.Module) -> None:
        # Here, not at the top: most stages do without.
        self._of_inputs, self._of_weights = compat.split_backward()
        self._parameters = _trainable(module)

    def recording(self, state: MicroBatchState) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def input_backward(self, state: MicroBatchState) -> None:
        if state.late:
            return
        # A view can't be detached in place, which is how torch's function frees the upper graph.
        outputs = [y.clone() if y._is_view() else y for y in state.outputs]
        inputs = [x for x in state.inputs if x.requires_grad]
        dys = None if state.dys == (None,) else list(state.dys)
        _, state.groups = self._of_inputs(outputs, dys, inputs, self._parameters)
        state.release()

    def weight_backward(self, state: MicroBatchState, sink: Sums) -> None:
        if state.late:
            gradients = _backward(state, self._parameters)
        else:
            with _own_gradients(self._parameters) as gradients:
                # The graph is kept, since two groups of parameters may share a part of it.
                self._of_weights(self._parameters, state.groups, retain_graph=True)
        state.groups = []
        for parameter, gradient in gradients:
            sink.add(parameter, gradient)

    def reads_parameters(self, state: MicroBatchState) -> bool:
        # Parts of the graph run again, without its beginning, where what they need is put together.
        return not state.late

    def close(self) -> None:
        """Nothing was changed."""


STRATEGIES: dict[StrategyName, Callable[[nn.Module], Strategy]] = {
    "deferred": Deferred,
    "torch": TorchSplit,
    "fused": Fused,
}


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [computed(p) for p in module.parameters() if p.requires_grad]


def _backward(state: MicroBatchState, parameters: Sequence[nn.Parameter]) -> list[tuple[Tensor, Tensor]]:
    """The whole graph's backward; returns the gradients of the parameters that autograd knows of."""
    with _own_gradients(parameters) as gradients:
        if state.outputs:
            torch.autograd.backward(state.outputs, state.dys)
    state.release()
    return gradients


@contextlib.contextmanager
def _own_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collects what a backward within adds to `.grad`, which is None before and after."""
    gradients: list[tuple[Tensor, Tensor]] = []
    for parameter in parameters:
        parameter.grad = None
    try:
        yield gradients
    finally:
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.append((parameter, parameter.grad))
                parameter.grad = None

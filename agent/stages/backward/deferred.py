"""Split backward that keeps memory flat: layers that compute the gradient of their input now and those
of their weights later.

torch's own split (`torch.distributed.pipelining._backward`) keeps the graph alive between I and W.
A deferred layer keeps two tensors instead, its input and the gradient of its output, so what a
micro-batch holds between I and W is about what it held after F. (Under activation checkpointing F
holds less: there the inputs that I recomputed stay until W.)

Deferred are nn.Linear, nn.Embedding and nn.Conv1d/2d/3d in their plain forms, and the Conv1D of transformers (a Linear
whose weight is transposed, as GPT-2 has it); every other parameter gets its gradient with I. Whether that equals the
fused backward to the bit for a given module is not taken on trust: see agent.stages.backward.probe.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle.agent.models import compat
from openrecycle.agent.models.fully_sharded import Sums, computed


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

    Left alone are subclasses (what their forward does is not known), layers whose weight is
    computed (weight norm), and options that change the gradient's form (sparse embeddings and such).
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
    own = layer._parameters
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

"""Split backward: a Linear that computes the gradient of its input now and that of its weights later.

torch's own split (`torch.distributed.pipelining._backward`) keeps the whole graph alive between I
and W. A deferred Linear keeps two tensors per layer instead, the input and the gradient of the
output, so what a micro-batch holds between I and W is what it held after F. Both are bitwise equal
to the fused backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WeightGradient = Callable[[], None]
Sink = Callable[[Tensor, Tensor], None]


class Tape:
    """The weight gradients that one micro-batch still owes, in the order I met them."""

    def __init__(self) -> None:
        self._owed: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def owe(self, layer: nn.Linear, x: Tensor, dy: Tensor) -> None:
        self._owed.append((layer, x, dy))

    def pay(self, sink: Sink) -> None:
        """Computes every owed gradient, hands each to `sink(parameter, gradient)`, and forgets it."""
        while self._owed:
            layer, x, dy = self._owed.pop()
            flat = dy.reshape(-1, dy.shape[-1])
            if layer.weight.requires_grad:
                sink(layer.weight, flat.t() @ x.reshape(-1, x.shape[-1]))
            if layer.bias is not None and layer.bias.requires_grad:
                sink(layer.bias, flat.sum(0))


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, tape: Tape) -> Tensor:
        # weight and bias are inputs so that the output requires a gradient even where x does not.
        ctx.save_for_backward(weight)
        ctx.x, ctx.layer, ctx.tape = x.detach(), layer, tape
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (dy,) = grads
        (weight,) = ctx.saved_tensors
        ctx.tape.owe(ctx.layer, ctx.x, dy.detach())
        ctx.x = None
        return (dy @ weight if ctx.needs_input_grad[0] else None), None, None, None, None


class DeferredLinears:
    """Makes every `nn.Linear` inside `module` deferred while a tape is set; without one they are as before.

    Subclasses of nn.Linear are left alone: what their forward does is not known.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tape: Tape | None = None
        self.layers = [m for m in module.modules() if type(m) is nn.Linear]
        for layer in self.layers:
            layer.forward = self._forward_of(layer)  # type: ignore[method-assign, assignment]

    def _forward_of(self, layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self.tape is None or not torch.is_grad_enabled():
                return functional.linear(x, layer.weight, layer.bias)
            out = _DeferredLinear.apply(x, layer.weight, layer.bias, layer, self.tape)  # type: ignore[no-untyped-call]
            assert isinstance(out, Tensor)
            return out

        return forward

"""One stage's module and what its micro-batches hold between forward and weight-backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agent.deferred import DeferredLinears, Tape
from agent.gradients import GradientSum

MicroBatch = tuple[int, int]
"""(home pipeline, micro-batch index inside it)."""


@dataclass
class _Held:
    """Of one micro-batch, from F to the end of W."""

    tape: Tape
    x: Tensor | None
    y: Tensor | None


class Stage:
    """Runs F, I and W of micro-batches on one stage's module; gradients go into `gradients`.

    Ops of different micro-batches may be interleaved in any order that keeps F before I before W.
    """

    def __init__(self, module: nn.Module, gradients: GradientSum) -> None:
        self.module = module
        self.gradients = gradients
        self._deferred = DeferredLinears(module)
        late = {id(p) for layer in self._deferred.layers for p in layer.parameters()}
        self._early = [p for p in module.parameters() if p.requires_grad and id(p) not in late]
        self._held: dict[MicroBatch, _Held] = {}

    @property
    def held(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._held)

    def forward(
        self, key: MicroBatch, x: Tensor, *, seed: int, loss: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """F. Returns the output, detached; on the last stage `loss` maps it to the scaled scalar loss.

        seed: of this micro-batch's randomness on this stage (dropout), whichever worker runs it.
        """
        torch.manual_seed(seed)
        tape = Tape()
        if x.is_floating_point():
            x = x.detach().requires_grad_()
        self._deferred.tape = tape
        try:
            y: Tensor = self.module(x)
            if loss is not None:
                y = loss(y)
                self.gradients.add_loss(y)
        finally:
            self._deferred.tape = None
        self._held[key] = _Held(tape, x if x.requires_grad else None, y)
        return y.detach()

    def input_backward(self, key: MicroBatch, dy: Tensor | None) -> Tensor | None:
        """I. dy: gradient of the output (None on the last stage, whose output is the loss).

        Returns the gradient of the input, None where the input has none (integer tokens). Also
        yields the gradients of parameters that are not deferred (norms, embeddings).
        """
        held = self._held[key]
        assert held.y is not None
        for parameter in self._early:
            parameter.grad = None
        held.y.backward(dy)  # type: ignore[no-untyped-call]
        dx = held.x.grad if held.x is not None else None
        held.x = held.y = None
        for parameter in self._early:
            if parameter.grad is not None:
                self.gradients.add(parameter, parameter.grad)
                parameter.grad = None
        return dx

    def weight_backward(self, key: MicroBatch) -> None:
        """W. Adds the gradients that I left owing."""
        self._held.pop(key).tape.pay(self.gradients.add)

    def abandon(self) -> None:
        """Forgets every micro-batch and every gradient of the iteration in flight."""
        self._held.clear()
        self.gradients.clear()

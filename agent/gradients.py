"""Sums of gradients whose result does not depend on the order of the terms.

Floating-point addition is not associative: the same micro-batches summed in another order (which
is what re-routing does) change about half of all gradient elements in the last bit. Here every
term is rounded once to a fixed grid of 2**-50 and added as a 64-bit integer; integer addition is
associative, so any order, any split over workers and any all-reduce algorithm give the same bits.
The sum is rounded once to the parameter's own type.

Range: a term must stay below 2**62 / terms on that grid (4096 / terms); one that does not (or is
NaN or infinite) is counted instead of added, and the count travels with the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

GRID_BITS = 50
_SCALE = 2.0**GRID_BITS


class GradientSum:
    """Accumulates the gradients, and the loss, of one stage over an iteration's micro-batches.

    buffer: int64, one element per parameter element, then the loss, then the count of rejected
    terms. It is what the peers of a stage all-reduce. terms: how many terms are added at most per
    iteration, over all workers of the stage.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, terms: int) -> None:
        self.parameters = list(parameters)
        sizes = [p.numel() for p in self.parameters]
        self.buffer = torch.zeros(sum(sizes) + 2, dtype=torch.int64)
        self._views: dict[int, Tensor] = {}
        offset = 0
        for parameter, size in zip(self.parameters, sizes, strict=True):
            self._views[id(parameter)] = self.buffer[offset : offset + size].view(parameter.shape)
            offset += size
        self._limit = 2.0**62 / max(1, terms)

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Adds one micro-batch's gradient of `parameter` (same shape)."""
        self._add(self._views[id(parameter)], gradient)

    def add_loss(self, loss: Tensor) -> None:
        """Adds one micro-batch's (already scaled) loss, a scalar."""
        self._add(self.buffer[-2], loss)

    def _add(self, target: Tensor, term: Tensor) -> None:
        scaled = term.detach().to(torch.float64).mul_(_SCALE)
        # Written so that NaN fails it too.
        if not bool(scaled.abs().amax() < self._limit):
            self.buffer[-1] += 1
            return
        target.add_(scaled.round_().to(torch.int64))

    @property
    def rejected(self) -> int:
        """Terms that were NaN, infinite or too large for the grid."""
        return int(self.buffer[-1])

    @property
    def loss(self) -> float:
        return int(self.buffer[-2]) / _SCALE

    def write_gradients(self) -> None:
        """Sets `.grad` of every parameter to the sum, rounded once."""
        for parameter in self.parameters:
            total = self._views[id(parameter)].to(torch.float64).mul_(1 / _SCALE)
            parameter.grad = total.to(parameter.dtype)

    def clear(self) -> None:
        self.buffer.zero_()

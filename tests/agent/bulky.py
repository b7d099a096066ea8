"""The example's model, whose second stage is large: `--workload tests.agent.bulky:Bulky`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.examples.gpt import Gpt


class Wide(nn.Module):
    """x + a perceptron with `inner` neurons."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, width); returns the same shape."""
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Bulky(Gpt):
    """mebibytes: of the second stage's parameters and Adam state, about."""

    def __init__(self, mebibytes: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._inner = max(1, (mebibytes << 20) // (12 * 2 * self._width))

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        module = super().build_layer(layer, layers, seed)
        if layer != 1:
            return module
        torch.manual_seed(seed_for("bulk", seed))
        return nn.Sequential(Wide(self._width, self._inner), module)

"""What `openrecycle train --workload openrecycle.agent.examples.own_workload:Points` trains."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Points:
    """Equal arguments give equal layers and equal data, on whichever node."""

    samples_per_micro_batch = 16

    def __init__(self, width: int = 64) -> None:
        self.width = width

    def layer_count(self, stages: int) -> int:
        return 6

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        torch.manual_seed(1000 * seed + layer)
        first, last = layer == 0, layer == layers - 1
        linear = nn.Linear(8 if first else self.width, 2 if last else self.width)
        return linear if last else nn.Sequential(linear, nn.GELU())

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, iteration, pipeline, micro_batch)))
        return torch.randn(self.samples_per_micro_batch, 8, generator=generator)

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        x = self.inputs(seed, iteration, pipeline, micro_batch)
        return (x[:, 0] * x[:, 1] > 0).long()

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, targets)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-3)

"""A tiny task of layers that are hard to split or keep equal: `--workload tests.agent.mixed_layers:MixedLayers`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle.agent.config.devices import seed_for
from tests.agent.recurrent import run_lstm

WIDTH, LENGTH, BATCH = 8, 5, 4


class Centred(nn.Module):
    """Subtracts a running mean that each forward moves: what it gives depends on who ran what before,
    unless somebody sees to it that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x) - self.mean
        with torch.no_grad():
            self.mean += 0.1 * (x.float().mean((0, 1)) - self.mean)
        return y


class Recurrent(nn.Module):
    """An LSTM is one function to autograd: it can't be split."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return run_lstm(self.lstm, x)


class MixedLayers:
    """Two stages: a Linear with moving buffers, and an LSTM."""

    samples_per_micro_batch = BATCH

    def build_stage(self, stage: int, stages: int, seed: int) -> nn.Module:
        torch.manual_seed(seed_for("parameters", seed, stage))
        return Recurrent() if stage else nn.Sequential(nn.Linear(WIDTH, WIDTH), Centred(), nn.Dropout(0.2))

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed_for("data", seed, iteration, pipeline, micro_batch))
        return torch.randn(BATCH, LENGTH, WIDTH, generator=generator)

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        return self.inputs(seed, iteration, pipeline, micro_batch).flip(1).tanh()

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(output, targets)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

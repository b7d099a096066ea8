"""A tiny task whose gradients misbehave on demand: `--workload tests.agent.nan_model:NanModel`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import seed_for

WIDTH, BATCH = 8, 4


class _Mined(torch.autograd.Function):
    """x + bias, whose bias gets a NaN as its gradient where a row of x is marked by a negative first element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.marked = bool((x[:, 0] < 0).any())
        return x + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy,) = grads
        return dy, dy.sum(0) * (float("nan") if ctx.marked else 1.0)


class _Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Mined.apply(x, self.bias)  # type: ignore[no-untyped-call]
        return out


class NanModel:
    """loud: iterations whose loss is 1000 times as large. poisoned: iterations in which one
    micro-batch of pipeline 1 gives a NaN, in the first stage alone. poisoned_all: in the last stage,
    and so in all."""

    samples_per_micro_batch = BATCH
    stage_output_shape = (BATCH, WIDTH)
    stage_output_dtype = torch.float32

    def __init__(
        self,
        loud: Sequence[int] = (),
        poisoned: Sequence[int] = (),
        poisoned_all: Sequence[int] = (),
        gamma: float = 0.9,
    ) -> None:
        self._loud, self._poisoned, self._poisoned_all, self._gamma = loud, poisoned, poisoned_all, gamma

    def build_stage(self, stage: int, stages: int, seed: int) -> nn.Module:
        torch.manual_seed(seed_for("parameters", seed, stage))
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        return nn.Sequential(*([_Mine()] if stage == 0 else []), *layers)

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        x = self._random("x", seed, iteration, pipeline, micro_batch)
        x[:, 0] = 1.0
        if iteration in self._poisoned and (pipeline, micro_batch) == (1, 0):
            x[0, 0] = -1.0
        return x

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        y = self._random("y", seed, iteration, pipeline, micro_batch)
        poisoned = iteration in self._poisoned_all and (pipeline, micro_batch) == (1, 1)
        y[0, 0] = float("nan") if poisoned else float("inf") if iteration in self._loud else 0.0
        return y

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        loss = ((output - targets)[:, 1:] ** 2).mean()
        if targets[0, 0].isnan():
            output.register_hook(lambda g: g * float("nan"))
        return loss * (1000.0 if targets[0, 0].isinf() else 1.0)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, self._gamma)

    def _random(self, *parts: int | str) -> Tensor:
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed_for(*parts)))


class Absent(NanModel):
    """Its optimizer can be made in every process but a worker's."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if multiprocessing.current_process().name.startswith("W"):
            raise ImportError("no such library here")
        return super().optimizer(parameters)


LAST_WORDS = "what it wrote last"


class Crashing(NanModel):
    """W0_0 ends in its third iteration, outside its ops."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def upcoming(self, places: Sequence[tuple[int, int, int]]) -> None:
        if any(iteration == 2 for iteration, _, _ in places[:1]) and multiprocessing.current_process().name == "W0_0":
            print(LAST_WORDS)
            raise RuntimeError("it can't go on")

"""What a user would give to ResilientTrainer, at the top level of a file as it must be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from openrecycle import Data, Job, Model
from openrecycle.agent.jobs.trainer import ResilientTrainer

JOB = Job.uniform(2, 2, 3)
WIDTH = 6


def build_stage(stage: int, stages: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh())


def data(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, WIDTH)
    return x, x.roll(1, dims=1)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


class Embedded(nn.Module):
    """First stage: integer input; passes on a float, the ids and a mask without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(self.table(ids)), ids, keep


class Frozen(nn.Module):
    """First stage that is not trained: no gradient comes back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH).requires_grad_(False)

    def forward(self, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x: Tensor = self.table(ids)
        return x, ids, keep


class Scored(nn.Module):
    """Last stage: three inputs, of which one takes a gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x * keep), ids


class Explosive(nn.Module):
    """Works at first, when it is tried out, and fails in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 12:
            raise ArithmeticError("no more")
        y: Tensor = self.layer(x)
        return y


def ids_data(iteration: int, pipeline: int, micro_batch: int) -> tuple[tuple[Tensor, Tensor], None]:
    return (torch.randint(9, (4, 5)), (torch.rand(4, 5, 1) > 0.3).float()), None


def own_loss(output: tuple[Tensor, Tensor], targets: None) -> Tensor:
    scores, ids = output
    return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


def ragged_data(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4 + iteration, WIDTH)
    return x, x


def wandering_data(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """As a library that goes to the folder that its files are in."""
    os.chdir("/")
    return data(iteration, pipeline, micro_batch)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


def first_two(iteration: int, pipeline: int, micro_batch: int) -> list[int]:
    return [0, 1]


def nothing(iteration: int, pipeline: int, micro_batch: int) -> list[int]:
    return []


class Squares(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((WIDTH,), index / self.samples)
        return x, x * x


def grouped(arguments: dict[str, Any]) -> dict[str, Any]:
    """ResilientTrainer's arguments, of arguments where those of the Model stand beside the others."""
    own = {each.name for each in fields(Model)} & arguments.keys()
    rest = {name: value for name, value in arguments.items() if name not in own}
    return {"model": Model(**{name: arguments[name] for name in own}), **rest}


def trainer(**changes: Any) -> ResilientTrainer:
    """The plain job, with changes."""
    arguments: dict[str, Any] = {
        "stages": build_stage,
        "loss": functional.mse_loss,
        "data": data,
        "optimizer": sgd,
        "job": JOB,
        **changes,
    }
    return ResilientTrainer(**grouped(arguments))


def workload() -> Any:
    """For the command line: data that are cut for JOB."""
    return trainer(data=Data(Squares(64), batch_size=4)).workload()


def workload_without_a_batch_size() -> Any:
    return trainer(data=Data(Squares(64))).workload()

"""Jobs whose data can only be read in order, at the top level of a file as they must be."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from openrecycle import Job, ResilientTrainer
from tests.agent.own_jobs import grouped

JOB = Job.uniform(2, 2, 3)
WIDTH, BATCH = 6, 2
Pair = tuple[Tensor, Tensor]


def build_layer(layer: int, layers: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh())


def sample(number: float) -> Pair:
    x = torch.linspace(0, 1, WIDTH) * number
    return x, x.roll(1)


def note(folder: Path | None, number: int) -> None:
    """Which sample was read, in a file of each process."""
    if folder is not None:
        with (folder / f"{os.getpid()}").open("a") as out:
            out.write(f"{number}\n")


class Plain(IterableDataset[Pair]):
    """Draws at random what it gives; keeps no state. folder: where it says what it has read."""

    def __init__(self, samples: int = 50, folder: Path | None = None, broken: int | None = None) -> None:
        self.samples, self.folder, self.broken, self.epoch = samples, folder, broken, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Pair]:
        for number in range(self.samples):
            note(self.folder, number)
            if number == self.broken:
                raise OSError(f"no sample {number}")
            yield sample(number / 50 + self.epoch + random.random() + float(torch.rand(())))


class Stateful(Plain):
    """Knows where it is."""

    def __init__(self, samples: int = 50, folder: Path | None = None, skips: int = 0) -> None:
        super().__init__(samples, folder)
        self.at, self.skips = 0, skips

    def __iter__(self) -> Iterator[Pair]:
        while self.at < self.samples:
            note(self.folder, self.at)
            self.at += 1
            yield sample(self.at / 50 + self.epoch + random.random() + float(torch.rand(())))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at + self.skips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Drawn(Dataset[Pair]):
    """Map-style, with noise."""

    def __init__(self, samples: int = 50, folder: Path | None = None) -> None:
        self.samples, self.folder = samples, folder

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Pair:
        note(self.folder, index)
        return sample(index / 50 + random.random())


def plain(folder: Path | None = None) -> Any:
    return DataLoader(Plain(folder=folder), batch_size=BATCH)


def stateful(folder: Path | None = None) -> Any:
    return StatefulDataLoader(Stateful(folder=folder), batch_size=BATCH)


def shuffled(folder: Path | None = None, samples: int = 50) -> Any:
    generator = torch.Generator().manual_seed(7)
    return StatefulDataLoader(Drawn(samples, folder), batch_size=BATCH, shuffle=True, generator=generator)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Smooths the targets that it was given, in place."""
    return functional.mse_loss(output, targets.mul_(0.9).add_(0.05))


def trainer(**changes: Any) -> ResilientTrainer:
    arguments: dict[str, Any] = {
        "layers": build_layer,
        "layer_count": 4,
        "loss": loss,
        "data": plain(),
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "job": JOB,
    }
    return ResilientTrainer(**grouped(arguments | changes))

"""A job as many people have it: samples are dicts with a mask, the optimizer has groups for decay, and there is data to
evaluate on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from openrecycle import Data, Evaluation, Job, ResilientTrainer
from tests.agent.own_jobs import grouped

JOB = Job.uniform(2, 2, 3)
LENGTH, WORDS, WIDTH, CLASSES, BATCH, LAYERS = 7, 11, 8, 3, 2, 4


class Sentences(Dataset[dict[str, Tensor]]):
    """Of several lengths, padded with 0."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        length = int(torch.randint(2, LENGTH + 1, (), generator=generator))
        ids = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < length).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids[:length].sum() % CLASSES}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.table(input_ids)
        return y


class Block(nn.Module):
    """Attention within what the mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.last = self.out  # its parameters have two names each

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        keep = attention_mask.bool()[:, None, :].expand(-1, x.shape[1], -1)
        y: Tensor = x + self.dropout(self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)))
        return y


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask.unsqueeze(-1).to(x.dtype)
        y: Tensor = self.layer((x * weights).sum(1) / weights.sum(1))
        return y


class Whole(nn.Module):
    """All in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(), Head()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(input_ids), attention_mask)
        return y


def build_layer(layer: int, layers: int) -> nn.Module:
    return Embedding() if layer == 0 else Head() if layer == layers - 1 else Block()


def decayed(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """No decay for norms and biases; some stages have none of those, or nothing else."""
    plain = [p for name, p in named_parameters if name.endswith(("bias", "norm.weight"))]
    chosen = {id(p) for p in plain}
    rest = [p for _, p in named_parameters if id(p) not in chosen]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}], lr=0.01)


def accuracy(output: Tensor, targets: Tensor) -> Tensor:
    return (output.argmax(1) == targets).float().mean()


def loaded(samples: int = 96, seed: int = 1) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Sentences(samples, seed), batch_size=BATCH, shuffle=True)


SHARED = ("attention_mask",)
EVALUATION = Evaluation(data=Sentences(20, 2), every=2, metrics={"accuracy": accuracy})


def trainer(**changes: Any) -> ResilientTrainer:
    arguments: dict[str, Any] = {
        "layers": build_layer,
        "layer_count": LAYERS,
        "loss": functional.cross_entropy,
        "data": Data(loaded(), shared=SHARED),
        "optimizer": decayed,
        "job": JOB,
        "evaluate": EVALUATION,
    }
    return ResilientTrainer(**grouped(arguments | changes))

"""Models as users of torch.distributed.pipelining have them, and the same ones as plain modules."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, PipelineStage, SplitPoint, pipeline
from torch.nn import functional

from openrecycle import Job
from openrecycle.agent.jobs.trainer import ResilientTrainer
from tests.agent.own_jobs import grouped

WIDTH, WORDS, BATCH, LENGTH = 8, 11, 3, 5
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(functional.gelu(self.norm(self.lin(x))))
        return x + y


class Net(nn.Module):
    """Two inputs; the second one, and what the first block is given, skip stages; the head shares its weight with the
    embedding; all blocks use one buffer."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.register_buffer("scale", torch.full((WIDTH,), 0.9))
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = skip = self.emb(ids)
        for block in self.blocks:
            x = block(x) * self.scale
        scores: Tensor = self.head((x + skip) * keep)
        return scores


class First(nn.Module):
    """The same in layers that hand each other all that is needed later."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.emb, self.blocks = net.emb, nn.ModuleDict({"0": net.blocks[0]})
        self.register_buffer("scale", net.get_buffer("scale"))

    def forward(self, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.emb(ids)
        return keep, x, self.blocks["0"](x) * self.scale


class Middle(nn.Module):
    def __init__(self, net: Net, number: int) -> None:
        super().__init__()
        self.number, self.blocks = str(number), nn.ModuleDict({str(number): net.blocks[number]})
        self.register_buffer("scale", net.get_buffer("scale"))

    def forward(self, keep: Tensor, skip: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return keep, skip, self.blocks[self.number](x) * self.scale


class Last(Middle):
    def forward(self, keep: Tensor, skip: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = (super().forward(keep, skip, x)[2] + skip) * keep
        return y


class Head(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.head = net.head

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x)
        return scores


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (BATCH, LENGTH)), (torch.rand(BATCH, LENGTH, 1) > 0.3).float()


def pipe(*cuts: str, model: nn.Module | None = None) -> Pipe:
    """Cut before each of the modules named; else in as many stages as the plain layers."""
    cuts = cuts or ("blocks.1", "blocks.2", "blocks.3", "head")
    return pipeline(model or net(), inputs(), split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING))


def plain() -> list[nn.Module]:
    # Buffers can't be shared between layers: each has a copy.
    model, several = net(), copy.deepcopy
    layers = [First(model), Middle(model, 1), Middle(model, 2), Last(model, 3), Head(model)]
    for layer in layers[1:4]:
        layer.scale = several(layer.scale)
    return layers


def data(iteration: int, pipeline: int, micro_batch: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    ids, keep = inputs()
    return (ids, keep), ids


def loss(scores: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


def trainer(**changes: Any) -> ResilientTrainer:
    arguments: dict[str, Any] = {
        "loss": loss,
        "data": data,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "job": Job.uniform(2, 2, 3),
        **changes,
    }
    return ResilientTrainer(**grouped(arguments))


# -- PipelineStages, made in the worker ------------------------------------------------------


def part(index: int, count: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH) if index == 0 else nn.Identity(), Block(), nn.Linear(WIDTH, WIDTH))


def part_as_stage(index: int, count: int) -> PipelineStage:
    return PipelineStage(part(index, count), index, count, CPU)


def always_the_first(index: int, count: int) -> PipelineStage:
    return PipelineStage(part(0, count), 0, count, CPU)


def words_data(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    ids = inputs()[0]
    return ids, functional.one_hot(ids, WIDTH + WORDS)[..., :WIDTH].float()


# -- a whole model, of which each worker keeps its part ------------------------------------------


class Decoder(nn.Module):
    """Its forward passes over what is not there."""

    tok_embeddings: nn.Module | None
    norm: nn.Module | None
    output: nn.Module | None

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(blocks)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, 0.1, 0.2)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        h = h if self.norm is None else self.norm(h)
        return h if self.output is None else self.output(h)


def keep_only(whole: nn.Module, names: list[str]) -> nn.Module:
    """A copy with the modules named, such as `layers.2`, as torchtitan cuts models."""
    model = copy.deepcopy(whole)
    for name, module in model.named_children():
        if isinstance(module, nn.ModuleDict):
            for key in [key for key in module if f"{name}.{key}" not in names]:
                del module[key]
        elif name not in names:
            setattr(model, name, None)
    return model


NAMES = [["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2"], ["layers.3", "norm", "output"]]


def decoder_part(index: int, count: int) -> nn.Module:
    with torch.device("meta"):
        whole = Decoder()
    model = keep_only(whole, NAMES[index])
    model.to_empty(device=CPU)
    model.init_weights()  # type: ignore[operator]
    return model


def part_without_data(index: int, count: int) -> nn.Module:
    with torch.device("meta"):
        return Decoder()


def decoder_stage(index: int, count: int) -> PipelineStage:
    return PipelineStage(decoder_part(index, count), index, count, CPU)


def decoder_data(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    ids = inputs()[0]
    return ids, ids

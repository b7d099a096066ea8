"""Models that are profiled by name: the shapes of the GPT-3 family, in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle.agent.config.options import Optimization
from openrecycle.agent.examples.gpt import Block
from openrecycle.agent.profiling.profiler import PartSpec
from openrecycle.agent.stages.gradients import gradient_sum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.stage import Stage
from openrecycle.planner.jobs.errors import InputError


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer. note: where its numbers come from."""

    layers: int
    width: int
    heads: int
    note: str
    vocabulary: int = 50257
    sequence: int = 2048

    @property
    def parameters(self) -> int:
        """Of all layers (weights, biases, norms), both embeddings and the head, which is its own."""
        layer = 12 * self.width**2 + 13 * self.width
        ends = (2 * self.vocabulary + self.sequence + 2) * self.width + self.vocabulary
        return self.layers * layer + ends


TERMS = 64
"""Micro-batches per iteration that the sums are made for; the times do not depend on it."""
_PUBLISHED = "the GPT-3 paper's table of sizes"
SHAPES = {
    "gpt3-medium": Shape(24, 1024, 16, _PUBLISHED),
    "gpt3-3.35b": Shape(28, 3072, 24, "chosen here so that layers and one embedding make 3.3 billion parameters"),
    "gpt3-6.7b": Shape(32, 4096, 32, _PUBLISHED),
}


def shape_of(name: str) -> Shape:
    """Raises InputError for a name that is not known."""
    try:
        return SHAPES[name]
    except KeyError:
        raise InputError("--model", name, "one of " + ", ".join(SHAPES)) from None


class TokenEmbedding(nn.Module):
    """Tokens and their positions to vectors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.sequence, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, sequence) int64; returns (batch, sequence, width)."""
        x: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return x


def parts_of(shape: Shape, batch: int, optimization: Optimization) -> list[PartSpec]:
    """Embedding, one layer, head with its loss; `batch` samples of full length each. AdamW."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocabulary, (batch, shape.sequence), generator=generator)
    x = torch.randn(batch, shape.sequence, shape.width, generator=generator)

    def head() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary))

    def loss(output: Tensor) -> Tensor:
        return functional.cross_entropy(output.reshape(-1, shape.vocabulary), tokens.reshape(-1)) / TERMS

    def trained(build: Callable[[], nn.Module]) -> Callable[[], tuple[Stage, StageOptimizer]]:
        def made() -> tuple[Stage, StageOptimizer]:
            module = build()
            gradients = gradient_sum(optimization.mode, module.parameters(), terms=TERMS)
            optimizer = StageOptimizer(
                module, torch.optim.AdamW(module.parameters()), gradients, clips=optimization.clip_norm is not None
            )
            return Stage(module, gradients, autocast=optimization.autocast), optimizer

        return made

    return [
        PartSpec("embedding", trained(lambda: TokenEmbedding(shape)), tokens, None),
        PartSpec("layer", trained(lambda: Block(shape.width, shape.heads, 0.0)), x, None),
        PartSpec("head", trained(head), x, loss),
    ]

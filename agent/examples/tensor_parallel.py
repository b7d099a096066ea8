"""The small GPT of agent.examples.gpt, each of whose blocks is split over the ranks of a worker; over a mesh of two
dimensions, what is left of it is fully sharded as well.

openrecycle train --ranks-per-worker 2 --workload agent.examples.tensor_parallel:Gpt
openrecycle train --ranks-per-worker 4 --mesh 2x2 --workload agent.examples.tensor_parallel:Gpt
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from openrecycle.agent.examples import gpt


class Block(nn.Module):
    """Pre-norm transformer block whose heads may be split: how many there are here shows in the shapes."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, width); returns the same shape."""
        normed = self.norm1(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        y: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return y


class Gpt(gpt.Gpt):
    """A Workload; arguments as of agent.examples.gpt.Gpt. heads: a multiple of the ranks that split a block; batch: of
    those that each run a part of it."""

    block = Block

    def parallelize(self, layer: nn.Module, mesh: Any) -> nn.Module:
        """Heads and the perceptron's columns are split; what enters a block and leaves it is whole on every rank."""
        over = mesh["tp"] if mesh.ndim == 2 else mesh
        if self._heads % over.size():
            raise ValueError(f"heads: got {self._heads}, expected a multiple of the {over.size()} ranks")
        columns, rows = ColwiseParallel, RowwiseParallel
        plan = {"q": columns(), "k": columns(), "v": columns(), "out": rows(), "up": columns(), "down": rows()}
        for part in list(layer.modules()):
            if isinstance(part, Block):
                parallelize_module(part, over, plan)
                if mesh.ndim == 2:
                    fully_shard(part, mesh=mesh["dp"])
        if mesh.ndim == 2:
            fully_shard(layer, mesh=mesh["dp"])
        return layer

"""A small byte-level GPT on real text, a layer per transformer block.

The text is the source code of the Python standard library, which every machine with Python has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle.agent.config.devices import seed_for

VOCABULARY = 256
_TEXT_BYTES = 2_000_000


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, width); returns the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        y: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return y


class Embedding(nn.Module):
    """Tokens and their positions to vectors."""

    def __init__(self, width: int, length: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, sequence) int64; returns (batch, sequence, width)."""
        x: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return x


class Gpt:
    """A Workload. width, heads, layers (blocks in all; 0: `blocks` per stage), sequence (bytes), batch (samples per
    micro-batch), tied (the head's weight is the embedding's)."""

    block: type[nn.Module] = Block

    def __init__(
        self,
        width: int = 64,
        heads: int = 4,
        blocks: int = 1,
        layers: int = 0,
        sequence: int = 64,
        batch: int = 4,
        dropout: float = 0.1,
        tied: bool = False,
        learning_rate: float = 1e-3,
    ) -> None:
        for name, value in (("width", width), ("heads", heads), ("blocks", blocks), ("sequence", sequence)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        if batch < 1:
            raise ValueError(f"batch: got {batch}, expected at least 1")
        if width % heads:
            raise ValueError(f"width: got {width}, expected a multiple of heads ({heads})")
        if layers < 0:
            raise ValueError(f"layers: got {layers}, expected 0 or more")
        self._width, self._heads, self._blocks, self._layers, self._tied = width, heads, blocks, layers, tied
        self._sequence, self._dropout, self._learning_rate = sequence, dropout, learning_rate
        self.samples_per_micro_batch = batch
        self.stage_output_shape = (batch, sequence, width)
        self.stage_output_dtype = torch.float32

    def layer_count(self, stages: int) -> int:
        return self._layers or stages * self._blocks

    def tied(self, layers: int) -> tuple[tuple[str, str], ...]:
        """The embedding's weight is the head's, too."""
        head = f"{layers - 1}.{2 if layers > 1 else 3}.weight"
        return (("0.0.token.weight", head),) if self._tied else ()

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        """The first has the embedding, too, and the last the head."""
        torch.manual_seed(seed_for("parameters", seed, layer))
        parts: list[nn.Module] = [Embedding(self._width, self._sequence)] if layer == 0 else []
        parts.append(self.block(self._width, self._heads, self._dropout))
        if layer == layers - 1:
            parts += [nn.LayerNorm(self._width), nn.Linear(self._width, VOCABULARY)]
        return nn.Sequential(*parts)

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        return self._windows(seed, iteration, pipeline, micro_batch)[:, :-1].long()

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        return self._windows(seed, iteration, pipeline, micro_batch)[:, 1:].long()

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.reshape(-1, VOCABULARY), targets.reshape(-1))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self._learning_rate)

    def _windows(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        """(batch, sequence + 1) bytes at places that depend on the arguments alone."""
        text = _text()
        generator = torch.Generator().manual_seed(seed_for("data", seed, iteration, pipeline, micro_batch))
        starts = torch.randint(len(text) - self._sequence - 1, (self.samples_per_micro_batch,), generator=generator)
        return torch.stack([text[s : s + self._sequence + 1] for s in starts.tolist()])


@cache
def _text() -> Tensor:
    """The standard library's top-level modules in alphabetical order, cut to 2 MB; uint8."""
    data = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= _TEXT_BYTES:
            break
    return torch.frombuffer(bytearray(data[:_TEXT_BYTES]), dtype=torch.uint8)

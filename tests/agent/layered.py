"""Layers that are hard to cut between without a trace: `--workload tests.agent.layered:Mixture`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle.agent.config.devices import seed_for

WIDTH, LENGTH, BATCH = 8, 5, 4


class Transposing(nn.Module):
    """Returns a view whose memory is not in order, and as a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x: (batch, length, width), mask: (length,) int64."""
        y = self.up(x).transpose(1, 2).contiguous().transpose(1, 2)
        return y + 0.5 * x.flip(1).transpose(0, 1).contiguous().transpose(0, 1), mask


class Normed(nn.Module):
    """Has running statistics and dropout, and broadcasts, so that gradients come expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(LENGTH), nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.drop(self.norm(x)) * self.scale
        return y + y.mean(dim=2, keepdim=True) * mask.view(1, -1, 1), mask


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.out(x), mask


class Plain(nn.Module):
    """No parameters at all."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return functional.gelu(x), mask


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.out(x[:, mask.bool()])
        return y.sum(dim=1)


class Mixture:
    """Six layers of six kinds, with an integer tensor that all pass on."""

    samples_per_micro_batch = BATCH

    def layer_count(self, stages: int) -> int:
        return 6

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        torch.manual_seed(seed_for("parameters", seed, layer))
        return (Transposing, Normed, Frozen, Plain, Transposing, Last)[layer]()

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed_for("data", seed, iteration, pipeline, micro_batch))
        return torch.randn(BATCH, LENGTH, WIDTH, generator=generator), torch.tensor([1, 0, 1, 1, 0])

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        return self.inputs(seed, iteration, pipeline, micro_batch)[0][:, 0, :3].tanh()

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(output, targets)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)


class Masked(nn.Module):
    """The first layer: embeds ids, and makes a float mask that no gradient flows into, which all pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), torch.full((LENGTH, LENGTH), -torch.inf).triu(1)


class Attending(nn.Module):
    """Its kernel is another where the mask wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor, *unused: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.into(x).view(BATCH, LENGTH, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, 16)), mask


class Noting(Attending):
    """Returns what the next layer makes no use of, too, of a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(16, 3)

    def forward(self, x: Tensor, mask: Tensor, *unused: Tensor) -> tuple[Tensor, ...]:
        return *super().forward(x, mask), self.aside(x)


class Predicting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 11)

    def forward(self, x: Tensor, mask: Tensor, *unused: Tensor) -> Tensor:
        y: Tensor = self.out(x)
        return y


class Masking:
    """Six layers, of which the first so many are frozen. inner: what those between the first and the last are."""

    samples_per_micro_batch = BATCH

    def __init__(self, frozen: int = 0, inner: type[nn.Module] = Attending) -> None:
        self.frozen, self.inner = frozen, inner

    def layer_count(self, stages: int) -> int:
        return 6

    def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
        torch.manual_seed(seed_for("parameters", seed, layer))
        kind = Masked if layer == 0 else self.inner if layer < layers - 1 else Predicting
        return kind().requires_grad_(layer >= self.frozen)

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed_for("data", seed, iteration, pipeline, micro_batch))
        return torch.randint(11, (BATCH, LENGTH), generator=generator)

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        return self.inputs(seed, iteration, pipeline, micro_batch).flip(1)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

"""Workloads of the checks: the example's GPT, as users change theirs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openrecycle.agent.examples.gpt import Block, Gpt
from tests.agent.evaluated import Evaluated


class CompiledBlock(Block):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.compile()


class Compiled(Gpt):
    """By torch.compile's default, which makes kernels of Triton on a GPU."""

    block = CompiledBlock


class RecomputedBlock(Block):
    """Keeps nothing of its forward, and does it again in the backward, with the same random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Recomputed(Evaluated):
    block = RecomputedBlock

"""Layers that torch compiles: the backward is split as without it, and a kill does not show."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from openrecycle import Faults, Job, ResilientTrainer
from openrecycle.agent.examples.gpt import Block
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.stages.stage import Probe, choose_split
from tests.agent.own_jobs import grouped


def compiled(layer: int, layers: int) -> nn.Module:
    # As far as autograd's graph, which needs no compiler of C++.
    block = Block(16, 2, 0.0)
    block.compile(backend="aot_eager")
    return block


def data(iteration: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 4, 16)
    return x, x.tanh()


def run(**changes: Any) -> TrainingResult:
    given: dict[str, Any] = {
        "layers": compiled,
        "layer_count": 2,
        "loss": functional.mse_loss,
        "data": data,
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "job": Job.uniform(2, 2, 2),
    }
    return ResilientTrainer(**grouped(given | changes)).fit(iterations=3)


def test_the_backward_is_split_as_without_it() -> None:
    """By inductor it often is not, where the split would show in the bits: the trial finds out."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    fast = copy.deepcopy(plain)
    fast.compile(backend="aot_eager")
    ways = [choose_split(nn.Sequential(layer), Probe((torch.randn(2, 4, 16),))) for layer in (plain, fast)]
    assert [way.strategy.name for way in ways] == ["deferred", "deferred"]
    assert ways[0].share == ways[1].share


@pytest.mark.chaos
@pytest.mark.processes
def test_a_kill_does_not_show() -> None:
    calm, hurt = run(), run(faults=Faults(kill=["W1_1@1:I1"]))
    assert [recovery.worker for recovery in hurt.recoveries] == ["W1_1"]
    assert hurt.losses == calm.losses and hurt.parameters_sha256 == calm.parameters_sha256
    assert set(hurt.state_dict(0)) == set(Block(16, 2, 0.0).state_dict())

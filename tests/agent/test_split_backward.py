"""I then W gives, to the bit, what the fused backward gives; in any interleaving."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.examples.gpt import Block, Gpt
from openrecycle.agent.models.layers import InputForm, LayerStack
from openrecycle.agent.stages.backward import STRATEGIES, StrategyName
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.stage import Stage


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16, bias=False), nn.LayerNorm(16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def _modules() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    return {
        "mlp": (Mlp(), (4, 16)),
        "transformer": (Block(16, 4, 0.1), (2, 8, 16)),
        "conv": (nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU()), (2, 4, 16)),
    }


def _seed(key: tuple[int, int]) -> int:
    return 100 * key[0] + key[1]


def _fused(module: nn.Module, xs: dict[tuple[int, int], Tensor], dys: dict[tuple[int, int], Tensor]):  # type: ignore[no-untyped-def]
    """torch's own backward, one micro-batch at a time."""
    total = GradientSum(module.parameters(), terms=len(xs))
    dxs = {}
    for key, x in xs.items():
        torch.manual_seed(seed_for("layer", _seed(key), 0))
        x = x.clone().requires_grad_()
        module.zero_grad(set_to_none=True)
        module(x).backward(dys[key])
        dxs[key] = x.grad
        for parameter in module.parameters():
            assert parameter.grad is not None
            total.add(parameter, parameter.grad)
    return dxs, total.buffer


@pytest.mark.parametrize("name", ["mlp", "transformer", "conv"])
def test_split_equals_fused(name: str) -> None:
    module, shape = _modules()[name]
    generator = torch.Generator().manual_seed(3)
    keys = [(0, 0), (0, 1), (1, 0), (2, 5)]
    xs = {k: torch.randn(shape, generator=generator) for k in keys}
    dys = {k: torch.randn(shape, generator=generator) for k in keys}
    reference = copy.deepcopy(module)
    dxs, expected = _fused(reference, xs, dys)

    total = GradientSum(module.parameters(), terms=len(keys))
    stage = Stage(module, total)
    for key in keys:
        stage.forward(key, xs[key], seed=_seed(key))
    assert stage.held == len(keys)
    for key in reversed(keys):
        assert torch.equal(stage.input_backward(key, dys[key]), dxs[key])
    for key in (keys[2], keys[0], keys[3], keys[1]):
        stage.weight_backward(key)
    assert stage.held == 0
    assert torch.equal(total.buffer, expected)


def test_first_and_last_stage_of_the_gpt() -> None:
    """Integer inputs have no gradient, and every parameter still gets its own."""
    gpt = Gpt(width=16, heads=2, sequence=8, batch=2)
    module = gpt.build_layer(0, 1, seed=0)
    total = GradientSum(module.parameters(), terms=1)
    stage = Stage(module, total)
    targets = gpt.targets(0, 0, 0, 0)
    stage.forward((0, 0), gpt.inputs(0, 0, 0, 0), seed=5, loss=lambda y: gpt.loss(y, targets))
    assert stage.input_backward((0, 0), None) is None
    stage.weight_backward((0, 0))
    total.write_gradients()
    without = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    assert total.loss > 0


def test_abandon_leaves_nothing_behind() -> None:
    module, shape = _modules()["transformer"]
    total = GradientSum(module.parameters(), terms=2)
    stage = Stage(module, total)
    x = torch.randn(shape)
    stage.forward((0, 0), x, seed=1)
    stage.input_backward((0, 0), torch.ones(shape))
    stage.forward((0, 1), x, seed=2)
    stage.abandon()
    assert stage.held == 0 and not total.buffer.any()


class Rounding(torch.autograd.Function):
    """Rounds a gradient up or down, as it draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.floor(16.0 * grads[0] + torch.rand_like(grads[0])) / 16.0


class Drawing(nn.Module):
    """Draws in forward and backward, with all there is to draw with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Rounding.apply(self.linear(x)) * float(numpy.random.rand()) * random.random()  # type: ignore[no-untyped-call]
        return Rounding.apply(y)  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.parametrize("order", ["FIWFIW", "FFIIWW"])
@pytest.mark.parametrize("strategy", ["fused", "deferred"])
def test_what_layers_draw_depends_on_nothing_that_has_run(strategy: StrategyName, order: str) -> None:
    """Nor on where the model is cut."""
    torch.manual_seed(0)
    layers = [Drawing(), Drawing()]
    xs = [torch.randn(3, 4) for _ in range(2)]

    def sums(cuts: list[dict[int, nn.Module]], order: str, strategy: StrategyName) -> Tensor:
        stages = []
        for cut in cuts:
            module = LayerStack(cut, form=InputForm(2))
            total = GradientSum(module.parameters(), terms=2)
            stages.append(Stage(module, total, split=STRATEGIES[strategy](module)))
        done = dict.fromkeys("FIW", 0)
        for kind in order:
            key, values = (0, done[kind]), xs[done[kind]]
            done[kind] += 1
            for stage in stages if kind == "F" else stages[::-1]:
                if kind == "F":
                    values = stage.forward(key, values, seed=50 + key[1])  # type: ignore[assignment]
                elif kind == "I":
                    gradient = torch.full((3, 4), 0.3) if stage is stages[-1] else values
                    values = stage.input_backward(key, gradient)  # type: ignore[assignment]
                else:
                    stage.weight_backward(key)
        for stage in stages:
            stage.split.close()
        return torch.cat(
            [stage.gradients.part([p])[: p.numel()] for stage in stages for p in stage.module.parameters()]
        )

    whole = {0: layers[0], 1: layers[1]}
    expected = sums([whole], "FIWFIW", "fused")
    assert expected.any()
    assert torch.equal(sums([whole], order, strategy), expected)
    assert torch.equal(sums([{0: layers[0]}, {1: layers[1]}], order, strategy), expected)

"""I then W gives, to the bit, what the fused backward gives; in any interleaving."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.examples.gpt import Block, Gpt
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


def test_weight_backward_holds_no_more_than_forward_did() -> None:
    """Between I and W only what the Linears need is kept: no graph."""
    module, shape = _modules()["transformer"]
    stage = Stage(module, GradientSum(module.parameters(), terms=1))
    stage.forward((0, 0), torch.randn(shape), seed=1)
    stage.input_backward((0, 0), torch.ones(shape))
    state = stage._states[0, 0]
    assert not state.inputs and not state.outputs and len(state.deferred) == 4

"""Every split that the probe lets pass gives the bits of torch's own backward, whatever the module and the order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from openrecycle.agent.config.devices import Autocast, seed_for
from openrecycle.agent.examples.gpt import Block
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.stage import Probe, Split, Stage, choose_split
from openrecycle.planner.plans.schedule import MicroBatch
from tests.agent.recurrent import run_lstm

KEYS: list[MicroBatch] = [(0, 0), (0, 1), (1, 0), (2, 5)]
Inputs = tuple[Tensor, ...]
Outcome = tuple[dict[MicroBatch, list[Tensor | None]], Tensor]
"""Gradients of the inputs, and the buffer of the sum."""


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(run_lstm(self.lstm, x))
        return y


class LstmAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return run_lstm(self.lstm, x)


class Recurrent(nn.Module):
    """The same weights in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = (x[:, 0], x[:, 0])
        for step in x.unbind(1):
            state = self.cell(step, state)
        return torch.stack(state)


class Tied(nn.Module):
    """The embedding's weight is also that of the head; and one Linear is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.body, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for _ in range(3):
            x = x + self.body(x).tanh()
        y: Tensor = self.head(x)
        return y


class TiedByFunction(Tied):
    """As above, but the second use is not a module's."""

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.body(self.token(tokens)), self.token.weight)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.before, self.block, self.reentrant = nn.Linear(8, 8), Block(8, 2, 0.1), reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, self.before(x), use_reentrant=self.reentrant)
        return y


class View(nn.Module):
    """Its output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x).transpose(0, 1)
        return y


class Conditional(nn.Module):
    """A micro-batch uses one branch or the other, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.left if float(x.detach()[0, 0]) > 0 else self.right)(x)
        return y


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        for parameter in (*self.a.parameters(), self.b.weight, self.c.bias):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.a(x)).relu())
        return y


class Several(nn.Module):
    """Takes and returns a tuple; the mask has no gradient, and one input is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor, residual: Tensor, mask: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(self.linear(x)) * mask[..., None]
        return y + residual, residual * 2, mask


class ByHand(nn.Module):
    """Matrix products that are nobody's but its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 32) / 4), nn.Parameter(torch.randn(32, 8) / 4)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.up).relu() @ self.down * self.scale


def _conv(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, groups=2, bias=False)
    )


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    expected: str
    """The split that `auto` finds."""


def _floats(*shape: int) -> Callable[[], Inputs]:
    return lambda: (torch.randn(shape),)


def _tokens() -> Inputs:
    return (torch.randint(0, 11, (4, 6)),)


CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), _floats(4, 8), "deferred"),
    "transformer": Case(lambda: Block(16, 4, 0.1), _floats(2, 8, 16), "deferred"),
    "conv and batch norm": Case(lambda: _conv(nn.BatchNorm2d(8)), _floats(3, 3, 9, 9), "deferred"),
    "conv and group norm": Case(lambda: _conv(nn.GroupNorm(2, 8)), _floats(3, 3, 9, 9), "deferred"),
    "conv1d": Case(lambda: nn.Conv1d(4, 4, 3, padding=1), _floats(2, 4, 16), "deferred"),
    "lstm": Case(Lstm, _floats(3, 5, 8), "deferred"),
    "lstm alone, one fused function": Case(LstmAlone, _floats(3, 5, 8), "fused"),
    "lstm cell": Case(Recurrent, _floats(3, 5, 8), "fused"),
    "tied": Case(Tied, _tokens, "deferred"),
    "tied by function": Case(TiedByFunction, _tokens, "deferred"),
    "tokens, nothing to defer": Case(
        lambda: nn.Sequential(nn.Embedding(11, 8, sparse=False, scale_grad_by_freq=True), ByHand()), _tokens, "fused"
    ),
    "checkpoint": Case(lambda: Checkpointed(reentrant=False), _floats(2, 4, 8), "deferred"),
    "reentrant checkpoint": Case(lambda: Checkpointed(reentrant=True), _floats(2, 4, 8), "deferred"),
    "view": Case(View, _floats(4, 8), "deferred"),
    "conditional": Case(Conditional, _floats(4, 8), "deferred"),
    "frozen": Case(Frozen, _floats(4, 8), "deferred"),
    "several tensors": Case(
        Several,
        lambda: (torch.randn(4, 8), torch.randn(4, 8), torch.randint(0, 2, (4,)), torch.randn(4, 8)),
        "deferred",
    ),
    "by hand": Case(ByHand, _floats(4, 8), "torch"),
    "double precision": Case(lambda: nn.Linear(8, 8).double(), lambda: (torch.randn(4, 8).double(),), "deferred"),
    "nothing but a norm": Case(lambda: nn.LayerNorm(8), _floats(4, 8), "fused"),
}


def _build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def _data(case: Case) -> dict[MicroBatch, Inputs]:
    torch.manual_seed(1)
    return {key: case.inputs() for key in KEYS}


def _seed(key: MicroBatch) -> int:
    return 100 * key[0] + key[1]


def _as_tuple(y: Tensor | Inputs) -> Inputs:
    return y if isinstance(y, tuple) else (y,)


def _dys(ys: Inputs) -> tuple[Tensor | None, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(y.shape, generator=generator).to(y) if y.is_floating_point() else None for y in ys)


def unsplit(case: Case, autocast: bool = False) -> Outcome:
    """torch's own backward, one micro-batch after the other, with no code of ours but the sum."""
    module = _build(case)
    tried = _build(case)
    tried(*_data(case)[KEYS[0]])
    after = dict(tried.named_buffers())
    start = {name: buffer.clone() for name, buffer in module.named_buffers() if not torch.equal(buffer, after[name])}
    moving = {name: buffer for name, buffer in module.named_buffers() if name in start}
    total = GradientSum(module.parameters(), terms=len(KEYS), buffers=moving.values())
    dxs: dict[MicroBatch, list[Tensor | None]] = {}
    for key, inputs in _data(case).items():
        torch.manual_seed(seed_for("layer", _seed(key), 0))
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            ys = _as_tuple(module(*leaves))
        roots = [(y, dy) for y, dy in zip(ys, _dys(ys), strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in roots], [dy for _, dy in roots])
        dxs[key] = [x.grad if x.is_floating_point() else None for x in leaves]
        for parameter in module.parameters():
            if parameter.grad is not None:
                total.add(parameter, parameter.grad)
                parameter.grad = None
        for name, buffer in moving.items():
            total.add_change(buffer, buffer.double() - start[name].double())
            buffer.copy_(start[name])
    return dxs, total.buffer


def _choose(case: Case, module: nn.Module, wanted: str = "auto", autocast: Autocast | None = None) -> Split:
    return choose_split(module, Probe(_data(case)[KEYS[0]]), wanted=wanted, autocast=autocast)  # type: ignore[arg-type]


def _run(
    case: Case, module: nn.Module, split: Split, order: random.Random, autocast: Autocast | None = None
) -> Outcome:
    """All micro-batches through a Stage, in a random valid order of ops."""
    total = GradientSum(module.parameters(), terms=len(KEYS), buffers=split.moving)
    stage = Stage(module, total, split=split.strategy, autocast=autocast)
    data, left = _data(case), {key: ["F", "I", "W"] for key in KEYS}
    ys: dict[MicroBatch, Inputs] = {}
    dxs: dict[MicroBatch, list[Tensor | None]] = {}
    while left:
        key = order.choice(sorted(left))
        op = left[key].pop(0)
        if op == "F":
            y = stage.forward(key, data[key] if len(data[key]) > 1 else data[key][0], seed=_seed(key))
            ys[key] = _as_tuple(y)
        elif op == "I":
            dys = _dys(ys[key])
            dx = stage.input_backward(key, dys if len(dys) > 1 else dys[0])
            dxs[key] = list(dx) if isinstance(dx, tuple) else [dx]
        else:
            stage.weight_backward(key)
            del left[key]
    assert stage.held == 0
    return dxs, total.buffer


def _assert_same(
    got: Outcome,
    wanted: Outcome,
) -> None:
    for key in KEYS:
        for ours, torchs in zip(got[0][key], wanted[0][key], strict=True):
            if torchs is None:  # an integer, or an input that the output does not depend on
                assert ours is None or not ours.any()
            else:
                assert ours is not None and torch.equal(ours, torchs)
    assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("name", CASES)
def test_every_split_that_passes_gives_the_bits_of_the_fused_backward(name: str) -> None:
    run_split(CASES[name], unsplit(CASES[name]))


def run_split(case: Case, wanted: Outcome, autocast: Autocast | None = None) -> None:
    passed = []
    for strategy in ("deferred", "torch", "fused"):
        module = _build(case)
        split = _choose(case, module, strategy, autocast)
        passed.append(split.strategy.name)
        for attempt in range(2):
            _assert_same(_run(case, module, split, random.Random(attempt), autocast), wanted)
    found = _choose(case, _build(case), autocast=autocast)
    assert found.strategy.name == case.expected, found.text
    assert found.strategy.name in passed


@pytest.mark.parametrize(
    "name", ["mlp", "transformer", "conv and group norm", "lstm", "lstm cell", "tied", "checkpoint", "by hand"]
)
def test_under_bf16_autocast_too(name: str) -> None:
    case = CASES[name]
    wanted = unsplit(case, autocast=True)
    assert not torch.equal(wanted[1], unsplit(case)[1])
    module = _build(case)
    split = _choose(case, module, autocast="bf16")
    assert split.strategy.name == case.expected, split.text
    _assert_same(_run(case, module, split, random.Random(0), "bf16"), wanted)

"""The probe: what it refuses, what it says, and that it leaves nothing behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from openrecycle.agent.config.options import Autocast, Optimization
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.models.compat import FlopCount
from openrecycle.agent.models.layers import StageCuts, StageIOError, TensorSpec
from openrecycle.agent.stages.gradients import FastSum, GradientSum
from openrecycle.agent.stages.stage import Probe, Stage, assemble, choose_split
from openrecycle.planner.jobs.job import Job
from tests.golden import golden


class Stateful(nn.Module):
    """Not a function of its inputs, parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x) * self.calls
        return y


class SideBranch(nn.Module):
    """The second output does not depend on the input: torch's split loses its parameter's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.aside = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.aside @ self.aside


class Named(nn.Module):
    """Puts a new tensor in its buffer's place instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        y: Tensor = self.linear(x)
        return y


class Turning(nn.Module):
    """With complex numbers, as of rotary positions."""

    def __init__(self, by: complex) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(4, 4), by
        self.register_buffer("turn", torch.ones(4, dtype=torch.complex64))
        self.turn: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.turn = self.turn + self.by
        y: Tensor = self.linear(x) * self.turn.real
        return y


def _x() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("module", [Stateful(), SideBranch()])
def test_what_does_not_give_the_same_bits_is_refused_with_the_reason(module: nn.Module) -> None:
    split = choose_split(module, Probe((_x(),)))
    assert split.strategy.name == "fused" and split.warning and split.share == 0
    assert golden("other-bits-than-the-fused") in split.text


@pytest.mark.filterwarnings("error")
def test_a_complex_buffer_may_be_there_but_not_move() -> None:
    assert choose_split(Turning(0), Probe((_x(),))).strategy.name == "deferred"
    with pytest.raises(RuntimeError, match="complex buffer"):
        choose_split(Turning(1j), Probe((_x(),)))


def test_a_stage_that_is_all_in_one_kernel_says_so() -> None:
    split = choose_split(nn.LSTM(4, 4), Probe((_x()[None],), loss=lambda y: y[0].sum()))
    assert split.strategy.name == "fused" and split.warning
    assert golden("no-matrix-product") in split.text


def test_nothing_to_train_is_no_reason_to_warn() -> None:
    split = choose_split(nn.Linear(4, 4).requires_grad_(False), Probe((_x(),)))
    assert split.strategy.name == "fused" and not split.warning


def test_a_module_s_own_error_is_not_swallowed() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        choose_split(nn.Linear(5, 4), Probe((_x(),)))


@pytest.mark.parametrize("wanted", ["auto", "deferred", "torch", "fused"])
def test_it_leaves_nothing_behind(wanted: str) -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    split = choose_split(module, Probe((_x(),)), wanted=wanted)  # type: ignore[arg-type]
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in module.parameters())
    patched = [m for m in module.modules() if "forward" in vars(m)]
    assert bool(patched) == (split.strategy.name == "deferred")
    split.strategy.close()
    assert not any("forward" in vars(m) for m in module.modules())


def test_a_forward_that_was_replaced_on_a_layer_stays() -> None:
    """As adapters do it: the class of the layer does not show it."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = module[0].forward
    module[0].forward = lambda x: 3.0 * plain(x)  # type: ignore[method-assign]
    replaced, y = module[0].forward, module(_x())
    for _ in range(2):  # layers that come to another stage are tried again
        split = choose_split(module, Probe((_x(),)), wanted="deferred")
        assert split.strategy.name == "deferred" and torch.equal(module(_x()), y)
        split.strategy.close()
        assert module[0].forward is replaced and "forward" not in vars(module[1])


def test_a_buffer_that_is_replaced_counts_as_moving() -> None:
    module = Named()
    buffer = module.seen
    split = choose_split(module, Probe((_x(),)))
    assert len(split.moving) == 1 and split.moving[0] is buffer is module.seen and float(buffer) == 0


def test_a_buffer_that_changes_its_shape_is_an_error_in_words() -> None:
    class Growing(Named):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen.reshape(-1), x.detach()[0]])
            y: Tensor = self.linear(x)
            return y

    with pytest.raises(RuntimeError, match=golden("must-keep-their-shape")):
        choose_split(Growing(), Probe((_x(),)))


class Late(Named):
    """Writes to its buffer from the third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drawn", torch.ones(4))
        self.drawn: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 100:
            self.drawn.mul_(2.0)
        self.drawn = self.drawn.clone()  # of the same values
        y: Tensor = super().forward(x) * self.drawn
        return y


class Listed(nn.Module):
    """Writes to its buffer by way of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.all = [self.seen]

    def forward(self, x: Tensor) -> Tensor:
        self.all[0] += 1
        y: Tensor = self.linear(x)
        return y


class Cached(nn.Module):
    """Makes a table in its first forward, and knows by something else that it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.there = nn.Linear(4, 4), False
        self.register_buffer("table", None)
        self.table: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if not self.there:
            self.table, self.there = torch.ones(4), True
        y: Tensor = self.linear(x) * self.table
        return y


@pytest.mark.filterwarnings("error")
def test_infinities_in_a_buffer_do_not_move() -> None:
    """As in a mask of attention: the difference of two of them is no number."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mask.softmax(-1) @ self.linear(x)
            return y

    assert choose_split(Masked(), Probe((_x(),))).moving == []


class Table(nn.Module):
    """Positions that are read by a method; who owns it calls no forward. It may count its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(2000, 4))
        self.register_buffer("uses", torch.zeros(()))
        self.rows: Tensor

    def first(self, rows: int) -> Tensor:
        return self.rows[:rows]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(len(x))


def test_a_table_that_is_read_by_a_method_does_not_move() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = nn.Linear(4, 4), Table()

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 100:
                self.table.rows.mul_(2.0)
            y: Tensor = self.linear(x) * self.table.first(len(x))
            return y

    module = Rotated()
    split = choose_split(module, Probe((_x(),)))
    # Nobody knows about what is small.
    assert [id(b) for b in split.moving] == [id(module.table.uses)]
    stage = Stage(module, GradientSum(module.parameters(), terms=1, buffers=split.moving), tried=True)
    with pytest.raises(StageIOError, match=r"the buffer 0\.table\.rows"):
        stage.forward((0, 1), _x() + 100.0, seed=0)


def test_a_buffer_that_begins_at_infinity_can_not_move() -> None:
    """As a running minimum: the sum would refuse its change in each iteration, which would make no step."""

    class Ranged(nn.Module):
        def __init__(self, beginning: float) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("least", torch.full((), beginning))
            self.least: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.least.copy_(torch.minimum(self.least, x.detach().min()))
            y: Tensor = self.linear(x)
            return y

    assert len(choose_split(Ranged(1e4), Probe((_x(),))).moving) == 1
    with pytest.raises(StageIOError, match=golden("begins-at-infinity")):
        choose_split(Ranged(float("inf")), Probe((_x(),)))


def test_a_buffer_that_begins_to_change_later_is_refused_by_its_name() -> None:
    module = Late()
    split = choose_split(module, Probe((_x(),)))
    assert [id(b) for b in split.moving] == [id(module.seen)]
    sums = GradientSum(module.parameters(), terms=1, buffers=split.moving)
    stage = Stage(module, sums, split=split.strategy, tried=True)
    stage.forward((0, 0), _x(), seed=0)
    with pytest.raises(StageIOError, match=golden("begins-to-change-later")):
        stage.forward((0, 1), _x() + 100.0, seed=0)


def test_a_buffer_may_change_in_evaluation_alone() -> None:
    """Nothing is left behind: who evaluates what depends on who is alive."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("keys", torch.zeros(3, 4))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.keys: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            if not self.training:
                self.keys[:2] = y[:2]
                self.seen = self.seen + 1
            return y + self.keys

    module = Remembering()
    split = choose_split(module, Probe((_x(),)))
    assert split.moving == []
    stage = Stage(module, GradientSum(module.parameters(), terms=1), split=split.strategy, tried=True)
    with stage.evaluating():
        first, second = stage.evaluate(_x(), seed=0), stage.evaluate(_x(), seed=0)
        assert torch.equal(first, second) and torch.equal(first, copy.deepcopy(module)(_x()))
    assert not module.keys.any() and int(module.seen) == 0


@pytest.mark.parametrize("autocast", [None, "bf16", "fp16"])
def test_evaluation_has_the_type_that_training_has(autocast: Autocast | None) -> None:
    """Torch's fast path for attention in evaluation returns the lower type under a CPU's autocast."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    x = torch.randn(3, 5, 4)
    stage = Stage(layer, GradientSum(layer.parameters(), terms=1), autocast=autocast)
    trained = stage.forward((0, 0), x, seed=0)
    with stage.evaluating():
        evaluated = stage.evaluate(x, seed=0)
    assert isinstance(trained, Tensor) and evaluated.dtype == trained.dtype
    torch.testing.assert_close(evaluated, trained)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_buffer_must_be_changed_by_its_own_name() -> None:
    with pytest.raises(StageIOError, match=golden("by-its-own-name")):
        choose_split(Listed(), Probe((_x(),)))


def test_a_cache_that_is_taken_to_be_kept_is_told_of() -> None:
    """The second forward finds the zeros that the first has found, and takes them for what that has made of them."""

    class Filled(Cached):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.zeros(4)

        def forward(self, x: Tensor) -> Tensor:
            assert self.table is not None
            if not self.there:
                self.table.fill_(1.0)
                self.there = True
            y: Tensor = self.linear(x) * self.table
            return y

    split = choose_split(Filled(), Probe((_x(),)))
    assert golden("another-output-the-second-time") in split.text and split.warning


def test_a_cache_that_counts_on_being_kept_is_named() -> None:
    with pytest.raises(TypeError) as raised:
        choose_split(Cached(), Probe((_x(),)))
    assert golden("made-in-the-first-forward") in raised.value.__notes__[-1]


def _twice_as_large(module: nn.Module, by: str) -> None:
    weight = module.get_parameter("weight")
    if by == "data":
        weight.data.mul_(2.0)
    elif by == "another":
        weight.data = 2.0 * weight.data
    else:
        with torch.no_grad():
            weight.mul_(2.0)


@pytest.mark.parametrize("by", ["data", "another", "itself"])
def test_a_parameter_that_a_forward_changes_is_refused_by_its_name(by: str) -> None:
    module = nn.Linear(4, 4)
    module.register_forward_pre_hook(lambda module, _: _twice_as_large(module, by))
    with pytest.raises(StageIOError, match=golden("a-forward-changes-the-parameter")):
        choose_split(module, Probe((_x(),)))


def _clamped(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1.0, 1.0)


def _clamped_gradient(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clamp(-1.0, 1.0)


@pytest.mark.parametrize("wanted", ["auto", "deferred", "torch"])
@pytest.mark.parametrize("after", [False, True])
def test_hooks_of_parameters_are_called_also_if_they_do_nothing_in_the_trial(wanted: str, after: bool) -> None:
    module = nn.Linear(4, 4)
    if after:
        module.weight.register_post_accumulate_grad_hook(_clamped)
    else:
        module.weight.register_hook(_clamped_gradient)
    split = choose_split(module, Probe((_x() * 1e-2,)), wanted=wanted)  # type: ignore[arg-type]
    sums = GradientSum(module.parameters(), terms=1)
    stage = Stage(module, sums, split=split.strategy, tried=True)
    stage.forward((0, 0), _x() * 100.0, seed=0)
    stage.input_backward((0, 0), torch.ones(3, 4))
    stage.weight_backward((0, 0))
    sums.write_gradients()
    assert module.weight.grad is not None and float(module.weight.grad.abs().max()) == 1.0
    if after:
        assert golden("a-hook-wants-whole-gradients") in split.text and split.warning


def test_workers_of_a_stage_come_to_the_same_split() -> None:
    found = [choose_split(nn.Linear(4, 4), Probe((_x(),))) for _ in range(2)]
    assert found[0].text == found[1].text and found[0].share == found[1].share


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_demo_s_stages_are_deferred_whole(stage: int) -> None:
    gpt, job = Gpt(width=16, heads=2, sequence=8, batch=2), Job(pipelines=2, stages=3, micro_batches=4)
    ops, split = assemble(gpt, job, StageCuts.of(gpt, 3), stage, 0, Optimization())
    assert split.strategy.name == "deferred" and not split.warning and split.share > 0.45
    assert type(ops.gradients) is GradientSum
    ops, split = assemble(gpt, job, StageCuts.of(gpt, 3), stage, 0, Optimization(mode="fast", autocast="bf16"))
    assert split.strategy.name == "deferred" and type(ops.gradients) is FastSum


def test_several_tensors_between_stages() -> None:
    class Pair(Gpt):
        """Stages hand on their activations and the token positions."""

        def build_layer(self, layer: int, layers: int, seed: int) -> nn.Module:
            inner = super().build_layer(layer, layers, seed)

            class Both(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.inner = inner

                def forward(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor] | Tensor:
                    y: Tensor = self.inner(x)
                    places = torch.arange(x.shape[1]) if positions is None else positions
                    return y if layer == layers - 1 else (y, places)

            return Both()

    pair, job = Pair(width=16, heads=2, sequence=8, batch=2), Job(pipelines=2, stages=3, micro_batches=4)
    boundary = (TensorSpec((2, 8, 16), "float32"), TensorSpec((8,), "int64", gradient=False))
    for stage in range(3):
        ops, split = assemble(pair, job, StageCuts((1, 1, 1), (boundary, boundary)), stage, 0, Optimization())
        assert split.strategy.name == "deferred"
    assert ops.held == 0


def test_work_is_counted_as_torch_counts_it() -> None:
    def backward() -> None:
        gpt = Gpt(width=16, heads=2, sequence=8, batch=2)
        y = gpt.build_layer(1, 3, 0)(torch.ones(2, 8, 16))
        y.backward(torch.ones_like(y))

    with FlopCount() as ours:
        backward()
    with FlopCounterMode(display=False) as theirs:
        backward()
    assert ours.total == theirs.get_total_flops() > 0

"""Both kinds of sum: what counts, what is refused, norms, buffers; and once per micro-batch."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from openrecycle.agent.config.devices import CPU_CHUNK
from openrecycle.agent.stages.gradients import SUM_OF, FastSum, GradientSum
from openrecycle.agent.stages.kernels import fused_add
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import Slot, judge
from openrecycle.agent.stages.stage import Probe, Stage, choose_split
from tests.conftest import examples

KINDS = [GradientSum, FastSum]


def test_the_recipe_s_mode_names_the_kind() -> None:
    assert type(SUM_OF["deterministic"]([], terms=1)) is GradientSum
    assert type(SUM_OF["fast"]([], terms=1)) is FastSum


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_of_any_type_and_layout(kind: type[GradientSum], dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(300, 500, dtype=dtype))  # more than one chunk
    total = kind([parameter], terms=3)
    generator = torch.Generator().manual_seed(0)
    terms = [(torch.randn(500, 300, generator=generator) / 8).to(dtype).t() for _ in range(3)]
    kept = [term.clone() for term in terms]
    for term in terms:
        total.add(parameter, term)
    assert all(map(torch.equal, terms, kept))
    total.write_gradients()
    assert parameter.grad is not None and parameter.grad.dtype == dtype
    exact = torch.stack([t.double() for t in terms]).sum(0)
    torch.testing.assert_close(parameter.grad, exact.to(dtype))
    assert math.isclose(total.squared_norms([total.parameters])[0], float(exact.square().sum()), rel_tol=1e-6)


def by_chunks(sums: Tensor, term: Tensor, limit: float) -> int:
    """Adds it, as far as it fits; returns whether a part did not."""
    for start in range(0, term.numel(), CPU_CHUNK):
        # Compared in fp64, whatever the term is of.
        part = term[start : start + CPU_CHUNK].to(torch.float64) * 2.0**50
        if not bool((part.abs() < limit).all()):
            return 1
        sums[start : start + CPU_CHUNK] += part.round().to(torch.int64)
    return 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 3, CPU_CHUNK + 3])
@pytest.mark.parametrize("step", [1, 2, -1])
def test_the_compiled_loop_adds_what_fits(dtype: torch.dtype, size: int, step: int) -> None:
    fused, generator = fused_add(torch.device("cpu")), torch.Generator().manual_seed(size)
    assert fused is not None
    numbers = torch.randn(2 * size, generator=generator)
    numbers *= 2.0 ** torch.randint(-60, 5, (2 * size,), generator=generator)
    term = numbers.to(dtype)[::2] if step == 2 else numbers.to(dtype)[:size]
    term = torch._neg_view(term) if step == -1 else term  # as an imaginary part may be
    for last in (0.0, 2.0**8, -(2.0**8), math.nan, math.inf):
        if size:
            term[-1] = last
        sums, rejected = torch.ones(size, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        theirs = sums.clone()
        fused(sums, term, rejected, 2.0**50, 2.0**58)
        assert int(rejected) == by_chunks(theirs, term.resolve_neg(), 2.0**58) == int(size > 0 and last != 0.0)
        assert torch.equal(sums, theirs)


@pytest.mark.parametrize("terms", [1, 18, 25, 29])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_compiled_loop_knows_the_limit_to_the_last_bit(dtype: torch.dtype, terms: int) -> None:
    fused, limit = fused_add(torch.device("cpu")), 2.0**62 / terms
    assert fused is not None
    nearest = torch.tensor([limit * 2.0**-50], dtype=dtype)
    for term in (torch.nextafter(nearest, torch.zeros(1, dtype=dtype)), nearest, torch.nextafter(nearest, 2 * nearest)):
        sums, rejected = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        theirs = sums.clone()
        fused(sums, term, rejected, 2.0**50, limit)
        assert int(rejected) == by_chunks(theirs, term, limit)
        assert torch.equal(sums, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lower", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(6, 10), (1025, 1024), (149_796, 7), (2, 600_000), (0, 5), (5, 0)])
def test_a_product_counts_as_the_gradient_that_it_is(
    kind: type[GradientSum], lower: torch.dtype, rows: int, columns: int
) -> None:
    """Also one that is made in parts, and one of which a part would be multiplied by other code than the whole."""
    parameter, other = nn.Parameter(torch.zeros(rows, columns)), nn.Parameter(torch.zeros(3))
    apart, together = (kind([other, parameter], terms=3) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        left, right = (torch.randn(shape, generator=generator).to(lower) for shape in ((rows, 16), (16, columns)))
        apart.add(parameter, (left @ right).float())
        together.add_product(parameter, left, right)
    if kind is GradientSum or lower is torch.bfloat16:
        assert torch.equal(together.buffer, apart.buffer)
    torch.testing.assert_close(together.buffer, apart.buffer)
    together.write_gradients()
    assert parameter.grad is not None and other.grad is None
    together.clear()
    together.write_gradients()
    assert parameter.grad is None and not together.buffer.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uses", [1, 2, 3])
def test_a_weight_that_is_used_more_than_once_has_the_sum_of_its_gradients(kind: type[GradientSum], uses: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    module = nn.Sequential(*[layer, nn.Tanh()] * uses)
    x, dy = torch.randn(4, 5), torch.randn(4, 5)
    module(x).backward(dy)
    expected = {p: p.grad for p in module.parameters()}
    total = kind(module.parameters(), terms=1)
    stage = Stage(module, total)
    stage.forward((0, 0), x, seed=0)
    stage.input_backward((0, 0), dy)
    stage.weight_backward((0, 0))
    total.write_gradients()
    for parameter, gradient in expected.items():
        assert parameter.grad is not None and gradient is not None
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_nobody_used_has_no_gradient(kind: type[GradientSum]) -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(3)) for _ in range(3))
    frozen.requires_grad_(False)
    total = kind([used, unused, frozen], terms=1)
    total.add(used, torch.zeros(3))
    total.write_gradients()
    assert used.grad is not None and unused.grad is None and frozen.grad is None
    assert total.parameters == [used, unused]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_shows(kind: type[GradientSum], bad: float) -> None:
    parameter = nn.Parameter(torch.zeros(200_000))
    total = kind([parameter], terms=2)
    total.add(parameter, torch.ones(200_000))
    assert total.rejected == 0
    term = torch.ones(200_000)
    term[199_999] = bad
    total.add(parameter, term)
    assert total.rejected == 1
    total.clear()
    assert total.rejected == 0 and not total.buffer.any()


@pytest.mark.parametrize("terms", [1, 18, 4096])
def test_the_range_is_4096_over_the_number_of_terms(terms: int) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    total = GradientSum([parameter], terms=terms)
    largest = math.nextafter(4096 / terms, 0.0)
    for _ in range(min(terms, 20)):
        total.add(parameter, torch.tensor([largest, -largest], dtype=torch.float64))
    assert total.rejected == 0
    total.add(parameter, torch.tensor([0.0, -4096 / terms], dtype=torch.float64))
    assert total.rejected == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_may_be_larger_than_any_gradient(kind: type[GradientSum]) -> None:
    losses, sums = [3.5e9, 0.125, 7e12, 4096.0, 2.0], []
    for order in (losses, losses[::-1]):
        total = kind([nn.Parameter(torch.zeros(1))], terms=len(losses))
        for loss in order:
            total.add_loss(torch.tensor(loss))
        assert total.rejected == 0
        sums.append(total.loss)
    assert sums == pytest.approx([sum(losses)] * 2, rel=1e-6)
    assert kind is not GradientSum or sums[0] == sums[1]
    total.add_loss(torch.tensor(float("nan")))
    assert total.rejected == 1


@examples(15)
@given(seed=st.integers(0, 2**31))
def test_the_norm_is_the_same_however_the_terms_came(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 40_000, 1)]
    terms = [(p, torch.randn(p.shape, generator=generator)) for p in parameters for _ in range(4)]
    norms = set()
    for _ in range(2):
        random.Random(seed).shuffle(terms)
        total = GradientSum(parameters, terms=4)
        for parameter, term in terms:
            total.add(parameter, term)
        norms.add(total.squared_norms([total.parameters])[0])
    assert len(norms) == 1
    assert GradientSum([], terms=1).squared_norms([[]]) == (0.0,)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_may_change_by_more_than_gradients(kind: type[GradientSum]) -> None:
    buffer, counter = torch.tensor([1.0, -2.0]), torch.tensor(7)
    total = kind([], terms=1000, buffers=[buffer, counter])
    for change in (10_000.0, -4_000.0):
        total.add_change(buffer, torch.tensor([change, 0.5], dtype=torch.float64))
        total.add_change(counter, torch.tensor(1, dtype=torch.float64))
    total.write_buffers()
    assert buffer.tolist() == [3001.0, -1.5] and int(counter) == 8
    assert total.rejected == 0 and total.squared_norms([total.parameters])[0] == 0.0


def test_a_norm_beyond_all_numbers_is_infinite() -> None:
    """Each gradient is finite, and so is the sum of each one's squares: the update is skipped, and nobody ends."""
    parameters = [nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2)]
    total = FastSum(parameters, terms=1)
    for parameter in parameters:
        total.add(parameter, torch.full((4,), 6.5e153, dtype=torch.float64))
    (norm,) = total.squared_norms([parameters])
    assert total.rejected == 0 and judge([Slot((norm,))], clip_norm=1.0).coefficient is None


# -- a micro-batch counts once, whole ---------------------------------------------------------


def _ones(stage: Stage, key: tuple[int, int], *, to: str = "FIW") -> None:
    x = torch.ones(2, 4)
    stage.forward(key, x, seed=0, loss=lambda y: y.sum())
    if "I" in to:
        stage.input_backward(key, None)
    if "W" in to:
        stage.weight_backward(key)


@pytest.mark.parametrize("wanted", ["deferred", "torch", "fused"])
def test_a_settled_micro_batch_is_not_counted_again(wanted: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    probe = Probe((torch.ones(2, 4),), loss=lambda y: y.sum())
    split = choose_split(module, probe, wanted=wanted)  # type: ignore[arg-type]
    assert split.strategy.name == wanted
    total = GradientSum(module.parameters(), terms=8)
    stage = Stage(module, total, split=split.strategy)
    _ones(stage, (0, 0))
    once = total.buffer.clone()
    assert once.any() and total.settled == {(0, 0)}
    # What was on its way does not count, in no part.
    _ones(stage, (0, 1), to="F")
    assert torch.equal(total.buffer, once) and total.settled == {(0, 0)}
    stage.abandon(keep_settled=True)
    assert stage.held == 0 and torch.equal(total.buffer, once)
    # Again, because a neighbour needs its output and its gradient.
    _ones(stage, (0, 0))
    assert torch.equal(total.buffer, once)
    _ones(stage, (0, 1))
    assert torch.equal(total.buffer, 2 * once) and total.settled == {(0, 0), (0, 1)}
    stage.abandon()
    assert not total.buffer.any() and not total.settled


# -- buffers that a forward changes -----------------------------------------------------------


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU())


class Average(nn.Module):
    """Keeps one of its inputs, in a way that no version shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.average.data.mul_(0.9).add_(x.detach().mean((0, 2)), alpha=0.1)
        return x


class Skipped(nn.Module):
    """Stochastic depth: a forward enters it, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Average(), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x) if torch.rand(()) < 0.5 else x
        return y


def test_statistics_of_a_layer_that_the_trial_did_not_enter() -> None:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(3, 4, 5, generator=generator) for _ in range(4)]

    def buffers_after(order: Iterable[int]) -> dict[str, Tensor]:
        net = nn.Sequential(*(Skipped() for _ in range(6)))
        split = choose_split(net, Probe((xs[0],)))
        total = GradientSum(net.parameters(), terms=4, buffers=split.moving)
        stage = Stage(net, total, split=split.strategy, tried=True)
        for m in order:
            stage.forward((0, m), xs[m], seed=100 + m)
            stage.input_backward((0, m), torch.ones(3, 4, 5))
            stage.weight_backward((0, m))
        total.write_buffers()
        return dict(net.named_buffers())

    ours, theirs = buffers_after(range(4)), buffers_after((3, 2, 1, 0))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert sum(int(b) for name, b in ours.items() if name.endswith("num_batches_tracked")) > 0
    assert any(b.any() for name, b in ours.items() if name.endswith("average"))


class Scaled(nn.Module):
    """Changes a buffer and then computes with it, in place or by `.data`; gives it to the next layer, too."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.linear, self.by_data = nn.Linear(4, 4), by_data
        self.register_buffer("scale", torch.ones(4))
        self.scale: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        with torch.no_grad():
            scale = self.scale.data if self.by_data else self.scale
            scale.mul_(0.5).add_(y.abs().amax(0), alpha=0.5)
        return y / self.scale, self.scale


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("wanted", ["deferred", "torch", "fused"])
def test_a_forward_may_compute_with_what_it_has_changed(wanted: str, by_data: bool) -> None:
    """Nothing is written to what it has saved for its backward, or given."""
    torch.manual_seed(0)
    module, x, dy = Scaled(by_data), torch.randn(3, 4).requires_grad_(), torch.randn(3, 4)
    plain = copy.deepcopy(module)
    y, scale = plain(x)
    y.backward(dy)
    split = choose_split(module, Probe((x.detach(),)), wanted=wanted)  # type: ignore[arg-type]
    assert split.strategy.name == wanted
    total = GradientSum(module.parameters(), terms=2, buffers=split.moving)
    stage = Stage(module, total, split=split.strategy, tried=True)
    for key in ((0, 0), (0, 1)):
        out = stage.forward(key, x.detach(), seed=0)
        assert torch.equal(out[0], y) and torch.equal(out[1], scale)
        assert torch.equal(module.scale, torch.ones(4))
    for key in ((0, 0), (0, 1)):
        dx = stage.input_backward(key, (dy, None))
        assert isinstance(dx, Tensor) and isinstance(x.grad, Tensor) and torch.equal(dx, x.grad)
        stage.weight_backward(key)
    total.write_gradients()
    weight, expected = module.linear.weight.grad, plain.linear.weight.grad
    assert weight is not None and expected is not None
    torch.testing.assert_close(weight, 2.0 * expected, rtol=1e-6, atol=1e-6)


class Lazy(nn.Module):
    """Makes a mask in a forward, as long as it needs one, and keeps it."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if registered:
            self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        y, mask = self.linear(x), getattr(self, "mask", None)
        if mask is None or len(mask) < x.shape[1]:
            self.register_buffer("mask", torch.ones(x.shape[1], x.shape[1]).tril())
        return self.mask[: x.shape[1], : x.shape[1]] @ y  # type: ignore[index,no-any-return]


@pytest.mark.parametrize("registered", [True, False])
def test_what_a_forward_makes_is_no_state(registered: bool) -> None:
    """Layers that move have run nothing, and some workers have run longer micro-batches than others."""
    holder = nn.Sequential(Lazy(registered), Lazy(registered))
    split = choose_split(holder, Probe((torch.ones(2, 3, 4),)))
    stage = Stage(holder, GradientSum(holder.parameters(), terms=4, buffers=split.moving), tried=True)
    x = torch.ones(2, 5, 4)
    y = stage.forward((0, 0), x, seed=0)
    with torch.no_grad():
        assert isinstance(y, Tensor) and torch.equal(y, copy.deepcopy(holder)(x))
    coming = nn.Sequential(Lazy(registered), Lazy(registered))
    of_both = [
        StageOptimizer(m, torch.optim.SGD(m.parameters(), 0.1), GradientSum(m.parameters(), terms=4))
        for m in (holder, coming)
    ]
    of_both[1].load_state(of_both[0].state())
    assert list(holder.named_buffers()) == []
    assert torch.equal(dict(holder.named_parameters())["0.linear.weight"], coming[0].linear.weight)


@pytest.mark.parametrize("routing", [[(0, 1, 2), (3,)], [(3, 1), (0, 2)], [(2, 3, 0, 1), ()]])
def test_running_statistics_do_not_depend_on_who_ran_what(routing: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(3, 2, 9, generator=generator) for _ in range(4)]
    expected = []  # of a forward of each micro-batch by itself
    for x in xs:
        net = _net()
        net(x)
        expected.append({name: buffer.double() for name, buffer in net.named_buffers()})

    stages = []
    for mine in routing:
        net = _net()
        split = choose_split(net, Probe((xs[0],)))
        assert len(split.moving) == 3 and "mean" in split.text
        total = GradientSum(net.parameters(), terms=4, buffers=split.moving)
        stage = Stage(net, total, split=split.strategy)
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        for m in mine:
            y = stage.forward((0, m), xs[m], seed=0)
            assert isinstance(y, Tensor)
            stage.input_backward((0, m), torch.ones_like(y))
            stage.weight_backward((0, m))
        assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())
        stages.append(stage)
    reduced = stages[0].gradients.buffer + stages[1].gradients.buffer
    for stage in stages:
        stage.gradients.buffer.copy_(reduced)
        stage.gradients.write_buffers()
        for name, buffer in dict(stage.module.layers)[0].named_buffers():
            mean = torch.stack([e[name] for e in expected]).mean(0)
            torch.testing.assert_close(buffer.double(), mean, rtol=1e-6, atol=1e-7)
    ours, theirs = (dict(dict(stage.module.layers)[0].named_buffers()) for stage in stages)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert int(ours["1.num_batches_tracked"]) == 1

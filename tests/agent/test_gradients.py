"""The sum of gradients does not depend on order, split or grouping."""

from __future__ import annotations

import random
from math import nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from openrecycle.agent.config.devices import Mode
from openrecycle.agent.stages.gradients import MOST_CHANGE, SUM_OF, GradientSum
from openrecycle.agent.stages.kernels import fused_add
from tests.conftest import examples


def _sum(terms: list[torch.Tensor], parameter: nn.Parameter) -> GradientSum:
    total = GradientSum([parameter], terms=len(terms))
    for term in terms:
        total.add(parameter, term)
    return total


@examples(30)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 40), workers=st.integers(1, 5))
def test_any_order_and_any_split_over_workers_gives_the_same_bits(seed: int, count: int, workers: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.zeros(7, 5))
    scale = 10.0 ** torch.randint(-8, 2, (7, 5), generator=generator)
    terms = [torch.randn(7, 5, generator=generator) * scale for _ in range(count)]
    whole = _sum(terms, parameter)
    shuffled = terms[:]
    random.Random(seed).shuffle(shuffled)
    parts = [_sum(shuffled[i::workers], parameter) for i in range(workers)]
    assert torch.equal(sum((p.buffer for p in parts), torch.zeros_like(whole.buffer)), whole.buffer)


def test_float_sums_are_not_like_that() -> None:
    """The reason for this class: the same terms in another order, in fp32, differ."""
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(1000, generator=generator) for _ in range(18)]
    forwards, backwards = sum(terms), sum(reversed(terms))
    assert isinstance(forwards, torch.Tensor) and isinstance(backwards, torch.Tensor)
    assert not torch.equal(forwards, backwards)


def test_the_sum_is_the_rounded_exact_one() -> None:
    generator = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.zeros(1000))
    terms = [torch.randn(1000, generator=generator) for _ in range(18)]
    total = _sum(terms, parameter)
    total.write_gradients()
    exact = torch.stack(terms).double().sum(0)
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, exact.float(), rtol=2e-7, atol=1e-14)


def test_loss_is_exact_for_short_fractions() -> None:
    total = GradientSum([], terms=4)
    for value in (0.5, 0.25, 1.125, 3.0):
        total.add_loss(torch.tensor(value))
    assert total.loss == 4.875


def test_changes_of_a_buffer_may_be_as_large_as_is_said() -> None:
    counter = torch.zeros(1, dtype=torch.int64)
    for change, rejected in ((MOST_CHANGE / 4 - 1, 0), (MOST_CHANGE / 4, 4)):
        total = GradientSum([], terms=4, buffers=[counter])
        for _ in range(4):
            total.add_change(counter, torch.tensor([change], dtype=torch.float64))
        assert total.rejected == rejected
        if not rejected:
            total.write_buffers()
            assert counter.item() == change


@pytest.mark.parametrize("mode", SUM_OF)
@pytest.mark.parametrize("usual", [1e-100, 1e-9, 1e-3, 1.0, 4096.0])
def test_a_weighted_mean_is_exact_however_small_weights_are(usual: float, mode: Mode) -> None:
    """Of gradients 1 and 5, the second of which counts three times as much."""
    parameter = nn.Parameter(torch.zeros(1))
    total = SUM_OF[mode]([parameter], terms=2, nominal=2 * usual)
    for weight, gradient in ((usual, 1.0), (3 * usual, 5.0)):
        total.add(parameter, torch.tensor([gradient * weight * (0.5 / usual)]))
        total.add_weight(torch.tensor([weight], dtype=torch.float64))
    total.write_gradients()
    assert parameter.grad is not None and not total.rejected
    torch.testing.assert_close(parameter.grad, torch.tensor([4.0]), rtol=2e-6, atol=0.0)


def test_a_weight_that_is_far_from_the_usual_one_is_counted_not_added() -> None:
    total = GradientSum([], terms=2, nominal=2e-9)
    total.add_weight(torch.tensor([1e6], dtype=torch.float64))
    assert total.rejected == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_number_is_in_no_sum(bad: float) -> None:
    fused_add(torch.device("cpu"))  # once it is loaded, it adds small terms, too
    total = GradientSum([], terms=2)
    total.add_loss(torch.tensor(1.5))
    total.add_loss(torch.tensor(bad))
    assert (total.loss, total.rejected) == (3.0, 1)


@pytest.mark.parametrize("mode", SUM_OF)
@pytest.mark.parametrize("weights", [(), (1.0, 3.0, 4.0)])
def test_the_loss_is_the_mean_over_micro_batches_that_have_one(mode: Mode, weights: tuple[float, ...]) -> None:
    nominal = 3.0 if weights else None
    for losses, mean in (((2.0, nan, 5.0), (2.0 + 4 * 5.0) / 5 if weights else 3.5), ((nan,) * 3, nan)):
        total = SUM_OF[mode]([], terms=3, nominal=nominal)
        for place, loss in enumerate(losses):
            weight = torch.tensor([weights[place]], dtype=torch.float64) if weights else None
            total.add_loss(torch.tensor(loss * (1.0 if weight is None else weight.item()) / 3), weight)
            if weight is not None:
                total.add_weight(weight)
        assert total.loss == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_what_does_not_fit_is_counted_not_added(bad: float) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    total = GradientSum([parameter], terms=2)
    total.add(parameter, torch.tensor([1.0, bad, 2.0]))
    assert total.rejected == 1
    total.add(parameter, torch.ones(3))
    total.write_gradients()
    assert parameter.grad is not None and parameter.grad.tolist() == [1.0, 1.0, 1.0]
    total.clear()
    assert total.rejected == 0 and not total.buffer.any()

"""fp16: the loss is scaled as by torch.amp.GradScaler, and the scale is the same everywhere after a death."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from openrecycle import Data, Faults, InputError, Job, Optimization, ResilientTrainer
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.models.state import StageState
from openrecycle.agent.stages.gradients import SUM_OF, Mode
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import CLEAN, SKIP, LossScale, PostValidation, ValidationResult
from openrecycle.agent.stages.stage import Stage
from tests.agent.own_jobs import grouped
from tests.conftest import at_length

FP16 = Optimization(autocast="fp16", clip_norm=1.0)


def build_layer(layer: int, layers: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def steep(output: Tensor, target: Tensor) -> Tensor:
    """Its gradients are too large for fp16 until the scale has been halved some times."""
    return functional.mse_loss(output.float(), target) * 40


def train(iterations: int = 8, **changes: Any) -> TrainingResult:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(*(torch.randn(64, 8, generator=generator) for _ in range(2)))
    given: dict[str, Any] = {
        "layers": build_layer,
        "layer_count": 4,
        "loss": steep,
        "data": Data(data, batch_size=4),
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "job": Job.uniform(2, 2, 2),
        "optimization": FP16,
    }
    return ResilientTrainer(**grouped(given | changes)).fit(iterations=iterations)


@cache
def undisturbed() -> TrainingResult:
    return train()


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
def test_scales_and_steps_are_those_of_torch(mode: Mode) -> None:
    torch.manual_seed(0)
    ours, theirs = build_layer(0, 1), build_layer(0, 1)
    theirs.load_state_dict(ours.state_dict())
    sums = SUM_OF[mode](ours.parameters(), terms=1)
    stage = Stage(ours, sums, autocast="fp16")
    optimizer = StageOptimizer(ours, torch.optim.SGD(ours.parameters(), lr=1e-3), sums, scales_loss=True)
    scaler, sgd = torch.amp.GradScaler("cpu"), torch.optim.SGD(theirs.parameters(), lr=1e-3)
    skipped = 0
    for step in range(12):
        x, target = torch.randn(2, 4, 8)
        loss = partial(steep, target=target)
        assert sums.loss_scale == scaler.get_scale()
        stage.forward((0, step), x, seed=0, loss=loss)
        stage.input_backward((0, step), None)
        stage.weight_backward((0, step))
        slot = optimizer.measure()
        skipped += bool(slot.rejected)
        optimizer.step(SKIP if slot.rejected else CLEAN, slot)
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            scaled = scaler.scale(loss(theirs(x)))
        scaled.backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(mine, other, rtol=1e-6, atol=1e-8)
    assert 0 < skipped < 12


def test_the_scale_grows_after_so_many_steps() -> None:
    scale = LossScale()
    for _ in range(1999):
        scale = scale.after(ValidationResult(0.5))
    assert scale.value == 2.0**16 and scale.after(CLEAN) == LossScale(2.0**17)
    assert scale.after(SKIP) == LossScale(2.0**15)
    kept = PostValidation(loss_scale=scale)
    assert PostValidation.from_json(kept.to_json()) == kept


@pytest.mark.parametrize("value", [3.0, 0.0, -2.0, math.inf, math.nan, 2.0**50, 2.0**-50])
def test_a_scale_that_is_none_is_refused(value: float) -> None:
    document = PostValidation(loss_scale=LossScale()).to_json() | {"loss_scale": {"value": value, "streak": 0}}
    with pytest.raises((ValueError, OverflowError)):
        PostValidation.from_json(document)


def test_a_state_is_resumed_in_another_precision() -> None:
    def made(scales_loss: bool) -> StageOptimizer:
        module = nn.Linear(2, 2)
        sums = SUM_OF["deterministic"](module.parameters(), terms=1)
        return StageOptimizer(module, torch.optim.SGD(module.parameters()), sums, scales_loss=scales_loss)

    def copied(state: StageState) -> StageState:
        return StageState(state.document, {name: t.clone() for name, t in state.tensors.items()})

    low, full = made(True), made(False)
    low.step(SKIP)
    full.load_state(copied(low.state()))
    assert full.gradients.loss_scale == 1.0 and full.committed == 1
    low.load_state(copied(low.state()))
    assert low.gradients.loss_scale == 2.0**15
    low.load_state(copied(full.state()))
    assert low.gradients.loss_scale == 2.0**16


def test_an_overflow_can_not_end_the_job() -> None:
    with pytest.raises(InputError) as caught:
        Optimization(autocast="fp16", non_finite="stop")
    assert caught.value.field.endswith("non_finite")


@pytest.mark.processes
def test_steps_are_skipped_until_the_scale_fits() -> None:
    result = undisturbed()
    assert all(map(math.isfinite, result.losses)) and result.losses[-1] < result.losses[0]
    # Nothing moves while gradients overflow: the losses would differ by more.
    other = train(optimization=Optimization(autocast="bf16", clip_norm=1.0))
    assert result.losses[-1] > other.losses[-1]


@pytest.mark.processes
@pytest.mark.parametrize("kill", [*map(at_length, ("W0_1@1:F1", "W1_1@2:W0", "W1_1@5:I0", "W1_0@0:I1")), "W0_0@3:O"])
def test_a_kill_does_not_show(kill: str) -> None:
    result = train(faults=Faults(kill=[kill]))
    assert [recovery.worker for recovery in result.recoveries] == [kill.partition("@")[0]]
    assert result.losses == undisturbed().losses
    for layer in range(4):
        mine, theirs = result.state_dict(layer), undisturbed().state_dict(layer)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)

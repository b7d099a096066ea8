"""Step, roll-back and transfer of a stage's state, exact to the bit."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from agent.gradients import GradientSum
from agent.optimizer import NonFiniteError, StageOptimizer, StateError


def _stage(seed: int = 0) -> StageOptimizer:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    gradients = GradientSum(module.parameters(), terms=1)
    return StageOptimizer(module, torch.optim.AdamW(module.parameters(), lr=0.01), gradients)


def _train(stage: StageOptimizer, iteration: int) -> None:
    generator = torch.Generator().manual_seed(iteration)
    for parameter in stage.module.parameters():
        stage.gradients.add(parameter, torch.randn(parameter.shape, generator=generator))
    stage.gradients.add_loss(torch.tensor(float(iteration)))
    assert stage.step() == iteration


def _everything(stage: StageOptimizer) -> tuple[dict, dict]:  # type: ignore[type-arg]
    return copy.deepcopy(stage.module.state_dict()), copy.deepcopy(stage.optimizer.state_dict())


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


@pytest.mark.parametrize("steps", [0, 3])
def test_roll_back_is_exact_also_of_the_first_step(steps: int) -> None:
    stage = _stage()
    for i in range(steps):
        _train(stage, i)
    before = _everything(stage)
    _train(stage, steps)
    assert not _equal(_everything(stage), before)
    stage.roll_back()
    assert stage.committed == steps
    assert _equal(_everything(stage), before)
    with pytest.raises(StateError, match="no snapshot"):
        stage.roll_back()


def test_a_rolled_back_stage_redoes_the_step_to_the_same_bits() -> None:
    stage, reference = _stage(), _stage()
    for i in range(4):
        _train(stage, i)
        _train(reference, i)
        if i in (0, 2):
            stage.roll_back()
            _train(stage, i)
    assert stage.parameters_sha256() == reference.parameters_sha256()
    assert _equal(_everything(stage), _everything(reference))


def test_a_newcomer_takes_over_everything() -> None:
    donor, newcomer = _stage(), _stage(seed=99)
    for i in range(3):
        _train(donor, i)
    newcomer.load(*donor.dump())
    assert newcomer.committed == 3
    assert _equal(_everything(newcomer), _everything(donor))
    _train(donor, 3)
    _train(newcomer, 3)
    assert newcomer.parameters_sha256() == donor.parameters_sha256()


def test_a_damaged_state_is_refused() -> None:
    donor = _stage()
    _train(donor, 0)
    header, body = donor.dump()
    damaged = body.clone()
    damaged[5] ^= 1
    with pytest.raises(StateError, match="checksum"):
        _stage().load(header, damaged)
    with pytest.raises(StateError, match="header"):
        _stage().load(b"{", body)
    other = json.loads(header)
    other["entries"][0]["shape"] = [3, 12]
    with pytest.raises(StateError, match="another model"):
        _stage().load(json.dumps(other).encode(), body)


def test_non_finite_gradients_change_nothing() -> None:
    stage = _stage()
    before = _everything(stage)
    parameter = next(iter(stage.module.parameters()))
    stage.gradients.add(parameter, torch.full(parameter.shape, float("nan")))
    with pytest.raises(NonFiniteError, match="iteration 0"):
        stage.step()
    assert stage.committed == 0 and _equal(_everything(stage), before)

"""Analytic profiles: parameter counts, FLOPs, stages."""

from __future__ import annotations

import pytest

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.profiles import SHAPES, analytic_job, model_shape

# Billions of parameters that the names promise.
SIZES = {
    "gpt-2": 1.5,
    "gpt-3-medium": 0.35,
    "gpt-3-2.7b": 2.7,
    "gpt-3-3.35b": 3.35,
    "gpt-3-6.7b": 6.7,
    "gpt-18.4b": 18.4,
    "gpt-39.1b": 39.1,
    "gpt-76.1b": 76.1,
    "gpt-145.6b": 145.6,
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters(name: str) -> None:
    assert model_shape(name).parameters / 1e9 == pytest.approx(SIZES[name], rel=0.05)


def test_flops_are_six_per_parameter_and_token() -> None:
    """And a little more for attention: forward 2, the two gradients 2 each."""
    shape = SHAPES["gpt-76.1b"]
    flops = 3 * (shape.layers * shape.layer_flops + shape.head_flops)
    assert 1.0 < flops / (6 * shape.parameters * shape.sequence) < 1.1


def test_the_last_stage_has_the_projection_and_the_ends_fewer_layers() -> None:
    job = analytic_job(SHAPES["gpt-145.6b"], 2, 6, 4)
    forwards = [p.forward for p in job.profiles]
    assert forwards[-1] != forwards[0]
    assert max(forwards[1:-1]) >= forwards[0]
    weights = sum(p.weight_bytes for p in job.profiles) / 4
    shape = SHAPES["gpt-145.6b"]
    assert weights == pytest.approx(shape.parameters + shape.vocabulary * shape.hidden, rel=1e-3)


def test_what_can_not_be() -> None:
    with pytest.raises(InputError, match="--model"):
        model_shape("gpt-9")
    with pytest.raises(InputError, match="stages"):
        analytic_job(SHAPES["gpt-3-medium"], 2, 25, 4)

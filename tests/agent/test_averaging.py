"""The moving average of the parameters goes where the optimizer's state goes."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from openrecycle import Callback, Checkpoints, ExponentialMovingAverage, Faults, InputError, Optimization, Planning
from openrecycle.agent.jobs.results import TrainingResult, WrittenCheckpoint
from tests.agent import masked_jobs
from tests.conftest import at_length

DECAY = 0.5
averaged = ExponentialMovingAverage(masked_jobs.decayed, decay=DECAY)
plain_sgd = ExponentialMovingAverage(partial(torch.optim.SGD, lr=0.1), decay=DECAY)


def run(iterations: int = 8, **changes: Any) -> TrainingResult:
    return masked_jobs.trainer(**({"optimizer": averaged, "evaluate": None} | changes)).fit(iterations=iterations)


@cache
def undisturbed() -> TrainingResult:
    return run()


def averages(result: TrainingResult) -> dict[str, torch.Tensor]:
    layers = range(masked_jobs.LAYERS)
    return {f"{k}.{n}": t for k in layers for n, t in result.state_dict(k, averaged=True).items()}


def same(a: TrainingResult, b: TrainingResult) -> bool:
    mine, theirs = averages(a), averages(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize(
    "changes",
    [
        {"faults": Faults(kill=["W1_1@2:F1"], rejoin=["W1_1@3"]), "planning": Planning(relayout="always")},
        at_length({"faults": Faults(kill=["W0_0@3:O"])}),
        {"faults": Faults(kill=["W1_1@2:O"]), "optimization": Optimization(sharding="zero1")},
    ],
)
def test_it_survives_what_the_parameters_survive(changes: dict[str, Any]) -> None:
    assert same(run(**changes), undisturbed())


@pytest.mark.chaos
@pytest.mark.processes
def test_it_is_in_checkpoints(tmp_path: Path) -> None:
    run(4, checkpoints=Checkpoints(directory=tmp_path, every=2))
    assert same(run(checkpoints=Checkpoints(directory=tmp_path, every=2, resume="newest")), undisturbed())


class Weights(Callback):
    """Of each checkpoint, as it is written: the layers' weights, and their averages."""

    def __init__(self) -> None:
        self.found: dict[int, list[dict[str, torch.Tensor]]] = {}

    def on_checkpoint(self, checkpoint: WrittenCheckpoint) -> None:
        layers = range(masked_jobs.LAYERS)
        both = [checkpoint.state_dict(k, averaged=averaged) for averaged in (False, True) for k in layers]
        self.found[checkpoint.iteration] = both


@pytest.mark.processes
def test_it_is_the_average_over_the_steps_and_there_while_it_trains(tmp_path: Path) -> None:
    weights = Weights()
    # Each is read before the next is written, or not at all: all are kept.
    result = run(4, checkpoints=Checkpoints(directory=tmp_path, every=1, keep=9), callbacks=[weights])
    assert sorted(weights.found) == [1, 2, 3, 4]
    layers = range(masked_jobs.LAYERS)
    last = [result.state_dict(k, averaged=averaged) for averaged in (False, True) for k in layers]
    for found, expected in zip(weights.found[4], last, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(weights.found[2][0]["table.weight"], last[0]["table.weight"])
    average = weights.found[1][1]
    for step in (1, 2, 3, 4):
        average = {n: average[n].lerp(t, 1 - DECAY) for n, t in weights.found[step][1].items()}
    found = last[masked_jobs.LAYERS + 1]
    assert found.keys() == average.keys()
    for name, value in found.items():
        assert torch.allclose(value, average[name], atol=1e-6)
        assert not torch.equal(value, last[1][name])


def _never(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, targets) * math.nan


@pytest.mark.processes
@pytest.mark.parametrize("sharding", ["none", at_length("zero1")])
def test_of_a_job_that_never_made_a_step_it_is_the_model_as_it_was(sharding: Literal["none", "zero1"]) -> None:
    result = run(2, loss=_never, optimization=Optimization(sharding=sharding))
    plain = {f"{k}.{n}": t for k in range(masked_jobs.LAYERS) for n, t in result.state_dict(k).items()}
    assert all(map(math.isnan, result.losses)) and averages(result).keys() == plain.keys()
    assert all(torch.equal(average, plain[name]) for name, average in averages(result).items())


@pytest.mark.processes
def test_of_a_job_without_one_none_is_given() -> None:
    result = run(1, optimizer=masked_jobs.decayed)
    with pytest.raises(InputError) as error:
        result.state_dict(0, averaged=True)
    assert error.value.field == "averaged"


def test_an_optimizer_that_keeps_nothing_else() -> None:
    """One that takes a state that is not empty for its own is left alone until it has made it."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = plain_sgd([("a", parameter)])
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
    assert torch.allclose(optimizer.state[parameter]["average"], torch.full((2,), 0.85))


@pytest.mark.parametrize("decay", [1.0, -0.1, 1])
def test_a_decay_that_can_not_be(decay: float) -> None:
    with pytest.raises(InputError):
        ExponentialMovingAverage(partial(torch.optim.SGD, lr=0.1), decay=decay)

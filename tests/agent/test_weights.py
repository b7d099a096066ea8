"""The weights that a job ends with, as files of the safetensors format."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from openrecycle.agent.checkpoints import (
    Identity,
    WeightsError,
    load_weights,
    read_weights,
    save_weights,
    until_written,
    weights_file,
    write_share,
)
from openrecycle.agent.jobs.callables import CallableWorkload, Model
from openrecycle.agent.jobs.results import CheckpointWeights, WrittenCheckpoint
from openrecycle.agent.models.layers import build_layers
from openrecycle.agent.models.state import StateError, Writer
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import ExponentialMovingAverage, StageOptimizer, make_optimizer
from openrecycle.planner.jobs.errors import InputError


class Counted(nn.Module):
    """With all that a state dict may hold: one storage under two names, views, odd types, and no tensor at all."""

    def __init__(self, count: Any = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.tied = nn.Linear(4, 3)
        self.tied.weight = self.layer.weight
        self.count = count
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("wave", torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128).conj())
        self.register_buffer("small", torch.tensor(2.5, dtype=torch.bfloat16))
        self.register_buffer("none", torch.zeros(0, 3, dtype=torch.bool))

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "at": torch.tensor([self.count, 7])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["at"], torch.tensor([state["count"], 7]))
        self.count = state["count"]


def test_a_state_dict_is_read_as_it_was_written(tmp_path: Path) -> None:
    module, other = Counted(), Counted(9)
    save_weights(str(tmp_path), 4, module.state_dict())
    other.load_state_dict(read_weights(str(tmp_path), 4))
    mine, theirs = module.state_dict(), other.state_dict()
    assert other.count == 3
    for name, value in mine.items():
        if name != "_extra_state":
            assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


def test_other_readers_find_the_modules_names(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    save_weights(str(tmp_path), 0, module.state_dict())
    found = load_file(weights_file(str(tmp_path), 0))
    module.load_state_dict(found)
    assert sorted(found) == sorted(module.state_dict())


def test_whoever_may_read_other_files_may_read_these(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_weights(str(tmp_path), 0, nn.Linear(2, 2).state_dict())
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o640


def test_what_can_t_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"layer 2.*_extra_state"):
        save_weights(str(tmp_path), 2, _Odd().state_dict())
    assert list(tmp_path.iterdir()) == []


def test_weights_that_find_no_room_are_tried_again() -> None:
    """As they are all that is left of a training. Not for ever, and not where that is of no use."""

    def write(fails: int, error: WeightsError) -> list[float]:
        paused, tries = list[float](), list[int]()

        def once() -> None:
            tries.append(1)
            if len(tries) <= fails:
                raise error

        until_written(once, paused.append, said.append, retry_seconds=100.0)
        return paused

    said = list[str]()
    assert not write(0, WeightsError("full")) and not said
    assert len(write(3, WeightsError("full", passes=True))) == 3
    assert len(said) == 1 and said[0].startswith("full")
    with pytest.raises(WeightsError, match="full"):
        write(1000, WeightsError("full", passes=True))
    with pytest.raises(WeightsError, match="odd"):
        write(1, WeightsError("odd"))
    assert len(said) == 2


class _Odd(nn.Module):
    def get_extra_state(self) -> object:
        return object()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_weights(str(tmp_path), 0, nn.Linear(2, 2).state_dict())
    file = weights_file(str(tmp_path), 0)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StateError, match=file.name):
        read_weights(str(tmp_path), 0)
    with pytest.raises(OSError, match="layer1"):
        read_weights(str(tmp_path), 1)


def test_a_folder_of_weights_goes_into_the_layers(tmp_path: Path) -> None:
    trained, model = (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(2))
    averages = {name: torch.ones_like(value) for name, value in trained[0].state_dict().items()}
    for layer, part in enumerate(trained):
        save_weights(str(tmp_path), layer, part.state_dict())
    assert load_weights(model, tmp_path) is model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
    with pytest.raises(InputError, match="averaged: got True"):
        load_weights(model, tmp_path, averaged=True)
    save_weights(str(tmp_path), 0, averages, averaged=True)
    first, _, last = load_weights(list(model), tmp_path, averaged=True)
    assert isinstance(first, nn.Linear) and torch.equal(first.weight, torch.ones(3, 4))
    assert torch.equal(last.get_parameter("weight"), trained[2].get_parameter("weight"))


def wrapped(layer: int, layers: int) -> nn.Module:
    """As for activation checkpointing: the whole layer, or a part of it."""
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if not layer:
        return checkpoint_wrapper(made)  # type: ignore[no-any-return]
    made[1] = checkpoint_wrapper(made[1])
    return made


_sgd = partial(torch.optim.SGD, lr=0.0)


def after_a_step(folder: Path, optimizer: Any) -> CheckpointWeights:
    """A checkpoint of two layers, all of whose numbers are 7."""
    model = Model(layers=wrapped, layer_count=2, loss=nn.functional.mse_loss)
    task: Any = CallableWorkload(model, None, optimizer, None, 0)  # type: ignore[arg-type]
    stack = build_layers(task, range(2), 2, 0)
    with torch.no_grad():
        for tensor in (*stack.parameters(), *stack.buffers()):
            tensor.fill_(7)
    sums = GradientSum(stack.parameters(), terms=1)
    stage = StageOptimizer(stack, make_optimizer(optimizer, list(stack.named_parameters())), sums)
    for parameter in sums.parameters:
        sums.add(parameter, torch.ones(parameter.shape))
    stage.step()
    write_share(folder, stage.share(Writer(0, 1)), 0, 2, Identity("", 2, 1, 1, 1, 0), 1, 1)
    return CheckpointWeights(folder, 1, lambda: task, 2, 0)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_checkpoint_has_the_weights_of_what_is_wrapped(layer: int, tmp_path: Path) -> None:
    """A state dict says their names without the wrapper's."""
    weights = after_a_step(tmp_path, ExponentialMovingAverage(_sgd, decay=0.5))
    for averaged in (False, True):
        state = weights(layer, averaged=averaged)
        assert sorted(state) == sorted(wrapped(layer, 2).state_dict())
        assert all(value.eq(7).all() for value in state.values())


@pytest.mark.parametrize("optimizer", [_sgd, partial(torch.optim.AdamW, lr=0.0)])
def test_a_checkpoint_without_averages_gives_none(optimizer: Any, tmp_path: Path) -> None:
    """Also where the optimizer keeps nothing at all."""
    weights = after_a_step(tmp_path, optimizer)
    checkpoint = WrittenCheckpoint(1, weights)
    assert checkpoint.state_dict(0).keys() == wrapped(0, 2).state_dict().keys()
    with pytest.raises(InputError) as caught:
        checkpoint.state_dict(0, averaged=True)
    assert caught.value.field == "averaged"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(4, 3)), ["model: got '1 layers', expected the 2 "]),
        ([nn.Linear(4, 3), nn.Linear(5, 2)], ["model: got 'Linear'", "size mismatch"]),
        (nn.Linear(4, 3), ["model: got 'Linear'", "size mismatch"]),
    ],
)
def test_weights_of_another_model_are_refused(model: Any, words: list[str], tmp_path: Path) -> None:
    for layer, part in enumerate((nn.Linear(4, 3), nn.Linear(3, 2))):
        save_weights(str(tmp_path), layer, part.state_dict())
    with pytest.raises(InputError) as caught:
        load_weights(model, tmp_path)
    assert all(word in str(caught.value) for word in words)


def test_a_folder_without_weights_or_with_damaged_ones_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"folder: got .*layer0\.safetensors"):
        load_weights(model, tmp_path)
    weights_file(str(tmp_path), 0).write_bytes(b"no")
    with pytest.raises(InputError, match=r"folder: got .*layer0\.safetensors"):
        load_weights(model, tmp_path)

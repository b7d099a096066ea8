"""The mean over all tokens of an iteration, whichever micro-batch they are in, and however many a micro-batch has."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from openrecycle import Data, Evaluation, Faults, InputError, Job, Optimization, Planning, ResilientTrainer
from openrecycle.agent.config.devices import Mode, seed_for
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.models.data import MicroBatchSampler
from tests.agent.own_jobs import grouped
from tests.conftest import at_length

JOB = Job.uniform(2, 2, 3)
LENGTH, WORDS, WIDTH, BATCH, LAYERS, PADDING = 6, 9, 8, 2, 4, -100
ITERATIONS = 6


class Tagged(Dataset[dict[str, Tensor]]):
    """A tag per token. Two samples of three have no token that counts, so that whole micro-batches have none."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        count = 1 + index % LENGTH if index % 3 == 0 else 0
        tags = torch.where(torch.arange(LENGTH) < count, (ids + 1) % WORDS, PADDING)
        return {"ids": ids, "labels": tags}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.table(ids)
        return y


class Tags(nn.Sequential):
    """The last layer may give the loss anything."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)}


def build_layer(layer: int, layers: int) -> nn.Module:
    if layer == 0:
        return Words()
    if layer == layers - 1:
        return Tags(nn.Linear(WIDTH, WORDS), nn.Tanh())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def tag_loss(output: dict[str, Tensor], tags: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), tags.flatten(), ignore_index=PADDING)


def tokens(tags: Tensor) -> Tensor:
    return (tags != PADDING).sum()


sgd = partial(torch.optim.SGD, lr=0.5)


def trainer(**changes: Any) -> ResilientTrainer:
    arguments: dict[str, Any] = {
        "layers": build_layer,
        "layer_count": LAYERS,
        "loss": tag_loss,
        "data": Data(Tagged(), batch_size=BATCH, weight=tokens),
        "optimizer": sgd,
        "job": JOB,
        "evaluate": Evaluation(data=Tagged(), every=3),
    }
    return ResilientTrainer(**grouped(arguments | changes))


@cache
def undisturbed(clip: float | None = None) -> TrainingResult:
    return trainer(optimization=Optimization(clip_norm=clip)).fit(iterations=ITERATIONS)


def alone() -> tuple[list[float], list[nn.Module]]:
    """The same in one process: the sum over all tokens, divided by their number."""
    layers = []
    for k in range(LAYERS):
        torch.manual_seed(seed_for("parameters", 0, k))
        layers.append(build_layer(k, LAYERS))
    model, data, losses = nn.Sequential(*layers), Tagged(), []
    optimizer, sampler = sgd(model.parameters()), MicroBatchSampler(len(data), BATCH, JOB)
    for iteration in range(ITERATIONS):
        rows = [data[i] for p in range(2) for m in range(3) for i in sampler(iteration, p, m)]
        ids, tags = (torch.stack([row[name] for row in rows]) for name in ("ids", "labels"))
        loss = tag_loss(model(ids), tags)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, layers


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["deterministic", at_length("fast")])
def test_all_tokens_count_the_same(mode: Mode) -> None:
    result = (
        undisturbed() if mode == "deterministic" else trainer(optimization=Optimization(mode=mode)).fit(iterations=6)
    )
    losses, layers = alone()
    assert result.losses == pytest.approx(losses, rel=1e-5)
    for k, layer in enumerate(layers):
        for name, value in result.state_dict(k).items():
            assert torch.allclose(value, layer.state_dict()[name], atol=1e-5), (k, name)
    rows = [Tagged()[i] for i in range(24)]
    with torch.no_grad():
        output = nn.Sequential(*layers)(torch.stack([row["ids"] for row in rows]))
    expected = tag_loss(output, torch.stack([row["labels"] for row in rows])).item()
    assert result.evaluations[-1].loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kill", "planning", "clip"),
    [
        at_length("W1_1@1:F1", Planning(technique="adaptive", relayout="never"), None),
        ("W0_0@2:W2", Planning(relayout="always"), 0.2),
        at_length("W1_0@1:R", Planning(technique="decoupled"), None),
        at_length("W0_1@2:V", Planning(), 0.2),
    ],
)
def test_the_bits_are_the_same_through_a_kill(kill: str, planning: Planning, clip: float | None) -> None:
    changes = {"faults": Faults(kill=[kill]), "planning": planning, "optimization": Optimization(clip_norm=clip)}
    result, plain = trainer(**changes).fit(iterations=ITERATIONS), undisturbed(clip)
    assert (result.losses, result.parameters_sha256) == (plain.losses, plain.parameters_sha256)
    assert result.evaluations == plain.evaluations
    assert len(result.recoveries) == 1


def nothing(tags: Tensor) -> None:
    return None


def test_a_weight_that_is_none_is_said_at_once() -> None:
    with pytest.raises(InputError) as error:
        trainer(data=Data(Tagged(), batch_size=BATCH, weight=nothing))
    assert error.value.field == "data.weight"

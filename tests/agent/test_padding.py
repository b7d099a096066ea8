"""Samples of several lengths become micro-batches of one shape, or of several."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from openrecycle import Data, Faults, InputError, Job, JobFailed, Optimization, PadCollate, Platform
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.transport.group import GivenGlooGroup
from tests.agent import masked_jobs
from tests.conftest import at_length
from tests.golden import golden

FILL = {"input_ids": 0, "attention_mask": 0}
SEVERAL = PadCollate((3, 5, masked_jobs.LENGTH), FILL)
SHARED = ("attention_mask",)


class Unpadded(masked_jobs.Sentences):
    """From some sample on."""

    def __init__(self, since: int = 0) -> None:
        super().__init__(40, seed=1)
        self.since = since

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        length = int(sample["attention_mask"].sum()) if index >= self.since else masked_jobs.LENGTH
        return sample | {name: sample[name][:length] for name in FILL}


def trainer(samples: Any, **how: Any) -> Any:
    return masked_jobs.trainer(data=Data(samples, batch_size=1, shared=SHARED, **how), evaluate=None)


def test_dicts_and_tuples_are_padded() -> None:
    pad = PadCollate(4, {"a": 0, "b": -100})
    samples = [{"a": torch.ones(2, 3), "b": [1, 2], "c": 5}, {"a": torch.ones(4, 3), "b": [3, 4, 5, 6], "c": 6}]
    out = pad(samples)
    assert out["a"].shape == (2, 4, 3) and out["a"].sum() == 18
    assert out["b"].tolist() == [[1, 2, -100, -100], [3, 4, 5, 6]] and out["c"].tolist() == [5, 6]
    x, y = PadCollate(3, {0: 0.5})([(torch.ones(1), 7), (torch.ones(2), 8)])
    assert x.tolist() == [[1, 0.5, 0.5], [1, 1, 0.5]] and y.tolist() == [7, 8]


def test_a_micro_batch_gets_the_least_length_that_holds_it() -> None:
    pad = PadCollate((2, 4, 8), {"a": 0, "b": -100})
    out = pad([{"a": [1], "b": [1]}, {"a": [1, 1, 1], "b": [1]}])
    assert out["a"].shape == out["b"].shape == (2, 4)
    widest = pad.widest(out)
    assert widest["a"].tolist() == [[1] + [0] * 7, [1] * 3 + [0] * 5] and widest["b"][0].tolist() == [1] + [-100] * 7
    x, _ = PadCollate((2, 4), {0: 0.5}).widest(PadCollate((2, 4), {0: 0.5})([([1.0], 7), ([1.0], 8)]))
    assert x.tolist() == [[1, 0.5, 0.5, 0.5]] * 2
    assert not PadCollate((4,), {"a": 0}).varies and pad.varies


@pytest.mark.parametrize("sample", [{"a": [1] * 5}, {"a": 1}, {"b": [1]}, ([1],), torch.ones(2)])
def test_what_cannot_be_padded_is_refused(sample: Any) -> None:
    with pytest.raises(InputError):
        PadCollate(4, {"a": 0})([sample])


@pytest.mark.parametrize(
    ("length", "values"),
    [(0, FILL), (True, FILL), (3, {}), (3, 0), ((), FILL), ((3, 3), FILL), ((5, 3), FILL), ((3, 0.5), FILL)],
)
def test_what_is_wrong_is_said_at_once(length: Any, values: Any) -> None:
    with pytest.raises(InputError):
        PadCollate(length, values)


def micro_batches(job: Any, iterations: int) -> list[tuple[list[Any], list[Any]]]:
    """What it trains on, in order."""
    workload = job.workload()
    places = [(i, p, m) for i in range(iterations) for p in range(2) for m in range(masked_jobs.JOB.micro_batches)]
    if upcoming := getattr(workload, "upcoming", None):
        upcoming(places)
    batches = [(workload.inputs(0, *place), workload.targets(0, *place)) for place in places]
    return [([t.tolist() for t in inputs], targets.tolist()) for inputs, targets in batches]


def test_samples_that_are_padded_here_or_before_are_the_same() -> None:
    here = trainer(Unpadded(), collate=PadCollate(masked_jobs.LENGTH, FILL))
    before = trainer(masked_jobs.Sentences(40, seed=1))
    assert micro_batches(here, 2) == micro_batches(before, 2)


def test_a_length_that_changes_is_said_before_anything_starts() -> None:
    with pytest.raises(InputError, match="PadCollate"):
        trainer(Unpadded()).fit(iterations=2)


@pytest.mark.processes
def test_a_length_that_changes_later_is_said() -> None:
    with pytest.raises(JobFailed, match="PadCollate"):
        trainer(Unpadded(since=8), shuffle=False).fit(iterations=4)


# -- micro-batches of several shapes -----------------------------------------------------------


class Lines(IterableDataset[dict[str, Tensor]]):
    """The same samples, one after the other."""

    def __iter__(self) -> Any:
        return iter([Unpadded()[i] for i in range(40)])


VARIED = Data(Unpadded(), batch_size=1, shared=SHARED, collate=SEVERAL)


@cache
def whole(pipelines: int, micro_batches: int) -> TrainingResult:
    """Each worker has all layers: nothing is sent to another stage."""
    job = Job.uniform(pipelines, 1, micro_batches)
    return several(evaluate=masked_jobs.EVALUATION, job=job).fit(iterations=4)


def several(**changes: Any) -> Any:
    return masked_jobs.trainer(**{"data": VARIED, "evaluate": None} | changes)


def as_over_nccl(layer: int, layers: int) -> torch.nn.Module:
    """In a worker: what is sent fills the buffer of its receive."""
    if multiprocessing.parent_process() is not None:
        GivenGlooGroup.whole_buffers = True  # type: ignore[misc]
    return masked_jobs.build_layer(layer, layers)


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kill", "changes"),
    [
        ("W1_1@1:I1", {}),
        (
            "W0_0@2:W2",
            {"layers": as_over_nccl, "platform": Platform(transport="ordered"), "data": replace(VARIED, prefetch=2)},
        ),
        at_length("W1_0@1:F1", {"optimization": Optimization(clip_norm=0.1)}),
        at_length("W0_1@2:R", {"job": Job.uniform(3, 2, 2)}),
    ],
)
def test_shapes_may_vary_through_a_kill(kill: str, changes: dict[str, Any]) -> None:
    """Bitwise as where nothing is cut and nobody dies."""
    given = {"evaluate": masked_jobs.EVALUATION} | changes
    hurt = several(faults=Faults(kill=[kill]), **given).fit(iterations=4)
    if "optimization" in changes:
        calm = several(**given).fit(iterations=4)
        assert hurt.parameters_sha256 == calm.parameters_sha256
    else:
        job = given.get("job", masked_jobs.JOB)
        calm = whole(job.pipelines, job.micro_batches)
        for layer in range(masked_jobs.LAYERS):
            mine, theirs = hurt.state_dict(layer), calm.state_dict(layer)
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert hurt.losses == calm.losses and hurt.evaluations == calm.evaluations
    assert len(hurt.recoveries) == 1


def frozen_first(layer: int, layers: int) -> torch.nn.Module:
    return masked_jobs.build_layer(layer, layers).requires_grad_(layer > 0)


@pytest.mark.processes
def test_shapes_may_vary_where_no_gradient_travels() -> None:
    """What a frozen first stage is given back has neither gradients nor their shapes."""
    cut = Job.uniform(2, 2, 3, layers=masked_jobs.LAYERS, partition=(1, masked_jobs.LAYERS - 1))
    losses = [several(layers=frozen_first, job=job).fit(iterations=2).losses for job in (cut, Job.uniform(2, 1, 3))]
    assert losses[0] == losses[1]


def test_shapes_do_vary() -> None:
    workload = several().workload()
    shapes = {workload.inputs(0, i, p, m)[0].shape for i in range(3) for p in range(2) for m in range(3)}
    assert shapes == {(1, 3), (1, 5), (1, 7)}
    inputs, targets = workload.largest(0)
    assert [tuple(t.shape) for t in inputs] == [(1, 7), (1, 7)] and targets.shape == (1,)


def test_shapes_may_vary_in_a_stream() -> None:
    """The collate of a loader is known, and the first micro-batch is not changed by its having been looked at."""
    loader = DataLoader(Lines(), batch_size=1, collate_fn=SEVERAL)
    streamed = several(data=Data(loader, shared=SHARED))
    ordered = several(data=replace(VARIED, shuffle=False))
    assert micro_batches(streamed, 3) == micro_batches(ordered, 3)


class Grows(torch.nn.Module):
    """Twice as long as its input."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        length = 2 * x.shape[1] if x.shape[1] < masked_jobs.LENGTH else x.shape[1]
        return torch.zeros(x.shape[0], length, x.shape[2]) + x.mean()


def growing(layer: int, layers: int) -> torch.nn.Module:
    return Grows() if layer == 1 else masked_jobs.build_layer(layer, layers)


@pytest.mark.processes
def test_an_output_larger_than_the_largest_is_said() -> None:
    with pytest.raises(JobFailed, match=golden("at-most-as-of-the-largest")):
        several(layers=growing).fit(iterations=3)

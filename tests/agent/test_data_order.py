"""Which samples a micro-batch holds: a function of its place, each sample at most once an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.models.data import BatchCut, DatasetBatches, MicroBatchSampler, alike, cuts_from, read_cuts
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job
from tests.agent.own_jobs import Endless, Squares
from tests.conftest import refuses

grids = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))


def epoch_of(sampler: MicroBatchSampler, job: Job, epoch: int) -> list[int]:
    first = epoch * sampler.iterations_per_epoch
    return [
        index
        for iteration in range(first, first + sampler.iterations_per_epoch)
        for pipeline in range(job.pipelines)
        for micro_batch in range(job.micro_batches)
        for index in sampler(iteration, pipeline, micro_batch)
    ]


@given(grids, st.integers(0, 60), st.integers(0, 2**40), st.booleans())
def test_an_epoch_is_a_permutation_cut_to_whole_iterations(
    grid: tuple[int, int, int], more: int, seed: int, shuffle: bool
) -> None:
    pipelines, micro_batches, batch = grid
    job, need = Job.uniform(pipelines, 1, micro_batches), pipelines * micro_batches * batch
    samples = need + more
    sampler = MicroBatchSampler(samples, batch, job, seed=seed, shuffle=shuffle)
    for epoch in (0, 1):
        seen = epoch_of(sampler, job, epoch)
        assert len(set(seen)) == len(seen) == samples // need * need
        assert set(seen) <= set(range(samples))
        assert shuffle or seen == list(range(len(seen)))


@given(st.integers(0, 200), st.integers(0, 1), st.integers(0, 2), st.integers(0, 99))
def test_it_is_a_function(iteration: int, pipeline: int, micro_batch: int, other: int) -> None:
    """Whatever was asked for in between, and by whichever sampler."""
    job = Job.uniform(2, 1, 3)
    sampler = MicroBatchSampler(100, 4, job, seed=7)
    once = sampler(iteration, pipeline, micro_batch)
    sampler(other, 0, 0)
    assert sampler(iteration, pipeline, micro_batch) == once
    assert MicroBatchSampler(100, 4, job, seed=7)(iteration, pipeline, micro_batch) == once


def test_epochs_and_seeds_differ() -> None:
    job = Job.uniform(2, 1, 3)
    sampler = MicroBatchSampler(96, 4, job)
    orders = {tuple(epoch_of(sampler, job, epoch)) for epoch in range(3)}
    orders.add(tuple(epoch_of(MicroBatchSampler(96, 4, job, seed=1), job, 0)))
    assert len(orders) == 4


def test_grids_of_one_size_see_the_same_iterations() -> None:
    """So a job may go on with another number of pipelines."""
    wide, narrow = Job.uniform(4, 1, 3), Job.uniform(2, 1, 6)
    first, second = MicroBatchSampler(500, 2, wide), MicroBatchSampler(500, 2, narrow)
    for iteration in (0, 7, 30):
        one = [i for p in range(4) for m in range(3) for i in first(iteration, p, m)]
        other = [i for p in range(2) for m in range(6) for i in second(iteration, p, m)]
        assert one == other


sizes = st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))


@given(st.lists(sizes, min_size=1, max_size=4), st.integers(0, 30), st.booleans())
def test_with_another_batch_the_data_go_on_after_what_was_read(
    parts: list[tuple[int, int, int, int]], more: int, shuffle: bool
) -> None:
    """parts: (iterations, pipelines, micro-batches, batch size), each resumed from the one before."""
    samples = more + max(pipelines * micro_batches * batch for _, pipelines, micro_batches, batch in parts)
    cuts, first, epochs = tuple[BatchCut, ...](), 0, [list[int]()]
    for count, pipelines, micro_batches, batch in parts:
        job, per_iteration = Job.uniform(pipelines, 1, micro_batches), pipelines * micro_batches * batch
        sampler = MicroBatchSampler(samples, batch, job, shuffle=shuffle)
        sampler.cut_as(cuts_from(read_cuts(cuts) if cuts else (), sampler.cuts[-1], first))
        cuts = sampler.cuts
        for iteration in range(first, first + count):
            if len(epochs[-1]) + per_iteration > samples:
                epochs.append([])
            for p in range(pipelines):
                for m in range(micro_batches):
                    epochs[-1] += sampler(iteration, p, m)
        first += count
    order = [
        MicroBatchSampler(samples, samples, Job.uniform(1, 1, 1), shuffle=shuffle)(e, 0, 0) for e in range(len(epochs))
    ]
    assert epochs == [whole[: len(seen)] for whole, seen in zip(order, epochs, strict=True)]


A, B, C = BatchCut(0, 6, 2), BatchCut(5, 8, 2), BatchCut(9, 6, 2)


@pytest.mark.parametrize(
    ("before", "iteration", "expected"),
    [
        ((), 7, (C._replace(first=0),)),  # a checkpoint that does not say it
        ((A,), 9, (A,)),
        ((A, B), 9, (A, B, C)),
        ((A, B), 5, (A,)),  # an iteration that was not trained
        ((A, B), 4, (A,)),  # back to a checkpoint from before
        ((A, B), 0, (A,)),
        ((B._replace(first=0),), 9, (B._replace(first=0), C)),
    ],
)
def test_cuts_of_a_resumed_job(before: tuple[BatchCut, ...], iteration: int, expected: tuple[BatchCut, ...]) -> None:
    assert cuts_from(before, C, iteration) == expected


def test_a_data_set_may_replace_a_stream_whose_samples_are_not_known() -> None:
    sampler = MicroBatchSampler(50, 2, Job.uniform(2, 1, 3), shuffle=False)
    sampler.cut_as(cuts_from((A._replace(samples=0),), sampler.cuts[-1], 9))
    assert sampler(9, 0, 0) == [12, 13], "four iterations of 12 are an epoch"


@pytest.mark.parametrize(
    "document", [[], [[1, 6, 2]], [[0, 6, 2], [0, 6, 2]], [[0, 6]], [[0, -6, 2]], [[0, 6, "2"]], 3]
)
def test_cuts_that_are_none(document: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        read_cuts(document)


def test_too_few_samples_for_one_iteration() -> None:
    with refuses("data", 23):
        MicroBatchSampler(23, 4, Job.uniform(2, 5, 3))


def test_a_data_set_as_micro_batches() -> None:
    batches = DatasetBatches(Squares(50), lambda i, p, m: [i, 10])
    inputs, targets = batches(4, 0, 0)
    assert inputs[:, 0].tolist() == pytest.approx([0.08, 0.2]) and targets[:, 0].tolist() == pytest.approx(
        [0.0064, 0.04]
    )
    with pytest.raises(InputError, match=r"data: got 'Endless'.*map-style"):
        DatasetBatches(Endless(), lambda i, p, m: [0])


@pytest.mark.parametrize(
    "read",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: {"x": [torch.tensor([1.0, math.nan]), (math.nan, 2.0)], "y": "words"},
        object,
    ],
)
def test_what_is_read_twice_is_the_same(read: Callable[[], Any]) -> None:
    assert alike(read(), read())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2).double()),
        (torch.eye(2), torch.eye(2).to_sparse()),
        ({"x": 1.0}, {"x": math.nan}),
        ([1, 2], [1]),
    ],
)
def test_what_is_read_twice_is_another_one(one: Any, other: Any) -> None:
    assert not alike(one, other)

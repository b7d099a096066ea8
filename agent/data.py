"""Data for jobs that survive: which samples a micro-batch holds depends on its place alone.

A sampler that hands out samples one after the other would give a re-run micro-batch other samples,
and another worker yet others. This one is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from openrecycle.agent.randomness import seed_for
from openrecycle.planner.errors import InputError
from openrecycle.planner.job import Job

Sampler = Callable[[int, int, int], Sequence[int]]
"""(iteration, pipeline, micro-batch) to the indices of its samples."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a data set becomes micro-batches. shuffle: every epoch in another order. collate: samples to what a
    micro-batch is. sampler: which samples are in which micro-batch, where MicroBatchSampler is not wanted."""

    shuffle: bool = True
    collate: Callable[[list[Any]], Any] = default_collate
    sampler: Sampler | None = None


class MicroBatchSampler:
    """Each epoch a permutation of the data set, cut into iterations, pipelines and micro-batches.

    Within an epoch no sample comes twice; what is left over at its end, less than one iteration
    needs, is dropped. The permutation depends on (seed, epoch) only; shuffle=False keeps the order.
    Slots are numbered pipeline by pipeline: two grids with equal pipelines x micro-batches x
    batch_size see the same samples in the same iteration.
    """

    def __init__(self, samples: int, batch_size: int, job: Job, *, seed: int = 0, shuffle: bool = True) -> None:
        """samples: in the data set. batch_size: samples per micro-batch. Raises InputError."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InputError("batch_size", batch_size, "a whole number of at least 1")
        self._per_iteration = job.pipelines * job.micro_batches * batch_size
        self.iterations_per_epoch = samples // self._per_iteration
        if not self.iterations_per_epoch:
            raise InputError(
                "data",
                samples,
                f"at least {self._per_iteration} samples: {job.pipelines} pipelines x {job.micro_batches} "
                f"micro-batches x batch_size {batch_size} go into one iteration",
            )
        self._samples, self._batch_size = samples, batch_size
        self._micro_batches, self._seed, self._shuffle = job.micro_batches, seed, shuffle
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __call__(self, iteration: int, pipeline: int, micro_batch: int) -> list[int]:
        epoch, place = divmod(iteration, self.iterations_per_epoch)
        slot = pipeline * self._micro_batches + micro_batch
        first = place * self._per_iteration + slot * self._batch_size
        if not self._shuffle:
            return list(range(first, first + self._batch_size))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(seed_for("shuffle", self._seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(self._samples, generator=generator)
        order: list[int] = self._order[first : first + self._batch_size].tolist()
        return order


@dataclass(frozen=True)
class DatasetBatches:
    """Micro-batches of a map-style data set: a data function for ResilientTrainer.

    A sample, and so the collated batch, is (inputs, targets). Samples that are drawn at random
    (augmentation) may use torch's generator: it is seeded for the micro-batch.
    """

    dataset: Any
    sampler: Sampler
    collate: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        """Raises InputError unless the data set can be asked for any sample."""
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__"):
            raise InputError(
                "data",
                type(self.dataset).__name__,
                "a function of (iteration, pipeline, micro_batch), or a map-style data set: a micro-batch that is "
                "run again needs the same samples again",
            )

    def __call__(self, iteration: int, pipeline: int, micro_batch: int) -> Any:
        indices = self.sampler(iteration, pipeline, micro_batch)
        batch = self.collate([self._sample(i) for i in indices])
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise InputError("data", type(batch).__name__, "samples that collate to (inputs, targets)")
        return batch

    def _sample(self, index: int) -> Any:
        """Raises what the data set raises, with the sample's name."""
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"sample {index}")
            raise


def first_length(inputs: Tensor | tuple[Tensor, ...] | list[Tensor]) -> int:
    """Samples in a micro-batch: the first tensor's first dimension."""
    tensor = inputs[0] if isinstance(inputs, (tuple, list)) else inputs
    return tensor.shape[0] if tensor.dim() else 1

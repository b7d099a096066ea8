"""Data for jobs that survive: which samples a micro-batch holds depends on its place alone.

A sampler that hands out samples one after the other would give a re-run micro-batch other samples,
and another worker yet others. This one is a function.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from openrecycle.agent.config.randomness import seed_for
from openrecycle.planner.jobs.errors import InputError, check_whole
from openrecycle.planner.jobs.job import Job

log = logging.getLogger("openrecycle")

Sampler = Callable[[int, int, int], Sequence[int]]
"""(iteration, pipeline, micro-batch) to the indices of its samples."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a data set becomes micro-batches. shuffle: every epoch in another order. collate: samples to what a
    micro-batch is. sampler: which samples are in which micro-batch, where MicroBatchSampler is not wanted.

    Where a micro-batch is a dict: targets: the name of what the loss gets, or several names, for a loss that gets a
    dict of them. All other tensors are the keyword arguments of layer 0. shared: those of them that every layer gets
    that takes them, such as ("attention_mask",).

    weight: (targets) to how much a micro-batch counts, such as its number of tokens that are no padding: the loss of an
    iteration is then the mean over all of these, whichever micro-batch they are in. By default all count the same.
    prefetch: how many micro-batches a process beside each worker reads ahead; 0: the worker reads each when it needs
    it.
    """

    shuffle: bool = True
    collate: Callable[[list[Any]], Any] = default_collate
    sampler: Sampler | None = None
    targets: str | Sequence[str] = "labels"
    shared: Sequence[str] = ()
    weight: Callable[[Any], Any] | None = None
    prefetch: int = 0

    def __post_init__(self) -> None:
        """Raises InputError."""
        check_whole("loading.prefetch", self.prefetch, 0)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) of a micro-batch, which is such a pair, or a dict. Raises InputError."""
        if isinstance(batch, Mapping):
            single = isinstance(self.targets, str)
            wanted = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
            if missing := [name for name in wanted if name not in batch]:
                expected = f"a dict with {', '.join(missing)}; or name what the loss gets: Loading(targets=...)"
                raise InputError("data", f"a dict of {', '.join(map(str, batch))}", expected)
            inputs = {name: value for name, value in batch.items() if name not in wanted}
            return inputs, batch[wanted[0]] if single else {name: batch[name] for name in wanted}
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            expected = "a pair (inputs, targets), or a dict; Loading(collate=...) can make one of samples"
            raise InputError("data", type(batch).__name__, expected)
        return batch[0], batch[1]

    def names(self, inputs: Any) -> tuple[str, ...]:
        """Of inputs that are keyword arguments, in the order in which their tensors are passed on; () of others.
        Raises InputError."""
        if not isinstance(inputs, Mapping):
            if self.shared:
                expected = "nothing where inputs are no dict; return such a tensor from each layer"
                raise InputError("loading.shared", tuple(self.shared), expected)
            return ()
        for name, value in inputs.items():
            if not isinstance(value, Tensor) or not isinstance(name, str):
                expected = f"tensors alone; leave {name!r} out of the samples, or have Loading(collate=...) do it"
                raise InputError("data", f"{name!r}, of the type {type(value).__name__}", expected)
        if unknown := set(self.shared) - set(inputs):
            raise InputError("loading.shared", sorted(unknown), f"names of inputs: {', '.join(sorted(inputs))}")
        return tuple(sorted(inputs))


@dataclass(frozen=True)
class PadCollate:
    """A collate for samples of several lengths: pads the first dimension of some tensors, or lists of numbers, to
    `length`, and puts samples together as torch's default_collate does.

    length: that of all micro-batches; or several, such as (128, 256, 512): a micro-batch gets the least of them that
    holds its longest sample. values: which are padded, and with what; by name where samples are dicts, such as
    {"input_ids": 0, "labels": -100}, else by position, such as {0: 0.0}.
    """

    length: int | Sequence[int]
    values: Mapping[Any, float]

    def __post_init__(self) -> None:
        """Raises InputError."""
        given = self.length if isinstance(self.length, Sequence) else (self.length,)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in given)
        if not given or not whole or list(given) != sorted(set(given)):
            raise InputError("length", self.length, "a whole number of at least 1, or several that grow")
        if not isinstance(self.values, Mapping) or not self.values:
            raise InputError("values", self.values, "what to pad with, by name or position")

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.length) if isinstance(self.length, Sequence) else (self.length,)

    @property
    def varies(self) -> bool:
        """Are micro-batches of several shapes?"""
        return len(self.lengths) > 1

    def __call__(self, samples: list[Any]) -> Any:
        """Raises InputError."""
        found = [self._parts(sample) for sample in samples]
        longest = max(there[name].shape[0] for there in found for name in self.values)
        length = next((n for n in self.lengths if n >= longest), self.lengths[-1])
        for there in found:
            for name, value in self.values.items():
                there[name] = self._to_length(name, there[name], value, length)
        named = isinstance(samples[0], Mapping)
        return default_collate([there if named else tuple(there.values()) for there in found])

    def widest(self, batch: Any) -> Any:
        """A micro-batch that this has made, padded on to the largest length."""
        there = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
        for name, value in self.values.items():
            there[name] = pad_to(there[name], self.lengths[-1], value)
        return there if isinstance(batch, Mapping) else list(there.values())

    def _parts(self, sample: Any) -> dict[Any, Any]:
        """With tensors for what is to be padded."""
        if isinstance(sample, Mapping):
            there: dict[Any, Any] = dict(sample)
        elif isinstance(sample, (tuple, list)):
            there = dict(enumerate(sample))
        else:
            raise InputError("data", type(sample).__name__, "samples that are dicts or tuples, to pad parts of them")
        if missing := [name for name in self.values if name not in there]:
            raise InputError("data", f"a sample of {', '.join(map(str, there))}", f"{missing[0]!r} in it, to be padded")
        for name in self.values:
            there[name] = tensor = torch.as_tensor(there[name])
            if not tensor.dim():
                raise InputError("data", f"{name!r} with one number", "a tensor or list with a length, to be padded")
        return there

    def _to_length(self, name: Any, tensor: Tensor, value: float, length: int) -> Tensor:
        more = length - tensor.shape[0]
        if more < 0:
            expected = f"at most {length}, as PadCollate says; cut longer samples where they are read"
            raise InputError("data", f"{name!r} of length {tensor.shape[0]}", expected)
        return torch.cat([tensor, tensor.new_full((more, *tensor.shape[1:]), value)])


def pad_to(batch: Tensor, length: int, value: float) -> Tensor:
    """Samples that are together already, (samples, length, ...), padded."""
    more = max(0, length - batch.shape[1])
    return torch.cat([batch, batch.new_full((batch.shape[0], more, *batch.shape[2:]), value)], 1)


class MicroBatchSampler:
    """Each epoch a permutation of the data set, cut into iterations, pipelines and micro-batches.

    Within an epoch no sample comes twice; what is left over at its end, less than one iteration
    needs, is dropped. The permutation depends on (seed, epoch) only; shuffle=False keeps the order.
    Slots are numbered pipeline by pipeline: two grids with equal pipelines x micro-batches x
    batch_size see the same samples in the same iteration.
    """

    def __init__(self, samples: int, batch_size: int, job: Job, *, seed: int = 0, shuffle: bool = True) -> None:
        """samples: in the data set. batch_size: samples per micro-batch. Raises InputError."""
        check_whole("batch_size", batch_size, 1)
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


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a job is evaluated on while it trains, forward only, by all workers, in evaluation mode and without
    gradients.

    data: as the trainer's, with micro-batches of the same form: a data set, whose whole micro-batches are taken in
    order, a DataLoader of one, or a function from the number of a micro-batch to it. every: iterations from one
    evaluation to the next; one more follows the last iteration. micro_batches: how many at most; needed where data is
    a function. metrics: by name, functions of (output, targets) to the mean of a micro-batch, beside the loss.
    """

    data: Any
    every: int = 100
    micro_batches: int | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InputError."""
        check_whole("evaluate.every", self.every, 1)
        if self.micro_batches is not None:
            check_whole("evaluate.micro_batches", self.micro_batches, 1)
        if not isinstance(self.metrics, Mapping) or not all(map(callable, self.metrics.values())):
            raise InputError("evaluate.metrics", self.metrics, "functions of (output, targets), by name")
        if taken := {"loss", "iteration"} & set(self.metrics):
            raise InputError("evaluate.metrics", sorted(taken), "other names; the loss is measured in any case")


@contextlib.contextmanager
def own_numbers(*parts: int | str) -> Iterator[None]:
    """Within, the random numbers of torch (on the CPU), Python and NumPy depend on `parts` alone; afterwards each goes
    on from where it was."""
    seed, numpy = seed_for(*parts), sys.modules.get("numpy")
    mine = torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(mine[0])
        random.setstate(mine[1])
        if numpy is not None:
            numpy.random.set_state(mine[2])


def say_workers_unused(loader: DataLoader[Any]) -> None:
    """A worker process has no children of its own, but for the one that reads ahead."""
    if loader.num_workers:
        log.warning(
            "data: num_workers=%d of the DataLoader is not used; each worker reads its data itself, and "
            "Loading(prefetch=...) reads ahead beside it",
            loader.num_workers,
        )


def _sample(dataset: Any, index: int) -> Any:
    """Raises what the data set raises, with the sample's name."""
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"sample {index}")
        raise


@dataclass(frozen=True)
class InOrder:
    """Micro-batches of a map-style data set, one after the other."""

    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any] = default_collate

    def __call__(self, index: int) -> Any:
        first = index * self.batch_size
        return self.collate([_sample(self.dataset, i) for i in range(first, first + self.batch_size)])


@dataclass(frozen=True)
class DatasetBatches:
    """Micro-batches of a map-style data set: a data function for ResilientTrainer.

    Samples that are drawn at random (augmentation) may use the generators of torch, Python and NumPy: they are seeded
    for the micro-batch.
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
                "a map-style data set: any of its samples may be asked for again",
            )

    def __call__(self, iteration: int, pipeline: int, micro_batch: int) -> Any:
        """Raises what the data set raises, with the sample's name."""
        return self.collate([_sample(self.dataset, i) for i in self.sampler(iteration, pipeline, micro_batch)])


def of_loader(loader: DataLoader[Any], loading: Loading) -> tuple[Any, int, Loading]:
    """The data set, the samples per micro-batch and the loading that a DataLoader stands for. It reads one batch after
    the other; what is needed here is any batch at any time, so its own iterator is not used. Raises InputError."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        raise InputError("data", "a DataLoader of an iterable data set", "one of a map-style data set")
    if type(loader.batch_sampler) not in (BatchSampler, type(None)) or loader.batch_size is None:
        expected = "one with a batch_size, and no batch sampler; or its data set, with Loading(sampler=...)"
        raise InputError("data", "a DataLoader with a batch sampler of its own, or none", expected)
    shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(sampler)
    if not shuffled and type(sampler) is not SequentialSampler:
        expected = "one that shuffles, or does not; or its data set, with Loading(sampler=...)"
        raise InputError("data", f"a DataLoader with a {type(sampler).__name__}", expected)
    say_workers_unused(loader)
    return loader.dataset, loader.batch_size, replace(loading, collate=loader.collate_fn, shuffle=shuffled)


def first_length(inputs: Tensor | tuple[Tensor, ...] | list[Tensor]) -> int:
    """Samples in a micro-batch: the first tensor's first dimension."""
    tensor = inputs[0] if isinstance(inputs, (tuple, list)) else inputs
    return tensor.shape[0] if tensor.dim() else 1

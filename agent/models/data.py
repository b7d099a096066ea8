"""Where micro-batches come from, in jobs that survive failures: data sets, streams, and processes that read ahead.

The samples in a micro-batch depend only on its place: (iteration, pipeline, micro-batch). With a sampler that hands out
samples one after the other, a micro-batch that is run again, or by another worker, would get other samples. So
`MicroBatchSampler` is a function of the place.

Iterable data sets, and loaders that keep their own order, can only be read one item after the other. Item n of such a
stream is micro-batch n of the job, in the order of iterations, pipelines and micro-batches. Each process that needs
data goes through the whole stream by itself, and keeps what may be asked for again. If the stream has a state dict, its
position travels with the stage's state, so that nobody has to read the stream from its beginning again.

Random numbers that are drawn while item k of an epoch is read depend on (seed, epoch, k), so they are the same wherever
the reading began.

With `Data(prefetch=...)` each worker has a process that reads micro-batches beside the training, in the order in
which the worker needs them (`ReadAhead`). They are passed in shared memory, as torch passes tensors between processes.
It does not matter which of the two processes reads a micro-batch: what was read in vain is dropped, and if the process
is gone, the worker reads by itself. The process ends with its worker, however that ends.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.multiprocessing  # how tensors go through a pipe
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.models.state import StageState, StateError, decode, encode, whole_number
from openrecycle.forking import end_with_parent, fork_context
from openrecycle.planner.jobs.errors import InputError, as_whole, check_whole, in_a_line
from openrecycle.planner.jobs.job import Job

# -- data for jobs that survive -----------------------------------------------------------------

log = logging.getLogger("openrecycle")

Sampler = Callable[[int, int, int], Sequence[int]]
"""A function of (iteration, pipeline, micro-batch) that returns the indices of the samples."""


DataFunction = Callable[[int, int, int], Any]
"""A function of (iteration, pipeline, micro-batch) that returns (inputs, targets), or a dict (see Data)."""


PLACE = ("iteration", "pipeline", "micro_batch")
LABELS = "labels"
"""What the loss gets of a micro-batch that is a dict, where nothing else is said."""


def is_function(samples: Any) -> bool:
    """Does this make whole micro-batches? A data set that can be called as well does not."""
    return callable(samples) and not hasattr(samples, "__getitem__")


def kind_name(given: Any) -> str:
    """What was given where something else belongs, in an error."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def _check_samples(field: str, samples: Any) -> None:
    """Raises InputError for what is neither a data set nor a function. field: as what it was given."""
    data_set = hasattr(samples, "__getitem__") or hasattr(samples, "__iter__") or isinstance(samples, DataLoader)
    if isinstance(samples, type | str | bytes) or not (data_set or callable(samples)):
        raise InputError(field, kind_name(samples), "a data set, a DataLoader of one, or a function")


def are_names(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(name, str) for name in given)


@dataclass(frozen=True, eq=False)  # equal samples may be tensors, which have no one answer to ==
class Data:
    """What a job trains on, and how it becomes micro-batches: pairs (inputs, targets), or dicts.

    samples: a data set, map-style or iterable; a DataLoader of one, also torchdata's StatefulDataLoader; or a function
    of (iteration, pipeline, micro_batch) that returns a micro-batch, the same for equal arguments in every process
    (torch's generator is seeded accordingly). The last two may also be given without Data(...) around them.

    Of a data set: batch_size: samples per micro-batch. shuffle: every epoch has another order. collate: a function that
    makes a micro-batch of a list of samples. A DataLoader has these three itself. sampler: a function of (iteration,
    pipeline, micro_batch) that returns the indices of the samples, in place of batch_size and shuffle.

    Where a micro-batch is a dict: targets: the name of the entry that the loss gets; or several names, and the loss
    gets a dict of them. All other tensors are the keyword arguments of layer 0. shared: names of those that every other
    layer gets, too, if it takes them, such as ("attention_mask",).

    weight: a function of targets that returns how much a micro-batch counts, such as its number of tokens without
    padding. The loss of an iteration is then the mean over all tokens, whichever micro-batch they are in. By default
    all micro-batches count the same.
    prefetch: how many micro-batches a process beside each worker reads ahead. 0: the worker reads each micro-batch
    when it needs it.
    """

    samples: Any = field(repr=False)  # they may be a long list
    _: KW_ONLY
    batch_size: int | None = None
    shuffle: bool = True
    collate: Callable[[list[Any]], Any] = default_collate
    sampler: Sampler | None = None
    targets: str | Sequence[str] = LABELS
    shared: Sequence[str] = ()
    weight: Callable[[Any], Any] | None = None
    prefetch: int = 0

    def __post_init__(self) -> None:
        """Raises InputError."""
        if isinstance(self.samples, DatasetBatches | StreamBatches):
            return  # `cut` has made it of data that were checked
        _check_samples("data", self.samples)
        function, loader = is_function(self.samples), isinstance(self.samples, DataLoader)
        object.__setattr__(self, "prefetch", check_whole("data.prefetch", self.prefetch, 0))
        if not isinstance(self.shuffle, bool):
            raise InputError("data.shuffle", self.shuffle, "True or False")
        for name, what in (
            ("collate", "a function of a list of samples, which makes a micro-batch of them"),
            ("sampler", "a function of (iteration, pipeline, micro_batch) that returns the indices of the samples"),
            ("weight", "a function of targets to a number"),
        ):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "collate"):
                raise InputError(f"data.{name}", value, what)
        if not isinstance(self.targets, str) and not are_names(self.targets):
            raise InputError("data.targets", self.targets, "the name of an entry, or a list of names")
        if not are_names(self.shared):
            raise InputError("data.shared", self.shared, 'a list of names, such as ["attention_mask"]')
        if function or loader:
            self._check_alone(function)
        elif self.batch_size is not None or self.sampler is None:
            expected = "an int of at least 1, the samples in a micro-batch"
            object.__setattr__(self, "batch_size", check_whole("data.batch_size", self.batch_size, 1, expected))

    def _check_alone(self, function: bool) -> None:
        """Raises InputError for what a function or a DataLoader would leave unused."""
        if function:
            check_data_function(self.samples)
        what = "a function, which makes whole micro-batches" if function else "a DataLoader, which has its own"
        # Beside a function that pads by itself, a PadCollate says to which lengths.
        pads = self.collate is default_collate or (function and hasattr(self.collate, "varies"))
        given = {
            "batch_size": self.batch_size,
            "shuffle": None if self.shuffle else False,
            "collate": None if pads else self.collate,
            "sampler": self.sampler if function else None,
        }
        for name, value in given.items():
            if value is not None:
                raise InputError(f"data.{name}", value, f"nothing where the samples are {what}")

    @classmethod
    def of(cls, given: Any) -> Data:
        """Returns what was given as `data`, which need not be a Data where nothing else is to be said. Raises
        InputError."""
        if isinstance(given, Data):
            return given
        if isinstance(given, DataLoader) or is_function(given):
            return cls(given)
        expected = "Data(samples, batch_size=...), a DataLoader, or a function of (iteration, pipeline, micro_batch)"
        raise InputError("data", kind_name(given), expected)

    def without_loader(self, field: str = "data") -> Data:
        """Returns the data set, samples per micro-batch, collation and shuffling that a DataLoader stands for; other
        data as they are. A loader's own iterator, which reads batch after batch, is not used: here any batch may be
        needed at any time. field: as what it was given. Raises InputError."""
        loader = self.samples
        if not isinstance(loader, DataLoader):
            return self
        sampler = loader.sampler
        if isinstance(loader.dataset, IterableDataset):
            raise InputError(field, "a DataLoader of an iterable data set", "one of a map-style data set")
        or_alone = f"; or its data set{', with Data(sampler=...)' if field == 'data' else ''}"
        if type(loader.batch_sampler) not in (BatchSampler, type(None)) or loader.batch_size is None:
            expected = f"one with a batch_size, and no batch sampler{or_alone}"
            raise InputError(field, "a DataLoader with a batch sampler of its own, or none", expected)
        shuffled = (
            isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(sampler)
        )
        if not shuffled and type(sampler) is not SequentialSampler:
            expected = f"one that shuffles, or does not{or_alone}"
            raise InputError(field, f"a DataLoader with a {type(sampler).__name__}", expected)
        say_workers_unused(loader)
        how: dict[str, Any] = {"batch_size": loader.batch_size, "collate": loader.collate_fn, "shuffle": shuffled}
        return replace(self, samples=loader.dataset, **how)

    def cut(self, job: Job, seed: int) -> Data:
        """Returns these data with `samples` that are a function of a micro-batch's place, cut for the job's grid.
        Raises InputError."""
        if is_function(self.samples):
            return self
        if (stream := stream_of(self, job, seed)) is not None:
            collate = self.samples.collate_fn if isinstance(self.samples, DataLoader) else self.collate
            return replace(self, samples=stream, batch_size=stream.batch_size, collate=collate)
        data = self.without_loader()
        samples, sampler, batch_size = data.samples, data.sampler, data.batch_size
        if sampler is not None:
            if isinstance(sampler, MicroBatchSampler) and sampler.grid != (grid := (job.pipelines, job.micro_batches)):
                form = "{} pipelines with {} micro-batches each".format
                raise InputError("data.sampler", f"one for {form(*sampler.grid)}", f"one for the job's {form(*grid)}")
            with own_numbers("first look", seed):
                batch_size = self._sampled(sampler)
        else:
            if not hasattr(samples, "__len__"):
                raise InputError("data", type(samples).__name__, "a data set with a length, or a sampler beside it")
            if isinstance(samples, tuple) and all(isinstance(part, Tensor) for part in samples):
                got = f"a tuple of {len(samples)} tensors"
                raise InputError("data", got, "a data set of them: TensorDataset(*tensors)")
            assert batch_size is not None
            sampler = MicroBatchSampler(len(samples), batch_size, job, seed=seed, shuffle=data.shuffle)
        return replace(data, samples=DatasetBatches(samples, sampler, data.collate), batch_size=batch_size)

    def _sampled(self, sampler: Sampler) -> int:
        """Returns how many samples a sampler puts into a micro-batch. Raises InputError."""
        try:
            count = len([int(index) for index in sampler(0, 0, 0)])
        except Exception as error:
            expected = "the indices of the samples in micro-batch 0 of pipeline 0 in iteration 0"
            raise InputError("data.sampler", in_a_line(error)[:200], expected) from error
        if not count:
            raise InputError("data.sampler", "no indices", "at least one for each micro-batch")
        if self.batch_size not in (None, count):
            raise InputError("data.batch_size", self.batch_size, f"nothing, or {count}, as the sampler has it")
        return count

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Returns (inputs, targets) of a micro-batch, which is such a pair, or a dict. Raises InputError."""
        if isinstance(batch, Mapping):
            single = isinstance(self.targets, str)
            wanted = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
            if missing := [name for name in wanted if name not in batch]:
                expected = f"a dict with {', '.join(missing)}; or name what the loss gets: Data(targets=...)"
                raise InputError("data", f"a dict of {', '.join(map(str, batch))}", expected)
            inputs = {name: value for name, value in batch.items() if name not in wanted}
            return inputs, batch[wanted[0]] if single else {name: batch[name] for name in wanted}
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            expected = "a pair (inputs, targets), or a dict; Data(collate=...) can make one of samples"
            raise InputError("data", type(batch).__name__, expected)
        return batch[0], batch[1]

    def check_targets(self, batch: Any) -> None:
        """Raises InputError where `targets` name entries of a micro-batch that is no dict."""
        if self.targets != LABELS and not isinstance(batch, Mapping):
            expected = "nothing where a micro-batch is a pair (inputs, targets); or dicts, with such an entry"
            raise InputError("data.targets", self.targets, expected)

    def names(self, inputs: Any) -> tuple[str, ...]:
        """Returns the names of inputs that are keyword arguments, in the order in which their tensors are passed on; ()
        if the inputs are no dict. Raises InputError."""
        if not isinstance(inputs, Mapping):
            if self.shared:
                expected = "nothing where inputs are no dict; return such a tensor from each layer"
                raise InputError("data.shared", tuple(self.shared), expected)
            return ()
        for name, value in inputs.items():
            # torch's own collation makes lists of tensors if samples are lists of numbers, as of other libraries.
            if isinstance(value, (list, tuple)) and value and all(isinstance(part, Tensor) for part in value):
                expected = (
                    'tensors; have the data set give them (of Hugging Face: `with_format("torch")`), or '
                    "Data(collate=...) make them"
                )
                raise InputError("data", f"{name!r}, a list in each sample", expected)
            if not isinstance(value, Tensor) or not isinstance(name, str):
                expected = f"tensors alone; leave {name!r} out of the samples, or have Data(collate=...) do it"
                raise InputError("data", f"{name!r}, of the type {type(value).__name__}", expected)
        if unknown := set(self.shared) - set(inputs):
            raise InputError("data.shared", sorted(unknown), f"names of inputs: {', '.join(sorted(inputs))}")
        return tuple(sorted(inputs))


@dataclass(frozen=True)
class PadCollate:
    """A collate for samples of several lengths. It pads the first dimension of some tensors, or lists of numbers, to
    `length`, and then combines the samples as torch's default_collate does.

    length: the length in all micro-batches; or several in rising order, such as (128, 256, 512), and each micro-batch
    gets the smallest that its longest sample fits into. values: what is padded, and with which value; by name where
    samples are dicts, such as {"input_ids": 0, "labels": -100}, else by position, such as {0: 0.0}.
    """

    length: int | Sequence[int]
    values: Mapping[Any, float]

    def __post_init__(self) -> None:
        """Raises InputError."""
        several = isinstance(self.length, Sequence)
        given = [as_whole(n) or 0 for n in (self.length if isinstance(self.length, Sequence) else (self.length,))]
        if not given or min(given) < 1 or given != sorted(set(given)):
            raise InputError("length", self.length, "a whole number of at least 1, or several that grow")
        object.__setattr__(self, "length", tuple(given) if several else given[0])
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
        """Makes a micro-batch of samples. Raises InputError."""
        found = [self._parts(sample) for sample in samples]
        longest = max(there[name].shape[0] for there in found for name in self.values)
        length = next((n for n in self.lengths if n >= longest), self.lengths[-1])
        for there in found:
            for name, value in self.values.items():
                there[name] = self._to_length(name, there[name], value, length)
        named = isinstance(samples[0], Mapping)
        return default_collate([there if named else tuple(there.values()) for there in found])

    def widest(self, batch: Any) -> Any:
        """Pads a micro-batch that this has made further, to the largest length."""
        there = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
        for name, value in self.values.items():
            there[name] = pad_to(there[name], self.lengths[-1], value)
        return there if isinstance(batch, Mapping) else list(there.values())

    def _parts(self, sample: Any) -> dict[Any, Any]:
        """Returns a copy of the sample as a dict, in which everything that is to be padded is a tensor."""
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
    """Pads samples that are combined already, (samples, length, ...)."""
    more = max(0, length - batch.shape[1])
    return torch.cat([batch, batch.new_full((batch.shape[0], more, *batch.shape[2:]), value)], 1)


class BatchCut(NamedTuple):
    """How data are cut into iterations from iteration `first` on: micro-batches per iteration, and samples per
    micro-batch (0: not known here). It goes into checkpoints: a job may be resumed with another grid or batch size, and
    its data then go on after the last sample that was read."""

    first: int
    micro_batches: int
    samples: int


def read_cuts(document: Any) -> tuple[BatchCut, ...]:
    """Reads cuts, oldest first, from a checkpoint. Raises ValueError or TypeError."""
    cuts = tuple(BatchCut(*map(whole_number, cut)) for cut in document)
    if [cut.first for cut in cuts] != sorted({0, *(cut.first for cut in cuts)}):
        raise ValueError(f"cuts that begin with the iterations {[cut.first for cut in cuts]}")
    return cuts


def cuts_from(before: Sequence[BatchCut], mine: BatchCut, iteration: int) -> tuple[BatchCut, ...]:
    """Returns the cuts of a job that was cut as `before` says up to an iteration, and is cut as `mine` from it on.
    before: nothing where it is not known; then all iterations count as cut as `mine`."""
    kept = tuple(cut for cut in before if cut.first < iteration)
    if not kept:
        return (mine._replace(first=0),)
    return kept if kept[-1][1:] == mine[1:] else (*kept, mine._replace(first=iteration))


class MicroBatchSampler:
    """Cuts a permutation of the data set, one for each epoch, into iterations, pipelines and micro-batches.

    Within an epoch no sample comes twice. The remainder at the end of an epoch, less than one iteration needs, is
    dropped. The permutation depends on (seed, epoch) only; with shuffle=False the order of the data set is kept.
    Slots are numbered pipeline by pipeline: two grids with equal pipelines x micro-batches x
    batch_size see the same samples in the same iteration.
    """

    def __init__(self, samples: int, batch_size: int, job: Job, *, seed: int = 0, shuffle: bool = True) -> None:
        """samples: in the data set. batch_size: samples per micro-batch. Raises InputError."""
        batch_size = check_whole("batch_size", batch_size, 1)
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
        self.grid = job.pipelines, job.micro_batches
        self._micro_batches, self._seed, self._shuffle = job.micro_batches, seed, shuffle
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        self.cut_as((BatchCut(0, job.pipelines * job.micro_batches, batch_size),))

    def cut_as(self, cuts: tuple[BatchCut, ...]) -> None:
        """cuts: of the job until now; the last one is this sampler's own."""
        self.cuts, self._begin = cuts, (0, 0)
        for cut, following in itertools.pairwise(cuts):
            samples = cut.samples or self._batch_size  # it is not known of a stream that this data set replaces
            self._begin = self._after(self._begin, following.first - cut.first, cut.micro_batches * samples)

    def __call__(self, iteration: int, pipeline: int, micro_batch: int) -> list[int]:
        # Earlier iterations are asked for only to see what the data look like.
        begun = self.cuts[-1].first if iteration >= self.cuts[-1].first else 0
        epoch, first = self._after(self._begin if begun else (0, 0), iteration - begun, self._per_iteration)
        if first + self._per_iteration > self._samples:
            epoch, first = epoch + 1, 0
        first += (pipeline * self._micro_batches + micro_batch) * self._batch_size
        if not self._shuffle:
            return list(range(first, first + self._batch_size))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(seed_for("shuffle", self._seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(self._samples, generator=generator)
        order: list[int] = self._order[first : first + self._batch_size].tolist()
        return order

    def _after(self, place: tuple[int, int], iterations: int, size: int) -> tuple[int, int]:
        """Returns (epoch, samples of it that were read) so many iterations of `size` samples after such a place."""
        epoch, read = place
        left = max(0, self._samples - read) // size
        if iterations <= left:
            return epoch, read + iterations * size
        more, last = divmod(iterations - left - 1, max(1, self._samples // size))
        return epoch + 1 + more, (last + 1) * size


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What a job is evaluated on while it trains. All workers run it, forward only, in evaluation mode and without
    gradients.

    data: micro-batches of the same form as the trainer's. A data set, whose whole micro-batches are taken in order; a
    DataLoader of one; or a function of a micro-batch's number that returns it. every: iterations from one evaluation to
    the next; one more follows the last iteration. micro_batches: how many at most; needed where data is a function.
    metrics: what is measured beside the loss; by name, functions of (output, targets) that return the mean of a
    micro-batch.
    """

    data: Any = field(repr=False)
    every: int = 100
    micro_batches: int | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InputError."""
        _check_samples("evaluate.data", self.data)
        object.__setattr__(self, "every", check_whole("evaluate.every", self.every, 1))
        if self.micro_batches is not None:
            taken = check_whole("evaluate.micro_batches", self.micro_batches, 1)
            object.__setattr__(self, "micro_batches", taken)
        if not isinstance(self.metrics, Mapping) or not all(map(callable, self.metrics.values())):
            raise InputError("evaluate.metrics", self.metrics, "functions of (output, targets), by name")
        if known := {"loss", "iteration"} & set(self.metrics):
            raise InputError("evaluate.metrics", sorted(known), "other names; the loss is measured in any case")

    def without_loader(self, batch_size: int | None) -> Data:
        """Returns what `data`, a DataLoader, stands for. batch_size: the one that is trained on, if it is known. Raises
        InputError."""
        own = Data(self.data).without_loader("evaluate.data")
        if batch_size not in (None, own.batch_size):
            got = f"a DataLoader with batch_size {own.batch_size}"
            raise InputError("evaluate.data", got, f"batch_size {batch_size}, as in training")
        return own


def reseed(seed: int, device: torch.device) -> None:
    """Seeds the random numbers of torch, Python and NumPy; this takes 10 µs."""
    reseed_torch(seed, device)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def reseed_torch(seed: int, device: torch.device) -> None:
    """Seeds torch's random numbers of the CPU and of `device`. torch.manual_seed is slower: it visits every kind of
    accelerator, and takes down the stack for those that are not there. That took 0.1 ms on CPUs, and with a GPU 0.7 ms,
    where it was a third of an iteration."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _of_gpu(device).manual_seed(seed)


def _of_gpu(device: torch.device) -> Any:
    """Returns the generator of random numbers of a GPU."""
    generators: Any = torch.cuda.default_generators
    return generators[torch.cuda.current_device() if device.index is None else device.index]


@contextlib.contextmanager
def own_numbers(*parts: int | str) -> Iterator[None]:
    """Makes the random numbers of torch, Python and NumPy inside the block depend on `parts` alone; afterwards each
    generator goes on from where it was. Of torch these are the CPU's generator and, if this process uses a GPU, the
    GPU's: `parallelize` may draw there, as with to_empty() and init_weights()."""
    numpy = sys.modules.get("numpy")
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")  # type: ignore[no-untyped-call]
    drawing = [torch.default_generator, *([_of_gpu(device)] if device.type == "cuda" else [])]
    mine = [each.get_state() for each in drawing], random.getstate(), numpy and numpy.random.get_state()
    reseed(seed_for(*parts), device)
    try:
        yield
    finally:
        for each, state in zip(drawing, mine[0], strict=True):
            each.set_state(state)
        random.setstate(mine[1])
        if numpy is not None:
            numpy.random.set_state(mine[2])


def say_workers_unused(loader: DataLoader[Any]) -> None:
    """Warns that num_workers is not used: a worker process has no children but the one that reads ahead."""
    if loader.num_workers:
        log.warning(
            "data: num_workers=%d of the DataLoader is not used; each worker reads its data itself, and "
            "Data(prefetch=...) reads ahead beside it",
            loader.num_workers,
        )


def _sample(dataset: Any, index: int) -> Any:
    """Reads a sample. What the data set raises gets a note with the sample's index."""
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

    The data set may draw random numbers (augmentation) from the generators of torch, Python and NumPy: they are seeded
    for each micro-batch.
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
        """Raises what the data set raises, with a note that names the sample."""
        return self.collate([_sample(self.dataset, i) for i in self.sampler(iteration, pipeline, micro_batch)])


def check_data_function(data: Callable[..., Any], field: str = "data", place: Sequence[str] = PLACE) -> None:
    """Raises InputError if this is clearly no function of a micro-batch's place. field: as what it was given."""
    made = data if inspect.isroutine(data) else type(data).__call__
    fits = not inspect.isgeneratorfunction(made)
    try:
        inspect.signature(data).bind(*place)
    except TypeError:
        fits = False
    except ValueError:  # a builtin has no signature
        pass
    if not fits:
        expected = f"a function of ({', '.join(place)}) that returns a micro-batch"
        if place is PLACE:
            expected += "; give what can only be read in order as an IterableDataset"
        raise InputError(field, getattr(data, "__name__", type(data).__name__), expected)


def first_length(inputs: Tensor | tuple[Tensor, ...] | list[Tensor]) -> int:
    """Returns the number of samples in a micro-batch: the first dimension of the first tensor."""
    tensor = inputs[0] if isinstance(inputs, (tuple, list)) else inputs
    return tensor.shape[0] if tensor.dim() else 1


_POSITIONS = 2
"""Positions in the stream are kept of the current iteration and of so many before it: where each of them began."""


# -- data that can only be read one after the other ---------------------------------------------


class StreamSource(Protocol):
    """A stream: it can be read from its beginning, or from a state on, epoch after epoch."""

    @property
    def name(self) -> str: ...

    @property
    def batch_size(self) -> int | None: ...

    def copied(self) -> StreamSource:
        """Returns a copy that has not been read."""

    def set_epoch(self, epoch: int) -> None: ...

    def begin(self, state: Any) -> None:
        """Begins an epoch; with a state, goes on within one."""

    goes_on: ClassVar[bool]
    """Can reading go on after a micro-batch that raised? A generator ends when it raises, and that looks like the end
    of an epoch."""

    def next(self) -> Any:
        """The next micro-batch. Raises StopIteration at the end of an epoch."""

    def state(self) -> Any:
        """Returns the position, for `begin`; None where it can't be known."""


@dataclass
class IterableSource:
    """An iterable data set, and how its samples become micro-batches. batch_size: None if a sample is a micro-batch."""

    dataset: Iterable[Any]
    batch_size: int | None
    collate: Callable[[Any], Any]
    goes_on: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return type(self.dataset).__name__

    def copied(self) -> IterableSource:
        return IterableSource(copy.deepcopy(self.dataset), self.batch_size, self.collate)

    def set_epoch(self, epoch: int) -> None:
        _set_epoch(epoch, self.dataset)

    def begin(self, state: Any) -> None:
        # In the order of torchdata's StatefulDataLoader, for which such data sets are written.
        state = state or {"dataset": None, "iterator": None}
        if state["dataset"] is not None:
            self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        self._iterator: Iterator[Any] = iter(self.dataset)
        if state["iterator"] is not None:
            self._iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]

    def next(self) -> Any:
        if self.batch_size is None:
            return self.collate(next(self._iterator))
        samples = list(itertools.islice(self._iterator, self.batch_size))
        if len(samples) < self.batch_size:  # shapes must not change
            raise StopIteration
        return self.collate(samples)

    def state(self) -> Any:
        over: Any = self._iterator
        of: Any = self.dataset
        iterator = over.state_dict() if _keeps_state(over) else None
        dataset = of.state_dict() if over is not of and _keeps_state(of) else None
        return None if iterator is None and dataset is None else {"dataset": dataset, "iterator": iterator}


@dataclass
class Loader:
    """A StatefulDataLoader of a map-style data set."""

    loader: Any
    goes_on: ClassVar[bool] = True

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Loader:
        # The class is taken from the loader: whoever has such a loader has imported torchdata.
        kind = next(base for base in type(loader).__mro__ if base.__module__.startswith("torchdata."))
        options: dict[str, Any] = {"collate_fn": loader.collate_fn}
        if loader.batch_size is None:
            options |= {"batch_sampler": loader.batch_sampler} if loader.batch_sampler is not None else {}
        else:
            options |= {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": True}
        # The generator is left out: the sampler has it, and what the loader itself draws from it is not in its state.
        return cls(kind(loader.dataset, **options))

    @property
    def name(self) -> str:
        return type(self.loader).__name__

    @property
    def batch_size(self) -> int | None:
        size: int | None = self.loader.batch_size
        return size

    def copied(self) -> Loader:
        dataset = self.loader.dataset
        # A map-style data set is a function of the index: it may be large, and need not be copied.
        return Loader(copy.deepcopy(self.loader, {} if _keeps_state(dataset) else {id(dataset): dataset}))

    def set_epoch(self, epoch: int) -> None:
        _set_epoch(epoch, self.loader.dataset, self.loader.sampler, self.loader.batch_sampler)

    def begin(self, state: Any) -> None:
        if state is not None:
            self.loader.load_state_dict(state)
        self._iterator = iter(self.loader)

    def next(self) -> Any:
        return next(self._iterator)

    def state(self) -> Any:
        return self.loader.state_dict()


def _keeps_state(what: Any) -> bool:
    return hasattr(what, "state_dict") and hasattr(what, "load_state_dict")


def _set_epoch(epoch: int, *parts: Any) -> None:
    for part in {id(part): part for part in parts if hasattr(part, "set_epoch")}.values():
        part.set_epoch(epoch)


@dataclass(frozen=True)
class _Raised:
    """Stands in place of a micro-batch when reading it raised."""

    error: Exception


class StreamEndedError(InputError):
    """A stream has ended because an item raised. Nothing that comes after it can be read, not even by starting anew."""


class _SourceReader:
    """One pass through a source. item: the number of the micro-batch that comes next."""

    def __init__(self, source: StreamSource, seed: int, position: StageState | None = None) -> None:
        self._source, self._seed = source.copied(), seed
        self.item = self._epoch = self._read = 0
        self._failed: _Raised | None = None
        state = None
        if position is not None:
            document = position.document
            self.item, self._epoch, self._read = document["item"], document["epoch"], document["read"]
            state = decode(document["state"], position.tensors)
        self._begin(state)

    def _begin(self, state: Any = None) -> None:
        with own_numbers("stream", self._seed, self._epoch, "begin"):
            self._source.set_epoch(self._epoch)
            self._source.begin(state)

    def next(self) -> Any:
        """Returns the next micro-batch, or _Raised. Raises InputError where there is none."""
        while True:
            try:
                with own_numbers("stream", self._seed, self._epoch, self._read):
                    out = self._source.next()
                self._failed = None
            except StopIteration:
                if self._failed is not None and not self._source.goes_on:
                    error = self._failed.error
                    got = f"a stream that ended when item {self.item - 1} raised {in_a_line(error)}"
                    expected = "one that goes on: catch the error inside `__iter__`"
                    # The traceback shows where the item raised, and not where that was noticed.
                    raise StreamEndedError("data", got, expected).with_traceback(error.__traceback__) from error
                self._failed = None
                if not self._read:
                    raise _too_short(self._source) from None
                self._epoch, self._read = self._epoch + 1, 0
                self._begin()
                continue
            except Exception as error:
                error.add_note(f"item {self.item} of the data, {self._read} of epoch {self._epoch}")
                out = self._failed = _Raised(error)
            self.item += 1
            self._read += 1
            return out

    def position(self) -> StageState | None:
        """Returns the position as plain data; None if it can't be known. Raises StateError if it is not plain data."""
        state = None if self._failed is not None else self._source.state()
        if state is None:
            return None
        tensors: dict[str, Tensor] = {}
        document = {
            "item": self.item,
            "epoch": self._epoch,
            "read": self._read,
            "state": encode(state, "data", tensors),
        }
        return StageState(document, {name: tensor.clone() for name, tensor in tensors.items()})


def _too_short(source: StreamSource) -> InputError:
    size = "one item" if source.batch_size is None else f"{source.batch_size} samples, one micro-batch"
    return InputError("data", source.name, f"at least {size}, each time it is iterated")


@dataclass
class StreamBatches:
    """Micro-batches of a stream: a data function for ResilientTrainer. All micro-batches are kept of the iteration that
    was asked for last and of some before it. kept: how many before it. stateful: can positions be taken?"""

    source: StreamSource
    pipelines: int
    micro_batches: int
    seed: int
    kept: int = 1
    stateful: bool = True
    cuts: tuple[BatchCut, ...] = ()

    def __post_init__(self) -> None:
        self.cut_as(self.cuts or (BatchCut(0, self.per_iteration, self.batch_size or 0),))
        self._reading: _SourceReader | None = None
        self._there: dict[int, Any] = {}
        self._first: Any = None
        """The very first item. It is kept since stages are tried out on it, also during the training."""
        self._positions: dict[int, StageState] = {}
        self._news: list[StageState] = []

    def __getstate__(self) -> dict[str, Any]:
        return {own.name: getattr(self, own.name) for own in fields(self)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def batch_size(self) -> int | None:
        return self.source.batch_size

    @property
    def grid(self) -> tuple[int, int]:
        return self.pipelines, self.micro_batches

    @property
    def per_iteration(self) -> int:
        return self.pipelines * self.micro_batches

    def __call__(self, iteration: int, pipeline: int, micro_batch: int) -> Any:
        """Raises what the stream raises, with a note that has the number of the item."""
        # Earlier iterations are asked for only to see what the data look like.
        began = iteration * self.per_iteration if iteration < self.cuts[-1].first else self._item(iteration)
        item = began + pipeline * self.micro_batches + micro_batch
        if item not in self._there and not (item == 0 and self._first is not None):
            self._read_to(item)
        out = self._there[item] if item else self._first
        if isinstance(out, _Raised):
            raise out.error
        return out

    def forget(self) -> None:
        """Forgets what was read: another process reads from now on."""
        self._reading, self._there, self._first = None, {}, None

    def _read_to(self, item: int) -> None:
        reading = self._reading
        if item == 0 and reading is not None:
            # A separate pass, so that the one under way keeps its place.
            self._first = _SourceReader(self.source, self.seed).next()
            return
        nearest = max((n for n in self._positions if n <= item), default=0)
        if reading is None or reading.item > item or nearest > reading.item:
            reading = self._reading = _SourceReader(self.source, self.seed, self._positions.get(nearest))
        iteration = self.cuts[-1].first + (item - self._item(self.cuts[-1].first)) // self.per_iteration
        first, begin = self._item(iteration - self.kept), self._item(iteration)
        while reading.item <= item:
            number, out = reading.item, reading.next()
            if number == 0:
                self._first = out
            if number >= first:
                self._there[number] = out
                if self.stateful and (reading.item - begin) % self.per_iteration == 0:
                    self._add([position] if (position := reading.position()) is not None else [], news=True)
        self._there = {n: out for n, out in self._there.items() if n >= first}
        self.prune(iteration)

    # -- where it is ---------------------------------------------------------------------------

    def cut_as(self, cuts: tuple[BatchCut, ...]) -> None:
        """cuts: of the job until now; the last one is this stream's own."""
        self.cuts = cuts
        self._begin = sum((after.first - cut.first) * cut.micro_batches for cut, after in itertools.pairwise(cuts))

    def _item(self, iteration: int) -> int:
        """Returns the number of an iteration's first item."""
        return self._begin + (iteration - self.cuts[-1].first) * self.per_iteration

    def position(self, iteration: int) -> StageState | None:
        """Returns a position from which an iteration can be read: where it begins, or shortly before. None: it can only
        be read from the stream's beginning. May be called in any thread."""
        positions = self._positions
        item = max((n for n in positions if n <= self._item(iteration)), default=None)
        return None if item is None else positions[item]

    def go_on(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Takes a position from a peer or a checkpoint, to read from. Raises KeyError, TypeError or ValueError where it
        is none."""
        for name in ("item", "epoch", "read"):
            whole_number(document[name])
        mine = {name: tensor.cpu().clone() for name, tensor in tensors.items() if name.startswith("data.")}
        decode(document["state"], mine)
        self._add([StageState(dict(document), mine)], news=True)

    def take_news(self) -> list[StageState]:
        """Returns the positions that are new since the last call."""
        news, self._news = self._news, []
        return news

    def merge(self, positions: Iterable[StageState]) -> None:
        """Takes in the positions that `take_news` of another process has returned."""
        self._add(positions, news=False)

    def _add(self, positions: Iterable[StageState], *, news: bool) -> None:
        # A new dictionary, since another thread may be reading the old one.
        found = {position.document["item"]: position for position in positions if self.stateful}
        self._positions = {**self._positions, **found}
        if news:
            self._news.extend(found.values())

    def prune(self, iteration: int) -> None:
        """Drops the positions that a worker at this iteration no longer needs."""
        first = self._item(iteration - _POSITIONS)
        self._positions = {n: position for n, position in self._positions.items() if n >= first}
        self._news = self._news[-2 * _POSITIONS :]

    # -- at the start --------------------------------------------------------------------------

    def check(self) -> None:
        """Reads the first item twice, and the second one also from the position after the first. Raises InputError if
        they differ. An item that raises is no error here: it is reported later."""
        one = _SourceReader(self.source, self.seed)
        first = one.next()
        if isinstance(first, _Raised):
            return
        if not alike(first, _SourceReader(self.source, self.seed).next()):
            expected = "the same items on each pass; seed what draws its random numbers"
            raise InputError("data", f"{self.source.name}, whose second pass gives another first item", expected)
        try:
            position, reason = one.position(), "it has no state_dict and load_state_dict"
        except StateError as error:
            position, reason = None, str(error)
        if position is None:
            log.warning("data: the state of %s can't be kept (%s), so it is read from its beginning again after a "
                        "worker is lost, or to resume", self.source.name, reason)  # fmt: skip
            self.stateful = False
            return
        if not alike(one.next(), _SourceReader(self.source, self.seed, position).next()):
            expected = "one that leads to where it was taken"
            raise InputError("data", f"{self.source.name}, whose state_dict leads to another item", expected)


def stream_of(given: Data, job: Job, seed: int) -> StreamBatches | None:
    """Returns the micro-batches of data that are a stream; None for other data. Raises InputError."""
    source: StreamSource
    data = given.samples
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset):
            source = IterableSource(data.dataset, data.batch_size, data.collate_fn)
        elif _keeps_state(data):
            source = Loader.of(data)
        else:
            return None
        say_workers_unused(data)
    elif isinstance(data, IterableDataset) or _only_iterates(data):
        source = IterableSource(data, given.batch_size, given.collate)
    else:
        return None
    if given.sampler is not None:
        raise InputError("data.sampler", given.sampler, "nothing where the data are a stream, which has its own order")
    if inspect.isgenerator(data):
        raise InputError("data", "a generator", "an IterableDataset: a generator can be iterated only once")
    stream = StreamBatches(source, job.pipelines, job.micro_batches, seed, kept=2 if given.prefetch else 1)
    try:
        source.copied()
    except Exception as error:
        reason = in_a_line(error)
        raise InputError("data", source.name, f"a stream that can be copied to worker processes ({reason})") from None
    stream.check()
    return stream


def _only_iterates(data: Any) -> bool:
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not callable(data)


def alike(one: Any, other: Any) -> bool:
    """Are two readings of an item, or of a micro-batch, equal? What can't be compared counts as equal."""
    if isinstance(one, _Raised) or isinstance(other, _Raised):
        return isinstance(one, _Raised) and isinstance(other, _Raised)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.layout != other.layout or one.dtype != other.dtype:
            return False
        if one.is_nested or other.is_nested:
            return True  # torch has no comparison for these, nor, below, for sparse ones
        if one.shape != other.shape:
            return False
        if one.layout != torch.strided:
            return True
        same = (one == other) | ((one != one) & (other != other))  # NaN is NaN here
        return bool(torch.all(same))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    plain = (bool, int, float, str, bytes)
    if not (isinstance(one, plain) and isinstance(other, plain)):
        return True
    return one == other or (one != one and other != other)


Place = tuple[int, int, int]
"""(iteration, pipeline, micro-batch)."""


_BROKEN = (OSError, EOFError, RuntimeError, pickle.PickleError)
"""What the two processes raise when the other one is gone or, by torch, when shared memory can't be had or is gone. The
data are not the cause."""


# -- micro-batches that are read beside the training --------------------------------------------


@dataclass(frozen=True)
class Read:
    """Reads micro-batches with the seed of their place."""

    make_batch: Callable[[int, int, int], Any]
    seed: int

    def __call__(self, place: Place) -> Any:
        with own_numbers("data", self.seed, *place):
            return self.make_batch(*place)

    @property
    def stream(self) -> StreamBatches | None:
        return self.make_batch if isinstance(self.make_batch, StreamBatches) else None

    @property
    def cut(self) -> MicroBatchSampler | StreamBatches | None:
        """What cuts a data set or stream into iterations; None: a user's function does."""
        cut = getattr(self.make_batch, "sampler", self.make_batch)
        return cut if isinstance(cut, MicroBatchSampler | StreamBatches) else None


_MOST_ASKED = 64
"""At most so many requests are under way: they always fit into the pipe, even while the other process waits to send an
answer that does not fit."""


class ReadAhead:
    """A process that reads up to `count` micro-batches ahead. To be used by one thread."""

    def __init__(self, read: Read, count: int) -> None:
        self._read, self._count = read, count
        self._wanted: set[Place] = set()
        self._expected: list[Place] = []
        self._asked: list[Place] = []
        self._there: dict[Place, tuple[bool, Any]] = {}
        """(True, the micro-batch), or (False, what reading it raised)."""
        self._process: multiprocessing.process.BaseProcess | None
        self._process, self._pipe = _started(read)
        if read.stream is not None:
            read.stream.forget()

    @property
    def pid(self) -> int | None:
        """The process's id; None if it is gone."""
        return None if self._process is None else self._process.pid

    def expect(self, places: Sequence[Place]) -> None:
        """Says which micro-batches are wanted next, in this order. This replaces what was said before."""
        self._wanted = set(places)
        self._there = {place: found for place, found in self._there.items() if place in self._wanted}
        self._expected = [place for place in places if place not in self._asked and place not in self._there]
        self._ask()

    def take(self, place: Place) -> Any:
        """Waits for a micro-batch and returns it. Raises what reading it raises."""
        self._wanted.add(place)
        try:
            if place not in self._there and place not in self._asked:
                self._send(place)
            while place not in self._there and self._process is not None:
                self._receive()
        except _BROKEN as error:
            self._gone(error)
        if place in self._expected:
            self._expected.remove(place)
        if place not in self._there:
            return self._read(place)
        self._wanted.remove(place)
        fine, found = self._there.pop(place)
        self._ask()
        if not fine:
            raise found
        return found

    def _ask(self) -> None:
        try:
            while self._process is not None and self._pipe.poll():
                self._receive()
            while self._expected and len(self._asked) < min(_MOST_ASKED, self._count - len(self._there)):
                self._send(self._expected.pop(0))
        except _BROKEN as error:
            self._gone(error)

    def _send(self, place: Place) -> None:
        if self._process is None:
            return
        stream = self._read.stream
        news = stream.take_news() if stream is not None else []
        while news and self._asked:  # news may be large: with answers under way, both sides could block in `send`
            self._receive()
        self._pipe.send((place, pickle.dumps(news)))
        self._asked.append(place)

    def _receive(self) -> None:
        place, fine, found, news = self._pipe.recv()
        self._asked.remove(place)
        if place in self._wanted:
            self._there[place] = fine, found if fine else pickle.loads(found)
        stream = self._read.stream
        if stream is not None:
            stream.merge(pickle.loads(news))
            stream.prune(place[0])

    def end(self) -> int | None:
        """Ends the process: from now on, the worker reads by itself. Returns its exit code."""
        process, self._process = self._process, None
        self._asked, self._expected = [], []
        if process is None:
            return None
        process.kill()
        process.join(1.0)
        self._pipe.close()
        return process.exitcode

    def _gone(self, error: Exception) -> None:
        if self._process is not None:
            log.warning(
                "data: the process that reads ahead is gone (exit code %s, %s); the worker reads by itself",
                self.end(),
                type(error).__name__,
            )


def _started(read: Read) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Starts the process, by the fork server. A child forked from this process would keep its connections open after
    this process ends, and peers would not see the end."""
    # multiprocessing marks workers as daemons, which may have no children. This child ends with its worker anyway.
    multiprocessing.current_process().daemon = False
    context = fork_context()
    ours, theirs = context.Pipe(duplex=True)
    # Pickled here: multiprocessing would move the tensors among a process's arguments to shared memory.
    payload, threads = pickle.dumps(read), torch.get_num_threads()
    process = context.Process(target=_serve, args=(payload, threads, theirs), name="read-ahead", daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(payload: bytes, threads: int, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(partial(os._exit, 0))
    torch.set_num_threads(threads)
    read: Read = pickle.loads(payload)
    stream = read.stream
    with contextlib.suppress(*_BROKEN):
        while True:
            place, offered = pipe.recv()
            if stream is not None:
                stream.merge(pickle.loads(offered))
            try:
                found = read(place)
            except Exception as error:
                found, fine = _sendable(error), False
            else:
                fine = True
            news = pickle.dumps(stream.take_news() if stream is not None else [])
            try:
                pipe.send((place, fine, found, news))
            except (OSError, RuntimeError):
                raise  # no shared memory is left, perhaps: this process ends, and the worker reads by itself
            except Exception as error:  # a micro-batch that can't be sent
                pipe.send((place, False, _sendable(error), news))
    os._exit(0)


def _sendable(error: Exception) -> bytes:
    """Pickles an exception with its notes, and with the traceback as its cause."""
    where = error.__traceback__
    for sent in (error, RuntimeError(f"{type(error).__name__}: {error}")):
        sent.__notes__ = list(getattr(error, "__notes__", ()))
        with contextlib.suppress(Exception):
            payload = pickle.dumps(ExceptionWithTraceback(sent, where))
            pickle.loads(payload)
            return payload
    raise error

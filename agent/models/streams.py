"""Data that can only be read one after the other: iterable data sets, and loaders that keep their own order.

Item n of the stream is micro-batch n of the job, in the order of iterations, pipelines and micro-batches. Each process
that needs data goes through the whole stream by itself, and keeps what may be asked for again. Where the stream can say
where it is, that goes along with the stage's state, so that nobody has to read it from its beginning.

Random numbers that are drawn while item k of an epoch is read depend on (seed, epoch, k), so that they are the same
wherever the reading began.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from openrecycle.agent.models.data import Loading, own_numbers, say_workers_unused
from openrecycle.agent.models.state import StageState, StateError, decode, encode, whole_number
from openrecycle.planner.jobs.errors import InputError, check_whole, in_a_line
from openrecycle.planner.jobs.job import Job

log = logging.getLogger("openrecycle")

_POSITIONS = 2
"""Of so many iterations before the one in hand it is kept where they began, beside its own."""


class StreamSource(Protocol):
    """What can be read from its beginning, or from a state on, epoch after epoch."""

    @property
    def name(self) -> str: ...

    @property
    def batch_size(self) -> int | None: ...

    def copied(self) -> StreamSource:
        """One that has not been read."""

    def set_epoch(self, epoch: int) -> None: ...

    def begin(self, state: Any) -> None:
        """An epoch; or, with a state, the rest of one."""

    goes_on: ClassVar[bool]
    """Can what comes after a micro-batch that raised be read? A generator ends with what it raises, and nothing tells
    that from the end of an epoch."""

    def next(self) -> Any:
        """The next micro-batch. Raises StopIteration at the end of an epoch."""

    def state(self) -> Any:
        """For `begin`; None where it can't be known."""


@dataclass
class IterableSource:
    """An iterable data set, and how its samples become micro-batches. batch_size: None where each sample is one."""

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
        # Whoever has such a loader has imported it.
        kind = next(base for base in type(loader).__mro__ if base.__module__.startswith("torchdata."))
        options: dict[str, Any] = {"collate_fn": loader.collate_fn}
        if loader.batch_size is None:
            options |= {"batch_sampler": loader.batch_sampler} if loader.batch_sampler is not None else {}
        else:
            options |= {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": True}
        # Without its generator: the sampler has it, and what the loader itself draws from it is not in its state.
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
    """Instead of a micro-batch: what reading it raised."""

    error: Exception


class _Reading:
    """One way through a source. item: the number of the micro-batch that comes next."""

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
        """The next micro-batch, or _Raised. Raises InputError where there is none."""
        while True:
            try:
                with own_numbers("stream", self._seed, self._epoch, self._read):
                    out = self._source.next()
                self._failed = None
            except StopIteration:
                if self._failed is not None and not self._source.goes_on:
                    expected = "one that goes on after it"
                    got = f"a stream that ended with what item {self.item - 1} raised"
                    raise InputError("data", got, expected) from self._failed.error
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
        """Where it is, as plain data. Raises StateError where that holds other things."""
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
    """Micro-batches of a stream: a data function for ResilientTrainer. kept: iterations before the one of the newest
    micro-batch asked for, of which all are kept."""

    source: StreamSource
    pipelines: int
    micro_batches: int
    seed: int
    kept: int = 1
    stateful: bool = True

    def __post_init__(self) -> None:
        self._reading: _Reading | None = None
        self._there: dict[int, Any] = {}
        self._first: Any = None
        """The very first item: stages are tried out on it, also in the midst of the training."""
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
    def per_iteration(self) -> int:
        return self.pipelines * self.micro_batches

    def __call__(self, iteration: int, pipeline: int, micro_batch: int) -> Any:
        """Raises what the stream raises, with the item's number."""
        item = iteration * self.per_iteration + pipeline * self.micro_batches + micro_batch
        if item not in self._there and not (item == 0 and self._first is not None):
            self._read_to(item)
        out = self._there[item] if item else self._first
        if isinstance(out, _Raised):
            raise out.error
        return out

    def forget(self) -> None:
        """What was read; somebody else reads from now on."""
        self._reading, self._there, self._first = None, {}, None

    def _read_to(self, item: int) -> None:
        reading = self._reading
        if item == 0 and reading is not None:
            self._first = _Reading(self.source, self.seed).next()  # not worth giving up the place where it is
            return
        nearest = max((n for n in self._positions if n <= item), default=0)
        if reading is None or reading.item > item or nearest > reading.item:
            reading = self._reading = _Reading(self.source, self.seed, self._positions.get(nearest))
        iteration = item // self.per_iteration
        first = (iteration - self.kept) * self.per_iteration
        while reading.item <= item:
            number, out = reading.item, reading.next()
            if number == 0:
                self._first = out
            if number >= first:
                self._there[number] = out
                if self.stateful and reading.item % self.per_iteration == 0:
                    self._add([position] if (position := reading.position()) is not None else [], news=True)
        self._there = {n: out for n, out in self._there.items() if n >= first}
        self.prune(iteration)

    # -- where it is ---------------------------------------------------------------------------

    def position(self, iteration: int) -> StageState | None:
        """From where an iteration can be read: where it begins, or shortly before. None: from the stream's beginning.
        From any thread."""
        positions = self._positions
        item = max((n for n in positions if n <= iteration * self.per_iteration), default=None)
        return None if item is None else positions[item]

    def go_on(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """A position from elsewhere, to read from. Raises KeyError, TypeError or ValueError where it is none."""
        for name in ("item", "epoch", "read"):
            whole_number(document[name])
        mine = {name: tensor.cpu().clone() for name, tensor in tensors.items() if name.startswith("data.")}
        decode(document["state"], mine)
        self._add([StageState(dict(document), mine)], news=True)

    def take_news(self) -> list[StageState]:
        """Positions that have come since this was asked last."""
        news, self._news = self._news, []
        return news

    def merge(self, positions: Iterable[StageState]) -> None:
        """What another process's `take_news` gave."""
        self._add(positions, news=False)

    def _add(self, positions: Iterable[StageState], *, news: bool) -> None:
        # A new dictionary: another thread may read the one before.
        found = {position.document["item"]: position for position in positions if self.stateful}
        self._positions = {**self._positions, **found}
        if news:
            self._news.extend(found.values())

    def prune(self, iteration: int) -> None:
        """Of positions that nobody will want who is at that iteration."""
        first = (iteration - _POSITIONS) * self.per_iteration
        self._positions = {n: position for n, position in self._positions.items() if n >= first}
        self._news = self._news[-2 * _POSITIONS :]

    # -- at the start --------------------------------------------------------------------------

    def check(self) -> None:
        """Reads the first item twice, and the second one from the position after the first. Raises InputError where
        they are not the same; what reading raises is told of later."""
        one = _Reading(self.source, self.seed)
        first = one.next()
        if isinstance(first, _Raised):
            return
        if not _alike(first, _Reading(self.source, self.seed).next()):
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
        if not _alike(one.next(), _Reading(self.source, self.seed, position).next()):
            expected = "one that leads to where it was taken"
            raise InputError("data", f"{self.source.name}, whose state_dict leads to another item", expected)


def stream_of(data: Any, batch_size: int | None, loading: Loading, job: Job, seed: int) -> StreamBatches | None:
    """Of data that is a stream; None of other data. Raises InputError."""
    source: StreamSource
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset):
            source = IterableSource(data.dataset, data.batch_size, data.collate_fn)
        elif _keeps_state(data):
            source = Loader.of(data)
        else:
            return None
        say_workers_unused(data)
    elif isinstance(data, IterableDataset) or _only_iterates(data):
        if batch_size is None:
            raise InputError("batch_size", None, "the number of samples in a micro-batch where data is a stream")
        source = IterableSource(data, check_whole("batch_size", batch_size, 1), loading.collate)
    else:
        return None
    if loading.sampler is not None:
        raise InputError("loading.sampler", loading.sampler, "nothing where data is a stream, which has its own order")
    stream = StreamBatches(source, job.pipelines, job.micro_batches, seed, kept=2 if loading.prefetch else 1)
    try:
        source.copied()
    except Exception as error:
        reason = in_a_line(error)
        raise InputError("data", source.name, f"a stream that can be copied to worker processes ({reason})") from None
    stream.check()
    return stream


def _only_iterates(data: Any) -> bool:
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not callable(data)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, _Raised) or isinstance(other, _Raised):
        return isinstance(one, _Raised) and isinstance(other, _Raised)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        same = (one == other) | ((one != one) & (other != other))  # NaN is NaN here
        return bool(torch.all(same))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    plain = (bool, int, float, str, bytes)
    return one == other if isinstance(one, plain) and isinstance(other, plain) else True

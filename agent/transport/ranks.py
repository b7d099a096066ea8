"""The ranks of one worker: the processes that hold one stage together, tensor parallel for instance.

torch's DeviceMesh and DTensor know a group by its name for as long as the process lives, while its connections have to
be made anew with each generation: a rank that leaves an iteration has its siblings wait in a collective of a module,
and what wakes them (see agent.transport.group) closes the connections. So the group is one of our own that hands each
call on to a gloo group, which is replaced; as torchft does it with its process groups. No rank outlives another one of
its worker (agent.workers.rank_relay), so the members never change.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from openrecycle.agent.config.timeouts import Timeouts
from openrecycle.agent.models import compat
from openrecycle.agent.transport.group import TransferError, first_line, wake_all

dist: Any = torch.distributed
T = TypeVar("T")

BACKEND = "openrecycle"
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "allgather_coalesced",
    "all_gather_single",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "barrier",
    "send",
    "recv",
)


class SiblingError(TransferError):
    """An exchange among the ranks of this worker broke."""


_BROKEN = re.compile("gloo|pair closure|[Cc]onnection (closed|reset)|Broken pipe")
"""What gloo says in an exchange whose other end is gone, or was woken."""


def _by_exchange(error: BaseException) -> bool:
    """Did a collective raise it, or what it was raised for?"""
    causes: BaseException | None = error
    while causes is not None:
        if isinstance(causes, RuntimeError) and _BROKEN.search(str(causes)):
            return True
        causes = causes.__cause__ or causes.__context__
    return False


class ReplaceableGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch's whose connections can be made anew."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.connected: Any = None
        self.cancelled = False
        self.unended: list[Any] = []
        """Of groups that were cancelled: what is in them has not ended. Their destructor would wait for it."""
        self._name = ""

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    # gloo scatters what it has summed whole, too, but its wait for that heeds no time-out (see CancellableWork).

    def reduce_scatter_single(self, into: Tensor, parts: Tensor, options: Any = None) -> Any:
        """parts: of all ranks, one after the other along the first dimension."""
        return self.reduce_scatter_tensor_coalesced([into], [parts], options)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, into: list[Tensor], parts: list[list[Tensor]], options: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced(into, [torch.stack(theirs) for theirs in parts], options)

    def reduce_scatter_tensor_coalesced(self, into: list[Tensor], parts: list[Tensor], options: Any = None) -> Any:
        wholes = [part.detach().clone(memory_format=torch.contiguous_format) for part in parts]
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        mean = operation == dist.ReduceOp.AVG

        @torch.no_grad()
        def scatter() -> None:
            for mine, whole in zip(into, wholes, strict=True):
                mine.copy_(whole.view(self.size(), *mine.shape)[self.rank()])
                if mean:
                    mine.div_(self.size())

        how = dist.AllreduceOptions() if len(wholes) == 1 else dist.AllreduceCoalescedOptions()
        how.reduceOp = dist.ReduceOp.SUM if mean else operation
        begin = self.connected.allreduce if len(wholes) == 1 else self.connected.allreduce_coalesced
        return CancellableWork(self, begin(wholes, how), scatter)


_ASK_AGAIN = timedelta(milliseconds=200)


class CancellableWork(dist.Work):  # type: ignore[misc]
    """A collective under way, whose wait ends when the group is cancelled, whether or not gloo has noticed.

    For gloo forgets a send that it was about to begin over a connection that is just being closed: once in 13 deaths of
    a rank, its sibling waited in a reduce-scatter for the group's whole time-out, 150 s."""

    def __init__(self, group: ReplaceableGroup, work: Any, then: Callable[[], object] | None = None) -> None:
        """then: what is still to do when it is done."""
        super().__init__()
        self._group, self._connected, self._work, self._then = group, group.connected, work, then

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """timeout: 0 for the group's."""
        ends = time.monotonic() + timeout.total_seconds() if timeout else math.inf
        while True:
            left = ends - time.monotonic()
            try:
                self._work.wait(min(_ASK_AGAIN, timedelta(seconds=max(left, 0.001))) if timeout else _ASK_AGAIN)
                return self._done()
            except RuntimeError:
                if self._work.is_completed():
                    self._work.wait()  # raises what went wrong: it may have been the slice that was over
                    return self._done()
                if left <= 0:
                    raise
            if self._group.cancelled or self._group.connected is not self._connected:
                self._group.unended.append((self._connected, self._work))
                raise RuntimeError("connection closed: the exchange among the ranks was cancelled")

    def _done(self) -> bool:
        then, self._then = self._then, None
        if then is not None:
            then()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> Any:
        return self._work.get_future()


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: ReplaceableGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.connected, name)(*args, **kwargs)

    def call_cancellable(self: ReplaceableGroup, *args: Any, **kwargs: Any) -> Any:
        return CancellableWork(self, getattr(self.connected, name)(*args, **kwargs))

    # The wait for a send or a receive, unlike that for a collective, closes all connections when it expires.
    found = call if name in ("send", "recv") else call_cancellable
    found.__name__ = name
    return found


for _name in _COLLECTIVES:
    setattr(ReplaceableGroup, _name, _handed_on(_name))


class Ranks:
    """The ranks of this process's worker. mesh: torch's DeviceMesh of them; None where there is only this one."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.mesh: Any = None
        self._group: ReplaceableGroup | None = None
        self._gloo: Any = None
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, rank: int, size: int, meeting: str, timeouts: Timeouts) -> Ranks:
        """Of a process that has just started. meeting: a file that all of them reach, for this time only. Makes the
        process's default group. Blocks until all are there."""
        ranks = cls(rank, size)
        if size > 1:
            store = dist.FileStore(meeting, size)

            def make(_store: Any, rank: int, size: int, _timeout: Any) -> ReplaceableGroup:
                return ReplaceableGroup(rank, size)

            dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
            dist.init_process_group(BACKEND, store=dist.PrefixStore("torch", store), rank=rank, world_size=size)
            ranks._group = dist.group.WORLD
            ranks.connect(dist.PrefixStore("first", store), timeouts)
            from torch.distributed.device_mesh import DeviceMesh

            ranks.mesh = DeviceMesh.from_group(ranks._group, "cpu", mesh_dim_names=("ranks",))
        return ranks

    def connect(self, store: Any, timeouts: Timeouts) -> None:
        """Anew, by way of `store`. Blocks until all ranks are there. Raises RuntimeError."""
        if self._group is None:
            return
        # All ranks of a worker are on one node.
        seconds = timedelta(seconds=timeouts.group)
        device = compat.gloo_device("127.0.0.1")
        gloo = compat.gloo_group(store, self.rank, self.size, timeout=seconds, device=device)
        group = compat.process_group(gloo, store, self.rank, self.size)
        with self._lock:
            self._gloo = gloo
            self._group.connected, self._group.cancelled = group, False
            self._group.unended = [(of, work) for of, work in self._group.unended if not work.is_completed()]

    def cancel(self) -> None:
        """Makes every wait for another rank fail within milliseconds, until `connect`. From any thread."""
        with self._lock:
            group = self._group
            if group is None or group.connected is None or group.cancelled:
                return
            group.cancelled = True
            gloo = self._gloo
        wake_all(gloo, self.rank)

    def broke(self, error: BaseException) -> bool:
        """Was `error`, which a module raised, an exchange among the ranks that broke, or was ended?"""
        return self._group is not None and (self._group.cancelled or _by_exchange(error))

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns, in which modules exchange something with the other ranks. Raises SiblingError where that
        broke, or was ended: also where `work` has taken it for a fault of a module."""
        try:
            found = work()
        except RuntimeError as error:
            if self.broke(error):
                raise SiblingError(first_line(error)) from None
            raise
        if self._group is not None and self._group.cancelled:
            raise SiblingError("what the ranks of this worker did together was ended")
        return found

    def gather(self, values: Tensor) -> Tensor:
        """Everybody's `values`, of equal shape and type, in the order of ranks: shape (ranks, ...). Raises
        SiblingError."""
        if self._group is None:
            return values.unsqueeze(0)
        rows = torch.zeros((self.size, *values.shape), dtype=values.dtype)
        rows[self.rank] = values
        try:
            # Zeros are added, which rounds nothing.
            self._group.allreduce([rows]).wait()
        except RuntimeError as error:
            raise SiblingError(f"among the ranks of this worker: {first_line(error)}") from None
        return rows

    def gather_numbers(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """The same of whole numbers, equally many on all ranks."""
        return [tuple(row) for row in self.gather(torch.tensor(values, dtype=torch.int64)).tolist()]

"""The ranks of one worker: the processes that hold one stage together, tensor parallel for instance.

torch's DeviceMesh and DTensor know a group by its name for as long as the process lives, while its connections have to
be made anew with each generation: a rank that leaves an iteration has its siblings wait in a collective of a module,
and what wakes them (see agent.transport.group) closes the connections. So the group is one of our own that hands each
call on to a group of torch's, which is replaced; as torchft does it with its process groups. No rank outlives another
one of its worker (agent.workers.worker), so the members never change, and the connections for the next generation
are made while the present one trains, as all others are (agent.transport.communicator.Standby).

What is on the CPU goes over gloo, and so does what is on a GPU, by way of the host's memory, or over NCCL. Either way
whoever waits for a collective waits on the host: an op whose collective was cut short must not send on what it made of
it. NCCL's communicator is not made ahead: a kernel of the training that waits for a peer and the memory that a new
communicator takes from the device may wait for each other.

Over NCCL this has trained on one GPU that all ranks share, and between GPUs never (app/docs/gpus.md). That other
devices than the CPU go by way of the host is tested with a simulated one.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from openrecycle.agent.config.devices import mesh_names
from openrecycle.agent.config.options import LOOPBACK, Timeouts
from openrecycle.agent.models import compat
from openrecycle.agent.models.layers import CPU
from openrecycle.agent.transport.group import (
    Begun,
    Ending,
    NcclPending,
    TransferError,
    abort_aside,
    first_line,
    host_copy,
    host_memory,
    make_nccl,
    wait_or_leave,
    wake,
)

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
_IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce", "send"})
"""What they are given first is read; the others only write to it, or, where there is nothing to write, read none."""


class SiblingError(TransferError):
    """An exchange among the ranks of this worker broke."""


_CANCELLED = "connection closed: the exchange among the ranks was cancelled"
_BROKEN = re.compile("gloo|pair closure|[Cc]onnection (closed|reset)|Broken pipe")
"""What gloo says in an exchange whose other end is gone, or was woken."""


_ABSENT = re.compile("[Ww]ait timeout|[Tt]imed out")
"""And a store, where somebody does not come to make the connections."""


def _by_exchange(error: BaseException) -> bool:
    """Did a collective raise it, or what it was raised for?"""
    causes: BaseException | None = error
    while causes is not None:
        if isinstance(causes, RuntimeError) and _BROKEN.search(str(causes)):
            return True
        causes = causes.__cause__ or causes.__context__
    return False


class Connections(Ending):
    """Of this rank to the others of its worker, for one generation. Tensors of the CPU go over gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeouts: Timeouts) -> None:
        """Blocks until all ranks are there. Raises RuntimeError."""
        # All ranks of a worker are on one node.
        device = compat.gloo_device(LOOPBACK)
        seconds = timedelta(seconds=timeouts.group)
        self._gloo = compat.gloo_group(store, rank, size, timeout=seconds, device=device)
        self.group = compat.process_group(self._gloo, store, rank, size)
        """torch's own."""
        self._rank, self._size = rank, size
        self._nccl: Any = None
        self._to_abort: Any = None
        self._aborting, self.aborted = threading.Lock(), False
        self.cancelled = False
        self.seconds = timeouts.group
        self.unended: list[Any] = []
        """What was in them when they were cancelled, and has not ended. Their destructor would wait for it."""

    def add_nccl(self, store: Any, device: torch.device) -> None:
        """For tensors of `device`, which is this thread's. Blocks until all ranks have called it. Raises
        RuntimeError."""
        nccl = make_nccl(store, self._rank, self._size)
        with self._aborting:
            self._to_abort = nccl
        # It connects with its first operation; and for what goes from each rank to each, with the first of that kind.
        token, (to_all, from_all) = torch.zeros(1, device=device), torch.zeros(2, self._size, device=device)
        operations: list[Callable[[], Any]] = [
            lambda: nccl.allreduce([token]),
            lambda: nccl.alltoall_base(from_all, to_all, [], []),
        ]
        for begin in operations:
            if self.aborted:
                raise SiblingError(_CANCELLED)
            work = begin()
            if self.aborted:
                abort_aside(nccl)  # it may have made a communicator since the abort
            NcclPending(work, token, self.seconds, lambda: self.aborted, None).wait()
        compat.add_nccl(self.group, nccl)
        self._nccl = nccl

    def carries(self, tensor: Tensor) -> bool:
        """As it is; else by way of the host's memory."""
        return tensor.device.type == "cpu" or self._nccl is not None

    def cancel(self) -> None:
        """Makes every wait in them fail within milliseconds. From any thread."""
        self.cancelled = True
        self.halt()
        wake(self._gloo, (other for other in range(self._size) if other != self._rank))

    def halt(self) -> None:
        """Ends what is under way on a GPU, and goes on there with nothing. Returns at once. From any thread."""
        # First: whoever sees a collective end because of the abort must see that, too.
        self.aborted = True
        with self._aborting:
            nccl, self._to_abort = self._to_abort, None
        if nccl is not None:
            abort_aside(nccl)


class ReplaceableGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch's whose connections can be made anew."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.connections: Connections
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
        return self.call("allreduce" if len(wholes) == 1 else "allreduce_coalesced", wholes, how, then=scatter)

    def call(self, name: str, *args: Any, then: Callable[[], object] | None = None, **kwargs: Any) -> Any:
        """Begins a collective, or a send or receive. then: what is to be done once it has been waited for."""
        connections = self.connections
        tensors = [t for t in compat.tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        work: Any
        if all(map(connections.carries, tensors)):
            on_device = any(t.device.type != "cpu" for t in tensors)
            if on_device:
                if connections.aborted:
                    raise RuntimeError(_CANCELLED)
                # Else it would be in the caller's own stream, and there would be nothing to wait for, or to end.
                for options in (*args, *kwargs.values()):
                    if hasattr(options, "asyncOp"):
                        options.asyncOp = True
            work = getattr(connections.group, name)(*args, **kwargs)
            if on_device:
                return DeviceWork(connections, work, then)
        else:
            args, kwargs, bring_back = _by_host(name, args, kwargs)
            work = getattr(connections.group, name)(*args, **kwargs)
            first, afterwards = bring_back, then

            def then() -> None:
                first()
                if afterwards is not None:
                    afterwards()

        # The wait for a send or a receive, unlike that for a collective, closes all connections when it expires.
        kind = HandedOn if name in ("send", "recv") else CancellableWork
        return kind(connections, work, then)


def _by_host(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Callable[[], None]]:
    """The arguments of a collective with tensors of the CPU in place of others; and what brings back what it has
    brought. Waits for what is read."""
    came: list[tuple[Tensor, Tensor]] = []

    def on_host(value: Any, *, read: bool, written: bool) -> Any:
        if isinstance(value, Tensor):
            there = host_copy(value) if read else host_memory(value)
            if written:
                came.append((value, there))
            return there
        if isinstance(value, (list, tuple)):
            return [on_host(v, read=read, written=written) for v in value]
        return value

    first, *others = args
    found = [on_host(first, read=name in _IN_PLACE, written=name != "send")]
    found += [on_host(value, read=True, written=False) for value in others]
    named = {key: on_host(value, read=True, written=False) for key, value in kwargs.items()}

    @torch.no_grad()
    def bring_back() -> None:
        for tensor, there in came:
            tensor.copy_(there, non_blocking=True)

    return found, named, bring_back


class HandedOn(dist.Work):  # type: ignore[misc]
    """What a group of torch's has begun. then: what is still to do when it is done."""

    def __init__(self, connections: Connections, work: Any, then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._connections, self._work, self._then = connections, work, then

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """timeout: 0 for the group's."""
        self._work.wait(timeout) if timeout else self._work.wait()
        return self._done()

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


class CancellableWork(HandedOn):
    """A collective under way, whose wait ends when the group is cancelled."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        connections = self._connections
        if wait_or_leave(self._work, lambda: connections.cancelled, timeout.total_seconds() or math.inf):
            return self._done()
        connections.unended.append(self._work)
        raise RuntimeError(_CANCELLED)


class DeviceWork(HandedOn):
    """One over NCCL: what it brings is used once its end has been seen, and no cancel before it (agent.transport.group:
    an abort ends it as if it were done)."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds() if timeout else self._connections.seconds
        try:
            NcclPending(self._work, _NOTHING, seconds, lambda: self._connections.aborted, None).wait()
        except TransferError as error:
            raise SiblingError(first_line(error)) from None
        return self._done()


_NOTHING = torch.empty(0)


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: ReplaceableGroup, *args: Any, **kwargs: Any) -> Any:
        return self.call(name, *args, **kwargs)

    call.__name__ = name
    return call


for _name in _COLLECTIVES:
    setattr(ReplaceableGroup, _name, _handed_on(_name))


class Ranks:
    """The ranks of this process's worker. mesh: torch's DeviceMesh of them; None where there is only this one. Where it
    has two dimensions, there is a group for each line of it, beside that of all."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device = CPU, *, over_nccl: bool = False) -> None:
        self.rank, self.size = rank, size
        self.mesh: Any = None
        self._device, self._over_nccl = device, over_nccl
        self._groups: list[ReplaceableGroup] = []
        """That this rank is in; that of all comes first."""
        self._outlived: list[Connections] = []
        """In which something has not ended yet."""
        self._lock = threading.Lock()

    @classmethod
    def begin(
        cls,
        rank: int,
        size: int,
        meeting: str,
        timeouts: Timeouts,
        device: torch.device = CPU,
        *,
        shape: Sequence[int] = (),
        over_nccl: bool = False,
    ) -> Ranks:
        """Of a process that has just started. meeting: a file that all of them reach, for this time only. device: where
        the stage computes, this process's own. shape: of the mesh; (): one line. over_nccl: is what is there exchanged
        over NCCL? Makes the process's default group. Blocks until all are there. Raises SiblingError where one does not
        come."""
        ranks = cls(rank, size, device, over_nccl=over_nccl)
        if size > 1:
            store = dist.FileStore(meeting, size)

            def make(_store: Any, rank: int, size: int, _timeout: Any) -> ReplaceableGroup:
                return ReplaceableGroup(rank, size)

            dist.Backend.register_backend(BACKEND, make, devices=sorted({"cpu", device.type}))
            dist.init_process_group(BACKEND, store=dist.PrefixStore("torch", store), rank=rank, world_size=size)
            ranks._groups = [dist.group.WORLD]
            numbers = torch.arange(size, device="cpu").view(*(shape or [size]))
            if numbers.dim() > 1:
                # All ranks make each, also those that they are not in.
                made = [(line, dist.new_group(line)) for line in (*numbers.T.tolist(), *numbers.tolist())]
                ranks._groups += [group for line, group in made if rank in line]
            try:
                ranks.connect(dist.PrefixStore("first", store), timeouts)
            except RuntimeError as error:
                if _by_exchange(error) or _ABSENT.search(str(error)):
                    raise SiblingError(f"not all ranks of this worker have come: {first_line(error)}") from None
                raise
            from torch.distributed.device_mesh import DeviceMesh

            groups: list[Any] = ranks._groups[1:] or ranks._groups[:1]
            ranks.mesh = DeviceMesh.from_group(groups, device.type, numbers, mesh_dim_names=mesh_names(numbers.dim()))
        return ranks

    def connections(self, store: Any, timeouts: Timeouts) -> list[Connections]:
        """For another generation, by way of `store`; none where there is only this rank. Blocks until all ranks are
        there. From any thread. Raises RuntimeError."""
        return [
            Connections(dist.PrefixStore(group.group_name, store), group.rank(), group.size(), timeouts)
            for group in self._groups
        ]

    def connect(
        self, store: Any, timeouts: Timeouts, ahead: Sequence[Connections] = (), begun: Begun | None = None
    ) -> None:
        """Anew, by way of `store`. ahead: connections that there are, on all ranks. begun: gets them before anything
        is waited for in them. Blocks until all are there. Raises RuntimeError."""
        before = self._connected
        for old in before:
            old.halt()
        made = ahead or self.connections(dist.PrefixStore("gloo", store), timeouts)
        if begun is not None:
            for new in made:
                begun.add(new)
        if self._over_nccl:
            for group, new in zip(self._groups, made, strict=True):
                new.add_nccl(dist.PrefixStore(f"nccl/{group.group_name}", store), self._device)
        with self._lock:
            for group, new in zip(self._groups, made, strict=True):
                group.connections = new
            self._outlived = [old for old in (*self._outlived, *before) if _has_unended(old)]

    def cancel(self) -> None:
        """Makes every wait for another rank fail within milliseconds, until `connect`. From any thread."""
        with self._lock:
            connections = [each for each in self._connected if not each.cancelled]
            for each in connections:
                each.cancelled = True
        for each in connections:
            each.cancel()

    def halt(self) -> None:
        """Ends what is under way on the device, until `connect`. What is on the CPU goes on: a sibling is woken by the
        news of a generation, which comes to all ranks."""
        for each in self._connected:
            each.halt()

    @property
    def _connected(self) -> list[Connections]:
        return [group.connections for group in self._groups if hasattr(group, "connections")]

    @property
    def _cancelled(self) -> bool:
        return any(each.cancelled for each in self._connected)

    def broke(self, error: BaseException) -> bool:
        """Was `error`, which a module raised, an exchange among the ranks that broke, or was ended?"""
        return bool(self._groups) and (self._cancelled or _by_exchange(error))

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns, in which modules exchange something with the other ranks. Raises SiblingError where that
        broke, or was ended: also where `work` has taken it for a fault of a module."""
        try:
            found = work()
        except RuntimeError as error:
            if self.broke(error):
                raise SiblingError(first_line(error)) from None
            raise
        if self._cancelled:
            raise SiblingError("what the ranks of this worker did together was ended")
        return found

    def gather(self, values: Tensor) -> Tensor:
        """Everybody's `values`, of equal shape and type, in the order of ranks: shape (ranks, ...). Raises
        SiblingError."""
        if not self._groups:
            return values.unsqueeze(0)
        rows = torch.zeros((self.size, *values.shape), dtype=values.dtype)
        rows[self.rank] = values
        try:
            # Zeros are added, which rounds nothing.
            self._groups[0].allreduce([rows]).wait()
        except RuntimeError as error:
            raise SiblingError(f"among the ranks of this worker: {first_line(error)}") from None
        return rows

    def gather_numbers(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """The same of whole numbers, equally many on all ranks."""
        return [tuple(row) for row in self.gather(torch.tensor(values, dtype=torch.int64)).tolist()]


def _has_unended(connections: Connections) -> bool:
    connections.unended = [work for work in connections.unended if not work.is_completed()]
    return bool(connections.unended)

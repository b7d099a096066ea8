"""The ranks of one worker: the processes that together hold one stage, for instance with tensor parallelism.

torch's DeviceMesh and DTensor know a group by its name as long as the process lives, but its connections must be made
again with each generation: when a rank leaves an iteration, its siblings wait in a collective of a module, and waking
them (see agent.transport.group) closes the connections. So the group is a class of our own that passes each call on to
a group of torch's, which is replaced, as torchft does it with its process groups. No rank outlives another one of its
worker (agent.workers.worker), so the members never change. The connections for the next generation are made while the
present one trains, like all others (agent.transport.communicator.Standby).

Tensors on the CPU go over gloo. Tensors on a GPU go over NCCL, or over gloo by way of the host's memory. In both cases
the host waits for each collective: an op whose collective was cut short must not send what it has made of it. NCCL's
communicator is not made ahead (DEVELOPMENT.md says why). That other devices than the CPU go by way of the host is
tested with a simulated device.
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
    Cancellable,
    NcclPending,
    PendingConnections,
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
"""Collectives that read their first argument. The others only write to it, or ignore it if there is nothing to
write."""


class SiblingError(TransferError):
    """An exchange among the ranks of this worker broke."""


_CANCELLED = "connection closed: the exchange among the ranks was cancelled"
_BROKEN = re.compile("gloo|pair closure|[Cc]onnection (closed|reset)|Broken pipe")
"""What gloo's errors say if the other end of an exchange is gone, or the wait was woken."""


_ABSENT = re.compile("[Ww]ait timeout|[Tt]imed out")
"""What a store's errors say if a rank does not come to make the connections."""


def _by_exchange(error: BaseException) -> bool:
    """Says whether a collective raised this error, or one of its causes."""
    causes: BaseException | None = error
    while causes is not None:
        if isinstance(causes, RuntimeError) and _BROKEN.search(str(causes)):
            return True
        causes = causes.__cause__ or causes.__context__
    return False


class Connections(Cancellable):
    """The connections of this rank to the others of its worker, for one generation. Tensors of the CPU go over gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeouts: Timeouts) -> None:
        """Waits until all ranks are there. Raises RuntimeError."""
        # All ranks of a worker are on one node, so they reach each other at this address.
        device = compat.gloo_device(LOOPBACK)
        seconds = timedelta(seconds=timeouts.group)
        self._gloo = compat.gloo_group(store, rank, size, timeout=seconds, device=device)
        self.group = compat.process_group(self._gloo, store, rank, size)
        """torch's process group."""
        self._rank, self._size = rank, size
        self._nccl: Any = None
        self._to_abort: Any = None
        self._aborting, self.aborted = threading.Lock(), False
        self.cancelled = False
        self.seconds = timeouts.group
        self.unended: list[Any] = []
        """Operations that have not ended since the connections were cancelled. Their destructors would wait for
        that."""

    def add_nccl(self, store: Any, device: torch.device) -> None:
        """Adds NCCL for tensors of `device`, which must be this thread's device. Waits until all ranks have called it.
        Raises RuntimeError."""
        nccl = make_nccl(store, self._rank, self._size)
        with self._aborting:
            self._to_abort = nccl
        # It connects with its first operation; and for an all-to-all, with the first one.
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
                abort_aside(nccl)  # NCCL may have made a communicator since the abort
            NcclPending(work, token, self.seconds, lambda: self.aborted, None).wait()
        compat.add_nccl(self.group, nccl)
        self._nccl = nccl

    def carries(self, tensor: Tensor) -> bool:
        """Says whether a tensor is sent directly; otherwise it goes by way of the host's memory."""
        return tensor.device.type == "cpu" or self._nccl is not None

    def cancel(self) -> None:
        """Makes every wait in these connections fail within milliseconds. May be called from any thread."""
        self.cancelled = True
        self.halt()
        wake(self._gloo, (other for other in range(self._size) if other != self._rank))

    def halt(self) -> None:
        """Ends what is under way on a GPU; later operations there fail. Does not wait. May be called from any
        thread."""
        # The flag is set first: a thread that sees a collective end because of the abort must see the flag, too.
        self.aborted = True
        with self._aborting:
            nccl, self._to_abort = self._to_abort, None
        if nccl is not None:
            abort_aside(nccl)


class ReplaceableGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group for torch whose connections can be replaced."""

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

    # gloo's own reduce-scatter also sums everything first, but its wait ignores time-outs (see CancellableWork).

    def reduce_scatter_single(self, into: Tensor, parts: Tensor, options: Any = None) -> Any:
        """Sums `parts`, and leaves this rank's part in `into`. parts: those of all ranks along the first dimension."""
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
        """Begins a collective, or a send or receive. then: called once it has been waited for."""
        connections = self.connections
        tensors = [t for t in compat.tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        work: Any
        if all(map(connections.carries, tensors)):
            on_device = any(t.device.type != "cpu" for t in tensors)
            if on_device:
                if connections.aborted:
                    raise RuntimeError(_CANCELLED)
                # Otherwise it would run in the caller's own stream, with nothing to wait for or to end.
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

        # The wait for a send or receive closes all connections when it times out; the wait for a collective does not.
        kind = ForwardedWork if name in ("send", "recv") else CancellableWork
        return kind(connections, work, then)


def _by_host(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Callable[[], None]]:
    """Returns the arguments of a collective with tensors of the CPU in the place of others, and a function that copies
    its results back. Waits until the tensors that are read have been computed."""
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


class ForwardedWork(dist.Work):  # type: ignore[misc]
    """An operation that a group of torch's has begun. then: called when it is done."""

    def __init__(self, connections: Connections, work: Any, then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._connections, self._work, self._then = connections, work, then

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the operation. timeout: 0: that of the group."""
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


class CancellableWork(ForwardedWork):
    """A collective under way, whose wait ends when the group is cancelled."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        connections = self._connections
        if wait_or_leave(self._work, lambda: connections.cancelled, timeout.total_seconds() or math.inf):
            return self._done()
        connections.unended.append(self._work)
        raise RuntimeError(_CANCELLED)


class DeviceWork(ForwardedWork):
    """An operation over NCCL. Its results are used only once its end has been seen, and no cancel before that: an abort
    ends it as if it were done (see agent.transport.group)."""

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
    """The ranks of this process's worker. mesh: their DeviceMesh; None: there is only this rank. If the mesh has two
    dimensions, there is a group for each row and column, beside that of all ranks."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device = CPU, *, over_nccl: bool = False) -> None:
        self.rank, self.size = rank, size
        self.mesh: Any = None
        self._device, self._over_nccl = device, over_nccl
        self._groups: list[ReplaceableGroup] = []
        """The groups that this rank is in, first that of all ranks."""
        self._outlived: list[Connections] = []
        """Earlier connections in which some operation has not ended yet."""
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
        """Connects the ranks of a worker, in a process that has just started, and makes the process's default group.
        Waits until all ranks are there. Raises SiblingError if one does not come.

        meeting: a file that all ranks can reach, used only this time. device: where the stage computes, for this
        process alone. shape: of the mesh; (): one line. over_nccl: tensors on that device go over NCCL.
        """
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
                # All ranks must make each group, even those that they are not in.
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
        """Makes connections for another generation over `store`; none if there is only this rank. Waits until all ranks
        are there. May be called from any thread. Raises RuntimeError."""
        return [
            Connections(dist.PrefixStore(group.group_name, store), group.rank(), group.size(), timeouts)
            for group in self._groups
        ]

    def connect(
        self, store: Any, timeouts: Timeouts, ahead: Sequence[Connections] = (), begun: PendingConnections | None = None
    ) -> None:
        """Replaces the connections. Makes new ones over `store`, and waits until all ranks are there. Raises
        RuntimeError.

        ahead: connections that all ranks have already, which are taken instead. begun: gets the connections before
        anything waits in them.
        """
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
        """Makes every wait for another rank fail within milliseconds, until `connect`. May be called from any
        thread."""
        with self._lock:
            connections = [each for each in self._connected if not each.cancelled]
            for each in connections:
                each.cancelled = True
        for each in connections:
            each.cancel()

    def halt(self) -> None:
        """Ends what is under way on the device, until `connect`. Exchanges on the CPU go on: the news of a generation,
        which comes to all ranks, ends those."""
        for each in self._connected:
            each.halt()

    @property
    def _connected(self) -> list[Connections]:
        return [group.connections for group in self._groups if hasattr(group, "connections")]

    @property
    def _cancelled(self) -> bool:
        return any(each.cancelled for each in self._connected)

    def broke(self, error: BaseException) -> bool:
        """Says whether a module raised `error` because an exchange among the ranks broke, or was ended."""
        return bool(self._groups) and (self._cancelled or _by_exchange(error))

    def together(self, work: Callable[[], T]) -> T:
        """Calls `work`, in which modules exchange data with the other ranks, and returns its result. Raises
        SiblingError if such an exchange broke or was ended, even if `work` has taken that for a fault of a module."""
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
        """Gathers the `values` of all ranks, which must have equal shape and type. Returns shape (ranks, ...). Raises
        SiblingError."""
        if not self._groups:
            return values.unsqueeze(0)
        rows = torch.zeros((self.size, *values.shape), dtype=values.dtype)
        rows[self.rank] = values
        try:
            # Only zeros are added to each row, which rounds nothing.
            self._groups[0].allreduce([rows]).wait()
        except RuntimeError as error:
            raise SiblingError(f"among the ranks of this worker: {first_line(error)}") from None
        return rows

    def gather_numbers(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Gathers integers, equally many on all ranks. Returns a tuple for each rank."""
        return [tuple(row) for row in self.gather(torch.tensor(values, dtype=torch.int64)).tolist()]


def _has_unended(connections: Connections) -> bool:
    connections.unended = [work for work in connections.unended if not work.is_completed()]
    return bool(connections.unended)

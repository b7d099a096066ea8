"""The ranks of one worker: the processes that hold one stage together, tensor parallel for instance.

torch's DeviceMesh and DTensor know a group by its name for as long as the process lives, while its connections have to
be made anew with each generation: a rank that leaves an iteration has its siblings wait in a collective of a module,
and what wakes them (see agent.transport.group) closes the connections. So the group is one of our own that hands each
call on to a gloo group, which is replaced; as torchft does it with its process groups. No rank outlives another one of
its worker (agent.workers.rank_relay), so the members never change.
"""

from __future__ import annotations

import re
import threading
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
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
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
    """A process group of torch's whose connections can be made anew. `cancel` may be called from any thread."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.connected: Any = None
        self.cancelled = False
        self._name = ""

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: ReplaceableGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.connected, name)(*args, **kwargs)

    call.__name__ = name
    return call


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
            self._gloo.allreduce([rows]).wait()
        except RuntimeError as error:
            raise SiblingError(f"among the ranks of this worker: {first_line(error)}") from None
        return rows

    def gather_numbers(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """The same of whole numbers, equally many on all ranks."""
        return [tuple(row) for row in self.gather(torch.tensor(values, dtype=torch.int64)).tolist()]

"""A process group over NCCL, for tensors on a GPU.

NOT RUN: written where no GPU was at hand, from NCCL's manual and the interface of torch 2.13. `python -m tests.gpu`
runs it where there is one. What it shares with gloo (order, agreement, recovery) is tested on CPUs; this file's own
waiting and cancelling with stand-ins. What it relies on:
- Sends and receives of one pair of ranks, on a group of its own, are carried out in the order of the
  calls. torch makes a communicator of two ranks for each such pair, with its first message, as long as the group
  is bound to no device (`device_id`) and messages are not batched: both would put all pairs into one.
- Communicators get on independently of each other. NCCL does not promise it in general: a kernel that
  waits for its peer holds a few multiprocessors, and streams share the device's queues when there are more
  than CUDA_DEVICE_MAX_CONNECTIONS of them (see agent.config.devices: 32, the most there is). A worker has two
  streams per neighbour that its plan gives it, and one for its stage: a dozen neighbours are safe,
  more are not known to be.
- `ProcessGroupNCCL.abort`, called from another thread, ends the kernels that wait for a peer, dead or alive.
  It does not end a connection that is just being made, in which the calling thread waits for the other
  end. So all connections are made in a thread that may be left behind (see agent.transport.communicator), before the
  group is used: a peer that dies meanwhile costs that thread, and its communicator, but no process. That the
  communicators of a later group can be made while such a thread still waits is NCCL's to keep: they share nothing.
- A group in which somebody died is of no use afterwards: a generation has new ones, under new names.

A failure shows nowhere by itself: torch's own handling would end the process, so it is switched off,
and a kernel whose peer is gone waits until `cancel`, which the news of the next generation brings, or until the
time-out. An error that NCCL reports (of a connection to another machine, say) makes an operation count as completed,
and raises nowhere: so it is asked for. What a kernel that was ended early has left in a tensor is nobody's data: so
nothing that a transfer brings is used before its end has been seen on the host, and no cancel before it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor

from openrecycle.agent.config.timeouts import Timeouts
from openrecycle.agent.models import compat
from openrecycle.agent.transport.group import Group, TransferError, first_line, only_other
from openrecycle.planner.jobs.job import Worker

dist: Any = torch.distributed

_NO_TAG = 0
# Torch's own limit begins with the call, so it would take a receive that was posted ahead of a long op for failed. Ours
# begins with the wait.
NO_LIMIT = timedelta(days=7)
_GLANCE_SECONDS = 2e-5


class NcclPending:
    """An operation in the group's stream, with `peer` (None: with several). cancelled: has its group been?"""

    def __init__(
        self, work: Any, tensor: Tensor, seconds: float, cancelled: Callable[[], bool], peer: Worker | None
    ) -> None:
        self._work, self.tensor = work, tensor
        self._seconds, self._cancelled, self._peer = seconds, cancelled, peer

    def arrived(self) -> bool:
        try:
            return self._cancelled() or self._completed()
        except TransferError:
            return True  # `wait` raises it

    def wait(self) -> Tensor:
        # By glances: no wait of torch's is known to end when another thread aborts the group.
        deadline = time.monotonic() + self._seconds
        while not self._completed():
            if self._cancelled():
                break
            if time.monotonic() > deadline:
                raise TransferError(f"no answer from a peer within {self._seconds:g} s", self._peer)
            time.sleep(_GLANCE_SECONDS)
        # An abort completes what it ends: so this is asked after, not before.
        if self._cancelled():
            raise TransferError("the transfer was cancelled")
        if (failure := compat.failure_of(self._work)) is not None:
            raise TransferError(first_line(failure), self._peer)
        self._join()
        return self.tensor

    def _completed(self) -> bool:
        try:
            return bool(self._work.is_completed())
        except RuntimeError as error:
            raise TransferError(first_line(error), self._peer) from None

    def _join(self) -> None:
        """Orders the caller's stream behind the group's, which is a formality by now."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransferError(first_line(error), self._peer) from None


class NcclGroup(Group):
    """device: this worker's GPU, which no other rank uses unless NCCL is of 2.30 or later.

    members: by rank. The first exchange with a peer connects to it, and nothing ends that wait but the peer."""

    whole_buffers: ClassVar[bool] = True

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        members: Sequence[Worker],
        timeouts: Timeouts,
        device: torch.device,
    ) -> None:
        self.rank, self._members = rank, members
        self._seconds, self._sum_seconds, self._device = timeouts.transfer, timeouts.group, device
        self._cancelled, self._aborting = threading.Event(), threading.Lock()
        self._aborted = False
        self._group = compat.nccl_group(dist.PrefixStore(name, store), rank, len(members), timeout=NO_LIMIT)

    def send(self, to: int, tensor: Tensor, tag: int) -> NcclPending:
        assert tag == _NO_TAG, "NCCL has no tags"
        return self._start(self._members[to], self._seconds, tensor, lambda: self._group.send([tensor], to, _NO_TAG))

    def receive(self, source: int, buffer: Tensor, tag: int) -> NcclPending:
        assert tag == _NO_TAG, "NCCL has no tags"
        return self._start(
            self._members[source], self._seconds, buffer, lambda: self._group.recv([buffer], source, _NO_TAG)
        )

    def begin_sum(self, tensor: Tensor) -> NcclPending:
        peer = only_other(self._members, self.rank)
        return self._start(peer, self._sum_seconds, tensor, lambda: self._group.allreduce([tensor]))

    def begin_broadcast(self, tensor: Tensor, source: int) -> NcclPending:
        options = dist.BroadcastOptions()
        options.rootRank = source
        peer = only_other(self._members, self.rank)
        return self._start(peer, self._sum_seconds, tensor, lambda: self._group.broadcast([tensor], options))

    def cancel(self) -> None:
        # The flag first: whoever sees an operation end because of the abort must see the flag too.
        self._cancelled.set()
        # Aside: whoever cancels hears the launcher's news, and must not wait here.
        threading.Thread(target=self._abort, name="abort-group", daemon=True).start()

    def halt(self) -> None:
        # abort, never shutdown or destroy: those wait for peers, which may be dead.
        self._cancelled.set()
        self._abort()

    def rest(self) -> None:
        torch.cuda.synchronize(self._device)

    def _abort(self) -> None:
        with self._aborting:
            if not self._aborted:
                self._aborted = True
                with contextlib.suppress(RuntimeError):  # of a communicator whose peer is gone
                    self._group.abort()

    def _start(self, peer: Worker | None, seconds: float, tensor: Tensor, operation: Callable[[], Any]) -> NcclPending:
        if self._cancelled.is_set():
            raise TransferError("the group was cancelled")
        try:
            work = operation()
        except RuntimeError as error:
            raise TransferError(first_line(error), peer) from None
        return NcclPending(work, tensor, seconds, self._cancelled.is_set, peer)

"""One process group, as the rest of the agent sees it: over gloo, by way of the host's memory, or over NCCL.

This file is built on measured behaviour of gloo. A transfer with a killed peer raises within 20 ms. Everything else
that waits (a transfer with a survivor that has left, an all-reduce two hops away) hangs until its time-out, and
`abort()` wakes nothing. But a wait that times out closes every pair of its group, which wakes all. So `wake` posts a
receive that nobody answers, with a 1 ms time-out, to every rank. That is slow: gloo closes one pair after the other,
and waits for each until its own thread comes round, every 10 ms if nothing arrives. A connection that ends by itself is
closed by that thread at once. So if a group's connections can be found (see `_polled`), `cancel` ends those instead.

Ending all connections costs as much as a good part of forming anew, so `close` does it, when there is time. `cancel`
ends those over which something has passed (see `_that_carried`): gloo sends something when a transfer is posted at
either end. So nothing waits in another connection. Nor was a transfer posted in one and then dropped, which would make
gloo's thread spin once the peer sends it. None is posted later either: a thread that posts a transfer, or begins to
wait, looks after that whether the group has been cancelled, and then closes it. While there is a sum, whose messages
gloo posts at any time, `cancel` ends all connections. To ask for each connection what has passed takes 5 µs; so this
is asked during training (`look_ahead`), and again only if something was posted with yet another rank.

A pair between two living ranks is as good as before when a third one has died. So what needs only pairs (sends,
receives, `gather`) goes on in a group that has lost members; a sum does not.

By way of the host (`HostGroup`), tensors of a device go over a group that takes only those of the CPU. This is for GPUs
where NCCL can't be used, such as several workers on one GPU with an older NCCL. A send or a sum waits until the device
has computed its tensor. What comes back is copied to the device in the order of the caller's stream; the host does not
wait for that.

NCCL (`NcclGroup`), for tensors on a GPU:

It was run on one GPU by up to four workers (H100, H200; NCCL 2.30.7, torch 2.11), never between GPUs. `python -m
tests.gpu` does that where there is one. What it shares with gloo (order, agreement, recovery) is tested on CPUs; its
own waiting and cancelling is tested there with stand-ins. It relies on this:
- Sends and receives of one pair of ranks, on a group of its own, are carried out in the order of the calls. torch makes
  a communicator of two ranks for each such pair, with its first message, as long as the group is bound to no device
  (`device_id`) and messages are not batched: either would put all pairs into one communicator.
- Communicators make progress independently of each other. NCCL does not promise this in general: a kernel that waits
  for its peer holds a few multiprocessors (see MESSAGE_CTAS), and streams share the device's queues when there are more
  than CUDA_DEVICE_MAX_CONNECTIONS of them (see agent.config.devices: 32, the most there is). A worker has two streams
  per neighbour that its plan gives it, and one for its stage: a dozen neighbours are safe, more are not known to be.
- `ProcessGroupNCCL.abort`, called from another thread, ends the kernels that wait for a peer, dead or alive, within 2
  ms (H200). It returns half a second later, when memory has been given back. That waits for all that the GPU was given,
  and holds up what is launched meanwhile. So nothing is received before it has returned (see `make_nccl`): a receive of
  the next generation and an abort of the one before waited for each other (H100, a worker that came back).
  An abort ends the communicators that exist. One that is just being made does not exist yet, and the thread that makes
  it waits for the other end. So all connections are made before the group is used, in a thread that may be left behind
  (see agent.transport.communicator): a peer that dies meanwhile costs that thread and its communicator, but no process.
  Such a thread begins nothing more (`PendingConnections`), and what it was beginning is aborted when it has begun. It
  is NCCL's part that the communicators of a later group can be made while such a thread still waits: they share
  nothing.
- All of a communicator is connected with its first operation. By NCCL's source (2.30.7), this holds for a sum with
  NCCL_RUNTIME_CONNECT off, for all algorithms; for a pair with the first message each way, for all channels; for an
  all-to-all with the first one. So `connect` and agent.transport.ranks begin one of each.
- A group in which a member died is of no use afterwards: each generation has new ones, under new names.

A failure does not show by itself. torch's own handling would end the process, so it is switched off; a kernel whose
peer is gone waits until `cancel`, which the news of the next generation brings, or until the time-out. An error that
NCCL reports (such as of a connection to another machine) makes an operation count as completed and raises nothing, so
it is asked for. A kernel that was ended early leaves undefined data in its tensor. So nothing that a transfer brings is
used before the host has seen its end, and no cancel before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed
from torch import Tensor

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.models import compat
from openrecycle.planner.jobs.job import Worker

# -- one process group, as the rest of the agent sees it, and gloo's ----------------------------

# torch ships no types for what is used here.
dist: Any = torch.distributed

_NOBODY_SENDS = 2**31 - 1
_EXPIRED = "Timed out waiting"
"""How gloo words a time-out."""
_KEEP_ALIVE_SECONDS = 60
"""A router or firewall between two hosts may forget a connection over which nothing has passed for some minutes."""
_ROW, _TABLE, _TERM, _TOTAL = (2**31 - n for n in (2, 3, 4, 5))
PIECE_BYTES, UNDER_WAY_BYTES = 1 << 20, 16 << 20
"""For scatters: the most bytes of a message, and about how many bytes are under way each way."""
_ADDED = 1 << 15
"""How many elements torch adds in the calling thread; for more it uses others."""


class TransferError(RuntimeError):
    """A transfer or reduction broke: a peer died, or the groups were cancelled. peer: the other worker, if known."""

    def __init__(self, text: str, peer: Worker | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class SummedPart(NamedTuple):
    """Elements `start` to `end` of a tensor, and the ranks that want their sum, of which the first one adds."""

    start: int
    end: int
    ranks: tuple[int, ...]


class PendingTransfer(Protocol):
    """A transfer under way; keeps its tensor alive."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """Waits until the transfer is done, and returns its tensor. Raises TransferError."""

    def arrived(self) -> bool:
        """Says whether `wait` would return, or raise, at once. False where that can't be told."""


class Cancellable(Protocol):
    """Connections that can be ended."""

    def cancel(self) -> None:
        """Makes every wait on them fail within milliseconds. May be called from any thread."""

    def close(self) -> None:
        """Ends the connections that `cancel` has left. May be called from any thread."""
        return

    def halt(self) -> None:
        """Ends what is under way for good."""
        return  # gloo's transfers keep their tensors, and a reduction is over when its wait is

    def rest(self) -> None:
        """Waits until no tensor of a caller is read or written any more. Called after `halt` of all groups that use the
        device. It waits for the device, so only the thread that trains there may call it."""
        return


class Group(Cancellable, Protocol):
    """Ranks that exchange tensors. Used by one thread, except for `cancel`, `close` and a scatter's own thread. Methods
    raise TransferError.

    whole_buffers: what is sent must fill the buffer of its receive.
    """

    whole_buffers: ClassVar[bool] = False
    rank: int

    def send(self, to: int, tensor: Tensor, tag: int) -> PendingTransfer:
        """Starts a send; never waits for the receiver."""

    def receive(self, source: int, buffer: Tensor, tag: int) -> PendingTransfer:
        """Starts a receive into `buffer`. The n-th receive of one source and tag gets the n-th send of these."""

    def begin_sum(self, tensor: Tensor) -> PendingTransfer:
        """Starts to sum `tensor` over all ranks, in place. All ranks must begin their sums in the same order."""

    def sum(self, tensor: Tensor) -> None:
        """Sums `tensor` over all ranks, in place, and waits for it."""
        self.begin_sum(tensor).wait()

    def begin_scatter(self, tensor: Tensor, parts: Sequence[SummedPart]) -> PendingTransfer:
        """Starts a sum like `begin_sum`, of which each rank needs only the parts that name it; its other elements mean
        nothing afterwards. The parts cover the tensor, one after the other, and are the same on all ranks."""
        return self.begin_sum(tensor)

    def begin_broadcast(self, tensor: Tensor, source: int) -> PendingTransfer:
        """Starts to copy `tensor`, which must be contiguous, from one rank to all others, in place. All ranks must
        begin sums and broadcasts in the same order."""


def halt_all(groups: Iterable[Cancellable]) -> None:
    """Ends all groups first, and then waits for each: what one waits for on a device may be queued behind another's."""
    ending = list(groups)
    for group in ending:
        group.halt()
    for group in ending:
        group.rest()


class PendingConnections:
    """The connections that a thread makes, one after the other. Another thread may `give_up` and leave it behind.

    Over NCCL a thread that is left behind must begin nothing more: what it had the device wait for, and the end of
    that, would hold up the generation that trains by then.
    """

    def __init__(self) -> None:
        self._lock, self._all = threading.Lock(), list[Cancellable]()
        self._given_up = False

    def add(self, connections: Cancellable) -> None:
        """Adds connections, before anything waits in them. Raises TransferError if the thread was left behind."""
        with self._lock:
            self._all.append(connections)
        if self._given_up:
            connections.cancel()
            connections.close()
            raise TransferError("nobody waits for these connections any more")

    def give_up(self) -> None:
        """Ends all connections, and those that are added later. Called by another thread."""
        with self._lock:
            self._given_up, ending = True, list(self._all)
        for connections in ending:
            connections.cancel()
            connections.close()

    def end(self) -> None:
        """Ends all connections. Called by the thread that makes them, when it has failed."""
        if not self._given_up:
            halt_all(self._all)
            return
        # The device is used by a later generation by now, so this thread must not wait for it.
        for connections in self._all:
            connections.halt()
        await_aborts()


class GlooPending:
    """A transfer over gloo. timeout: of `wait`; None: the operation has its own. peers: the ranks that it needs. peer:
    the worker to name when it breaks. sends: it is a send."""

    def __init__(
        self,
        work: Any,
        tensor: Tensor,
        timeout: timedelta | None,
        group: GivenGlooGroup,
        peers: Collection[int],
        peer: Worker | None = None,
        *,
        sends: bool = False,
    ) -> None:
        self._work = work
        self.tensor = tensor
        self._apart = sends and tensor.nbytes >= _LARGE_SEND
        self.timeout, self._group, self.peers, self._peer = timeout, group, peers, peer

    def arrived(self) -> bool:
        """See PendingTransfer. For sends and receives, gloo shows the end only to a thread that waits."""
        return bool(self._work.is_completed())

    def wait(self) -> Tensor:
        self._group.begin_wait(self)
        try:
            if self.timeout is not None and self._apart:
                if not _wait_apart(self._work, self.timeout, lambda: self._group.cancelled):
                    self._group.close()
                    raise RuntimeError("connection closed: the group was cancelled")
            elif self.timeout is not None:
                self._work.wait(self.timeout)
            elif not wait_or_leave(self._work, lambda: self._group.cancelled):
                # Nothing comes over closed connections, so the operation does not write to the tensor any more.
                self._group.close()
                _unended[:] = [kept for kept in _unended if not kept[0].is_completed()] + [(self._work, self._group)]
                raise RuntimeError("connection closed: the group was cancelled")
            else:
                self._group.sum_ended()
        except RuntimeError as error:
            raise TransferError(first_line(error), self._peer) from None
        finally:
            self._group.end_wait(self)
        return self.tensor


ASK_AGAIN_SECONDS = 0.2


def wait_or_leave(work: Any, cancelled: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Waits for a gloo collective, or until its group is cancelled, even if gloo has not noticed that. Returns whether
    the collective has ended. Raises RuntimeError, also after so many seconds.

    It does not rely on gloo, which forgets a send that it was about to begin over a connection that is just being
    closed: once in 120 deaths a survivor waited in its stage's sum for the group's whole time-out, 150 s, and all
    others waited for it.
    """
    ends = time.monotonic() + seconds
    while True:
        left = ends - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(min(ASK_AGAIN_SECONDS, left), 0.001)))
            return True
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if something went wrong; otherwise only this slice of the wait had timed out
                return True
            if left <= 0:
                raise
        if cancelled():
            return False


_LARGE_SEND = 1 << 16
"""A send of so many bytes may be half written when its peer dies. A smaller one the system takes at once."""


def _wait_apart(work: Any, timeout: timedelta, cancelled: Callable[[], bool]) -> bool:
    """Waits for a send in a thread of its own, or until its group is cancelled. Returns whether the send has ended.
    Raises RuntimeError.

    gloo (torch 2.13) tells nobody of a send that was half written when its connection ended: with 256 MiB to a peer
    that got a SIGKILL, the sender waited for the whole time-out. It can't be waited for in slices, since a wait for a
    send that times out closes the group. A thread that is left waits until its time is over.
    """
    ended, problems = threading.Event(), list[RuntimeError]()

    def wait() -> None:
        try:
            work.wait(timeout)
        except RuntimeError as error:
            problems.append(error)
        finally:
            ended.set()

    threading.Thread(target=wait, name="send", daemon=True).start()
    while not ended.wait(ASK_AGAIN_SECONDS):
        if cancelled():
            return False
    if problems:
        raise problems[0]
    return True


def scatter_memory(ranks: int) -> int:
    """Returns the most bytes of terms that are on their way to a rank of a group over gloo, in host memory."""
    step = (ranks - 1) * PIECE_BYTES
    return -(-UNDER_WAY_BYTES // step) * step


class _Scatter:
    """A scatter of a group, which runs in the group's own thread for scatters: that adds what has come.

    Each rank sends its terms of a part to the first rank that wants the sum. That adds them to its own, and sends the
    sum to the others that want it. With two ranks that want each part, a rank sends as many bytes as the tensor has; in
    an all-reduce of n ranks it sends 2 (n - 1) / n times as many.
    """

    def __init__(self, group: GivenGlooGroup, tensor: Tensor, parts: Sequence[SummedPart]) -> None:
        self.tensor, self._group = tensor, group
        longest = PIECE_BYTES // tensor.element_size()
        self._waiting = deque(
            SummedPart(start, min(start + longest, part.end), part.ranks)
            for part in parts
            for start in range(part.start, part.end, longest)
        )
        self._ended, self._problem = threading.Event(), ""
        self._fault: Exception | None = None
        self._writing, self._left = threading.Lock(), False

    def arrived(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> Tensor:
        group = self._group
        # The thread of a scatter that was left may wait for minutes (see wait_or_leave), and later ones don't begin.
        while not self._ended.wait(0 if group.scatter_left else ASK_AGAIN_SECONDS) and not group.cancelled:
            pass
        if self._problem or not self._ended.is_set():
            if not self._ended.is_set():
                # Nothing comes over closed connections, and nothing is added any more.
                group.close()
                group.scatter_left = True
                with self._writing:
                    self._left = True
            if self._fault is not None:
                raise self._fault
            raise TransferError(self._problem or "the group was cancelled", group.only_other)
        return self.tensor

    def run(self, problem: str) -> str:
        """Runs the scatter, unless `problem` says that one before it went wrong. Returns what has gone wrong by now."""
        self._problem = problem
        try:
            if not problem:
                self._exchange()
        except Exception as error:
            self._problem = first_line(error)
            self._fault = None if isinstance(error, TransferError) else error  # such as no memory: not a peer's fault
        if self._fault is not None:  # its frames keep the buffers of receives: none may come once `wait` raises
            self._group.close()
        self._ended.set()
        if self._problem and not problem:
            # There is no memory here any more for what peers still send, and gloo's thread would spin over it. Closing
            # also keeps others from waiting for a sum that can't come.
            self._group.close()
        return self._problem

    def _exchange(self) -> None:
        group, under_way, size = self._group, deque[tuple[SummedPart, list[GlooPending], int]](), 0
        passed_on: list[GlooPending] = []
        while self._waiting or under_way:
            if self._waiting and (not under_way or size < UNDER_WAY_BYTES):
                under_way.append(self._begin(self._waiting.popleft(), passed_on))
                size += under_way[-1][2]
                continue
            part, terms, its = under_way.popleft()
            size -= its
            into = self.tensor[part.start : part.end]
            for term in terms:
                came = term.wait()
                if group.rank == part.ranks[0]:
                    with self._writing:
                        if self._left:
                            raise TransferError("nobody waits for it any more")
                        for some, more in zip(torch.split(into, _ADDED), torch.split(came, _ADDED), strict=True):
                            some.add_(more)
                    if came.nbytes == PIECE_BYTES:
                        group.spare.append(came)
            if group.rank == part.ranks[0]:
                passed_on += [group.begin_message(True, to, into, _TOTAL) for to in part.ranks[1:]]
        for pending in passed_on:
            pending.wait()

    def _begin(self, part: SummedPart, passed_on: list[GlooPending]) -> tuple[SummedPart, list[GlooPending], int]:
        """Begins the transfers of a part. Returns those that must end before its sum is there, or before its term has
        been sent, and how many bytes they have."""
        group, mine, first = self._group, self.tensor[part.start : part.end], part.ranks[0]
        if group.rank == first:
            terms = [group.begin_message(False, other, self._memory(mine), _TERM) for other in group.others]
        else:
            terms = [group.begin_message(True, first, mine, _TERM)]
            if group.rank in part.ranks:  # the sum replaces the term, which the first rank has read by then
                passed_on.append(group.begin_message(False, first, mine, _TOTAL))
        return part, terms, len(terms) * mine.nbytes

    def _memory(self, like: Tensor) -> Tensor:
        # Memory is used again: what this thread frees, the system's allocator does not use again.
        spare = self._group.spare
        fits = spare and like.nbytes == PIECE_BYTES and spare[-1].dtype == like.dtype
        return spare.pop() if fits else torch.empty_like(like)


_unended: list[tuple[Any, GivenGlooGroup]] = []
"""Collectives, and their groups, that nothing waits for any more. They are kept since their destructors would wait."""


class GivenGlooGroup(Group):
    """An existing gloo group, for tensors on the CPU. members: by rank."""

    def __init__(self, group: Any, rank: int, members: Sequence[Worker], timeouts: Timeouts) -> None:
        self.rank, self.members, self._group = rank, members, group
        self.others = [other for other in range(len(members)) if other != rank]
        self.only_other = only_other(members, rank)
        self._scatters, self._scattering = deque[_Scatter](), threading.Lock()
        self._scatters_run, self._scatter_problem = False, ""
        self.scatter_left = False
        """Whether a scatter was cancelled and its end was not waited for."""
        self.spare: list[Tensor] = []
        """Memory for pieces that come, which is not in use."""
        self._waits: dict[GlooPending, None] = {}
        self._posted: set[int] = set()
        """The ranks with which a transfer was ever posted."""
        self._cancelled = False
        self._sums = 0
        """The number of gloo's own collectives that have begun and not ended."""
        self._closing, self._closed = threading.Lock(), False
        self._timeout, self._sum_timeout = timedelta(seconds=timeouts.transfer), timedelta(seconds=timeouts.group)

    def send(self, to: int, tensor: Tensor, tag: int) -> GlooPending:
        return self._pending(True, to, tensor, tag)

    def receive(self, source: int, buffer: Tensor, tag: int) -> GlooPending:
        return self._pending(False, source, buffer, tag)

    def _pending(self, sends: bool, other: int, tensor: Tensor, tag: int) -> GlooPending:
        try:
            work = self._post(sends, other, tensor, tag)
        except RuntimeError as error:
            raise TransferError(first_line(error), self.members[other]) from None
        return GlooPending(work, tensor, self._timeout, self, (other,), self.members[other], sends=sends)

    def _post(self, sends: bool, other: int, tensor: Tensor, tag: int) -> Any:
        """Raises RuntimeError."""
        if not self._cancelled:
            work = (self._group.send if sends else self._group.recv)([tensor], other, tag)
            self._posted.add(other)
            # The order matters, as in `begin_wait`: either `cancel` sees what was posted, or this sees the cancel.
            if not self._cancelled:
                return work
            self.close()
        raise RuntimeError("the group was cancelled")

    def begin_sum(self, tensor: Tensor) -> PendingTransfer:
        options = dist.AllreduceOptions()
        return self._begin(self._group.allreduce, tensor, options)

    def begin_broadcast(self, tensor: Tensor, source: int) -> PendingTransfer:
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._begin(self._group.broadcast, tensor, options)

    def _begin(self, collective: Callable[[list[Tensor], Any], Any], tensor: Tensor, options: Any) -> PendingTransfer:
        options.timeout, peer = self._sum_timeout, self.only_other
        self._sums += 1
        try:
            return GlooPending(collective([tensor], options), tensor, None, self, self.others, peer)
        except RuntimeError as error:
            raise TransferError(first_line(error), peer) from None

    def begin_scatter(self, tensor: Tensor, parts: Sequence[SummedPart]) -> PendingTransfer:
        scatter = _Scatter(self, tensor, parts)
        with self._scattering:
            self._scatters.append(scatter)
            if not self._scatters_run:
                threading.Thread(target=self._run_scatters, name="scatter", daemon=True).start()
                self._scatters_run = True
        return scatter

    def _run_scatters(self) -> None:
        """Runs scatters one after the other, while there are any. After one that broke, the others fail, too."""
        while True:
            with self._scattering:
                if not self._scatters:
                    self._scatters_run = False
                    return
                scatter = self._scatters.popleft()
            self._scatter_problem = scatter.run(self._scatter_problem)

    def begin_message(self, sends: bool, other: int, tensor: Tensor, tag: int) -> GlooPending:
        """Starts a message of a scatter. Raises TransferError."""
        try:
            work = self._post(sends, other, tensor, tag)
        except RuntimeError as error:
            raise TransferError(first_line(error), self.only_other) from None
        return GlooPending(work, tensor, self._sum_timeout, self, (other,), self.only_other)

    def gather(self, row: Tensor, among: Sequence[int]) -> Tensor:
        """Gathers the rows of the ranks `among`, which must all call it. Returns shape (len(among), len(row)), in the
        order of `among`. row: one-dimensional, equally long on all. Raises TransferError."""
        # All rows go by way of the first rank, so it is two messages deep. In a ring, as in gloo's own sum, each hop
        # waits until one more process gets to run, and no rank of the group may be missing.
        table = torch.empty((len(among), len(row)), dtype=row.dtype)
        first, *others = among

        def wait(asked: Iterable[tuple[Any, int]], *, sends: bool = False) -> None:
            for work, other in asked:
                GlooPending(work, table, self._sum_timeout, self, (other,), sends=sends).wait()

        try:
            if self.rank == first:
                table[0] = row
                wait([(self._post(False, other, table[i], _ROW), other) for i, other in enumerate(others, 1)])
                wait([(self._post(True, other, table, _TABLE), other) for other in others], sends=True)
            else:
                asked = [
                    (self._post(False, first, table, _TABLE), first),
                    (self._post(True, first, row, _ROW), first),
                ]
                wait(reversed(asked))
        except RuntimeError as error:
            others = [rank for rank in among if rank != self.rank]
            peer = self.members[others[0]] if len(others) == 1 else None  # with more, nobody knows with which it broke
            raise TransferError(first_line(error), peer) from None
        return table

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def begin_wait(self, pending: GlooPending) -> None:
        """Called before a wait. The order matters: either `cancel` sees the wait, or this sees the cancel."""
        self._waits[pending] = None
        if self._cancelled:
            self.close()

    def end_wait(self, pending: GlooPending) -> None:
        self._waits.pop(pending, None)

    def sum_ended(self) -> None:
        """Notes that one of gloo's own collectives has ended without an error."""
        self._sums -= 1

    def cancel(self) -> None:
        self._cancelled = True
        self._wake()

    def _wake(self) -> None:
        """Makes the waits that there are fail."""
        wake(self._group, {rank for pending in list(self._waits) for rank in pending.peers})

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._end_all()
                wake(self._group, self.others)  # for connections that are left, or that gloo's thread has not seen end

    def _end_all(self) -> None:
        """Ends the connections that can be ended directly."""


def wake(group: Any, ranks: Iterable[int]) -> None:
    """Makes every wait for these ranks in a gloo group fail within milliseconds."""
    # A receive from a dead peer, or over a closed pair, fails at once; one that *times out* closes all pairs.
    for other in ranks:
        try:
            group.recv([torch.zeros(1)], other, _NOBODY_SENDS).wait(timedelta(milliseconds=1))
        except RuntimeError as error:  # it is meant to fail
            if _EXPIRED in str(error):
                return


class GlooGroup(GivenGlooGroup):
    """A gloo group that is formed here. devices: its peers connect to one of these."""

    def __init__(
        self, store: Any, name: str, rank: int, members: Sequence[Worker], timeouts: Timeouts, devices: Devices
    ) -> None:
        """Waits until all ranks are there. Raises RuntimeError."""
        own, form = dist.PrefixStore(name, store), timedelta(seconds=timeouts.form)
        with devices.lent() as self._device:
            others = set(self._device.connections())
            try:
                group = compat.gloo_group(own, rank, len(members), timeout=form, device=self._device.made)
            except RuntimeError:
                self._device.take_no_more(others)
                raise
            super().__init__(group, rank, members, timeouts)
            own_connections = self._device.new_connections(others, len(members) - 1)
        self._connections = own_connections
        """The group's own connections, some of which may have been closed since; empty where they can't be found."""
        self._used: tuple[int, list[_Descriptor]] | None = None
        """The connections over which something has passed, when transfers had been posted with so many ranks."""

    def keep_alive(self) -> None:
        """Keeps connections alive over which nothing passes. May be called from any thread."""
        for _, connection in _sockets(self._connections):
            with contextlib.suppress(OSError):  # it has ended
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)

    def look_ahead(self) -> None:
        """Finds out what `cancel` will have to end, unless something is posted with other ranks until then. May be
        called from any thread."""
        posted = len(self._posted)  # before the look, which sees all that these have brought about
        self._used = posted, list(_that_carried(self._connections))

    def cancel(self) -> None:
        if not self._cancelled:
            super().cancel()

    def _wake(self) -> None:
        if not self._device.told:
            super()._wake()
            return
        used = self._used
        # Does not call `wake`: a wait that times out before gloo's thread has come round would close the others, too.
        if self._sums:
            _end(self._connections)
        elif used is not None and used[0] == len(self._posted):
            _end(used[1])
        else:
            _end(_that_carried(self._connections))

    def _end_all(self) -> None:
        _end(self._connections)


class GlooDevice:
    """A gloo device: it listens for the peers of groups, and has a thread that reads what they send."""

    def __init__(self, address: str) -> None:
        self.made, self._listener = _device_at(address)

    @property
    def told(self) -> bool:
        """Whether its connections can be found."""
        return self._listener is not None

    def connections(self) -> list[_Descriptor]:
        """Returns its connections; empty where they can't be found."""
        if self._listener is None:
            return []
        return [target for target in _polled(self._listener.poll) if target not in self._listener.others]

    def take_no_more(self, before: Collection[_Descriptor]) -> None:
        """Called when a group could not be made. before: the device's earlier connections, which work on. gloo has
        freed what waited for peers, but would still tell it of a peer that connects late, or of a connection that was
        only begun, and the process would crash. So gloo's thread hears of neither any more."""
        if self._listener is None:
            return
        with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(self._listener.poll)) as poll:
            poll.modify(self._listener.accepts, 0)  # gloo itself removes it, so it must be there until then
            for target in self.connections():
                if target not in before:
                    with contextlib.suppress(OSError):  # it has just been closed
                        poll.unregister(target.number)

    def new_connections(self, before: Collection[_Descriptor], count: int) -> list[_Descriptor]:
        """Returns those of a group that has just been made, of at most `count`. before: the device's earlier ones."""
        found = [target for target in self.connections() if target not in before]
        # A peer that is ahead may be connecting for another group. gloo polls that until it has read for which.
        for _ in range(_LOOKS):
            if len(found) <= count:
                break
            time.sleep(_LOOK_SECONDS)
            there = set(self.connections())
            found = [target for target in found if target in there]
        return found


_LOOKS, _LOOK_SECONDS = 20, 1e-3
"""How often a device's new connections are looked at again while there are too many, and after which time."""


class Devices:
    """The gloo devices of a worker at one address, as few as will do: each has a thread that wakes a hundred times a
    second, and 512 of them, for 256 workers with connections on standby, take half a core. Finding out what a device
    polls takes some milliseconds, too."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._free: GlooDevice | None = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[GlooDevice]:
        """Lends a device to one caller at a time, who makes a group: new connections are the group's. If it can't be
        made, others don't get the device, which takes no more connections. Where connections can't be found, each group
        has its own device, since that can't be had there."""
        with self._lock:
            device, self._free = self._free, None
        device = device or GlooDevice(self.address)
        yield device
        if device.told:
            with self._lock:
                self._free = device

    def retire(self) -> None:
        """Has the next group be made with a new device, as this worker makes no more groups of those that its peers
        make."""
        with self._lock:
            self._free = None


class _Descriptor(NamedTuple):
    """A file descriptor, with the inode that it stands for: by the time it is used, its number may belong to another
    file."""

    number: int
    inode: int


class _Listener(NamedTuple):
    """What is known of a gloo device. poll: the descriptor with which its thread polls. accepts: that to which peers
    connect. others: what it polls beside connections, this one too."""

    poll: int
    accepts: int
    others: frozenset[_Descriptor]


_making_devices = threading.Lock()
_TARGET = re.compile(r"tfd:\s*(\d+) .* ino:([0-9a-f]+)")


def _device_at(address: str) -> tuple[Any, _Listener | None]:
    """Makes a gloo device, and finds out what it polls; None: that could not be found."""
    with _making_devices:
        before = _descriptors()
        device = compat.gloo_device(address)
        after = _descriptors()
    new = [target for target in after if target not in before]
    found = {target for target, it in _sockets(new) if it.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
    # New descriptors come first. The one that polls may have the number of one that another thread has just closed, but
    # that is rare.
    for poll in sorted(filter(after.__getitem__, after), key=before.__contains__):
        if found.intersection(targets := _polled(poll.number)):
            (accepts, _), *more = found
            return device, None if more else _Listener(poll.number, accepts, frozenset(targets))
    return device, None


def _descriptors() -> dict[_Descriptor, bool]:
    """Returns the descriptors of this process, and whether one can poll with each: then it is neither a file nor a
    socket for the system. Empty on a system without /proc."""
    found = {}
    with contextlib.suppress(OSError), os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # other threads open and close descriptors meanwhile
                about = os.fstat(number := int(entry.name))
                found[_Descriptor(number, about.st_ino)] = not stat.S_IFMT(about.st_mode)
    return found


def _polled(poll: int) -> list[_Descriptor]:
    """Returns what is polled with this descriptor."""
    try:
        text = Path(f"/proc/self/fdinfo/{poll}").read_text(encoding="ascii")
    except OSError:
        return []
    return [_Descriptor(int(number), int(inode, 16)) for number, inode in _TARGET.findall(text)]


def _sockets(descriptors: Iterable[_Descriptor]) -> Iterator[tuple[_Descriptor, socket.socket]]:
    """Yields those of these descriptors that are sockets. Each socket is valid until the next one is asked for."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # it has been closed
            copy = os.dup(descriptor.number)
            about = os.fstat(copy)
            if not stat.S_ISSOCK(about.st_mode) or about.st_ino != descriptor.inode:
                os.close(copy)
                continue
            # The family may be another one. If none were given, Python would ask the system for more than is needed.
            with socket.socket(socket.AF_INET6, socket.SOCK_STREAM, fileno=copy) as connection:
                yield descriptor, connection


def _end(connections: Iterable[_Descriptor]) -> None:
    """Has gloo's thread close these connections, and fail the waits in them."""
    for _, connection in _sockets(connections):
        with contextlib.suppress(OSError):  # it has ended already
            # Only for reading. A peer's readiness may still be read here, and gloo forgets a send that it then can't
            # begin: a thread that waited for one was not woken for two minutes (once in some 40 deaths).
            connection.shutdown(socket.SHUT_RD)


_HELLO_BYTES = 8
"""How many bytes gloo sends over a new connection, from the end that has made it."""
_COUNTS = struct.Struct("=128x Q 8x I 52x Q")
"""Fields of the kernel's tcp_info: bytes received, not yet sent, and sent (since Linux 4.19)."""


def _that_carried(connections: Iterable[_Descriptor]) -> Iterator[_Descriptor]:
    """Yields the connections over which anything has passed or is to pass, from either end, beside what gloo sends when
    it connects; and those of which that can't be found out."""
    # By their numbers: Python's own getsockopt would need copies of the descriptors, and takes several times as long. A
    # connection whose number belongs to another file by now is closed.
    ask, told, size = ctypes.CDLL(None).getsockopt, ctypes.create_string_buffer(_COUNTS.size), ctypes.c_uint()
    for connection in connections:
        size.value = _COUNTS.size
        failed = ask(connection.number, socket.IPPROTO_TCP, socket.TCP_INFO, told, ctypes.byref(size))
        if failed or size.value < _COUNTS.size or sum(_COUNTS.unpack(told)) != _HELLO_BYTES:
            yield connection


class _Late:
    """An operation on a LateGroup. It begins when it or a later one is waited for, or when a later one begins."""

    def __init__(self, group: LateGroup, tensor: Tensor, begin: Callable[[GlooGroup, Tensor], PendingTransfer]) -> None:
        self._group, self.tensor, self.begin = group, tensor, begin
        self.begun: PendingTransfer | None = None

    def arrived(self) -> bool:
        return self.begun is not None and self.begun.arrived()

    def wait(self) -> Tensor:
        if self.begun is None:
            self._group.begin_late()
        if self.begun is None:
            raise TransferError("one that was to begin before it broke")
        return self.begun.wait()


class LateGroup(Group):
    """A group for sums that is still connecting: the wait for its first sum includes that.

    form: connects, in a thread of its own, which is left behind if a peer does not come. It raises RuntimeError.
    """

    def __init__(self, form: Callable[[], GlooGroup], rank: int, timeouts: Timeouts) -> None:
        self.rank, self._form, self._seconds = rank, form, timeouts.group
        self._changed = threading.Condition()
        self._group: GlooGroup | None = None
        self._problem: str | None = None
        self._late: list[_Late] = []
        """The operations that can't begin yet, in order."""
        threading.Thread(target=self._run, name="connect-late", daemon=True).start()

    def send(self, to: int, tensor: Tensor, tag: int) -> PendingTransfer:
        return self._connected().send(to, tensor, tag)

    def receive(self, source: int, buffer: Tensor, tag: int) -> PendingTransfer:
        return self._connected().receive(source, buffer, tag)

    def begin_sum(self, tensor: Tensor) -> PendingTransfer:
        return self._begin(tensor, lambda group, tensor: group.begin_sum(tensor))

    def begin_broadcast(self, tensor: Tensor, source: int) -> PendingTransfer:
        return self._begin(tensor, lambda group, tensor: group.begin_broadcast(tensor, source))

    def _begin(self, tensor: Tensor, begin: Callable[[GlooGroup, Tensor], PendingTransfer]) -> PendingTransfer:
        # The caller is in the middle of a backward, and would seem to hang if it waited here.
        with self._changed:
            there = self._group is not None and self._problem is None
        if not there:
            self._late.append(_Late(self, tensor, begin))
            return self._late[-1]
        self.begin_late()
        return begin(self._connected(), tensor)

    def begin_scatter(self, tensor: Tensor, parts: Sequence[SummedPart]) -> PendingTransfer:
        return self._begin(tensor, lambda group, tensor: group.begin_scatter(tensor, parts))

    def begin_late(self) -> None:
        group, late, self._late = self._connected(), self._late, []
        for one in late:
            one.begun = one.begin(group, one.tensor)

    def cancel(self) -> None:
        with self._changed:
            self._problem = self._problem or "the group was cancelled"
            group = self._group
            self._changed.notify_all()
        if group is not None:
            group.cancel()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _connected(self) -> GlooGroup:
        with self._changed:
            self._changed.wait_for(lambda: self._group is not None or self._problem is not None, self._seconds)
            if self._group is None or self._problem is not None:
                raise TransferError(self._problem or f"the peers did not connect within {self._seconds:g} s")
            return self._group

    def _run(self) -> None:
        try:
            group = self._form()
        except RuntimeError as error:
            with self._changed:
                self._problem = self._problem or first_line(error)
                self._changed.notify_all()
            return
        with self._changed:
            self._group, given_up = group, self._problem is not None
            self._changed.notify_all()
        if given_up:
            group.cancel()
            group.close()
        else:
            group.keep_alive()


def only_other(members: Sequence[Worker], rank: int) -> Worker | None:
    """Returns the worker with which a sum over all broke. With more than two ranks nobody knows, and it is None."""
    return members[1 - rank] if len(members) == 2 else None


def first_line(error: BaseException) -> str:
    """Returns torch's message without the place in its source and without advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0][:200] or "the connection was closed"


def to_bits(number: float) -> int:
    """Returns the 64 bits of a number as an integer, so that a NaN also arrives as it was."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)


def from_bits(bits: int) -> float:
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(number)


# -- tensors of a device over a group that takes only those of the CPU --------------------------


class Arriving:
    """A transfer into the host's memory, which `wait` copies on to `tensor`."""

    def __init__(self, inner: PendingTransfer, tensor: Tensor) -> None:
        self._inner, self.tensor = inner, tensor

    def arrived(self) -> bool:
        return self._inner.arrived()

    def wait(self) -> Tensor:
        self.tensor.copy_(self._inner.wait(), non_blocking=True)
        return self.tensor


class HostGroup(Group):
    """A group for tensors of a device, which go by way of the host. inner: carries tensors of the CPU."""

    def __init__(self, inner: Group) -> None:
        self._inner, self.rank = inner, inner.rank

    def send(self, to: int, tensor: Tensor, tag: int) -> PendingTransfer:
        return self._inner.send(to, host_copy(tensor), tag)

    def receive(self, source: int, buffer: Tensor, tag: int) -> PendingTransfer:
        return Arriving(self._inner.receive(source, host_memory(buffer), tag), buffer)

    def begin_sum(self, tensor: Tensor) -> PendingTransfer:
        return Arriving(self._inner.begin_sum(host_copy(tensor)), tensor)

    def begin_scatter(self, tensor: Tensor, parts: Sequence[SummedPart]) -> PendingTransfer:
        return Arriving(self._inner.begin_scatter(host_copy(tensor), parts), tensor)

    def begin_broadcast(self, tensor: Tensor, source: int) -> PendingTransfer:
        host = host_copy(tensor) if source == self.rank else host_memory(tensor)
        return Arriving(self._inner.begin_broadcast(host, source), tensor)

    def cancel(self) -> None:
        self._inner.cancel()

    def close(self) -> None:
        self._inner.close()

    def halt(self) -> None:
        self._inner.halt()

    def rest(self) -> None:
        self._inner.rest()


def host_memory(like: Tensor) -> Tensor:
    """Returns memory on the CPU for such a tensor. For a GPU it is pinned, so that copies are quick; torch keeps pinned
    memory for later use, once copies are done."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type == "cuda")


def host_copy(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU, once the device has computed the tensor."""
    return host_memory(tensor).copy_(tensor)


_NO_TAG = 0
# torch's own time-out starts with the call, so a receive that is posted ahead of a long op would count as failed. Ours
# starts with the wait.
NO_LIMIT = timedelta(days=7)
_GLANCE_SECONDS = 2e-5


# -- a process group over NCCL, for tensors on a GPU --------------------------------------------

ABORT_SECONDS = 5.0
"""An abort that takes longer does not wait for memory, but for a peer that was just connecting."""
MESSAGE_CTAS = 2
"""How many blocks a kernel has that carries messages between two workers. While the kernel waits for the other worker,
each block takes a multiprocessor from those that compute. By default NCCL takes up to 32 of an H100's 132, for each of
the two streams to each neighbour."""
_aborting: list[threading.Thread] = []
"""Threads with aborts that nothing has waited for yet."""
_aborts = threading.Lock()


def abort_aside(group: Any) -> None:
    """Ends what is under way in a ProcessGroupNCCL within milliseconds, and gives its memory back, which takes half a
    second (H200, three communicators). Returns at once, since the thread that cancels also hears the launcher: another
    thread does it. May be called from any thread."""

    def abort() -> None:
        # abort, never shutdown or destroy: those wait for peers, which may be dead.
        with contextlib.suppress(RuntimeError):  # the peer of a communicator may be gone
            group.abort()

    thread = threading.Thread(target=abort, name="abort-group", daemon=True)
    with _aborts:
        thread.start()
        _aborting.append(thread)


def await_aborts() -> None:
    """Waits until the aborts that were begun before have given their memory back, for at most `ABORT_SECONDS`. An
    abort that hangs is waited for only once."""
    with _aborts:
        waiting = list(_aborting)
    until = time.monotonic() + ABORT_SECONDS
    for thread in waiting:
        thread.join(max(0.0, until - time.monotonic()))
    with _aborts:
        _aborting[:] = [thread for thread in _aborting if thread not in waiting]


def make_nccl(store: Any, rank: int, size: int, most_ctas: int | None = None) -> Any:
    """Makes a ProcessGroupNCCL, once groups that were aborted before have given their memory back. most_ctas: the most
    blocks of one of its kernels; None: NCCL's default."""
    await_aborts()
    return compat.nccl_group(store, rank, size, timeout=NO_LIMIT, most_ctas=most_ctas)


class NcclPending:
    """An operation in the group's stream, with `peer` (None: with several). cancelled: says whether its group was."""

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
        # It polls, since no wait of torch's is known to end when another thread aborts the group.
        deadline = time.monotonic() + self._seconds
        while not self._completed():
            if self._cancelled():
                break
            if time.monotonic() > deadline:
                raise TransferError(f"no answer from a peer within {self._seconds:g} s", self._peer)
            time.sleep(_GLANCE_SECONDS)
        # An operation that an abort ends counts as completed, so this is asked after it, not before.
        if self._cancelled():
            raise TransferError("the transfer was cancelled")
        if (failure := compat.failure_of(self._work)) is not None:
            raise TransferError(first_line(failure), self._peer)
        self._join()
        return self.tensor

    def _completed(self) -> bool:
        try:
            return bool(self._work.is_completed())
        except torch.AcceleratorError:
            raise  # the device has failed, and no peer
        except RuntimeError as error:
            raise TransferError(first_line(error), self._peer) from None

    def _join(self) -> None:
        """Orders the caller's stream after the group's, whose work has ended by now."""
        try:
            self._work.wait()
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            raise TransferError(first_line(error), self._peer) from None


class NcclGroup(Group):
    """A group over NCCL. device: this worker's GPU, which no other rank may use unless NCCL is 2.30 or later.

    members: by rank. messages: it is for sends and receives. The first exchange with a peer connects to it, and only
    the peer can end that wait.
    """

    whole_buffers: ClassVar[bool] = True

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        members: Sequence[Worker],
        timeouts: Timeouts,
        device: torch.device,
        *,
        messages: bool = False,
    ) -> None:
        self.rank, self.members = rank, members
        self._seconds, self._sum_seconds, self._device = timeouts.transfer, timeouts.group, device
        self._cancelled, self._aborting = threading.Event(), threading.Lock()
        self._aborted = False
        most_ctas = MESSAGE_CTAS if messages else None
        self._group = make_nccl(dist.PrefixStore(name, store), rank, len(members), most_ctas)

    def send(self, to: int, tensor: Tensor, tag: int) -> NcclPending:
        assert tag == _NO_TAG, "NCCL has no tags"
        return self._start(self.members[to], self._seconds, tensor, lambda: self._group.send([tensor], to, _NO_TAG))

    def receive(self, source: int, buffer: Tensor, tag: int) -> NcclPending:
        assert tag == _NO_TAG, "NCCL has no tags"
        return self._start(
            self.members[source], self._seconds, buffer, lambda: self._group.recv([buffer], source, _NO_TAG)
        )

    def begin_sum(self, tensor: Tensor) -> NcclPending:
        peer = only_other(self.members, self.rank)
        return self._start(peer, self._sum_seconds, tensor, lambda: self._group.allreduce([tensor]))

    def begin_broadcast(self, tensor: Tensor, source: int) -> NcclPending:
        options = dist.BroadcastOptions()
        options.rootRank = source
        peer = only_other(self.members, self.rank)
        return self._start(peer, self._sum_seconds, tensor, lambda: self._group.broadcast([tensor], options))

    def cancel(self) -> None:
        # The flag is set first: a thread that sees an operation end because of the abort must see the flag, too.
        self._cancelled.set()
        with self._aborting:
            begun, self._aborted = self._aborted, True
        if not begun:
            abort_aside(self._group)

    def halt(self) -> None:
        self.cancel()

    def rest(self) -> None:
        torch.cuda.synchronize(self._device)

    def _start(self, peer: Worker | None, seconds: float, tensor: Tensor, operation: Callable[[], Any]) -> NcclPending:
        if self._cancelled.is_set():
            raise TransferError("the group was cancelled")
        try:
            work = operation()
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            raise TransferError(first_line(error), peer) from None
        if self._cancelled.is_set():
            # An abort ends the communicators that exist, and the operation may have made another one since.
            abort_aside(self._group)
        return NcclPending(work, tensor, seconds, self._cancelled.is_set, peer)

"""One process group, as the rest of the agent sees it, and gloo's.

Measured behaviour of gloo that this file is built on: a transfer with a killed peer raises within
20 ms, but everything else that waits (a transfer with a survivor who has left, an all-reduce two hops
away) hangs to its time-out, and `abort()` wakes nothing. What does wake it: an expired wait closes
every pair of its group. So `cancel` posts a receive that nobody answers, with a 1 ms time-out, to
every rank.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed
from torch import Tensor

from openrecycle.agent.config.timeouts import Timeouts
from openrecycle.agent.models import compat
from openrecycle.planner.jobs.job import Worker

# torch ships no types for what is used here.
dist: Any = torch.distributed

_NOBODY_SENDS = 2**31 - 1


class TransferError(RuntimeError):
    """A transfer or reduction broke: a peer died, or the groups were cancelled. peer: with whom, where it is known."""

    def __init__(self, text: str, peer: Worker | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class PendingTransfer(Protocol):
    """A transfer under way; keeps its tensor alive."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """Blocks until the transfer is done; raises TransferError."""


class Group(Protocol):
    """Ranks that exchange tensors. All but `cancel` from one thread only; all raise TransferError.

    whole_buffers: must what is sent fill the buffer of its receive?
    """

    whole_buffers: ClassVar[bool]

    @property
    def rank(self) -> int: ...

    def send(self, to: int, tensor: Tensor, tag: int) -> PendingTransfer:
        """Starts a send; never waits for the receiver."""

    def receive(self, source: int, buffer: Tensor, tag: int) -> PendingTransfer:
        """Starts a receive into `buffer`. Among those of one source and tag, the n-th meets its n-th send."""

    def sum(self, tensor: Tensor) -> None:
        """Sums `tensor` over all ranks, in place; returns when the sum is there."""

    def cancel(self) -> None:
        """Makes every wait on this group fail within milliseconds. From any thread."""

    def halt(self) -> None:
        """Ends the group's life: what is under way in it comes to nothing."""

    def rest(self) -> None:
        """After `halt`, of all groups of the device: returns when it reads and writes no tensor of a caller's any
        more."""


def halt_all(groups: Iterable[Group]) -> None:
    """First all end, and then each is waited for: what one waits for on a device may wait behind another's."""
    ending = list(groups)
    for group in ending:
        group.halt()
    for group in ending:
        group.rest()


class GlooPending:
    def __init__(self, work: Any, tensor: Tensor, timeout: timedelta, peer: Worker | None = None) -> None:
        self._work = work
        self.tensor = tensor
        self._timeout, self._peer = timeout, peer

    def wait(self) -> Tensor:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise TransferError(first_line(error), self._peer) from None
        return self.tensor


class GivenGlooGroup:
    """A gloo group that there is already, for tensors on the CPU. members: by rank."""

    whole_buffers: ClassVar[bool] = False

    def __init__(self, group: Any, rank: int, members: Sequence[Worker], timeouts: Timeouts) -> None:
        self.rank, self._members, self._group = rank, members, group
        self._timeout, self._sum_timeout = timedelta(seconds=timeouts.transfer), timedelta(seconds=timeouts.group)

    def send(self, to: int, tensor: Tensor, tag: int) -> GlooPending:
        try:
            return GlooPending(self._group.send([tensor], to, tag), tensor, self._timeout, self._members[to])
        except RuntimeError as error:
            raise TransferError(first_line(error), self._members[to]) from None

    def receive(self, source: int, buffer: Tensor, tag: int) -> GlooPending:
        try:
            return GlooPending(self._group.recv([buffer], source, tag), buffer, self._timeout, self._members[source])
        except RuntimeError as error:
            raise TransferError(first_line(error), self._members[source]) from None

    def sum(self, tensor: Tensor) -> None:
        try:
            options = dist.AllreduceOptions()
            options.timeout = self._sum_timeout
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            raise TransferError(first_line(error), only_other(self._members, self.rank)) from None

    def halt(self) -> None:
        """Nothing to do: gloo's transfers keep their tensors, and a reduction is over when its wait is."""

    def rest(self) -> None:
        """Nothing to wait for, either."""

    def cancel(self) -> None:
        wake_all(self._group, self.rank)


def wake_all(group: Any, rank: int) -> None:
    """Makes every wait in a gloo group, in which this process is `rank`, fail within milliseconds."""
    # Every rank: a receive from a dead peer fails at once, and only one that *expires* closes the other pairs.
    for other in range(group.size()):
        if other == rank:
            continue
        with contextlib.suppress(RuntimeError):  # that it fails is the point
            group.recv([torch.zeros(1)], other, _NOBODY_SENDS).wait(timedelta(milliseconds=1))


class GlooGroup(GivenGlooGroup):
    """The same, formed here. address: of this host, as its peers reach it."""

    def __init__(
        self, store: Any, name: str, rank: int, members: Sequence[Worker], timeouts: Timeouts, address: str
    ) -> None:
        """Blocks until all ranks are there. Raises RuntimeError."""
        own, form = dist.PrefixStore(name, store), timedelta(seconds=timeouts.form)
        group = compat.gloo_group(own, rank, len(members), timeout=form, address=address)
        super().__init__(group, rank, members, timeouts)


def only_other(members: Sequence[Worker], rank: int) -> Worker | None:
    """With whom a sum over all broke: nobody can tell where there are more than two."""
    return members[1 - rank] if len(members) == 2 else None


def first_line(error: BaseException) -> str:
    """A message of torch's without the place in its source and the advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0][:200] or "the connection was closed"

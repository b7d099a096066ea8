"""Transfers between workers, reduction inside a stage, and re-forming both after a death.

One `Groups` per epoch: a gloo process group over all living workers (transfers, agreement) and one
over the living peers of this worker's stage (reduction). Measured behaviour of gloo that this file
is built on: a transfer with a killed peer raises within 20 ms, but everything else that waits
(a transfer with a survivor who has left, an all-reduce two hops away) hangs to its time-out, and
`abort()` wakes nothing. What does wake it: an expired wait closes every pair of its group. So
`cancel()`, called from another thread, posts a receive that nobody answers, with a 1 ms time-out,
to every rank of every live group.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from agent.store import StoreClient
from planner.job import Worker

# torch ships no types for what is used here.
dist: Any = torch.distributed

LOOPBACK = "127.0.0.1"
_NOBODY_SENDS = 2**31 - 1
_GO = b"go"
_SUPERSEDED = b"superseded"


class TransferError(RuntimeError):
    """A transfer or reduction broke: a peer died, or the groups were cancelled."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. form: to connect the groups of an epoch; transfer: to wait for a peer's data."""

    form: float = 15.0
    transfer: float = 120.0


class Pending:
    """A transfer under way; keeps its tensor alive until waited for."""

    def __init__(self, work: Any, tensor: Tensor, timeout: timedelta) -> None:
        self._work = work
        self.tensor = tensor
        self._timeout = timeout

    def wait(self) -> Tensor:
        """Blocks until the transfer is done; raises TransferError."""
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise TransferError(_first_line(error)) from None
        return self.tensor


class Groups:
    """The process groups of one epoch, seen from one worker."""

    def __init__(
        self,
        store: Any,
        epoch: int,
        me: Worker,
        living: Sequence[Worker],
        timeouts: Timeouts,
        address: str = LOOPBACK,
    ) -> None:
        self.epoch = epoch
        self._rank = {w: i for i, w in enumerate(living)}
        self._me = me
        self._timeout = timedelta(seconds=timeouts.transfer)
        peers = [w for w in living if w.stage == me.stage]
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeouts.form)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        try:
            self._world = dist.ProcessGroupGloo(
                dist.PrefixStore(f"epoch{epoch}/world", store), self._rank[me], len(living), options
            )
            self._stage = (
                dist.ProcessGroupGloo(
                    dist.PrefixStore(f"epoch{epoch}/stage{me.stage}", store), peers.index(me), len(peers), options
                )
                if len(peers) > 1
                else None
            )
        except RuntimeError as error:
            raise TransferError(f"the groups of epoch {epoch} could not be formed: {_first_line(error)}") from None

    def send(self, to: Worker, tensor: Tensor, tag: int) -> Pending:
        """Starts a send; the receiver may ask for it in any order."""
        try:
            return Pending(self._world.send([tensor], self._rank[to], tag), tensor, self._timeout)
        except RuntimeError as error:
            raise TransferError(_first_line(error)) from None

    def receive(self, source: Worker, buffer: Tensor, tag: int) -> Pending:
        """Starts a receive into `buffer`."""
        try:
            return Pending(self._world.recv([buffer], self._rank[source], tag), buffer, self._timeout)
        except RuntimeError as error:
            raise TransferError(_first_line(error)) from None

    def reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` (integer) over the living peers of the stage, in place."""
        if self._stage is None:
            return
        try:
            options = dist.AllreduceOptions()
            options.timeout = self._timeout
            self._stage.allreduce([tensor], options).wait()
        except RuntimeError as error:
            raise TransferError(_first_line(error)) from None

    def gather(self, value: int) -> dict[Worker, int]:
        """Everybody's `value`, on everybody."""
        return {w: row[0] for w, row in self.gather_rows((value,)).items()}

    def gather_rows(self, values: Sequence[int]) -> dict[Worker, tuple[int, ...]]:
        """Everybody's `values`, on everybody. All must bring equally many."""
        rows = torch.zeros((len(self._rank), len(values)), dtype=torch.int64)
        rows[self._rank[self._me]] = torch.tensor(values, dtype=torch.int64)
        try:
            self._world.allreduce([rows]).wait()
        except RuntimeError as error:
            raise TransferError(_first_line(error)) from None
        return {w: tuple(rows[i].tolist()) for w, i in self._rank.items()}

    def cancel(self) -> None:
        """Makes every wait on these groups fail within milliseconds. From any thread."""
        for group in filter(None, (self._world, self._stage)):
            # Every rank: a receive from a dead peer fails at once, and only one that *expires*
            # closes the other pairs.
            for rank in range(group.size()):
                if rank == group.rank():
                    continue
                with contextlib.suppress(RuntimeError):  # that it fails is the point
                    group.recv([torch.zeros(1)], rank, _NOBODY_SENDS).wait(timedelta(milliseconds=1))


class Communicator:
    """Forms the groups of one epoch after the other. `cancel` may be called from any thread."""

    def __init__(self, timeouts: Timeouts | None = None, *, address: str = LOOPBACK) -> None:
        """address: of this host, as its peers reach it."""
        self._timeouts, self._address = timeouts or Timeouts(), address
        self._stores = StoreClient()
        self._lock = threading.Lock()
        self._live: Groups | None = None
        self._forming: int | None = None
        self._newest = 0

    def form(self, epoch: int, me: Worker, living: Sequence[Worker], store: tuple[str, int]) -> Groups:
        """Waits until all of `living` are ready at the store (host, port), then connects.

        The groups in use live on until then: a peer may still be fetching what this worker sent
        last. Raises TransferError when it fails or a newer epoch is announced meanwhile.
        """
        with self._lock:
            if self._newest > epoch:
                raise TransferError(f"epoch {epoch} is superseded by {self._newest}")
            self._forming = epoch
        try:
            meeting = self._stores.connect(store, self._timeouts.form)
            # From here on `cancel` reaches this store; before, it may have missed it.
            if self._newest > epoch:
                raise TransferError(f"epoch {epoch} is superseded by {self._newest}")
            go = f"epoch{epoch}/go"
            if meeting.add(f"epoch{epoch}/ready", 1) == len(living):
                meeting.set(go, _GO)
            meeting.wait([go], timedelta(seconds=self._timeouts.form))
            if meeting.get(go) != _GO:
                raise TransferError(f"epoch {epoch} is superseded")
            self.abandon()
            groups = Groups(meeting, epoch, me, living, self._timeouts, self._address)
        except (RuntimeError, OSError) as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"epoch {epoch} did not come together: {_first_line(error)}") from None
        finally:
            with self._lock:
                self._forming = None
        with self._lock:
            if self._newest > epoch:
                raise TransferError(f"epoch {epoch} is superseded by {self._newest}")
            self._live = groups
        return groups

    def abandon(self) -> None:
        """Drops the groups in use. Their destructor waits for gloo's threads, so it runs aside."""
        with self._lock:
            groups, self._live = self._live, None
        if groups is not None:
            threading.Thread(target=_bury, args=([groups],), name="bury-groups", daemon=True).start()

    def cancel(self, newest_epoch: int) -> None:
        """Wakes whoever waits in groups, or for groups, of an epoch before `newest_epoch`."""
        with self._lock:
            self._newest = max(self._newest, newest_epoch)
            groups, forming = self._live, self._forming
        if forming is not None and forming < newest_epoch:
            self._stores.set_from_another_thread(f"epoch{forming}/go", _SUPERSEDED)
        if groups is not None and groups.epoch < newest_epoch:
            groups.cancel()


def _bury(coffin: list[Groups]) -> None:
    coffin.clear()


def _first_line(error: BaseException) -> str:
    """gloo's message without the place in its source and the advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0][:200] or "the connection was closed"

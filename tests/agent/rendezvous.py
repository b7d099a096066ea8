"""NCCL's place taken by gloo: `--workload tests.agent.rendezvous:Rendezvous` has a job's workers use the product's
NcclGroup over it, with real processes, on the CPU.

As with NCCL, what passes between two ranks of a group is carried out in order, one after the other, and a send is over
when it was received; nothing raises, and who waits is woken by `abort` alone.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrecycle.agent.config.options import LOOPBACK, Timeouts
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.models import compat
from openrecycle.agent.transport import communicator
from openrecycle.agent.transport.group import Devices, GlooGroup, Group, NcclGroup
from openrecycle.planner.jobs.job import Worker

_MESSAGE, _RECEIVED = 0, 1
_ALL = -1
_NOBODY_SENDS = 2**31 - 1


class _Work:
    """An operation. One that failed is never completed: a kernel whose peer is gone goes on waiting."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def exception(self) -> None:
        return None

    def wait(self) -> None:
        assert self.done.is_set(), "the host has not seen the end"


class Backend:
    """ProcessGroupNCCL, as far as NcclGroup asks. used: a file that is made with the first one."""

    used: Path

    def __init__(self, store: Any, rank: int, size: int, *, timeout: timedelta, most_ctas: int | None = None) -> None:
        self.used.touch()
        assert timeout > timedelta(days=1), "an operation fails so long after its call, not after its wait"
        self._gloo = compat.gloo_group(
            store, rank, size, timeout=timedelta(seconds=60), device=compat.gloo_device(LOOPBACK)
        )
        self._rank, self._aborted = rank, False
        self._streams: dict[int, queue.SimpleQueue[tuple[Callable[[], None], _Work]]] = {}

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        def run() -> None:
            self._gloo.send(tensors, to, _MESSAGE).wait()
            self._gloo.recv([torch.zeros(1)], to, _RECEIVED).wait()

        return self._enqueue(to, run)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        def run() -> None:
            self._gloo.recv(tensors, source, _MESSAGE).wait()
            self._gloo.send([torch.zeros(1)], source, _RECEIVED).wait()

        return self._enqueue(source, run)

    def allreduce(self, tensors: list[Tensor]) -> _Work:
        return self._enqueue(_ALL, lambda: self._gloo.allreduce(tensors).wait())

    def abort(self) -> None:
        if self._aborted:
            return  # as torch's own does
        self._aborted = True
        for other in range(self._gloo.size()):
            if other != self._rank:
                try:
                    self._gloo.recv([torch.zeros(1)], other, _NOBODY_SENDS).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue

    def _enqueue(self, other: int, run: Callable[[], None]) -> _Work:
        assert not self._aborted, "an aborted communicator takes nothing"
        if other not in self._streams:
            self._streams[other] = queue.SimpleQueue()
            threading.Thread(target=_stream, args=(self._streams[other],), daemon=True).start()
        work = _Work()
        self._streams[other].put((run, work))
        return work


def _stream(operations: queue.SimpleQueue[tuple[Callable[[], None], _Work]]) -> None:
    while True:
        run, work = operations.get()
        try:
            run()
        except RuntimeError:
            return  # and what comes after it waits, too
        work.done.set()


def _group(store: Any, name: str, rank: int, members: Sequence[Worker], timeouts: Timeouts, devices: Devices) -> Group:
    """The control plane is gloo's on GPUs, too."""
    if name.endswith("/world"):
        return GlooGroup(store, name, rank, members, timeouts, devices)
    return NcclGroup(store, name, rank, members, timeouts, torch.device("cpu"))


class Rendezvous(Gpt):
    """The example's model. launcher: a file that names its process, which is to be left as it is."""

    def __init__(self, launcher: str, **settings: Any) -> None:
        super().__init__(**settings)
        if os.getpid() != int(Path(launcher).read_text()):
            communicator.GlooGroup = _group  # type: ignore[assignment, misc]
            Backend.used = Path(launcher).with_name("used")
            compat.nccl_group = Backend  # type: ignore[assignment]
            torch.cuda.synchronize = lambda device=None: None

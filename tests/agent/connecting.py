"""Groups that connect as NCCL's do, over gloo: the first exchange with a peer waits for the other end, and nothing
wakes who waits there. `--workload tests.agent.connecting:Connecting` has a job's workers use them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.transport import communicator
from openrecycle.agent.transport.group import GlooGroup, GlooPending
from openrecycle.planner.jobs.job import Worker

FOR_EVER = timedelta(hours=1)


class ConnectingGroup(GlooGroup):
    """dies: (group's name, worker) of who is killed when it begins to connect."""

    dies: tuple[str, str] | None = None

    def __init__(
        self, store: Any, name: str, rank: int, members: Sequence[Worker], timeouts: Timeouts, *heard_at: Any
    ) -> None:
        super().__init__(store, name, rank, members, timeouts, *heard_at)
        self._store, self._name, self._met = store, name, set[int]()

    def send(self, to: int, tensor: Tensor, tag: int) -> GlooPending:
        self._meet(to)
        return super().send(to, tensor, tag)

    def receive(self, source: int, buffer: Tensor, tag: int) -> GlooPending:
        self._meet(source)
        return super().receive(source, buffer, tag)

    def _meet(self, other: int) -> None:
        if other in self._met or not self._name.endswith(("/forward", "/backward")):
            return
        if self.dies == (self._name, str(self.members[self.rank])):
            os.kill(os.getpid(), signal.SIGKILL)
        self._met.add(other)
        self._store.set(f"{self._name}/{self.rank}-{other}", b"here")
        self._store.wait([f"{self._name}/{other}-{self.rank}"], FOR_EVER)


class Connecting(Gpt):
    """The example's model. once: a file that names the launcher's process; dies: the worker that is killed while it
    connects in generation 2."""

    def __init__(self, once: str, dies: str, **settings: Any) -> None:
        super().__init__(**settings)
        if os.getpid() != int(Path(once).read_text()):
            ConnectingGroup.dies = ("generation2/forward", dies)
            communicator.GlooGroup = ConnectingGroup  # type: ignore[misc]

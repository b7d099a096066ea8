"""The example's model in a job of which links carry nothing, one way: `--workload tests.agent.bad_link:BadLink`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.transport import communicator
from openrecycle.agent.transport.group import GlooGroup, GlooPending


class _Lost(GlooPending):
    """On its way for ever; the sender does not notice."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> Tensor:
        return self.tensor


class LossyGroup(GlooGroup):
    """lost: (sender, receiver), by name, of the links on which messages are lost."""

    lost: Sequence[Sequence[str]] = ()

    def send(self, to: int, tensor: Tensor, tag: int) -> GlooPending:
        if self._loses(self.rank, to):
            return _Lost(tensor)
        return super().send(to, tensor, tag)

    def receive(self, source: int, buffer: Tensor, tag: int) -> GlooPending:
        pending = super().receive(source, buffer, tag)
        if self._loses(source, self.rank):
            # What will not come need not be waited for as long as what may; all else keeps the job's time-outs.
            pending.timeout = timedelta(milliseconds=500)
        return pending

    def _loses(self, source: int, to: int) -> bool:
        return [str(self.members[source]), str(self.members[to])] in [list(link) for link in self.lost]


class BadLink(Gpt):
    """lost: as of LossyGroup, in the workers of a job whose launcher is the process `launcher`."""

    def __init__(self, launcher: int, lost: Sequence[Sequence[str]], **settings: Any) -> None:
        super().__init__(**settings)
        if os.getpid() != launcher:
            LossyGroup.lost = lost
            communicator.GlooGroup = LossyGroup  # type: ignore[misc]

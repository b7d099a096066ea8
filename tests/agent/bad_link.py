"""The example's model in a job of which links carry nothing, one way: `--workload tests.agent.bad_link:BadLink`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from openrecycle.agent import communicator
from openrecycle.agent.examples.gpt import Gpt
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
        if [str(self._members[self.rank]), str(self._members[to])] in [list(link) for link in self.lost]:
            return _Lost(tensor)
        return super().send(to, tensor, tag)


class BadLink(Gpt):
    """lost: as of LossyGroup, in the workers of a job whose launcher is the process `launcher`."""

    def __init__(self, launcher: int, lost: Sequence[Sequence[str]], **settings: Any) -> None:
        super().__init__(**settings)
        if os.getpid() != launcher:
            LossyGroup.lost = lost
            communicator.GlooGroup = LossyGroup  # type: ignore[misc]

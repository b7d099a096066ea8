"""The example's model, evaluated on data of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.models.workload import Metric


class Batches:
    """Of iterations that no job comes to."""

    micro_batches = 3
    metrics: ClassVar[Mapping[str, Metric]] = {}

    def __init__(self, task: Gpt) -> None:
        self._task = task

    def inputs(self, seed: int, index: int) -> Tensor:
        return self._task.inputs(seed, 1_000_000, 0, index)

    def targets(self, seed: int, index: int) -> Tensor:
        return self._task.targets(seed, 1_000_000, 0, index)


class Evaluated(Gpt):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.evaluation = Batches(self)

"""The ops of a schedule in arrays, worker by worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.job import Worker

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class OpRows:
    """Compute ops in arrays. kind: index into KINDS. start, duration: ticks. bounds: where each worker's
    ops begin, by pipeline * stages + stage, and where the last one's end."""

    stages: int
    bounds: Ints
    kind: Ints
    home: Ints
    micro_batch: Ints
    start: Ints
    duration: Ints

    def of(self, worker: Worker) -> slice:
        """The part that is one worker's."""
        at = worker.pipeline * self.stages + worker.stage
        return slice(int(self.bounds[at]), int(self.bounds[at + 1]))

    def count(self, worker: Worker) -> int:
        part = self.of(worker)
        return int(part.stop - part.start)

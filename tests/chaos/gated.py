"""A job whose iterations begin only when a test lets them, so that how fast the machine is decides nothing."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from openrecycle.agent.examples.gpt import Gpt

LOOK_SECONDS = 0.005


class Gate:
    """A file; its size is the number of iterations that may begin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    @property
    def open_for(self) -> int:
        return self.path.stat().st_size

    def open(self, iterations: int) -> None:
        os.truncate(self.path, max(iterations, self.open_for))


class GatedGpt(Gpt):
    """gate: path of the file; "": none. skew: worker processes have wall clocks that are wrong by up to so many
    seconds, each by another time."""

    def __init__(self, gate: str = "", skew: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self._gate = gate
        if skew and multiprocessing.parent_process() is not None:
            true, wrong = time.time, random.Random(os.getpid()).uniform(-skew, skew)
            time.time = lambda: true() + wrong  # type: ignore[assignment]

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        pause = threading.Event()
        while self._gate and Path(self._gate).stat().st_size <= iteration:
            pause.wait(LOOK_SECONDS)
        return super().inputs(seed, iteration, pipeline, micro_batch)

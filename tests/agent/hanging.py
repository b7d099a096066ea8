"""The example's model, whose data loader hangs once: `--workload tests.agent.hanging:Hanging`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from agent.examples.gpt import Gpt


class Hanging(Gpt):
    """once: a file. Whoever loads the data of that iteration and pipeline takes it away and never comes back; when it
    is gone, nobody hangs any more."""

    def __init__(self, once: str, iteration: int, pipeline: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._once, self._where = Path(once), (iteration, pipeline)

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        if (iteration, pipeline) == self._where and self._once.exists():
            self._once.unlink()
            threading.Event().wait()
        return super().inputs(seed, iteration, pipeline, micro_batch)

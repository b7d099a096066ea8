"""The example GPT, whose processes note their processor time at every optimizer step.

For whoever trains it: the note is taken in the optimizer, so the agent and other trainers are measured
alike. Processor time is that of all threads of the process, in user space and in the kernel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openrecycle.agent.examples.gpt import Gpt


class ClockedGpt(Gpt):
    """notes: folder that gets one file per process, with one line of seconds per step."""

    def __init__(self, notes: str, **options: Any) -> None:
        super().__init__(**options)
        self._notes = Path(notes)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer = super().optimizer(parameters)
        if max(p.numel() for p in parameters) < 100:
            return optimizer  # the launcher tries it on a few numbers (agent.jobs.preflight)
        # Unbuffered: workers end without closing their files.
        file = os.open(self._notes / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def note(*_: Any) -> None:
            os.write(file, f"{time.process_time()}\n".encode())

        optimizer.register_step_post_hook(note)
        return optimizer


def processor_seconds(notes: Path, *, processes: int, warm_up: int) -> float:
    """Per iteration, summed over the processes; the first `warm_up` steps don't count."""
    marks = [list(map(float, text.split()))[warm_up:] for text in (f.read_text() for f in notes.iterdir()) if text]
    assert len(marks) == processes, f"{len(marks)} of {processes} processes have taken steps"
    return sum((times[-1] - times[0]) / (len(times) - 1) for times in marks)

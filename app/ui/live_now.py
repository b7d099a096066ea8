"""What a refresh of Live reads of the database, all at once. No Streamlit here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from openrecycle.app.console.measured import MeasuredIteration, measured_iteration
from openrecycle.app.console.service import Console
from openrecycle.app.console.view import JobView
from openrecycle.app.observing.rollout import RollOut
from openrecycle.app.ui.patience import Patience

_patience = Patience()


@dataclass(frozen=True)
class Now:
    """choice: see Operators.choice. at: POSIX seconds."""

    view: JobView
    choice: dict[str, Any]
    measured: MeasuredIteration | None
    roll_out: RollOut | None
    at: float


def read_now(console: Console, job_id: str, iterations: int, events: int) -> Now:
    """The newest so many iterations and events. Raises ConsoleError: 404; 503, also when it takes seconds."""

    def read() -> Now:
        at = time.time()
        view = console.view(job_id, iterations, events)
        choice = console.operators.choice(job_id)
        return Now(
            view, choice, measured_iteration(console, job_id), console.observing.roll_outs.of(console.job(job_id)), at
        )

    return _patience.read((id(console), job_id, events), read)

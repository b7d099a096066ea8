"""Instead of a worker that is told to die, somebody else does: whose process number is in a file.

As a module it is `agent`, whose workers do so: `python -m tests.chaos.struck FILE launch ...`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrecycle.agent.config.faults import FaultInjector
from openrecycle.agent.workers import worker

_main = worker.main


def main(victim: str, *arguments: Any) -> None:
    """A worker's process. victim: the file. The one that is struck goes before the op, and the worker goes on."""

    def before(self: FaultInjector, iteration: int, kind: str, pipeline: int = -1, micro_batch: int = -1) -> None:
        if (iteration, kind, pipeline, micro_batch) in self._points:
            self._points.clear()
            pid = Path(victim).read_text()
            if pid:
                os.kill(int(pid), signal.SIGKILL)

    FaultInjector.before = before  # type: ignore[method-assign]
    _main(*arguments)


def strike(victim: Path) -> Callable[..., None]:
    """What workers run."""
    return functools.partial(main, str(victim))


if __name__ == "__main__":
    from openrecycle.agent.cli import main as command
    from tests.chaos import struck

    file = sys.argv.pop(1)
    worker.main = struck.strike(Path(file))  # type: ignore[assignment]
    command()
